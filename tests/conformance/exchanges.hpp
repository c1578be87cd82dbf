// Point-to-point batches: rings, messages to oneself, several to one peer, ranks that stay out, random batches.
#pragma once

#include <algorithm>

#include <conformance/site.hpp>

namespace conformance {

using pleat::DType;
using pleat::Recv;
using pleat::Send;

struct PlannedMessage {
  int from, to;
  std::size_t elems;
  unsigned tag;
};

/// This rank's part of the messages, in one batch: sends in the order of `messages`, receives as well, or the peers'
/// messages shuffled among each other (those of one peer stay in order).
template <class Site>
void exchange_once(Site& site, const std::vector<PlannedMessage>& messages, DType dtype, bool shuffles = false) {
  using Buffer = typename Site::Buffer;
  std::vector<Buffer> sent, received;
  std::vector<Bytes> expected;
  std::vector<Send> tx;
  std::vector<Recv> rx;
  const std::size_t width = size_bytes(dtype);
  std::vector<PlannedMessage> mine;
  for (const PlannedMessage& m : messages) {
    if (m.from == site.rank()) {
      sent.push_back(site.upload(pattern(m.elems * width, m.from, m.to, m.tag)));
      tx.push_back({sent.back().block().data, m.elems, m.to});
    }
    if (m.to == site.rank()) mine.push_back(m);
  }
  if (shuffles) {
    const unsigned salt = static_cast<unsigned>(site.random());
    const auto place = [&](const PlannedMessage& m) { return (static_cast<unsigned>(m.from) * 7 + salt) % 11; };
    std::stable_sort(mine.begin(), mine.end(), [&](const auto& a, const auto& b) { return place(a) < place(b); });
  }
  for (const PlannedMessage& m : mine) {
    received.emplace_back(m.elems * width);
    expected.push_back(pattern(m.elems * width, m.from, m.to, m.tag));
    rx.push_back({received.back().block().data, m.elems, m.from});
  }
  site.comm.exchange(tx, rx, dtype, site.s());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    require_equal(site.download(received[i]), expected[i], "message ", i, " of ", mine[i].elems, " ", dtype,
                  " from rank ", mine[i].from);
  }
}

template <backend Backend, class View>
void check_exchanges() {
  at_all_sizes_on_ranks<Backend, View>("exchange around a ring", [](auto& site) {
    const int n = site.size();
    for (const DType dtype : dtypes) {
      for (const std::size_t elems : {0, 1, 100}) {
        std::vector<PlannedMessage> ring;
        for (int r = 0; r < n; ++r) ring.push_back({r, (r + 1) % n, elems, 20});
        exchange_once(site, ring, dtype);
      }
    }
  });
  at_all_sizes_on_ranks<Backend, View>("exchange with oneself", [](auto& site) {
    std::vector<PlannedMessage> messages;
    for (unsigned i = 0; i < 3; ++i) messages.push_back({site.rank(), site.rank(), i * 2, 30 + i});
    exchange_once(site, messages, DType::f32);
  });
  at_all_sizes_on_ranks<Backend, View>("exchange of several messages between all pairs", [](auto& site) {
    std::vector<PlannedMessage> messages;
    for (unsigned i = 0; i < 3; ++i) {
      for (int from = 0; from < site.size(); ++from) {
        for (int to = 0; to < site.size(); ++to) {
          messages.push_back({from, to, static_cast<std::size_t>(from + 2 * to) + i, 40 + i});
        }
      }
    }
    exchange_once(site, messages, DType::bf16);
    exchange_once(site, messages, DType::i64, true);
  });
  at_all_sizes_on_ranks<Backend, View>("exchange of nothing", [](auto& site) {
    site.comm.exchange({}, {}, DType::f32, site.s());
    site.finish();
  });
  // My k-th send to a peer matches its k-th receive from me across batches: one batch here, three there.
  at_all_sizes_on_ranks<Backend, View>("exchange with batches cut differently", [](auto& site) {
    if (site.size() == 1) return;
    const auto message = [](unsigned i) { return PlannedMessage{0, 1, 4 + i, 50 + i}; };
    if (site.rank() == 0) exchange_once(site, {message(0), message(1), message(2)}, DType::f64);
    if (site.rank() != 1) return;
    for (unsigned i = 0; i < 3; ++i) exchange_once(site, {message(i)}, DType::f64);
  });
  at_all_sizes_on_ranks<Backend, View>("random exchanges", [](auto& site) {
    std::minstd_rand common(static_cast<unsigned>(7 + site.size()));
    for (int batch = 0; batch < repeats(40); ++batch) {
      std::vector<PlannedMessage> messages(common() % 12);
      for (PlannedMessage& m : messages) {
        m.from = static_cast<int>(common() % static_cast<unsigned>(site.size()));
        m.to = static_cast<int>(common() % static_cast<unsigned>(site.size()));
        m.elems = common() % 50;
        m.tag = static_cast<unsigned>(common());
      }
      const DType dtype = dtypes[common() % std::size(dtypes)];
      const bool takes_part = std::any_of(messages.begin(), messages.end(), [&](const PlannedMessage& m) {
        return m.from == site.rank() || m.to == site.rank();
      });
      site.dawdle();
      if (takes_part) exchange_once(site, messages, dtype, true);
    }
  });
}

}  // namespace conformance
