// What the C++ blocks of the documentation stand in: block 2 of docs/tour.md is the file "tour.2". Compiled, not run.
#include <cstdint>
#include <utility>
#include <vector>

#include "support/dlpack.hpp"

#include <pleat/core/host/buffer.hpp>
#include <pleat/estimate.hpp>
#include <pleat/pleat.hpp>

using namespace pleat;
using Ranks = GroupComm<ThreadComm>;

void tour_1(int cp, const ring::Shape& shape, const ring::Options& options, HostExecutor executor,
            const Ranks& cp_group, const Memory<HostArena>& memory, Streams<HostStream> streams, TensorRef q,
            TensorRef k, TensorRef v, TensorRef out, TensorRef dout, TensorRef dq, TensorRef dk, TensorRef dv,
            ring::Saved& saved) {
#include "tour.1"
}

void mesh_1() {
#include "mesh.1"
}
void mesh_2(ThreadComm& world, int cp, int ep) {
#include "mesh.2"
}

void comm_1(ThreadComm& world, const void* mine, void* all, std::size_t elems, HostStream stream) {
  using Mesh = FoldedMesh<1, 4, 2, 4>;
#include "comm.1"
}

namespace my {
struct Tensor {
  void* storage;
  int axes, gpu;
  std::int64_t sizes[4], strides[4];
  bool is_constant;
};
}  // namespace my
#include "tensors.1"
static_assert(tensor<my::Tensor>);
void tensors_2(const bfloat16* pointer, int batch, int tokens, int heads, int dim, int gpu) {
#include "tensors.2"
}
void tensors_3(DLManagedTensor* managed, std::int64_t elems) {
#include "tensors.3"
}

using Ring = ring::RingAttention<HostExecutor, ThreadComm, HostArena>;
namespace attention {
using cudaStream_t = HostStream;
struct Defined {
#include "attention.1"
  Expander expander;
};
void attention_2(Ring& op, Defined::Expander& expander, Streams<HostStream> streams, TensorRef q, TensorRef latent,
                 TensorRef out, TensorRef dout, TensorRef dq, TensorRef dlatent, ring::Saved& saved) {
#include "attention.2"
}
}  // namespace attention
void attention_3(Ring& op, const std::vector<std::int64_t>& cu_seqlens, const HostBuffer& pinned,
                 const HostBuffer& device, HostStream stream, Streams<HostStream> streams, TensorRef q, TensorRef k,
                 TensorRef v, TensorRef out, ring::Saved& saved) {
#include "attention.3"
}
struct CappedAttention : attention_leaf<host_device> {};
void attention_4(const ring::Plan& plan, HostExecutor executor, const Ranks& cp_group, const Memory<HostArena>& memory,
                 HostStream stream) {
#include "attention.4"
}

namespace adapter {
namespace pleat {
using namespace ::pleat;
/// In the place of the real one, which needs cuDNN.
struct CudnnAttention : attention_leaf<host_device> {
  void prepare(const AttentionForward&) const;
  void prepare(const AttentionBackward&) const;
};
}  // namespace pleat
void attention_5(const ring::Plan& plan, HostExecutor executor, const Ranks& cp_group, const Memory<HostArena>& memory,
                 HostStream stream, TensorRef q, TensorRef k, TensorRef v, TensorRef out, TensorRef dout) {
#include "attention.5"
}
}  // namespace adapter

using Model = fsdp::ShardedModel<ThreadComm, HostArena>;
void product(TensorRef to, TensorRef a, TensorRef b, bool adds = false);
void fsdp_1(Model& model, int unit, TensorRef dx, TensorRef x, TensorRef dy) {
#include "fsdp.1"
}
void fsdp_2(Model& model, int unit, TensorRef dx, TensorRef x, TensorRef dy) {
#include "fsdp.2"
}

void moe_1(const moe::LayerPlan& plan, HostExecutor executor, Block block, HostStream stream,
           const std::vector<Block>& blocks, std::vector<moe::LayerSaved>& saved) {
#include "moe.1"
}
void my_experts(const float* rows, const std::int64_t* offsets, float* out, HostStream stream);
void moe_2(const moe::DispatchPlan& plan, HostExecutor executor, const Ranks& ep, const Memory<HostArena>& memory,
           Block block, Streams<HostStream> streams, HostStream stream, TensorRef x, TensorRef ids, TensorRef weights,
           TensorRef out, TensorRef y) {
#include "moe.2"
}

const std::vector<fsdp::ParamSpec> optim_1{
#include "optim.1"
};
using Sharder = fsdp::Sharder<HostExecutor, ThreadComm, HostArena>;
void optim_2(const fsdp::Plan& plan, HostExecutor executor, const fsdp::Groups<ThreadComm>& groups, Sharder& op,
             const Memory<HostArena>& memory, optim::StepNorm<HostExecutor, ThreadComm>& norm, double max_norm,
             HostStream stream) {
#include "optim.2"
}

struct StageModel {
  void forward(HostStream, const pipeline::ForwardCall&);
  void backward(HostStream, const pipeline::BackwardCall&);
  void input_backward(HostStream, const pipeline::BackwardCall&);
  void weight_backward(HostStream, const pipeline::BackwardCall&);
};
void pipeline_1(const Ranks& pp, int micro_batches, const std::vector<std::int64_t>& rows,
                const std::vector<std::int64_t>& other_rows, HostExecutor executor, const Memory<HostArena>& memory,
                Streams<HostStream> streams, StageModel& model) {
#include "pipeline.1"
}

void planning_1() {
#include "planning.1"
}

namespace checkpoints {
namespace ck = pleat::checkpoint;
using Optimizer = optim::ShardOptimizer<HostExecutor, ThreadComm>;
void checkpoints_1(const RuntimeMesh& mesh, int rank, const std::vector<fsdp::Plan>& plans, const std::string& run,
                   Sharder& op, Optimizer& optimizer, Block pinned, HostExecutor executor, HostStream stream,
                   std::int64_t step, std::int64_t position, std::int64_t applied) {
#include "checkpoints.1"
}
void load(ck::Model& model, const RuntimeMesh& mesh, int rank, const std::vector<ck::UnitMemory>& memory, Block staging,
          HostExecutor executor, HostStream stream, Sharder& op, const fsdp::ShardStreams<HostStream>& streams) {
#include "checkpoints.2"
}
void load_others(ck::Model& model, const std::string& folder, const RuntimeMesh& mesh, int rank,
                 const std::vector<ck::UnitMemory>& memory, Block staging, HostExecutor executor, HostStream stream) {
#include "checkpoints.3"
}
}  // namespace checkpoints
