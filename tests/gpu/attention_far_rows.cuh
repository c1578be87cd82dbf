// Attention on rows that lie billions of elements apart, beside the same call on dense rows: offsets of 32 bits, signed
// or not, would end elsewhere.
#pragma once

#include <unit/attention/cuda_leaf_cases.cuh>

#include <support/copy_now.hpp>

namespace attention_testing {

/// Which of the axes [batch, tokens, heads] reaches past 2^32 elements.
enum class Far { batch, tokens, heads };

/// Tensors of E one beside the other in memory whose untouched pages are never read.
template <class E>
class FarMemory {
 public:
  static constexpr std::int64_t room = 8192;  // elements of a row of all tensors

  FarMemory(Far far, const std::array<std::int64_t, 3>& extents) : extents_(extents) {
    const auto axis = static_cast<std::size_t>(far);
    strides_[axis] = ((std::int64_t{1} << 32) / (extents[axis] - 1) + room) / room * room;
    std::int64_t near = room;
    for (std::size_t i = 3; i-- > 0;) {
      if (i == axis) continue;
      strides_[i] = near;
      near *= extents[i];
    }
    reach_ = near + (extents[axis] - 1) * strides_[axis];
    memory_ = CudaBuffer(static_cast<std::size_t>(reach_) * sizeof(E));
  }
  /// [batch, tokens, heads, dim], of at most the extents.
  TensorRef tensor(std::int64_t tokens, std::int64_t heads, int dim) {
    TensorRef t(place(dim), dtype_of<E>, {}, {DeviceKind::cuda, 0});
    t.push_extent(extents_[0], strides_[0]);
    t.push_extent(tokens, strides_[1]);
    t.push_extent(heads, strides_[2]);
    t.push_extent(dim, 1);
    return t;
  }
  /// [batch, heads, tokens]
  TensorRef statistics(std::int64_t tokens, std::int64_t heads) {
    TensorRef t(place(1), dtype_of<E>, {}, {DeviceKind::cuda, 0});
    t.push_extent(extents_[0], strides_[0]);
    t.push_extent(heads, strides_[2]);
    t.push_extent(tokens, strides_[1]);
    return t;
  }

