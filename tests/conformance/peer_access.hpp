// Peer access: windows on a symmetric arena, signals that count, credits with reuse, groups within the arena, failures.
#pragma once

#include <pleat/comm/peer_access.hpp>
#include <pleat/comm/window_log.hpp>
#include <pleat/core/carve.hpp>

#include <conformance/failures.hpp>

namespace conformance {

/// A backend with an arena: `arena_type(GroupComm<comm_type> stage, bytes)`.
template <class B>
concept arena_backend = backend<B> && pleat::symmetric_arena<typename B::arena_type> &&
    std::constructible_from<typename B::arena_type, pleat::GroupComm<typename B::comm_type>, std::size_t>;

/// The ranks `first, first + stride, ...`.
inline pleat::Group strided_group(int first, int stride, int count) {
  return {first, pleat::GroupShape{}.append(stride, count)};
}

/// One rank's side of a check of windows.
template <class Backend>
class PeerSite : public Site<Backend, typename Backend::comm_type> {
 public:
  using Base = Site<Backend, typename Backend::comm_type>;
  using Arena = typename Backend::arena_type;

  PeerSite(typename Backend::comm_type& world) : Base(world, world), landing_(most_read_bytes) {}

  pleat::Group everybody() const { return strided_group(0, 1, this->size()); }
  Arena make_arena(std::size_t bytes) {
    return Arena(pleat::GroupComm<typename Backend::comm_type>(this->comm), bytes);
  }

  // A buffer that is made or filled waits for the device, and that has no deadline while a stream awaits a signal.

  /// Copies `data` to a place in some rank's window, on the stream. The staging memory lives as long as the site.
  void write(std::byte* target, const Bytes& data) {
    stage(data);
    write_staged(target);
  }
  /// The same in two steps, for what is awaited in between: `stage` waits for the stream.
  void stage(const Bytes& data) {
    this->finish();
    staged_.push_back(this->upload(data));
  }
  void write_staged(std::byte* target) {
    const pleat::Block data = staged_.back().block();
    executor_.copy(target, data.data, data.size_bytes, this->s());
  }
  /// At most `most_read_bytes`.
  Bytes read(const std::byte* source, std::size_t bytes) {
    require(bytes <= most_read_bytes, "room for what is read");
    executor_.copy(landing_.block().data, source, bytes, this->s());
    Bytes found = this->download(landing_);
    found.resize(bytes);
    return found;
  }

 private:
  static constexpr std::size_t most_read_bytes = 4096;

