// The leaves of dispatch and combine on the GPU against those of the host, on the same inputs: plans and rows are equal
// to the bit, sums to rounding. All ranks of a group are played by one.
#include <pleat/moe/cuda/plan.cuh>
#include <pleat/moe/cuda/row_leaf.cuh>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include <pleat/cuda/buffer.hpp>
#include <pleat/moe/host/leaf.hpp>

#include <doctest/doctest.h>

#include <support/copy_now.hpp>

#include "managed.hpp"
#include "support/repeats.hpp"

namespace {

using namespace pleat;
using namespace moe_testing;
using moe::DispatchPlan;
using moe::RowKind;
using moe::RowTable;
using moe::SourceRows;
using moe::Way;

/// The leaves of a device that this file tests, and its stream.
template <class Device>
struct LeavesOf : moe_leaf<host_device> {
  using Stream = HostStream;
};
template <>
struct LeavesOf<cuda_device> : moe::detail::CudaPlanLeaf, moe::detail::CudaRowLeaf {
  using Stream = cudaStream_t;
};

/// Inputs of all ranks.
struct Inputs {
  std::vector<std::int64_t> tokens;
  std::vector<Managed<std::int32_t>> ids;
  std::vector<Managed<std::byte>> x, weights;
};

template <class T>
void draw(Managed<std::byte>& bytes, std::mt19937& random, bool coarse) {
  bytes = Managed<std::byte>(bytes.size() * sizeof(T));
  auto* values = reinterpret_cast<T*>(bytes.data());
  for (std::size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    values[i] = static_cast<T>(coarse ? static_cast<float>(static_cast<int>(random() % 5)) - 1
                                      : std::normal_distribution<float>()(random));
  }
}

Inputs draw_inputs(const DispatchPlan& plan, unsigned seed) {
  std::mt19937 random(seed);
  Inputs in;
  const std::int64_t most = plan.shape.max_tokens;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const std::int64_t choices[] = {most, 0, most / 2, 1, most + 1, most - 1};
    const std::int64_t tokens = choices[(static_cast<unsigned>(rank) + seed) % 6];
    in.tokens.push_back(tokens);
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<std::int32_t> all(static_cast<std::size_t>(plan.shape.experts));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random);
      for (int j = 0; j < plan.shape.k; ++j) {
        const auto kind = random() % 12;
        ids.push_back(kind == 0   ? -1
                      : kind == 1 ? plan.shape.experts + static_cast<std::int32_t>(random() % 3)
                      : kind == 2 ? all[0]
                                  : all[static_cast<std::size_t>(j)]);
      }
    }
    in.ids.emplace_back(ids);
    in.x.emplace_back(static_cast<std::size_t>(tokens * plan.shape.hidden));
    in.weights.emplace_back(static_cast<std::size_t>(tokens * plan.shape.k));
    dispatch_dtype(FloatTypes{}, plan.shape.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      draw<T>(in.x.back(), random, false);
      draw<accumulator_t<T>>(in.weights.back(), random, true);
    });
  }
  return in;
}

/// The leaves of one device for all ranks of a group, with windows as on the peer path.
template <class DeviceType>
struct Group {
  using leaf = LeavesOf<DeviceType>;
  using Stream = typename leaf::Stream;

