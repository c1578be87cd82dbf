// The collective operations of a communicator, on every rank, dtype and shape of counts.
#pragma once

#include <numeric>

#include <conformance/site.hpp>

namespace conformance {

using pleat::Counts;
using pleat::DType;

inline std::size_t sum_of(Counts counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}
inline std::size_t sum_before(Counts counts, int rank) {
  return sum_of(counts.first(static_cast<std::size_t>(rank)));
}

template <class Site>
void all_gather_once(Site& site, std::size_t elems, DType dtype, bool in_place, unsigned tag) {
  const std::size_t bytes = elems * size_bytes(dtype);
  const Bytes mine = pattern(bytes, site.rank(), 0, tag);
  Bytes expected;
  for (int r = 0; r < site.size(); ++r) append(expected, pattern(bytes, r, 0, tag));

  Bytes before(expected.size(), std::byte{0xff});
  if (in_place) std::copy(mine.begin(), mine.end(), before.begin() + static_cast<long>(site.rank() * bytes));
  auto out = site.upload(before);
  auto in = site.upload(mine);
  const void* from = in_place ? out.block().data + static_cast<std::size_t>(site.rank()) * bytes : in.block().data;
  site.comm.all_gather(from, out.block().data, elems, dtype, site.s());
  require_equal(site.download(out), expected, "all_gather of ", elems, " ", dtype);
  require_equal(site.download(in), mine, "all_gather changed its input");
}

template <class Site>
void all_gather_v_once(Site& site, Counts counts, DType dtype, bool in_place, unsigned tag) {
  const auto pattern_of = [&](int r) {
    return pattern(counts[static_cast<std::size_t>(r)] * size_bytes(dtype), r, 0, tag);
  };
  const Bytes mine = pattern_of(site.rank());
  Bytes expected;
  for (int r = 0; r < site.size(); ++r) append(expected, pattern_of(r));
  const std::size_t offset = sum_before(counts, site.rank()) * size_bytes(dtype);

  Bytes before(expected.size(), std::byte{0xff});
  if (in_place) std::copy(mine.begin(), mine.end(), before.begin() + static_cast<long>(offset));
  auto out = site.upload(before);
  auto in = site.upload(mine);
  site.comm.all_gather_v(in_place ? out.block().data + offset : in.block().data, out.block().data, counts, dtype,
                         site.s());
  require_equal(site.download(out), expected, "all_gather_v of ", dtype);
}

template <class Site>
void all_to_all_once(Site& site, std::size_t elems, DType dtype, unsigned tag) {
  const std::size_t bytes = elems * size_bytes(dtype);
  Bytes sent, expected;
  for (int r = 0; r < site.size(); ++r) {
    append(sent, pattern(bytes, site.rank(), r, tag));
    append(expected, pattern(bytes, r, site.rank(), tag));
  }
  auto in = site.upload(sent);
  typename Site::Buffer out(expected.size());
  site.comm.all_to_all(in.block().data, out.block().data, elems, dtype, site.s());
  require_equal(site.download(out), expected, "all_to_all of ", elems, " ", dtype);
  require_equal(site.download(in), sent, "all_to_all changed its input");
}

/// `elems(from, to)` is what each rank sends to each.
template <class Site, class Elems>
void all_to_all_v_once(Site& site, Elems elems, DType dtype, unsigned tag) {
  std::vector<std::size_t> send, recv;
  Bytes sent, expected;
  for (int r = 0; r < site.size(); ++r) {
    send.push_back(elems(site.rank(), r));
    recv.push_back(elems(r, site.rank()));
    append(sent, pattern(send.back() * size_bytes(dtype), site.rank(), r, tag));
    append(expected, pattern(recv.back() * size_bytes(dtype), r, site.rank(), tag));
  }
  auto in = site.upload(sent);
  typename Site::Buffer out(expected.size());
  site.comm.all_to_all_v(in.block().data, send, out.block().data, recv, dtype, site.s());
  require_equal(site.download(out), expected, "all_to_all_v of ", dtype);
}

template <class Site>
void broadcast_once(Site& site, std::size_t elems, int root, DType dtype, unsigned tag) {
  const std::size_t bytes = elems * size_bytes(dtype);
  auto buffer = site.upload(site.rank() == root ? pattern(bytes, root, 0, tag) : Bytes(bytes, std::byte{0xff}));
  site.comm.broadcast(buffer.block().data, elems, root, dtype, site.s());
  require_equal(site.download(buffer), pattern(bytes, root, 0, tag), "broadcast of ", elems, " ", dtype, " from ",
                root);
}

/// Counts that differ, with ranks that give nothing.
inline std::vector<std::size_t> uneven_counts(int ranks, int shape) {
  std::vector<std::size_t> counts;
  for (int r = 0; r < ranks; ++r) {
    const int uneven[] = {r * 3 + 1, r % 2 * 5, r == ranks - 1 ? 7 : 0, 0};
    counts.push_back(static_cast<std::size_t>(uneven[shape]));
  }
  return counts;
}
inline constexpr int count_shapes = 4;

template <backend Backend, class View>
void check_collectives() {
  at_all_sizes_on_ranks<Backend, View>("all_gather", [](auto& site) {
    for (const DType dtype : dtypes) {
      for (const std::size_t elems : {0, 1, 3, 129}) {
        all_gather_once(site, elems, dtype, false, 1);
        all_gather_once(site, elems, dtype, true, 2);
      }
    }
  });
  at_all_sizes_on_ranks<Backend, View>("all_gather_v", [](auto& site) {
    for (const DType dtype : dtypes) {
      for (int shape = 0; shape < count_shapes; ++shape) {
        const std::vector<std::size_t> counts = uneven_counts(site.size(), shape);
        all_gather_v_once(site, counts, dtype, false, 3);
        all_gather_v_once(site, counts, dtype, true, 4);
      }
    }
  });
  at_all_sizes_on_ranks<Backend, View>("all_to_all", [](auto& site) {
    for (const DType dtype : dtypes) {
      for (const std::size_t elems : {0, 1, 5, 64}) all_to_all_once(site, elems, dtype, 5);
    }
  });
  at_all_sizes_on_ranks<Backend, View>("all_to_all_v", [](auto& site) {
    const int last = site.size() - 1;
    for (const DType dtype : dtypes) {
      const auto size = [](int n) { return static_cast<std::size_t>(n); };
      all_to_all_v_once(
          site, [&](int from, int to) { return size((from * 7 + to * 3) % 5); }, dtype, 6);
      all_to_all_v_once(
          site, [&](int from, int to) { return size(from == last ? 0 : to + 2); }, dtype, 7);
      all_to_all_v_once(
          site, [&](int from, int to) { return size(to == last ? from * 4 + 1 : 0); }, dtype, 8);
      all_to_all_v_once(
          site, [&](int, int) { return size(0); }, dtype, 9);
    }
  });
  at_all_sizes_on_ranks<Backend, View>("broadcast", [](auto& site) {
    for (int root = 0; root < site.size(); ++root) {
      for (const DType dtype : dtypes) {
        for (const std::size_t elems : {0, 1, 200}) broadcast_once(site, elems, root, dtype, 10);
      }
    }
  });
  at_all_sizes_on_ranks<Backend, View>("large messages", [](auto& site) {
    const std::size_t elems = (1 << 17) + 1;
    all_gather_once(site, elems, DType::u8, true, 11);
    all_to_all_once(site, elems / 4, DType::u8, 12);
    broadcast_once(site, elems, site.size() - 1, DType::bf16, 13);
  });
  at_all_sizes<Backend>("barrier", [](const std::string& name, int ranks) {
    typename Backend::template Shared<std::atomic<int>> entered;
    on_ranks<Backend, View>(name, ranks, [&](auto& site) {
      for (int round = 1; round <= 40; ++round) {
        if (round % 8 == 0) std::this_thread::sleep_for(milliseconds(site.rank()));
        entered->fetch_add(1);
        site.comm.barrier(site.s());
        site.finish();
        require(entered->load() >= round * site.size(), "a rank left barrier ", round, " before all had entered");
        site.comm.barrier(site.s());  // so that nobody enters the next round before all have looked
        site.finish();
      }
    });
  });
  at_all_sizes_on_ranks<Backend, View>("refusals of one's own arguments", [](auto& site) {
    const auto all_refuse = [&]<class Error>(std::type_identity<Error>, std::size_t elems, DType dtype,
                                             const char* id) {
      auto& comm = site.comm;
      const std::vector<std::size_t> counts(static_cast<std::size_t>(site.size()), elems);
      const pleat::Send send{nullptr, elems, site.rank()};
      const pleat::Recv recv{nullptr, elems, site.rank()};
      const auto refuses = [&](auto call) { require_throws<Error>(call, id); };
      refuses([&] { comm.all_gather(nullptr, nullptr, elems, dtype, site.s()); });
      refuses([&] { comm.all_gather_v(nullptr, nullptr, counts, dtype, site.s()); });
      refuses([&] { comm.all_to_all(nullptr, nullptr, elems, dtype, site.s()); });
      refuses([&] { comm.all_to_all_v(nullptr, counts, nullptr, counts, dtype, site.s()); });
      refuses([&] { comm.broadcast(nullptr, elems, 0, dtype, site.s()); });
      refuses([&] { comm.exchange({&send, 1}, {&recv, 1}, dtype, site.s()); });
    };
    all_refuse(std::type_identity<pleat::shape_error>{}, 3, static_cast<DType>(77), "of elements of dtype number 77");
    all_refuse(std::type_identity<pleat::comm_error>{}, std::size_t{1} << 62, DType::i32, "pleat[C05]");
    all_refuse(std::type_identity<pleat::comm_error>{}, SIZE_MAX, DType::u8, "more bytes than memory can have");
    all_gather_once(site, 3, DType::f32, false, 13);  // that ends nothing
  });
  // Every rank draws the same operations, and goes through them at a pace of its own.
  at_all_sizes_on_ranks<Backend, View>("random operations", [](auto& site) {
    std::minstd_rand common(static_cast<unsigned>(99 + site.size()));
    for (unsigned tag = 100, end = tag + static_cast<unsigned>(repeats(60)); tag < end; ++tag) {
      const DType dtype = dtypes[common() % std::size(dtypes)];
      const std::size_t elems = common() % 20;
      const int root = static_cast<int>(common()) % site.size();
      const auto counts = uneven_counts(site.size(), static_cast<int>(common() % count_shapes));
      const unsigned operation = common() % 6;
      site.dawdle();
      if (operation == 0) all_gather_once(site, elems, dtype, tag % 2 == 0, tag);
      if (operation == 1) all_gather_v_once(site, counts, dtype, tag % 2 == 0, tag);
      if (operation == 2) all_to_all_once(site, elems, dtype, tag);
      if (operation == 3) {
        all_to_all_v_once(
            site, [&](int from, int to) { return (elems * (static_cast<std::size_t>(from * 3 + to) % 4)); }, dtype,
            tag);
      }
      if (operation == 4) broadcast_once(site, elems, root, dtype, tag);
      if (operation == 5) site.comm.barrier(site.s());
    }
  });
}

}  // namespace conformance