 private:
  void* place(int dim) {
    E* const at = reinterpret_cast<E*>(memory_.data()) + used_;
    used_ += (dim + 63) / 64 * 64;
    return at;
  }
  std::array<std::int64_t, 3> extents_, strides_{};
  std::int64_t reach_ = 0, used_ = 0;
  CudaBuffer memory_;
};

/// Copies row by row between a tensor of any strides and a dense one of the same extents.
inline void copy_rows(const TensorRef& to, const TensorRef& from) {
  const auto elem = static_cast<std::int64_t>(size_bytes(to.dtype()));
  const auto width = static_cast<std::size_t>((to.rank() == 4 ? to.extent(3) : 1) * elem);
  const auto at = [&](const TensorRef& t, std::int64_t i, std::int64_t j, std::int64_t l) {
    return static_cast<std::byte*>(t.data()) + (i * t.stride(0) + j * t.stride(1) + l * t.stride(2)) * elem;
  };
  for (std::int64_t i = 0; i < to.extent(0); ++i) {
    for (std::int64_t j = 0; j < to.extent(1); ++j) {
      for (std::int64_t l = 0; l < to.extent(2); ++l) {
        check_cuda(cudaMemcpyAsync(at(to, i, j, l), at(from, i, j, l), width, cudaMemcpyDefault), "cudaMemcpyAsync");
      }
    }
  }
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/// The text of what is wrong; empty when nothing is.
template <class T, class Leaf>
std::string check_far_rows(Far far, int qk_dim, int v_dim) {
  const bool has_far_heads = far == Far::heads;
  const std::int64_t batch = 2, tokens = 150;
  const int q_heads = has_far_heads ? 6 : 2, kv_heads = has_far_heads ? 3 : 1;
  FarMemory<T> inputs(far, {batch, tokens, q_heads});
  FarMemory<float> sums(far, {batch, tokens, q_heads});
  std::mt19937 random(std::random_device{}());
  std::normal_distribution<float> normal;

  // Fills `dense`; a tensor of the same values whose rows are far apart.
  const auto drawn = [&](DeviceTensor<T>& dense, int heads, int dim) {
    std::vector<double> values(static_cast<std::size_t>(batch * tokens * heads * dim));
    for (double& value : values) value = normal(random);
    dense.put(values);
    const TensorRef t = inputs.tensor(tokens, heads, dim);
    copy_rows(t, dense.ref());
    return t;
  };
  const auto tensor = [&]<class E>(std::type_identity<E>, int heads, int dim) {
    return DeviceTensor<E>(Rows::contiguous, batch, tokens, heads, dim);
  };
  constexpr std::type_identity<T> stored{};
  constexpr std::type_identity<float> summed{};
  auto q = tensor(stored, q_heads, qk_dim), k = tensor(stored, kv_heads, qk_dim), v = tensor(stored, kv_heads, v_dim),
       dout = tensor(stored, q_heads, v_dim), out = tensor(stored, q_heads, v_dim),
       dk_out = tensor(stored, kv_heads, qk_dim);
  auto acc = tensor(summed, q_heads, v_dim), lse = tensor(summed, q_heads, 1), delta = tensor(summed, q_heads, 1),
       dq = tensor(summed, q_heads, qk_dim), dk = tensor(summed, kv_heads, qk_dim),
       dv = tensor(summed, kv_heads, v_dim);

  const std::vector<Rectangle> work{{0, tokens, 0, tokens, 0}};
  const CudaBuffer placed(sizeof(Rectangle)), workspace(attention_workspace_bytes(batch, q_heads, tokens));
  testing_support::copy_now(placed.data(), work.data(), sizeof(Rectangle));
  finish_uploads();
  const WorkView view(work, reinterpret_cast<const Rectangle*>(placed.data()));
  const double scale = 1 / std::sqrt(static_cast<double>(qk_dim));
  const CudaStream s;
  struct Tensors {
    TensorRef q, k, v, dout, out, acc, lse, delta, dq, dk, dv, dk_out;
  };
  const auto run = [&](const Tensors& t) {
    AttentionForward forward{t.q, t.k, t.v, view, scale, t.acc, t.lse, t.out};
    forward.last = false;  // two calls, so that what is resumed is far away too
    Leaf::forward(forward, s);
    forward.first = false;
    forward.last = true;
    forward.work = {};
    Leaf::forward(forward, s);
    Leaf::delta(t.delta, t.out, t.dout, s);
    AttentionBackward backward{t.q, t.k, t.v, t.dout, t.lse, t.delta, view, scale, t.dq, t.dk, t.dv};
    backward.workspace = workspace.data();
    backward.out = t.out;
    Leaf::backward(backward, s);
    backward.accumulate_dq = backward.accumulate_dk = backward.accumulate_dv = true;
    Leaf::backward(backward, s);
    const TensorRef terms[] = {t.dk, t.dk};
    Leaf::store(t.dk_out, terms, s);
    check_cuda(cudaStreamSynchronize(s), "far rows");
  };
  const Tensors far_ones{drawn(q, q_heads, qk_dim),
                         drawn(k, kv_heads, qk_dim),
                         drawn(v, kv_heads, v_dim),
                         drawn(dout, q_heads, v_dim),
                         inputs.tensor(tokens, q_heads, v_dim),
                         sums.tensor(tokens, q_heads, v_dim),
                         sums.statistics(tokens, q_heads),
                         sums.statistics(tokens, q_heads),
                         sums.tensor(tokens, q_heads, qk_dim),
                         sums.tensor(tokens, kv_heads, qk_dim),
                         sums.tensor(tokens, kv_heads, v_dim),
                         inputs.tensor(tokens, kv_heads, qk_dim)};
  run({q.ref(), k.ref(), v.ref(), dout.ref(), out.ref(), acc.ref(), lse.statistics(), delta.statistics(), dq.ref(),
       dk.ref(), dv.ref(), dk_out.ref()});
  const std::vector<double> want[] = {out.get(), lse.get(), dq.get(), dk.get(), dv.get(), dk_out.get()};
  for (auto* t : {&out, &dk_out}) t->poison();
  for (auto* t : {&lse, &dq, &dk, &dv}) t->poison();
  run(far_ones);
  copy_rows(out.ref(), far_ones.out);
  copy_rows(lse.statistics(), far_ones.lse);
  copy_rows(dq.ref(), far_ones.dq);
  copy_rows(dk.ref(), far_ones.dk);
  copy_rows(dv.ref(), far_ones.dv);
  copy_rows(dk_out.ref(), far_ones.dk_out);
  const std::vector<double> got[] = {out.get(), lse.get(), dq.get(), dk.get(), dv.get(), dk_out.get()};
  const char* names[] = {"out", "lse", "dq", "dk", "dv", "stored dk"};
  std::string failure;
  for (std::size_t i = 0; i < std::size(want); ++i) deviation(got[i], want[i], names[i], failure, 1e-2);
  return failure;
}

}  // namespace attention_testing
