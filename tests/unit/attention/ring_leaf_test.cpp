// Kernels that a ring is given: they get all its calls, and prepare() tells one of each of them beforehand.
#include <doctest/doctest.h>

#include "unit/attention/ring_run.hpp"

#include <pleat/attention/host/leaf.hpp>

namespace {

using namespace pleat;

/// Extents and strides of all tensors of a call, and its work: what a plan of the call may depend on.
struct Layout {
  std::vector<std::int64_t> numbers;
  std::vector<Rectangle> work;

  explicit Layout(const AttentionForward& a) : numbers{a.first, a.last}, work(a.work.begin(), a.work.end()) {
    append({a.q, a.k, a.v, a.o_acc, a.lse, a.out});
  }
  explicit Layout(const AttentionBackward& a)
      : numbers{a.accumulate_dq, a.accumulate_dk, a.accumulate_dv, a.deterministic},
        work(a.work.begin(), a.work.end()) {
    append({a.q, a.k, a.v, a.out, a.dout, a.lse, a.delta, a.dq, a.dk, a.dv});
  }
  void append(std::initializer_list<TensorRef> tensors) {
    for (const TensorRef& t : tensors) {
      for (int axis = 0; axis < t.rank(); ++axis) numbers.insert(numbers.end(), {t.extent(axis), t.stride(axis)});
    }
  }
  friend bool operator==(const Layout&, const Layout&) = default;
};

/// The host's kernel with an account of what it was prepared for and what it was asked.
struct RecordingLeaf {
  using Host = attention_leaf<host_device>;
  struct Record {
    std::vector<Layout> prepared, asked;
  };
  std::shared_ptr<Record> record = std::make_shared<Record>();

  void prepare(const AttentionForward& a) const { record->prepared.emplace_back(a); }
  void prepare(const AttentionBackward& a) const { record->prepared.emplace_back(a); }
  void forward(const AttentionForward& a, HostStream s) const {
    record->asked.emplace_back(a);
    Host::forward(a, s);
  }
  void backward(const AttentionBackward& a, HostStream s) const {
    record->asked.emplace_back(a);
    Host::backward(a, s);
  }
  void delta(const TensorRef& delta, const TensorRef& out, const TensorRef& dout, HostStream s) const {
    Host::delta(delta, out, dout, s);
  }
  void store(const TensorRef& out, std::span<const TensorRef> terms, HostStream s) const { Host::store(out, terms, s); }
};

void check_prepared(const ring::Plan& plan) {
  const Footprint need = plan.footprint();
  std::vector<RecordingLeaf> leaves(static_cast<std::size_t>(plan.cp));
  run_ranks(plan.cp, [&](ThreadComm& world) {
    const RecordingLeaf& leaf = leaves[static_cast<std::size_t>(world.rank())];
    HostArena arena(world, need.symmetric);
    HostBuffer scratch(need.scratch, 0xff), lse(need.saved, 0xff);
    const HostBuffer persistent(need.persistent, 0xff), pinned(need.pinned_host, 0xff);
    auto op = ring::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world),
                         Memory<HostArena>{scratch.block(), persistent.block(), pinned.block(), &arena}, {}, leaf);
    const std::int64_t tokens = plan.local_tokens(world.rank());
    const auto tensor = [&](std::vector<float>& data, int heads, int dim, int gap) {
      const std::int64_t pitch = heads * dim + gap;
      data.assign(static_cast<std::size_t>(plan.shape.batch * tokens * pitch), 0.5f);
      return ring_run::view(data, plan.shape.batch, tokens, pitch, 0, heads, dim);
    };
    std::vector<float> memory[8];
    const ring::Shape& shape = plan.shape;
    const TensorRef q = tensor(memory[0], shape.q_heads, shape.qk_dim, 3),
                    dq = tensor(memory[1], shape.q_heads, shape.qk_dim, 0);
    const TensorRef k = tensor(memory[2], shape.kv_heads, shape.qk_dim, 1),
                    dk = tensor(memory[3], shape.kv_heads, shape.qk_dim, 0);
    const TensorRef v = tensor(memory[4], shape.kv_heads, shape.v_dim, 2),
                    dv = tensor(memory[5], shape.kv_heads, shape.v_dim, 0);
    const TensorRef out = tensor(memory[6], shape.q_heads, shape.v_dim, 5),
                    dout = tensor(memory[7], shape.q_heads, shape.v_dim, 7);
    op.prepare(q, k, v, out, dout);
    world.barrier();
    ring::Saved saved(lse.block());
    op.forward({}, q, k, v, out, saved);
    op.backward({}, dout, saved, dq, dk, dv);
    world.barrier();
  });
  for (const RecordingLeaf& leaf : leaves) {
    CHECK(leaf.record->prepared.size() >= 2);
    CHECK(leaf.record->prepared == leaf.record->asked);
  }
}

}  // namespace

TEST_CASE("prepare tells a kernel of all calls that follow, for both transports") {
  for (const Transport transport : {Transport::collective, Transport::peer}) {
    for (const int cp : {1, 2, 4}) {
      CAPTURE(cp);
      ring::Shape shape{.batch = 2, .tokens = 24, .q_heads = 4, .kv_heads = 2, .qk_dim = 5, .v_dim = 3};
      check_prepared(ring::plan(cp, shape, {.transport = transport}));
      check_prepared(ring::plan(cp, shape, {.causal = false, .transport = transport}));
      if (transport == Transport::peer) {  // one by one, by a kernel that does not take all blocks together
        check_prepared(ring::plan(cp, shape, {.transport = transport, .launches = ring::Launches::one}));
      }
      shape.cu_seqlens = {0, 3, 3, 17, 22};
      check_prepared(ring::plan(cp, shape, {.transport = transport}));
    }
  }
}