  explicit Group(const DispatchPlan& p) : plan(p) {
    Carver symmetric;
    plan.carve_window(symmetric);
    for (int r = 0; r < plan.ranks; ++r) {
      windows.emplace_back(symmetric.used_bytes());
      saved.emplace_back(plan.footprint().saved);
      Carver carver(saved.back().block());
      records.push_back(plan.carve_saved(carver));
      status.emplace_back(std::vector<moe::DispatchStatus>(1));
    }
    Carver scratch;
    plan.carve_plan_scratch(scratch);
    scratch_memory = Managed<std::byte>(scratch.used_bytes());
    Carver carver(scratch_memory.block());
    plan_scratch = plan.carve_plan_scratch(carver);
    for (int r = 0; r < plan.ranks; ++r) {
      for (int way = 0; way < 2; ++way) {
        for (const bool outgoing : {true, false}) {
          Table table{Managed<std::byte*>(ranks()), Managed<std::int64_t>(ranks()), Managed<std::int64_t*>(ranks())};
          for (int p = 0; p < plan.ranks; ++p) {
            Carver memory(windows[static_cast<std::size_t>(outgoing ? p : r)].block());
            const moe::DispatchWindow window = plan.carve_window(memory);
            const int from = outgoing ? r : p;
            table.base[static_cast<std::size_t>(p)] = window.rows[way];
            table.first[static_cast<std::size_t>(p)] = from * plan.shape.max_tokens;
            table.counts[static_cast<std::size_t>(p)] = window.counts[way] + from;
          }
          tables.push_back(table);
        }
      }
    }
  }
  std::size_t ranks() const { return static_cast<std::size_t>(plan.ranks); }
  RowTable table(int rank, RowKind kind, bool outgoing) const {
    const auto way = static_cast<std::size_t>(way_of(kind));
    const Table& t = tables[static_cast<std::size_t>(rank) * 4 + way * 2 + (outgoing ? 0 : 1)];
    return {t.base.data(), t.first.data(), t.counts.data(), plan.format(kind)};
  }

  void dispatch(const Inputs& in) {
    each([&](int r, auto& record, Stream s) {
      const auto at = static_cast<std::size_t>(r);
      const std::int64_t planned = plan.planned(in.tokens[at]);
      const RowTable out = table(r, RowKind::token, true);
      leaf::plan_sends(plan, r, in.tokens[at], planned, in.ids[at].data(), record, plan_scratch, status[at].data(), s);
      leaf::pack_headers(plan, planned, in.ids[at].data(), in.weights[at].data(), record, out, s);
      leaf::pack(plan, r, planned, in.x[at].data(), record, out, s);
    });
    each([&](int r, auto& record, Stream s) {
      leaf::plan_rows(plan, r, table(r, RowKind::token, false), record, plan_scratch,
                      status[static_cast<std::size_t>(r)].data(), s);
      leaf::expand(plan, SourceRows::own(r, in.x[static_cast<std::size_t>(r)].data()), record, s);
      leaf::expand(plan, SourceRows::of_others(r, table(r, RowKind::token, false)), record, s);
    });
  }
  void combine(const Inputs& in, const std::vector<Managed<std::byte>>& out, std::vector<Managed<std::byte>>& y) {
    each([&](int r, auto& record, Stream s) {
      leaf::sum_experts(plan, out[static_cast<std::size_t>(r)].data(), true, record, table(r, RowKind::result, true),
                        s);
    });
    each([&](int r, auto& record, Stream s) {
      const auto at = static_cast<std::size_t>(r);
      leaf::sum_sources(plan, plan.planned(in.tokens[at]), table(r, RowKind::result, false), record,
                        in.tokens[at] % 2 == 0 ? nullptr : in.x[at].data(), y[at].data(), nullptr, status[at].data(),
                        s);
    });
  }
  void combine_backward(const Inputs& in, const std::vector<Managed<std::byte>>& out,
                        std::vector<Managed<std::byte>>& dout) {
    each([&](int r, auto& record, Stream s) {
      const auto at = static_cast<std::size_t>(r);
      leaf::pack(plan, r, plan.planned(in.tokens[at]), in.x[at].data(), record, table(r, RowKind::gradient, true), s);
    });
    each([&](int r, auto& record, Stream s) {
      const auto at = static_cast<std::size_t>(r);
      leaf::expand_gradient(plan, SourceRows::own(r, in.x[at].data()), out[at].data(), record, dout[at].data(), s);
      leaf::expand_gradient(plan, SourceRows::of_others(r, table(r, RowKind::gradient, false)), out[at].data(), record,
                            dout[at].data(), s);
    });
  }
  void dispatch_backward(const Inputs& in, const std::vector<Managed<std::byte>>& drows,
                         std::vector<Managed<std::byte>>& dx, std::vector<Managed<std::byte>>& dweights) {
    each([&](int r, auto& record, Stream s) {
      leaf::sum_experts(plan, drows[static_cast<std::size_t>(r)].data(), false, record,
                        table(r, RowKind::token_gradient, true), s);
    });
    each([&](int r, auto& record, Stream s) {
      const auto at = static_cast<std::size_t>(r);
      leaf::sum_sources(plan, plan.planned(in.tokens[at]), table(r, RowKind::token_gradient, false), record, nullptr,
                        dx[at].data(), dweights[at].data(), nullptr, s);
    });
  }

