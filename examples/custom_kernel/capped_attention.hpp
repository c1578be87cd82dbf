// A local kernel of one's own for the ring: attention whose scores are capped, cap * tanh(score / cap).
#pragma once

#include <cmath>

#include <pleat/attention/host/leaf.hpp>

/// Forward and backward are its own, delta and store those of the host. float only.
struct CappedAttention : pleat::attention_leaf<pleat::host_device> {
  using Rows = pleat::host_kernel::HeadRows<float>;
  using Statistics = pleat::host_kernel::RowStatistics<float>;
  float cap = 1;

  float score(const auto& a, const float* q, const float* k) const {
    return cap * std::tanh(static_cast<float>(a.scale) * pleat::host_kernel::dot<float>(q, k, a.q.extent(3)) / cap);
  }
  void forward(const pleat::AttentionForward& a, pleat::HostStream s) const {
    const Rows q(a.q), k(a.k), v(a.v), o(a.o_acc);
    const Statistics lse(a.lse);
    pleat::host_kernel::start<float>(a);
    pleat::host_kernel::for_each_pair(a, [&](const auto& p) {
      const float x = score(a, q.of_query(p), k.of_key(p)), before = lse.of_query(p), top = std::fmax(before, x);
      const float after = lse.of_query(p) = top + std::log(std::exp(before - top) + std::exp(x - top));
      for (int d = 0; d < a.v.extent(3); ++d) o.of_query(p)[d] *= std::exp(before - after);
      pleat::host_kernel::add_scaled(o.of_query(p), std::exp(x - after), v.of_key(p), a.v.extent(3));
    });
    if (a.last) store(a.out, {&a.o_acc, 1}, s);
  }
  void backward(const pleat::AttentionBackward& a, pleat::HostStream) const {
    const Rows q(a.q), k(a.k), v(a.v), dout(a.dout), dq(a.dq), dk(a.dk), dv(a.dv);
    const Statistics lse(a.lse), delta(a.delta);
    pleat::host_kernel::start<float>(a);
    pleat::host_kernel::for_each_pair(a, [&](const auto& p) {
      const float x = score(a, q.of_query(p), k.of_key(p)), weight = std::exp(x - lse.of_query(p));
      const float dp = pleat::host_kernel::dot<float>(dout.of_query(p), v.of_key(p), a.v.extent(3)) - delta.of_query(p);
      const float dx = weight * dp * (1 - x / cap * (x / cap)) * static_cast<float>(a.scale);
      pleat::host_kernel::add_scaled(dv.of_key(p), weight, dout.of_query(p), a.v.extent(3));
      pleat::host_kernel::add_scaled(dk.of_key(p), dx, q.of_query(p), a.q.extent(3));
      pleat::host_kernel::add_scaled(dq.of_query(p), dx, k.of_key(p), a.q.extent(3));
    });
  }
};
