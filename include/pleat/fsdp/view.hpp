// Views of a whole unit: its parameters or gradients as tensors in the unit's buffer.
#pragma once

#include <pleat/fsdp/layout.hpp>
#include <pleat/tensor/tensor_ref.hpp>

namespace pleat::inline v0::fsdp {

namespace detail {
/// Errors: shape_error F13.
inline void check_param(const char* unit, const UnitLayout& layout, int param) {
  const auto count = static_cast<int>(layout.params.size());
  if (param >= 0 && param < count) return;
  fail<shape_error>("pleat[F13]: unit ", unit, " has no parameter ", param, "; its parameters are ", Indices{count});
}
inline void check_expert(const char* unit, const UnitLayout& layout, std::int64_t expert) {
  if (expert >= 0 && expert < layout.block_count()) return;
  fail<shape_error>("pleat[F13]: unit ", unit, " has no local expert ", expert,
                    "; valid: ", Indices{layout.block_count()});
}
}  // namespace detail

/// The parameters of one unit in a buffer of its layout; borrowed, cheap to copy. Errors of its calls: shape_error F13
/// for a parameter or an expert that the unit does not have.
class UnitView {
 public:
  /// `unit`: its name, for the texts of errors.
  UnitView(const UnitLayout& layout, std::byte* base, DType dtype, Device device, const char* unit = "")
      : layout_(&layout), base_(base), dtype_(dtype), device_(device), unit_(unit) {}

  /// Parameter `param` [shape...], or [experts_local, shape...] with the expert stride as stride(0).
  TensorRef operator[](int param) const {
    detail::check_param(unit_, *layout_, param);
    TensorRef tensor = at(param, 0);
    if (layout_->experts_local != 0) tensor.push_extent(layout_->experts_local, layout_->expert_stride);
    push_shape(tensor, param);
    return tensor;
  }
  /// The parameter of one local expert [shape...].
  TensorRef expert(int param, std::int64_t e) const {
    detail::check_param(unit_, *layout_, param);
    detail::check_expert(unit_, *layout_, e);
    TensorRef tensor = at(param, e);
    push_shape(tensor, param);
    return tensor;
  }
  const UnitLayout& layout() const { return *layout_; }
  const char* unit() const { return unit_; }

 private:
  TensorRef at(int param, std::int64_t expert) const {
    const std::int64_t offset = layout_->place(param).offset + expert * layout_->expert_stride;
    return TensorRef(base_ + static_cast<std::size_t>(offset) * size_bytes(dtype_), dtype_, {}, device_);
  }
  void push_shape(TensorRef& tensor, int param) const {
    const ParamPlace& place = layout_->place(param);
    std::int64_t stride = place.elems;
    for (const std::int64_t extent : place.spec.shape) {
      stride = extent == 0 ? 0 : stride / extent;
      tensor.push_extent(extent, stride);
    }
  }

  const UnitLayout* layout_;
  std::byte* base_;
  DType dtype_;
  Device device_;
  const char* unit_;
};

}  // namespace pleat::inline v0::fsdp