  template <class F>
  void each(const F& f) {
    for (int r = 0; r < plan.ranks; ++r) f(r, records[static_cast<std::size_t>(r)], Stream{});
    finish();
  }

  struct Table {
    Managed<std::byte*> base;
    Managed<std::int64_t> first;
    Managed<std::int64_t*> counts;
  };
  DispatchPlan plan;
  std::vector<Managed<std::byte>> windows, saved;
  std::vector<moe::DispatchRecord> records;
  std::vector<Managed<moe::DispatchStatus>> status;
  Managed<std::byte> scratch_memory;
  moe::PlanScratch plan_scratch{};
  std::vector<Table> tables;
};

template <class T>
bool same(const T* a, const T* b, std::int64_t count) {
  return std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(T)) == 0;
}

/// The lists of a record up to their ends.
void check_plans(const DispatchPlan& plan, int own, const moe::DispatchRecord& a, const moe::DispatchRecord& b,
                 std::int64_t tokens) {
  CHECK(same(a.send_counts, b.send_counts, plan.ranks));
  CHECK(same(a.own_tokens, b.own_tokens, std::max<std::int64_t>(b.send_counts[own], 0)));
  for (std::int64_t t = 0; t < plan.planned(tokens); ++t) {
    for (std::int64_t i = t * plan.max_sends(); i < (t + 1) * plan.max_sends(); ++i) {
      REQUIRE(a.sent[i].rank == b.sent[i].rank);
      if (b.sent[i].rank < 0) break;
      REQUIRE(a.sent[i].slot == b.sent[i].slot);
    }
  }
  CHECK(same(a.recv_counts, b.recv_counts, plan.ranks));
  CHECK(same(a.offsets, b.offsets, plan.experts_local() + 1));
  CHECK(same(a.ends, b.ends, plan.experts_local()));
  CHECK(*a.dropped == *b.dropped);
  for (int source = 0; source < plan.ranks; ++source) {
    for (std::int64_t slot = 0; slot < b.recv_counts[source]; ++slot) {
      const std::int64_t first = (source * plan.shape.max_tokens + slot) * plan.max_entries();
      for (std::int64_t i = first; i < first + plan.max_entries(); ++i) {
        REQUIRE(a.entry_rows[i] == b.entry_rows[i]);
        if (b.entry_rows[i] < 0) break;
        REQUIRE(a.entry_choice[i] == b.entry_choice[i]);
        const std::size_t bytes = size_bytes(plan.accumulator());
        REQUIRE(std::memcmp(static_cast<std::byte*>(a.entry_weights) + static_cast<std::size_t>(i) * bytes,
                            static_cast<std::byte*>(b.entry_weights) + static_cast<std::size_t>(i) * bytes,
                            bytes) == 0);
      }
    }
  }
}

/// The largest difference in units of the largest value; what is NaN in one must be in the other.
double difference(const Managed<std::byte>& a, const Managed<std::byte>& b, DType dtype) {
  return dispatch_dtype(FloatTypes{}, dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto* x = reinterpret_cast<const T*>(a.data());
    const auto* y = reinterpret_cast<const T*>(b.data());
    double most = 0, error = 0;
    for (std::size_t i = 0; i < a.size() / sizeof(T); ++i) {
      const double u = static_cast<double>(x[i]), v = static_cast<double>(y[i]);
      if (std::isnan(u) != std::isnan(v)) return HUGE_VAL;
      if (std::isnan(v)) continue;
      most = std::fmax(most, std::fabs(v));
      error = std::fmax(error, std::fabs(u - v));
    }
    return static_cast<double>(most == 0 ? error : error / most);
  });
}
double tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-14 : dtype == DType::f32 ? 2e-6 : 1e-2;
}

