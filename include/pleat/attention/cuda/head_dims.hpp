// The head dims that kernels are made for, and which of them serves a call.
#pragma once

#include <pleat/attention/local_kernel.hpp>

namespace pleat::inline v0 {

/// One instantiation: query-key dim and value dim. A call of smaller dims runs in it with zeros as padding.
template <int QkDim, int VDim>
struct HeadDims {
  static constexpr int qk = QkDim, v = VDim;
};
template <class... Dims>
struct HeadDimsList {};

/// In order of cost.
using AllHeadDims = HeadDimsList<HeadDims<64, 64>, HeadDims<128, 128>, HeadDims<192, 128>, HeadDims<256, 256>>;

/// Calls f(HeadDims{}) with the first of the list that holds the dims. Errors: shape_error A06.
template <class... Dims, class F>
void dispatch_head_dims(HeadDimsList<Dims...>, std::int64_t qk_dim, std::int64_t v_dim, F&& f) {
  const bool found = ((qk_dim <= Dims::qk && v_dim <= Dims::v && (f(Dims{}), true)) || ...);
  if (!found) {
    Message choices;
    (choices.append(' ').append(Dims::qk).append('/').append(Dims::v), ...);
    fail<shape_error>("pleat[A06]: qk_dim=", qk_dim, ", v_dim=", v_dim,
                      ": no kernel of this device holds them; largest qk_dim/v_dim:", choices.c_str());
  }
}

}  // namespace pleat::inline v0
