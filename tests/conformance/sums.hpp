// The rank-ordered sums over a communicator: equal to the sequential sum bit by bit, with values whose order shows.
#pragma once

#include <cmath>

#include <pleat/comm/ordered_sum.hpp>

#include <conformance/collectives.hpp>

namespace conformance {

/// Element `i` of a rank's terms: magnitudes so far apart that every order of the sum gives other bits.
template <class T>
T term(int rank, std::size_t i) {
  const std::uint64_t bits = mixed(mixed(static_cast<std::uint64_t>(rank)) + i);
  const double mantissa = 1.0 + static_cast<double>(bits % 4096) / 4096;
  const int exponent = static_cast<int>(bits >> 20 & 31) - 16;
  return static_cast<T>(static_cast<float>(std::ldexp(bits >> 40 & 1 ? mantissa : -mantissa, exponent)));
}
template <class T>
Bytes terms(int rank, std::size_t first, std::size_t count) {
  Bytes bytes(count * sizeof(T));
  for (std::size_t i = 0; i < count; ++i) {
    const T value = term<T>(rank, first + i);
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

/// The sum in the order of the ranks, or against it.
template <class Wire, class Out>
Out sequential_sum(int ranks, std::size_t i, bool accumulate, Out before, bool backwards = false) {
  using Sum = std::common_type_t<pleat::accumulator_t<Wire>, pleat::accumulator_t<Out>>;
  Sum sum = 0;
  for (int r = 0; r < ranks; ++r) sum += static_cast<Sum>(term<Wire>(backwards ? ranks - 1 - r : r, i));
  return static_cast<Out>(accumulate ? static_cast<Sum>(before) + sum : sum);
}
template <class Wire, class Out>
Bytes sequential_sums(int ranks, std::size_t first, std::size_t count, bool accumulate, const Bytes& before,
                      bool backwards = false) {
  Bytes bytes(count * sizeof(Out));
  for (std::size_t i = 0; i < count; ++i) {
    Out old;
    std::memcpy(&old, before.data() + i * sizeof(Out), sizeof(Out));
    const Out sum = sequential_sum<Wire, Out>(ranks, first + i, accumulate, old, backwards);
    std::memcpy(bytes.data() + i * sizeof(Out), &sum, sizeof(Out));
  }
  return bytes;
}

template <class Wire, class Out, class Site>
void reduce_scatter_once(Site& site, Counts counts, bool accumulate) {
  const DType wire = pleat::dtype_of<Wire>, out_dtype = pleat::dtype_of<Out>;
  const std::size_t mine = counts[static_cast<std::size_t>(site.rank())], first = sum_before(counts, site.rank());
  const Bytes before =
      accumulate ? terms<Out>(1000 + site.rank(), first, mine) : Bytes(mine * sizeof(Out), std::byte{0xff});
  auto in = site.upload(terms<Wire>(site.rank(), 0, sum_of(counts)));
  auto out = site.upload(before);
  typename Site::Buffer scratch(pleat::reduce_scatter_scratch_bytes(mine, site.size(), wire));
  reduce_scatter_ordered(site.comm, in.block().data, wire, counts, out.block().data, out_dtype, accumulate,
                         scratch.block(), site.s());
  require_equal(site.download(out), sequential_sums<Wire, Out>(site.size(), first, mine, accumulate, before),
                "reduce_scatter_ordered of ", wire, " into ", out_dtype);
}

template <class T, class Site>
void all_reduce_once(Site& site, std::size_t elems) {
  const DType dtype = pleat::dtype_of<T>;
  const Bytes mine = terms<T>(site.rank(), 0, elems);
  auto buffer = site.upload(mine);
  typename Site::Buffer scratch(pleat::all_reduce_scratch_bytes(elems, site.size(), dtype));
  all_reduce_ordered(site.comm, buffer.block().data, elems, dtype, scratch.block(), site.s());
  require_equal(site.download(buffer), sequential_sums<T, T>(site.size(), 0, elems, false, mine),
                "all_reduce_ordered of ", elems, " ", dtype);
}

template <backend Backend>
void check_sums() {
  at_all_sizes_on_ranks<Backend, Handle>("reduce_scatter_ordered", [](auto& site) {
    using pleat::bfloat16;
    for (int shape = 0; shape < count_shapes; ++shape) {
      const std::vector<std::size_t> counts = uneven_counts(site.size(), shape);
      for (const bool accumulate : {false, true}) {
        reduce_scatter_once<double, double>(site, counts, accumulate);
        reduce_scatter_once<float, float>(site, counts, accumulate);
        reduce_scatter_once<bfloat16, bfloat16>(site, counts, accumulate);
        reduce_scatter_once<bfloat16, float>(site, counts, accumulate);
        reduce_scatter_once<float, bfloat16>(site, counts, accumulate);
        reduce_scatter_once<float, double>(site, counts, accumulate);
      }
    }
  });
  at_all_sizes_on_ranks<Backend, Handle>("all_reduce_ordered", [](auto& site) {
    for (const std::size_t elems : {0, 1, 2, 7, 64, 1001}) {
      all_reduce_once<double>(site, elems);
      all_reduce_once<float>(site, elems);
      all_reduce_once<pleat::bfloat16>(site, elems);
    }
  });
  // Unless the order shows in these values, the checks above could not fail.
  at_all_sizes<Backend>("the order of the sum shows", [](const std::string&, int ranks) {
    if (ranks < 3) return;
    const Bytes none(64 * sizeof(float));
    const auto differs = [&]<class Wire>(Wire) {
      return sequential_sums<Wire, float>(ranks, 0, 64, false, none) !=
             sequential_sums<Wire, float>(ranks, 0, 64, false, none, true);
    };
    require(differs(float{}) && differs(pleat::bfloat16{}), "both directions give the same bits");
  });
  at_all_sizes_on_ranks<Backend, Handle>("sums with too little scratch", [](auto& site) {
    if (site.size() == 1) return;
    const std::vector<std::size_t> counts(static_cast<std::size_t>(site.size()), 3);
    auto in = site.upload(terms<float>(site.rank(), 0, sum_of(counts)));
    typename Backend::Buffer out(3 * sizeof(float));
    typename Backend::Buffer small(pleat::reduce_scatter_scratch_bytes(3, site.size(), DType::f32) - 1);
    require_throws<pleat::shape_error>(
        [&] {
          reduce_scatter_ordered(site.comm, in.block().data, DType::f32, counts, out.block().data, DType::f32, false,
                                 small.block(), site.s());
        },
        "pleat[T02]");
    typename Backend::Buffer smaller(pleat::all_reduce_scratch_bytes(6, site.size(), DType::f32) - 1);
    require_throws<pleat::shape_error>(
        [&] { all_reduce_ordered(site.comm, in.block().data, 6, DType::f32, smaller.block(), site.s()); },
        "pleat[T02]");
  });
}

}  // namespace conformance