std::vector<Managed<std::byte>> arrays(const DispatchPlan& plan, const std::function<std::int64_t(int)>& elems,
                                       DType dtype) {
  std::vector<Managed<std::byte>> all;
  for (int r = 0; r < plan.ranks; ++r) all.emplace_back(static_cast<std::size_t>(elems(r)) * size_bytes(dtype));
  return all;
}

void check_case(const DispatchPlan& plan, unsigned seed) {
  CAPTURE(plan.ranks);
  CAPTURE(plan.shape.experts);
  CAPTURE(plan.shape.k);
  CAPTURE(plan.shape.hidden);
  CAPTURE(name_of(plan.shape.dtype));
  CAPTURE(name_of(plan.options.overflow));
  const DType dtype = plan.shape.dtype;
  const Inputs in = draw_inputs(plan, seed);
  Group<host_device> host(plan);
  Group<cuda_device> device(plan);
  host.dispatch(in);
  device.dispatch(in);
  for (int r = 0; r < plan.ranks; ++r) {
    CAPTURE(r);
    const auto at = static_cast<std::size_t>(r);
    check_plans(plan, r, device.records[at], host.records[at], in.tokens[at]);
    // whatever lies past the last offset is still what it was
    CHECK(same(device.records[at].rows, host.records[at].rows,
               plan.capacity_rows() * plan.shape.hidden * static_cast<std::int64_t>(size_bytes(dtype))));
  }

  const auto rows = [&](int) { return plan.capacity_rows() * plan.shape.hidden; };
  const auto elems = [&](int r) { return plan.planned(in.tokens[static_cast<std::size_t>(r)]) * plan.shape.hidden; };
  const auto choices = [&](int r) { return plan.planned(in.tokens[static_cast<std::size_t>(r)]) * plan.shape.k; };
  std::mt19937 random(seed + 1);
  auto out = arrays(plan, rows, DType::u8);
  dispatch_dtype(FloatTypes{}, dtype, [&](auto type) {
    for (auto& array : out) draw<typename decltype(type)::type>(array, random, false);
  });
  const auto both = [&](const auto& count, DType type, const auto& run) {
    std::pair<std::vector<Managed<std::byte>>, std::vector<Managed<std::byte>>> results{arrays(plan, count, type),
                                                                                        arrays(plan, count, type)};
    run(host, results.first);
    run(device, results.second);
    for (int r = 0; r < plan.ranks; ++r) {
      CAPTURE(r);
      CHECK(difference(results.second[static_cast<std::size_t>(r)], results.first[static_cast<std::size_t>(r)], type) <
            tolerance(type));
    }
    return results.second;
  };
  const auto y = both(elems, dtype, [&](auto& group, auto& to) { group.combine(in, out, to); });
  for (int r = 0; r < plan.ranks; ++r) {
    CHECK(same(device.status[static_cast<std::size_t>(r)].data(), host.status[static_cast<std::size_t>(r)].data(), 1));
  }
  both(rows, dtype, [&](auto& group, auto& to) { group.combine_backward(in, out, to); });
  auto dx = arrays(plan, elems, dtype);
  both(choices, plan.accumulator(), [&](auto& group, auto& to) { group.dispatch_backward(in, out, dx, to); });
  both(elems, dtype, [&](auto& group, auto& to) {
    auto dweights = arrays(plan, choices, plan.accumulator());
    group.dispatch_backward(in, out, to, dweights);
  });

  DispatchPlan narrow = plan;  // few CTAs: the same bits
  narrow.options.max_ctas = 2;
  Group<cuda_device> again(narrow);
  again.dispatch(in);
  auto narrow_y = arrays(plan, elems, dtype);
  again.combine(in, out, narrow_y);
  for (int r = 0; r < plan.ranks; ++r) {
    const auto at = static_cast<std::size_t>(r);
    CHECK(same(narrow_y[at].data(), y[at].data(), static_cast<std::int64_t>(y[at].size())));
  }
}

