// Latents in the ring on GPUs: the expansion of unit/attention/latents.hpp as kernels, and a rank's part of a problem.
#pragma once

#include <pleat/cuda/kernel.hpp>

#include <unit/attention/latents.hpp>

#include "ring_calls.hpp"

namespace latent_testing {

using namespace pleat;
using latents::LatentInputs;
using latents::LatentOutputs;
using latents::Widths;
using oracle::Problem;

/// Rows [batch, tokens, heads, dim] with a contiguous last axis.
template <class T>
struct Rows {
  T* data;
  std::int64_t batch_stride, token_stride, head_stride, tokens;

  /// `t`: with or without the axis of heads.
  static Rows of(const TensorRef& t) {
    return {t.as<T>(), t.stride(0), t.stride(1), t.rank() == 4 ? t.stride(2) : 0, t.extent(1)};
  }
  __device__ T* at(std::int64_t row, int head = 0) const {
    return data + row / tokens * batch_stride + row % tokens * token_stride + head * head_stride;
  }
};

/// Weights as HostExpander has them: [heads, nope, lora], then [heads, v_dim, lora].
struct Sizes {
  int lora, rope, nope, v_dim, heads;
  __host__ __device__ int outputs() const { return heads * (nope + v_dim); }
};

/// A block per row, a thread per made element.
template <class T>
PLEAT_KERNEL void expand_rows(Sizes w, const float* weights, Rows<const T> latent, Rows<T> keys, Rows<T> values) {
  const std::int64_t row = blockIdx.x;
  const T* const c = latent.at(row);
  for (int made = static_cast<int>(threadIdx.x); made < w.outputs(); made += static_cast<int>(blockDim.x)) {
    float sum = 0;
    for (int j = 0; j < w.lora; ++j) sum += weights[made * w.lora + j] * static_cast<float>(c[j]);
    const int value = made - w.heads * w.nope;
    if (value < 0) {
      keys.at(row, made / w.nope)[made % w.nope] = static_cast<T>(sum);
    } else {
      values.at(row, value / w.v_dim)[value % w.v_dim] = static_cast<T>(sum);
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < w.heads * w.rope; i += static_cast<int>(blockDim.x)) {
    keys.at(row, i / w.rope)[w.nope + i % w.rope] = c[w.lora + i % w.rope];
  }
}

__device__ inline float gradient_of(const Sizes& w, const Rows<const float>& dkeys, const Rows<const float>& dvalues,
                                    std::int64_t row, int made) {
  const int value = made - w.heads * w.nope;
  return value < 0 ? dkeys.at(row, made / w.nope)[made % w.nope] : dvalues.at(row, value / w.v_dim)[value % w.v_dim];
}
/// A block per row, a thread per number of the latent.
PLEAT_KERNEL void gradients_of_latents(Sizes w, const float* weights, Rows<const float> dkeys,
                                       Rows<const float> dvalues, Rows<float> dlatent, bool accumulate) {
  const std::int64_t row = blockIdx.x;
  for (int j = static_cast<int>(threadIdx.x); j < w.lora + w.rope; j += static_cast<int>(blockDim.x)) {
    float sum = 0;
    if (j < w.lora) {
      for (int made = 0; made < w.outputs(); ++made) {
        sum += weights[made * w.lora + j] * gradient_of(w, dkeys, dvalues, row, made);
      }
    } else {
      for (int h = 0; h < w.heads; ++h) sum += dkeys.at(row, h)[w.nope + j - w.lora];
    }
    float& to = dlatent.at(row)[j];
    to = (accumulate ? to : 0) + sum;
  }
}
/// A thread per weight, over all rows in their order.
template <class T>
PLEAT_KERNEL void gradients_of_weights(Sizes w, Rows<const T> latent, Rows<const float> dkeys,
                                       Rows<const float> dvalues, std::int64_t rows, float* gradients) {
  const int weight = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (weight >= w.outputs() * w.lora) return;
  float sum = gradients[weight];
  for (std::int64_t row = 0; row < rows; ++row) {
    sum += gradient_of(w, dkeys, dvalues, row, weight / w.lora) * static_cast<float>(latent.at(row)[weight % w.lora]);
  }
  gradients[weight] = sum;
}

/// A `latent_expander` over weights and their gradients in device memory.
template <class T>
struct CudaExpander {
  Sizes sizes;
  const float* weights;
  float* gradients;

  void expand(const TensorRef& latent, const TensorRef& keys, const TensorRef& values, cudaStream_t s) {
    const auto rows = static_cast<unsigned>(latent.extent(0) * latent.extent(1));
    if (rows == 0) return;
    expand_rows<T>
        <<<rows, 128, 0, s>>>(sizes, weights, Rows<const T>::of(latent), Rows<T>::of(keys), Rows<T>::of(values));
    check_launch("expand_rows");
  }
  void expand_backward(const TensorRef& latent, const TensorRef& dkeys, const TensorRef& dvalues,
                       const TensorRef& dlatent, bool accumulate, cudaStream_t s) {
    const auto rows = static_cast<unsigned>(latent.extent(0) * latent.extent(1));
    if (rows == 0) return;
    const auto keys = Rows<const float>::of(dkeys), values = Rows<const float>::of(dvalues);
    gradients_of_latents<<<rows, 128, 0, s>>>(sizes, weights, keys, values, Rows<float>::of(dlatent), accumulate);
    const auto blocks = static_cast<unsigned>((sizes.outputs() * sizes.lora + 127) / 128);
    gradients_of_weights<T><<<blocks, 128, 0, s>>>(sizes, Rows<const T>::of(latent), keys, values, rows, gradients);
    check_launch("gradients_of_weights");
  }
  static void preload() {
    preload_kernel(expand_rows<T>, "expand_rows");
    preload_kernel(gradients_of_latents, "gradients_of_latents");
    preload_kernel(gradients_of_weights<T>, "gradients_of_weights");
  }
};
static_assert(ring::latent_expander<CudaExpander<bfloat16>, cudaStream_t>);

inline LatentOutputs poisoned_outputs(const LatentInputs& in) {
  const double nan = std::nan("");
  return {std::vector<double>(in.dout.size(), nan), std::vector<double>(in.q.size(), nan),
          std::vector<double>(in.latent.size(), nan), std::vector<double>(in.weights.size())};
}

/// As templates_testing::run_ring, where latents travel. `weights`: gradients by this rank's queries.
template <class Backend, class T, class MakeExecutor>
void run_latents(typename Backend::comm_type& world, const Widths& w, const Problem& p, const LatentInputs& in,
                 Transport transport, std::optional<ring::Layout> layout, int calls, MakeExecutor make_executor,
                 LatentOutputs& all, std::vector<float>& weights) {
  using Buffer = typename Backend::Buffer;
  using LocalRows = templates_testing::RankRows<Buffer, T>;
  constexpr DeviceKind device = device_kind<typename Backend::comm_type::device_type>;
  const ring::Plan plan = ring::plan(world.size(),
                                     {.batch = p.batch,
                                      .tokens = p.tokens,
                                      .q_heads = p.q_heads,
                                      .kv_heads = p.kv_heads,
                                      .qk_dim = p.qk_dim,
                                      .v_dim = p.v_dim,
                                      .latent_dim = w.latent(),
                                      .dtype = dtype_of<T>,
                                      .cu_seqlens = p.cu_seqlens},
                                     {.causal = p.causal, .transport = transport, .layout = layout});
  const Footprint need = plan.footprint();
  const TokenSpans& mine = plan.spans[static_cast<std::size_t>(world.rank())];
  const std::int64_t tokens = mine.tokens(), rows = p.batch * tokens;

  const typename Backend::Stream compute, comm;
  const Streams<typename Backend::comm_type::stream_type> s{compute.get(), comm.get()};
  const auto executor = make_executor(world.rank(), s);
  const GroupComm<typename Backend::comm_type> group(world);

  const int pitch = w.latent() + 8;  // padding that nobody writes
  LocalRows q(rows, p.q_heads * p.qk_dim), dq(rows, p.q_heads * p.qk_dim), out(rows, p.q_heads * p.v_dim),
      dout(rows, p.q_heads * p.v_dim), latent(rows, pitch), dlatent(rows, pitch);
  const auto heads = [&](const LocalRows& r, int dim) { return r.view(p.batch, tokens, 0, p.q_heads, dim, device); };
  const auto compressed = [&](const LocalRows& r) {
    TensorRef t(r.data(), dtype_of<T>, {}, {device, 0});
    t.push_extent(p.batch, tokens * pitch);
    t.push_extent(tokens, pitch);
    t.push_extent(w.latent(), 1);
    return t;
  };
  const auto each = [&](LocalRows& local, auto& global, int local_pitch, int dim, auto f) {
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t i = 0; i < tokens; ++i) {
        for (int d = 0; d < dim; ++d) {
          f(local.host(reinterpret_cast<const T*>(local.data()) + (b * tokens + i) * local_pitch + d),
            global[p.row(b, mine.position(i), 1, 0) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)]);
        }
      }
    }
  };
  const auto load = [](T& local, double global) { local = static_cast<T>(static_cast<float>(global)); };
  const auto store = [](const T& local, double& global) { global = static_cast<double>(local); };
  each(q, in.q, p.q_heads * p.qk_dim, p.q_heads * p.qk_dim, load);
  each(dout, in.dout, p.q_heads * p.v_dim, p.q_heads * p.v_dim, load);
  each(latent, in.latent, pitch, w.latent(), load);
  q.upload();
  dout.upload();
  latent.upload();

  const std::vector<float> weight_values(in.weights.begin(), in.weights.end());
  const std::size_t weight_bytes = weight_values.size() * sizeof(float);
  Buffer weight_memory(weight_bytes), gradient_memory(weight_bytes);
  weight_memory.upload(reinterpret_cast<const std::byte*>(weight_values.data()));
  CudaExpander<T> expander{{w.lora, w.rope, w.nope, w.v_dim, p.kv_heads},
                           reinterpret_cast<const float*>(weight_memory.block().data),
                           reinterpret_cast<float*>(gradient_memory.block().data)};
  expander.preload();

  const Buffer lse(std::max<std::size_t>(1, need.saved));
  templates_testing::RingMemory<Backend> memory(plan, world, group, executor, s.compute);
  {
    auto op = ring::bind(plan, executor, group, memory.memory(), s.compute);
    for (int call = 0; call < calls; ++call) {
      executor.zero(gradient_memory.block().data, weight_bytes, s.compute);
      ring::Saved saved(Block{lse.block().data, need.saved});
      op.forward_latent(s, expander, heads(q, p.qk_dim), compressed(latent), heads(out, p.v_dim), saved);
      op.backward_latent(s, expander, heads(dout, p.v_dim), saved, heads(dq, p.qk_dim), compressed(dlatent));
    }
    templates_testing::end_calls(world, s);
  }
  out.download();
  dq.download();
  dlatent.download();
  weights.resize(weight_values.size());
  gradient_memory.download(reinterpret_cast<std::byte*>(weights.data()));
  each(out, all.out, p.q_heads * p.v_dim, p.q_heads * p.v_dim, store);
  each(dq, all.dq, p.q_heads * p.qk_dim, p.q_heads * p.qk_dim, store);
  each(dlatent, all.dlatent, pitch, w.latent(), store);
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* const pad = reinterpret_cast<const T*>(dlatent.data()) + row * pitch + w.latent();
    conformance::require(std::isnan(static_cast<float>(dlatent.host(pad))), "padding was written");
  }
}

}  // namespace latent_testing
