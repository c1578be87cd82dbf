// How a communicator ends: calls that disagree, ranks that throw, return early or never come; everybody hears of it.
#pragma once

#include <atomic>
#include <cstring>

#include <pleat/comm/run_ranks.hpp>

#include <conformance/exchanges.hpp>

namespace conformance {

/// What no rank of the library throws.
struct Boom : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Every blocking operation, called so that each rank waits for the rank `awaited`: the root of a broadcast, who may be
/// done without the others; in all else, each waits for every other.
template <class Site>
struct Operation {
  const char* name;
  void (*call)(Site&, int awaited);
};
template <class Site>
inline constexpr Operation<Site> operations[] = {
    {"all_gather",
     [](Site& site, int) {
       typename Site::Buffer in(4), out(4 * static_cast<std::size_t>(site.size()));
       site.comm.all_gather(in.block().data, out.block().data, 1, DType::f32, site.s());
       site.finish();
     }},
    {"all_gather_v",
     [](Site& site, int) {
       const std::vector<std::size_t> counts(static_cast<std::size_t>(site.size()), 1);
       typename Site::Buffer in(4), out(4 * counts.size());
       site.comm.all_gather_v(in.block().data, out.block().data, counts, DType::f32, site.s());
       site.finish();
     }},
    {"all_to_all",
     [](Site& site, int) {
       typename Site::Buffer in(4 * static_cast<std::size_t>(site.size())), out(in.block().size_bytes);
       site.comm.all_to_all(in.block().data, out.block().data, 1, DType::f32, site.s());
       site.finish();
     }},
    {"all_to_all_v",
     [](Site& site, int) {
       const std::vector<std::size_t> counts(static_cast<std::size_t>(site.size()), 1);
       typename Site::Buffer in(4 * counts.size()), out(4 * counts.size());
       site.comm.all_to_all_v(in.block().data, counts, out.block().data, counts, DType::f32, site.s());
       site.finish();
     }},
    {"broadcast",
     [](Site& site, int awaited) {
       typename Site::Buffer buffer(4);
       site.comm.broadcast(buffer.block().data, 1, awaited, DType::f32, site.s());
       site.finish();
     }},
    {"exchange",
     [](Site& site, int) {
       std::vector<PlannedMessage> all;
       for (int from = 0; from < site.size(); ++from) {
         for (int to = 0; to < site.size(); ++to) all.push_back({from, to, 2, 80});
       }
       exchange_once(site, all, DType::f32);
     }},
    {"split", [](Site& site, int) { (void)site.comm.split(0, 0); }},
    {"barrier",
     [](Site& site, int) {
       site.comm.barrier(site.s());
       site.finish();
     }},
};

/// Calls `f(operation)` for every operation; where PLEAT_TEST_OPERATION is set, for that one.
template <class Site, class F>
void for_each_operation(F f) {
  const char* const only = std::getenv("PLEAT_TEST_OPERATION");
  for (const auto& operation : operations<Site>) {
    if (only == nullptr || std::strcmp(only, operation.name) == 0) f(operation);
  }
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The texts of the errors that the ranks of a run saw, and of the one that ended it, with all that it took in time.
struct Outcome {
  std::vector<std::string> texts;
  std::string run_text;
  int failed_rank = -1;     // of a rank_error
  std::string nested_text;  // of what it holds

  void require_everybody(const std::string& part, int except = -1) const {
    for (std::size_t r = 0; r < texts.size(); ++r) {
      if (static_cast<int>(r) == except) continue;
      require(contains(texts[r], part), "rank ", r, " saw `", texts[r], "`, without ", part);
    }
  }
  void require_run(const std::string& part) const {
    require(contains(run_text, part), "the run ended with `", run_text, "`, without ", part);
  }
};

/// What each rank throws, where all can see it.
struct Texts {
  char of_rank[largest_size][pleat::Message::capacity_bytes];
};

/// Runs `f(site)` and notes what each rank throws.
template <backend Backend, class F>
Outcome outcome_of(const std::string& name, int ranks, F f, milliseconds deadline = 20s) {
  Outcome outcome;
  typename Backend::template Shared<Texts> texts;
  const auto start = std::chrono::steady_clock::now();
  try {
    on_ranks<Backend, Whole>(
        name, ranks,
        [&](auto& site) {
          try {
            f(site);
          } catch (const std::exception& e) {
            std::strncpy(texts->of_rank[site.rank()], e.what(), sizeof texts->of_rank[0] - 1);
            throw;
          }
        },
        deadline);
  } catch (const pleat::rank_error& e) {
    outcome.run_text = e.what();
    outcome.failed_rank = e.rank();
    try {
      e.rethrow_nested();
    } catch (const std::exception& nested) {
      outcome.nested_text = nested.what();
    } catch (...) {
      outcome.nested_text = "no std::exception";
    }
  } catch (const std::exception& e) {
    outcome.run_text = e.what();
  }
  require(std::chrono::steady_clock::now() - start < 30s, "the run took longer than 30 s to end");
  for (int r = 0; r < ranks; ++r) outcome.texts.emplace_back(texts->of_rank[r]);
  return outcome;
}

/// Two calls that do not agree: rank `ranks - 1` makes the wrong one.
template <class Site>
struct Disagreement {
  const char* name;
  const char* text;
  void (*call)(Site&, bool is_wrong);
};
template <class Site>
inline constexpr Disagreement<Site> disagreements[] = {
    {"operations", "calls barrier",
     [](Site& site, bool is_wrong) { is_wrong ? site.comm.barrier(site.s()) : operations<Site>[0].call(site, 0); }},
    {"dtypes", "dtypes",
     [](Site& site, bool is_wrong) {
       typename Site::Buffer in(8), out(64);
       site.comm.all_gather(in.block().data, out.block().data, 1, is_wrong ? DType::f64 : DType::i64, site.s());
     }},
    {"elems", "elems",
     [](Site& site, bool is_wrong) {
       typename Site::Buffer in(128), out(128);
       site.comm.all_to_all(in.block().data, out.block().data, is_wrong ? 2 : 1, DType::f32, site.s());
     }},
    {"roots", "roots",
     [](Site& site, bool is_wrong) {
       typename Site::Buffer buffer(4);
       site.comm.broadcast(buffer.block().data, 1, is_wrong ? 1 : 0, DType::f32, site.s());
     }},
    {"a root that is no rank", "is not in 0 to",
     [](Site& site, bool) {
       typename Site::Buffer buffer(4);
       site.comm.broadcast(buffer.block().data, 1, site.size(), DType::f32, site.s());
     }},
    {"too few counts", "counts for",
     [](Site& site, bool is_wrong) {
       const std::vector<std::size_t> counts(static_cast<std::size_t>(site.size()) - (is_wrong ? 1 : 0), 1);
       typename Site::Buffer in(64), out(64);
       site.comm.all_gather_v(in.block().data, out.block().data, counts, DType::f32, site.s());
     }},
    {"counts of all_gather_v", "elements of rank",
     [](Site& site, bool is_wrong) {
       std::vector<std::size_t> counts(static_cast<std::size_t>(site.size()), 1);
       if (is_wrong) counts[0] = 2;
       typename Site::Buffer in(64), out(64);
       site.comm.all_gather_v(in.block().data, out.block().data, counts, DType::f32, site.s());
     }},
    {"too many counts of all_to_all_v", "counts for",
     [](Site& site, bool is_wrong) {
       const std::vector<std::size_t> right(static_cast<std::size_t>(site.size()), 1),
           send(right.size() + (is_wrong ? 1 : 0), 1);
       typename Site::Buffer in(64), out(64);
       site.comm.all_to_all_v(in.block().data, send, out.block().data, right, DType::f32, site.s());
     }},
    {"what is sent and what is received", "elements of rank",
     [](Site& site, bool is_wrong) {
       const std::vector<std::size_t> right(static_cast<std::size_t>(site.size()), 1);
       std::vector<std::size_t> send = right;
       if (is_wrong) send[0] = 2;
       typename Site::Buffer in(64), out(64);
       site.comm.all_to_all_v(in.block().data, send, out.block().data, right, DType::f32, site.s());
     }},
};

/// Calls `check(site's type)` results at sizes of two or more: a failure needs somebody who sees it.
template <backend Backend, class F>
void at_sizes_of_two_or_more(const std::string& name, F check) {
  at_all_sizes<Backend>(name, [&](const std::string& label, int ranks) {
    if (ranks >= 2) check(label, ranks);
  });
}

/// What ranks that meet on the host tell each other before anything moves.
template <backend Backend>
void check_disagreements() {
  using Rank = Site<Backend, typename Backend::comm_type>;

  at_sizes_of_two_or_more<Backend>("C05: calls that disagree", [](const std::string& name, int ranks) {
    for (const auto& wrong : disagreements<Rank>) {
      const Outcome outcome = outcome_of<Backend>(name + ": " + wrong.name, ranks, [&](Rank& site) {
        wrong.call(site, site.rank() == ranks - 1);
        site.finish();
      });
      outcome.require_everybody("pleat[C05]");
      outcome.require_everybody(wrong.text);
      outcome.require_run(outcome.texts[0]);  // all ranks threw alike
      require(outcome.failed_rank < 0, "an error of all ranks is nobody's in particular");
    }
  });
  at_sizes_of_two_or_more<Backend>("C06: a message and its receive differ", [](const std::string& name, int ranks) {
    for (const bool is_count : {true, false}) {
      const Outcome outcome = outcome_of<Backend>(name, ranks, [&](Rank& site) {
        typename Backend::Buffer a(64), b(64);
        const Send send{a.block().data, is_count ? 3U : 4U, 1 - site.rank()};
        const Recv recv{b.block().data, 4, 1 - site.rank()};
        // Rank 0 sends what is wrong, and waits for a message of rank 1, which refuses.
        if (site.rank() == 0) site.comm.exchange({&send, 1}, {&recv, 1}, is_count ? DType::f32 : DType::i32, site.s());
        if (site.rank() == 1) site.comm.exchange({}, {&recv, 1}, DType::f32, site.s());
        site.finish();
      });
      for (const std::size_t rank : {0, 1}) {
        const std::string& text = outcome.texts[rank];
        require(contains(text, "pleat[C06]: a message of ") && contains(text, is_count ? "3 f32" : "4 i32") &&
                    contains(text, "4 f32"),
                "rank ", rank, " saw `", text, "`");
      }
      outcome.require_run("pleat[C06]");
    }
  });
}

template <backend Backend>
void check_failures() {
  using Rank = Site<Backend, typename Backend::comm_type>;

  if constexpr (Backend::traits.compares_calls) check_disagreements<Backend>();
  for (const bool is_first : {true, false}) {  // of its kind: ranks may meet anew for it
    const std::string who_throws = is_first ? "the first rank" : "the last rank";
    at_sizes_of_two_or_more<Backend>(
        "C02: " + who_throws + " throws while the others wait", [&](const std::string& name, int ranks) {
          const int thrower = is_first ? 0 : ranks - 1;
          for_each_operation<Rank>([&](const auto& operation) {
            const Outcome outcome = outcome_of<Backend>(name + " in " + operation.name, ranks, [&](Rank& site) {
              if (!is_first) operation.call(site, thrower);
              site.comm.barrier(site.s());
              if (site.rank() == thrower) {
                if (ranks % 2 == 0) std::this_thread::sleep_for(2ms);  // the others are asleep in the operation by now
                throw Boom("boom 17");
              }
              operation.call(site, thrower);
            });
            const std::string who = "rank " + std::to_string(thrower) + " failed after barrier (boom 17)";
            outcome.require_everybody("pleat[C02]: " + who, thrower);
            outcome.require_everybody(operation.name, thrower);
            outcome.require_run(who);
            require(outcome.failed_rank == thrower, "the run blames rank ", outcome.failed_rank);
            require(outcome.nested_text == "boom 17", "the nested exception is `", outcome.nested_text, "`");
          });
        });
  }
  at_sizes_of_two_or_more<Backend>("C02: what is thrown is no std::exception", [](const std::string& name, int ranks) {
    const Outcome outcome = outcome_of<Backend>(name, ranks, [&](Rank& site) {
      if (site.rank() == 1) throw 42;
      site.comm.barrier(site.s());
      site.finish();
    });
    outcome.require_everybody("pleat[C02]: rank 1 failed after ", 1);
    require(outcome.failed_rank == 1 && outcome.nested_text == "no std::exception", "the run ended with `",
            outcome.run_text, "`");
  });
  at_sizes_of_two_or_more<Backend>("C03: a rank returns early", [](const std::string& name, int ranks) {
    for_each_operation<Rank>([&](const auto& operation) {
      const int gone = ranks - 1;
      // A stream does not hear who returns: there the deadline ends the wait, and then says it.
      const milliseconds deadline = Backend::traits.awaits_on_host ? 20s : Backend::traits.short_deadline;
      const Outcome outcome = outcome_of<Backend>(
          name + " after one " + operation.name, ranks,
          [&](Rank& site) {
            operation.call(site, gone);
            if (site.rank() != gone) operation.call(site, gone);
          },
          deadline);
      outcome.require_everybody("pleat[C03]: rank " + std::to_string(gone) + " has returned", gone);
      outcome.require_everybody(operation.name, gone);
      outcome.require_run("pleat[C03]: rank " + std::to_string(gone) + " has returned");
    });
  });
  at_sizes_of_two_or_more<Backend>("C04: a rank never comes", [](const std::string& name, int ranks) {
    for_each_operation<Rank>([&](const auto& operation) {
      const int late = ranks / 2;
      typename Backend::template Shared<std::atomic<int>> ended;
      const Outcome outcome = outcome_of<Backend>(
          name + " to " + operation.name, ranks,
          [&](Rank& site) {
            operation.call(site, late);
            if (site.rank() == late) {
              while (ended->load() < ranks - 1) std::this_thread::sleep_for(1ms);
              return;
            }
            try {
              operation.call(site, late);
            } catch (...) {
              ended->fetch_add(1);
              throw;
            }
          },
          Backend::traits.short_deadline);
      outcome.require_everybody("pleat[C04]", late);
      outcome.require_everybody(operation.name, late);
      outcome.require_run("pleat[C04]");
      require(contains(outcome.run_text, " " + std::to_string(late)), "`", outcome.run_text, "` does not name rank ",
              late);
    });
  });
  at_sizes_of_two_or_more<Backend>("C06: a peer that is no rank", [](const std::string& name, int ranks) {
    for (const int peer : {-1, ranks}) {
      const Outcome outcome = outcome_of<Backend>(name, ranks, [&](Rank& site) {
        typename Backend::Buffer a(4);
        const Send send{a.block().data, 1, peer};
        const Recv recv{a.block().data, 1, peer};
        if (site.rank() == 0) site.comm.exchange({&send, 1}, {}, DType::f32, site.s());
        if (site.rank() == 1) site.comm.exchange({}, {&recv, 1}, DType::f32, site.s());
        site.comm.barrier(site.s());
        site.finish();
      });
      outcome.require_run("pleat[C06]: exchange with peer " + std::to_string(peer));
    }
  });
  // Failures at any time, everywhere: what must hold is that all ranks end, with an error, and touch no dead memory.
  at_sizes_of_two_or_more<Backend>("a failure at a random time", [](const std::string& name, int ranks) {
    for (int seed = 0; seed < repeats(Backend::traits.random_failures); ++seed) {
      const Outcome outcome = outcome_of<Backend>(name, ranks, [&](Rank& site) {
        std::minstd_rand common(static_cast<unsigned>(seed) * 77 + 1);
        const int thrower = static_cast<int>(common()) % ranks;
        const unsigned steps = static_cast<unsigned>(common() % 12);
        auto half = site.comm.split(site.rank() % 2, site.rank());
        Rank in_half(half, half);
        for (unsigned step = 0;; ++step) {
          const auto& operation = operations<Rank>[common() % std::size(operations<Rank>)];
          site.dawdle();
          if (step == steps && site.rank() == thrower) throw Boom("boom at random");
          operation.call(step % 3 == 0 ? site : in_half, 0);
        }
      });
      outcome.require_run("boom at random");
      outcome.require_everybody("boom at random");
    }
  });
}

}  // namespace conformance