TEST_CASE("plans and rows equal the host's to the bit, sums to rounding") {
  struct Shape {
    int ranks, experts, k;
    std::int64_t max_tokens, hidden;
  };
  // one rank and many, one expert each and more than a word of bits, k above a warp, rows that are no whole packs, rows
  // of several pieces
  const Shape shapes[] = {{1, 8, 2, 40, 64},   {2, 8, 3, 600, 24},  {4, 8, 8, 33, 7},     {3, 210, 5, 300, 8},
                          {8, 64, 8, 257, 16}, {2, 96, 40, 20, 5},  {70, 140, 3, 9, 8},   {5, 5, 1, 64, 3},
                          {2, 8, 3, 70, 1500}, {3, 9, 5, 66, 2100}, {1, 40, 33, 30, 1028}};
  unsigned seed = 0;
  for (const Shape& s : shapes) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      check_case(moe::plan(s.ranks, moe::DispatchShape{s.max_tokens, s.hidden, s.experts, s.k, dtype},
                           {.row_alignment = seed % 2 == 0 ? 128 : 4}),
                 ++seed);
    }
    check_case(moe::plan(s.ranks, moe::DispatchShape{s.max_tokens, s.hidden, s.experts, s.k, DType::f32},
                         {.transport = Transport::peer, .send_by = moe::SendBy::copies}),
               ++seed);
  }
}

TEST_CASE("what overflows is dropped as on the host") {
  unsigned seed = 100;
  for (const std::int64_t max_rows : {1, 50, 333, 2000}) {
    if (testing_support::is_quick() && max_rows != 333) continue;
    for (const DType dtype : {DType::f64, DType::f32}) {
      const moe::DispatchShape shape{1100, 8, 12, 4, dtype};
      check_case(
          moe::plan(3, shape, {.row_alignment = 8, .overflow = moe::Overflow::drop_lowest, .max_rows = max_rows}),
          ++seed);
    }
  }
}

template <int Threads>
__global__ void fill_kernel(bfloat16* x, std::int64_t hidden, std::int64_t elems) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * Threads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * Threads + threadIdx.x; i < elems; i += step) {
    x[i] = bfloat16(static_cast<float>((i / hidden + i % hidden) % 251));
  }
}