  pleat::executor_for<typename Backend::comm_type::device_type> executor_;
  std::vector<typename Base::Buffer> staged_;
  typename Base::Buffer landing_;
};

template <arena_backend Backend, class F>
void on_peers(const std::string& name, int ranks, F f) {
  on_ranks<Backend, Whole>(name, ranks, [&](auto& site) {
    PeerSite<Backend> peer_site(site.comm);
    f(peer_site);
  });
}
template <arena_backend Backend, class F>
void at_all_sizes_on_peers(const std::string& name, F f) {
  at_all_sizes<Backend>(name, [&](const std::string& label, int ranks) { on_peers<Backend>(label, ranks, f); });
}

/// Everybody writes to everybody, oneself included, signals, awaits all and reads.
template <class Site, class Peers>
void all_write_once(Site& site, Peers& peers, int channel, unsigned tag) {
  constexpr std::size_t bytes = 40;
  const int n = peers.size(), me = peers.rank();
  for (int i = 1; i <= n; ++i) {
    const int peer = (me + i) % n;
    site.dawdle();
    site.write(peers.base(peer) + static_cast<std::size_t>(me) * bytes, pattern(bytes, me, peer, tag));
    peers.signal(peer, channel, site.s());
  }
  Bytes expected;
  for (int peer = n - 1; peer >= 0; --peer) peers.await(peer, channel, site.s());
  for (int peer = 0; peer < n; ++peer) append(expected, pattern(bytes, peer, me, tag));
  require_equal(site.read(peers.base(me), expected.size()), expected, "what all ranks of a window wrote");
}
inline std::size_t all_write_bytes(int ranks) {
  return static_cast<std::size_t>(ranks) * 40;
}

/// Blocks go around a ring through slots that are used again: channel 0 is *full*, channel 1 is *free*.
template <class Site, class Peers>
void credits_once(Site& site, Peers& peers, int slots, int rounds) {
  constexpr std::size_t bytes = 24;
  const int n = peers.size(), me = peers.rank(), next = (me + 1) % n, last = (me + n - 1) % n;
  const auto slot = [&](int round) { return static_cast<std::size_t>(round % slots) * bytes; };
  for (int i = 0; i < slots; ++i) peers.signal(last, 1, site.s());
  const auto take = [&](int round) {
    peers.await(last, 0, site.s());
    const Bytes found = site.read(peers.base(me) + slot(round), bytes);
    site.dawdle();
    require_equal(found, pattern(bytes, last, me, static_cast<unsigned>(round)), "slot of round ", round);
    require_equal(site.read(peers.base(me) + slot(round), bytes), found, "slot of round ", round, " changed in use");
    peers.signal(last, 1, site.s());
  };
  for (int round = 0; round < rounds; ++round) {
    site.stage(pattern(bytes, me, next, static_cast<unsigned>(round)));
    peers.await(next, 1, site.s());
    site.dawdle();
    site.write_staged(peers.base(next) + slot(round));
    peers.signal(next, 0, site.s());
    if (round >= slots - 1) take(round - (slots - 1));  // as late as the credits allow
  }
  for (int round = std::max(0, rounds - (slots - 1)); round < rounds; ++round) take(round);
}

/// What a window refuses, and what is left where it was moved from.
template <arena_backend Backend>
void check_peer_refusals() {
  at_all_sizes_on_peers<Backend>("C33 and C34", [](auto& site) {
    auto arena = site.make_arena(512);
    auto peers = arena.open(site.everybody(), 64, 2);
    auto next = arena.open(site.everybody(), 64, 1);
    const auto refuses = [&](auto call, const char* text) { require_throws<pleat::comm_error>(call, text); };
    for (const int wrong : {-1, site.size()}) {
      refuses([&] { peers.signal(wrong, 0, site.s()); }, "pleat[C33]: signal with peer");
      refuses([&] { peers.await(wrong, 0, site.s()); }, "pleat[C33]: await with peer");
      refuses([&] { (void)peers.base(wrong); }, "pleat[C33]: base with peer");
    }
    for (const int wrong : {-1, 2, 99}) {
      refuses([&] { peers.signal(site.rank(), wrong, site.s()); }, "pleat[C33]: signal on channel");
      refuses([&] { peers.await(site.rank(), wrong, site.s()); }, "valid channels: 0 to 1");
    }
    next.signal(site.rank(), 0, site.s());
    next.await(site.rank(), 0, site.s());
    site.finish();
    auto moved = std::move(peers);
    refuses([&] { peers.signal(0, 0, site.s()); }, "pleat[C33]: signal with peer 0 of a window of 0 ranks");
    moved.signal(site.rank(), 1, site.s());
    moved.await(site.rank(), 1, site.s());
    site.finish();
    auto whole = std::move(arena);
    refuses([&] { (void)arena.open(site.everybody(), 8, 1); }, "pleat[C34]");
    (void)whole.open(site.everybody(), 8, 1);
  });
}

template <arena_backend Backend>
void check_peer_access() {
  check_peer_refusals<Backend>();
  at_all_sizes_on_peers<Backend>("window of all ranks", [](auto& site) {
    auto arena = site.make_arena(all_write_bytes(site.size()));
    auto peers = arena.open(site.everybody(), all_write_bytes(site.size()), 2);
    require(peers.rank() == site.rank() && peers.size() == site.size(), "the window has the ranks of its group");
    all_write_once(site, peers, 0, 1);
    site.comm.barrier(site.s());
    all_write_once(site, peers, 1, 2);
  });
  at_all_sizes_on_peers<Backend>("credits", [](auto& site) {
    for (const int slots : {1, 2, 3}) {
      auto arena = site.make_arena(static_cast<std::size_t>(slots) * 24);
      auto peers = arena.open(site.everybody(), static_cast<std::size_t>(slots) * 24, 2);
      credits_once(site, peers, slots, 30);
    }
  });
  at_all_sizes_on_peers<Backend>("windows lie apart", [](auto& site) {
    const std::size_t bytes[] = {1, all_write_bytes(site.size()), 0, 200};
    auto arena = site.make_arena(4096);
    using Peers = decltype(arena.open(site.everybody(), 1, 1));
    std::vector<Peers> windows;
    for (const std::size_t size : bytes) windows.push_back(arena.open(site.everybody(), size, 2));
    for (std::size_t i = 0; i < windows.size(); ++i) {
      for (int peer = 0; peer < site.size(); ++peer) {
        const std::byte* base = windows[i].base(peer);
        require(reinterpret_cast<std::uintptr_t>(base) % pleat::Carver::alignment_bytes == 0, "window ", i,
                " is aligned");
        require(base - windows[0].base(peer) == windows[i].base(0) - windows[0].base(0), "offsets are symmetric");
        if (i > 0) require(base >= windows[i - 1].base(peer) + bytes[i - 1], "window ", i, " overlaps the one before");
      }
    }
    all_write_once(site, windows[1], 0, 3);
  });
  // Even ranks read at once, odd ones write late, and signals that are not the awaited one have come already.
  at_all_sizes_on_peers<Backend>("signals of other windows, channels and peers do not count", [](auto& site) {
    const int n = site.size(), me = site.rank(), next = (me + 1) % n, last = (me + n - 1) % n;
    if (n == 1) return;
    auto arena = site.make_arena(512);
    auto peers = arena.open(site.everybody(), 128, 2);
    auto other = arena.open(site.everybody(), 128, 2);
    other.signal(next, 0, site.s());
    peers.signal(next, 1, site.s());
    if (n > 2) peers.signal((me + 2) % n, 0, site.s());
    site.comm.barrier(site.s());
    site.finish();
    const auto write = [&] {
      site.write(peers.base(next), pattern(8, me, next, 12));
      peers.signal(next, 0, site.s());
    };
    if (me % 2 == 1) {
      std::this_thread::sleep_for(3ms);
      write();
    }
    peers.await(last, 0, site.s());
    require_equal(site.read(peers.base(me), 8), pattern(8, last, me, 12), "what the awaited signal announces");
    if (me % 2 == 0) write();
    other.await(last, 0, site.s());
    peers.await(last, 1, site.s());
    site.finish();
  });
  at_all_sizes_on_peers<Backend>("signals count, whatever the order of peers and channels", [](auto& site) {
    auto arena = site.make_arena(0);
    auto peers = arena.open(site.everybody(), 0, 3);
    for (int peer = 0; peer < site.size(); ++peer) {
      for (int channel = 0; channel < 3; ++channel) {
        for (int i = 0; i <= channel + site.rank(); ++i) peers.signal(peer, channel, site.s());
      }
    }
    for (int channel = 2; channel >= 0; --channel) {
      for (int peer = site.size() - 1; peer >= 0; --peer) {
        for (int i = 0; i <= channel + peer; ++i) peers.await(peer, channel, site.s());
      }
    }
    site.finish();
  });
  at_all_sizes_on_peers<Backend>("a signal before its receiver has opened the window", [](auto& site) {
    auto arena = site.make_arena(all_write_bytes(site.size()));
    if (site.rank() % 2 == 1) std::this_thread::sleep_for(3ms);
    auto peers = arena.open(site.everybody(), all_write_bytes(site.size()), 2);
    all_write_once(site, peers, 1, 4);
  });
  at_all_sizes_on_peers<Backend>("groups within the arena", [](auto& site) {
    if (site.size() % 4 != 0) return;
    const int r = site.rank(), n = site.size();
    const pleat::Group pairs = strided_group(r / 2 * 2, 1, 2), strided = strided_group(r % 2, 2, n / 2);
    auto arena = site.make_arena(2048);
    require(arena.reachable(pairs) && arena.reachable(site.everybody()), "groups within are reachable");
    require(!arena.reachable(strided_group(r, n, 2)), "groups that lie partly outside are not");
    auto in_pair = arena.open(pairs, all_write_bytes(2), 1);
    auto in_strided = arena.open(strided, all_write_bytes(n / 2), 2);
    require(in_strided.rank() == r / 2 && in_strided.size() == n / 2, "a window has the ranks of its group");
    all_write_once(site, in_strided, 0, 5);
    all_write_once(site, in_pair, 0, 6);
    site.comm.barrier(site.s());
    all_write_once(site, in_strided, 1, 5);
  });
  at_all_sizes_on_peers<Backend>("an arena of a part of the world", [](auto& site) {
    if (site.size() % 4 != 0) return;
    const int half = site.size() / 2, first = site.rank() / half * half;
    auto stage = site.comm.split(first, site.rank());
    const pleat::Group ranks = strided_group(first, 1, half);
    typename Backend::arena_type arena(pleat::GroupComm(stage, ranks), 1024);
    require(arena.reachable(ranks) && !arena.reachable(site.everybody()), "only the stage is reachable");
    auto peers = arena.open(ranks, all_write_bytes(half), 1);
    all_write_once(site, peers, 0, 7);
    auto alone = arena.open(strided_group(site.rank(), 1, 1), 64, 1);
    all_write_once(site, alone, 0, 8);
  });
  at_all_sizes_on_peers<Backend>("the largest size that a rank asks for is everybody's", [](auto& site) {
    auto arena = site.make_arena(128 * static_cast<std::size_t>(site.rank() + 1));
    auto peers = arena.open(site.everybody(), 128 * static_cast<std::size_t>(site.size()), 1);
    all_write_once(site, peers, 0, 9);
  });
  at_all_sizes_on_peers<Backend>("C07 and C08", [](auto& site) {
    auto arena = site.make_arena(512);
    const int n = site.size(), r = site.rank();
    require_throws<pleat::comm_error>([&] { (void)arena.open(strided_group(r, n, 2), 8, 1); }, "pleat[C07]: group {");
    if (n > 1) {
      require_throws<pleat::comm_error>([&] { (void)arena.open(strided_group((r + 1) % n, 1, 1), 8, 1); },
                                        "pleat[C07]");
    }
    require_throws<pleat::comm_error>([&] { (void)arena.open(site.everybody(), 513, 1); }, "has 512 bytes");
    auto first = arena.open(site.everybody(), 300, 1);  // refusals used nothing up
    require_throws<pleat::comm_error>(
        [&] { (void)arena.open(site.everybody(), 129, 1); },
        "pleat[C08]: the arena has 512 bytes, the operations bound to it so far need 513");
    require_throws<pleat::comm_error>([&] { (void)arena.open(site.everybody(), SIZE_MAX - 100, 1); }, "pleat[C08]");
    require_throws<pleat::comm_error>([&] { (void)arena.open(site.everybody(), 8, -4); }, "pleat[C08]: -4 channels");
    require_throws<pleat::comm_error>(
        [&] { (void)arena.open(site.everybody(), 0, pleat::default_channels); },
        "pleat[C08]: the arena has 1024 channels, the operations bound to it so far need 1025");
    auto second = arena.open(site.everybody(), 128, 1);
    require(second.base(r) == first.base(r) + 384, "the second window follows the first");
  });
}

/// When the peer that is awaited throws, returns or stays silent.
template <arena_backend Backend>
void check_peer_failures() {
  using Rank = Site<Backend, typename Backend::comm_type>;
  constexpr bool on_host = Backend::traits.awaits_on_host;
  // Everybody awaits the last rank, which does something else.
  const auto await_last = [](Rank& site, auto instead) {
    PeerSite<Backend> peer_site(site.comm);
    auto arena = peer_site.make_arena(0);
    auto peers = arena.open(peer_site.everybody(), 0, 2);
    if (site.rank() == site.size() - 1) return instead();
    peers.await(site.size() - 1, 1, site.s());
    site.finish();
  };
  at_sizes_of_two_or_more<Backend>("C02: a rank throws while others await", [&](const std::string& name, int ranks) {
    const Outcome outcome = outcome_of<Backend>(name, ranks, [&](Rank& site) {
      await_last(site, [ranks] {
        if (ranks % 2 == 0) std::this_thread::sleep_for(2ms);
        throw Boom("boom in the arena");
      });
    });
    outcome.require_everybody("boom in the arena");
    if (on_host) {
      outcome.require_everybody("await of signal 1 on channel 1 from rank " + std::to_string(ranks - 1), ranks - 1);
    }
    require(outcome.failed_rank == ranks - 1, "the run blames rank ", outcome.failed_rank);
  });
  at_sizes_of_two_or_more<Backend>("C03: a rank returns while others await", [&](const std::string& name, int ranks) {
    // Where a rank whose arena goes waits for its peers, either side may give up first.
    const milliseconds deadline = on_host ? milliseconds(20s) : Backend::traits.short_deadline;
    const Outcome outcome = outcome_of<Backend>(
        name, ranks, [&](Rank& site) { await_last(site, [] {}); }, deadline);
    if (on_host) outcome.require_everybody("pleat[C03]: rank " + std::to_string(ranks - 1), ranks - 1);
    outcome.require_run(on_host ? "await of signal 1 on channel 1" : "pleat[C0");
    outcome.require_run("rank " + std::to_string(ranks - 1));
  });
  at_sizes_of_two_or_more<Backend>("C04: a signal never comes", [&](const std::string& name, int ranks) {
    typename Backend::template Shared<std::atomic<int>> ended;
    const Outcome outcome = outcome_of<Backend>(
        name, ranks,
        [&](Rank& site) {
          try {
            await_last(site, [&] {
              while (ended->load() < ranks - 1) std::this_thread::sleep_for(1ms);
            });
          } catch (...) {
            ended->fetch_add(1);
            throw;
          }
        },
        Backend::traits.short_deadline);
    outcome.require_everybody("pleat[C04]", ranks - 1);
    if (on_host) outcome.require_run("await of signal 1 on channel 1 from rank " + std::to_string(ranks - 1));
    outcome.require_run("rank " + std::to_string(ranks - 1));
  });
  if constexpr (on_host) {
    at_all_sizes<Backend>("C03: a signal that a rank awaits of itself", [&](const std::string& name, int ranks) {
      const Outcome outcome = outcome_of<Backend>(name, ranks, [&](Rank& site) {
        PeerSite<Backend> peer_site(site.comm);
        auto arena = peer_site.make_arena(0);
        auto peers = arena.open(peer_site.everybody(), 0, 1);
        peers.signal(site.rank(), 0, site.s());
        peers.await(site.rank(), 0, site.s());
        peers.await(site.rank(), 0, site.s());
      });
      outcome.require_run("waits for itself in await of signal 2");
    });
  }
  at_sizes_of_two_or_more<Backend>(
      "C32: a rank opens a window of another size", [](const std::string& name, int ranks) {
        const Outcome outcome = outcome_of<Backend>(name, ranks, [&](Rank& site) {
          PeerSite<Backend> peer_site(site.comm);
          auto arena = peer_site.make_arena(4096);
          const pleat::GroupComm<typename Backend::comm_type> stage(site.comm);
          const auto first = arena.open(peer_site.everybody(), 64, 2);
          arena.seal(stage);  // the same so far
          const bool is_last = site.rank() == ranks - 1;
          const auto second = arena.open(peer_site.everybody(), is_last ? 192 : 128, 2);
          std::string text;
          try {
            arena.seal(stage);
          } catch (const pleat::comm_error& e) {
            text = e.what();
          }
          require(contains(text, "pleat[C32]: window 1 of the arena has 192 bytes and 2 channels on rank " +
                                     std::to_string(ranks - 1) + ", 128 bytes and 2 channels on rank 0"),
                  "rank ", site.rank(), " saw `", text, "`");
          site.comm.barrier(site.s());  // nobody's error is a peer's
        });
        require(outcome.run_text.empty(), "the run ended with `", outcome.run_text, "`");
      });
  at_sizes_of_two_or_more<Backend>("C32: a rank opens one window less", [](const std::string& name, int ranks) {
    const Outcome outcome = outcome_of<Backend>(name, ranks, [&](Rank& site) {
      PeerSite<Backend> peer_site(site.comm);
      auto arena = peer_site.make_arena(4096);
      const pleat::GroupComm<typename Backend::comm_type> stage(site.comm);
      if (site.rank() > 0) (void)arena.open(peer_site.everybody(), 64, 2);
      bool is_noticed = false;
      try {
        arena.seal(stage);
      } catch (const pleat::comm_error& e) {
        is_noticed = contains(e.what(), "pleat[C32]: window 0 of the arena has 64 bytes and 2 channels on rank 1, 0 ");
      }
      require(is_noticed, "rank ", site.rank(), " did not notice");
      site.comm.barrier(site.s());
    });
    require(outcome.run_text.empty(), "the run ended with `", outcome.run_text, "`");
  });
  at_sizes_of_two_or_more<Backend>("a failure at a random time of a credit", [](const std::string& name, int ranks) {
    for (int seed = 0; seed < repeats(Backend::traits.random_failures); ++seed) {
      const Outcome outcome = outcome_of<Backend>(name, ranks, [&](Rank& site) {
        PeerSite<Backend> peer_site(site.comm);
        auto arena = peer_site.make_arena(48);
        auto peers = arena.open(peer_site.everybody(), 48, 2);
        credits_once(peer_site, peers, 2, site.rank() == seed % ranks ? seed : 1000);
        throw Boom("boom in a credit");
      });
      outcome.require_everybody("boom in a credit");
    }
  });
}

}  // namespace conformance
