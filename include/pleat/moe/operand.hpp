// The tensors a call of this folder takes: checked, dense, and sometimes absent.
#pragma once

#include <pleat/tensor/tensor_traits.hpp>

namespace pleat::inline v0::moe {

/// Errors: shape_error T07 when a tensor that has elements has no data.
inline TensorRef with_data(const char* what, const TensorRef& ref) {
  if (ref.data() == nullptr && ref.elems() != 0)
    fail<shape_error>("pleat[T07]: ", what, " is ", ref, ", and has no data");
  return ref;
}

/// Reads the tensor that `what` names; its rows lie without gaps. Errors: shape_error T07, E01 when there are gaps.
template <class T, class Kind>
TensorRef dense(const char* what, const T& t, DType dtype, Kind device, std::initializer_list<std::int64_t> extents) {
  const TensorRef ref = with_data(what, expect(what, t, dtype, device, extents));
  if (!ref.is_contiguous()) {
    fail<shape_error>("pleat[E01]: ", what, " is ", ref,
                      " with gaps between its rows; pass a contiguous row-major copy");
  }
  return ref;
}

/// The same for an operand a caller may leave out: `TensorRef{}`, without data, stays as it is.
template <class T, class Kind>
TensorRef dense_or_absent(const char* what, const T& t, DType dtype, Kind device,
                          std::initializer_list<std::int64_t> extents) {
  if (as_tensor(t).data() == nullptr && as_tensor(t).rank() == 0) return {};
  return dense(what, t, dtype, device, extents);
}

/// `tokens` consecutive tokens in `groups` equal groups. Errors: shape_error E04.
inline void check_divides(std::int64_t tokens, std::int64_t groups) {
  if (groups < 1 || tokens % groups != 0) {
    fail<shape_error>("pleat[E04]: ", tokens, " tokens cannot be cut into ", groups,
                      " equal groups; valid numbers of groups: ", Divisors{tokens});
  }
}

/// Errors: comm_error E06 when an operation is bound to a group of another size than it was planned for.
inline void check_group(int bound_ranks, int planned_ranks) {
  if (bound_ranks != planned_ranks) {
    fail<comm_error>("pleat[E06]: the plan is for a group of ", planned_ranks, " ranks, it was bound to one of ",
                     bound_ranks, "; plan with the size of the group");
  }
}

}  // namespace pleat::inline v0::moe