TEST_CASE("more than 299,594 rows of 7168 elements, 30 % of all ids -1: the last ones are right") {
  constexpr std::int64_t tokens = 53510, hidden = 7168;
  const DispatchPlan plan = moe::plan(1, moe::DispatchShape{tokens, hidden, 8, 8, DType::bf16});
  Carver symmetric;
  plan.carve_window(symmetric);
  const CudaBuffer window(symmetric.used_bytes()), saved(plan.footprint().saved), scratch(plan.footprint().scratch),
      x(static_cast<std::size_t>(tokens * hidden) * 2), y(x.size_bytes());
  Carver window_carver(window.block()), saved_carver(saved.block()), scratch_carver(scratch.block());
  const moe::DispatchWindow w = plan.carve_window(window_carver);
  const moe::DispatchRecord r = plan.carve_saved(saved_carver);
  const moe::PlanScratch s = plan.carve_plan_scratch(scratch_carver);
  std::vector<std::int32_t> all_ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int j = 0; j < 8; ++j) {
      const bool is_routed = (t * 8 + j) * 7 % 10 >= 3 || t == tokens - 1;
      all_ids.push_back(is_routed ? (j + static_cast<std::int32_t>(t)) % 8 : -1);
    }
  }
  const Managed<std::int32_t> ids(all_ids);
  const Managed<float> weights(std::vector<float>(all_ids.size(), 0.125f));
  const Managed<moe::DispatchStatus> status(std::vector<moe::DispatchStatus>(1));
  const Managed<std::int64_t> first(std::vector<std::int64_t>{0});
  const auto table = [&](RowKind kind, std::vector<Managed<std::byte*>>& bases,
                         std::vector<Managed<std::int64_t*>>& counts) {
    const int way = static_cast<int>(way_of(kind));
    bases.emplace_back(std::vector<std::byte*>{w.rows[way]});
    counts.emplace_back(std::vector<std::int64_t*>{w.counts[way]});
    return RowTable{bases.back().data(), first.data(), counts.back().data(), plan.format(kind)};
  };
  std::vector<Managed<std::byte*>> bases;
  std::vector<Managed<std::int64_t*>> counts;
  const RowTable there = table(RowKind::token, bases, counts), back = table(RowKind::result, bases, counts);
  using leaf = LeavesOf<cuda_device>;
  fill_kernel<256><<<1024, 256>>>(reinterpret_cast<bfloat16*>(x.data()), hidden, tokens * hidden);
  check_launch("fill_kernel");
  leaf::plan_sends(plan, 0, tokens, tokens, ids.data(), r, s, status.data(), nullptr);
  leaf::pack_headers(plan, tokens, ids.data(), weights.data(), r, there, nullptr);
  leaf::plan_rows(plan, 0, there, r, s, status.data(), nullptr);
  leaf::expand(plan, SourceRows::own(0, x.data()), r, nullptr);
  leaf::sum_experts(plan, r.rows, true, r, back, nullptr);
  leaf::sum_sources(plan, tokens, back, r, nullptr, y.data(), nullptr, status.data(), nullptr);
  finish();
  const auto read = [](const std::byte* from, std::int64_t row) {
    std::vector<bfloat16> values(hidden);
    testing_support::copy_now(values.data(), from + static_cast<std::size_t>(row * hidden) * 2, hidden * 2);
    return values;
  };
  std::int64_t ends[8];
  testing_support::copy_now(ends, r.ends, sizeof ends);
  CHECK(ends[7] > 299'594);
  CHECK(status[0].unrouted_choices == std::count(all_ids.begin(), all_ids.end(), -1));
  const std::vector<bfloat16> last = read(r.rows, ends[7] - 1), sum = read(y.data(), tokens - 1);
  for (std::int64_t h = 0; h < hidden; ++h) {
    const auto expected = static_cast<float>((tokens - 1 + h) % 251);
    REQUIRE(static_cast<float>(last[static_cast<std::size_t>(h)]) == expected);
    REQUIRE(static_cast<float>(sum[static_cast<std::size_t>(h)]) == expected);
  }
}

template <int Threads>
__global__ void accessors_kernel(DispatchPlan plan, std::int64_t* out) {
  out[0] = plan.experts_local();
  out[1] = plan.max_sends();
  out[2] = plan.capacity_rows();
  out[3] = plan.planned(plan.shape.max_tokens + 1);
  out[4] = static_cast<std::int64_t>(plan.format(RowKind::token).row_bytes);
  out[5] = static_cast<std::int64_t>(size_bytes(plan.accumulator()));
  out[6] = static_cast<std::int64_t>(way_of(RowKind::result));
  out[7] = plan.token_blocks();
}

TEST_CASE("a plan answers on the device as on the host") {
  const DispatchPlan plan = moe::plan(4, moe::DispatchShape{1000, 20, 12, 8, DType::bf16});
  const Managed<std::int64_t> out(8);
  accessors_kernel<1><<<1, 1>>>(plan, out.data());
  check_launch("accessors_kernel");
  finish();
  const std::int64_t expected[] = {3, 4, 12048, 0, 80 + 48, 4, 1, 4};
  for (std::size_t i = 0; i < 8; ++i) CHECK(out[i] == expected[i]);
}

}  // namespace
