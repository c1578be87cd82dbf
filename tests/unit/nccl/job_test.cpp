// How a job ends when a rank throws, dies, leaves or hangs: everybody hears of it, by name, and in time.
#include <atomic>
#include <thread>

#include <pleat/nccl/thread_link.hpp>

#include "processes.hpp"

#include <doctest/doctest.h>

namespace {

using namespace nccl_testing;
using pleat::Job;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
void wait_for_ever(Job& job, const std::vector<int>& members) {
  job.wait_until([] { return false; }, members, [] { return std::vector<int>(); });
}

/// Runs `f(job)` on threads and gives what each has thrown.
std::vector<std::string> run_threads(int ranks, const std::function<void(Job&)>& f,
                                     std::chrono::milliseconds deadline = 10s) {
  auto post = std::make_shared<pleat::detail::ThreadPost>(ranks);
  std::vector<std::string> texts(static_cast<std::size_t>(ranks), "returned");
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        Job job(std::make_unique<pleat::ThreadLink>(post, rank), deadline);
        try {
          f(job);
        } catch (const std::exception& e) {
          job.fail(e.what());
          texts[static_cast<std::size_t>(rank)] = e.what();
        }
      });
    }
  }
  return texts;
}

TEST_CASE("[C02]: a process that is killed is seen at once") {
  for (const int ranks : {2, 4}) {
    const auto endings = run_jobs(ranks, [&](Job& job) {
      job.meet(first_ranks(ranks), 20);
      job.enter("all_gather");
      if (job.rank() == 1) ::kill(::getpid(), SIGKILL);
      wait_for_ever(job, first_ranks(ranks));
    });
    for (int r = 0; r < ranks; ++r) {
      const Ending& ending = endings[static_cast<std::size_t>(r)];
      if (r == 1) {
        CHECK(ending.text == "killed");
        continue;
      }
      CHECK_MESSAGE(contains(ending.text, "pleat[C02]: rank 1 died"), ending.text);
      CHECK_MESSAGE(contains(ending.text, "rank " + std::to_string(r) + " was in all_gather"), ending.text);
      CHECK(ending.after < 5s);
    }
  }
}
TEST_CASE("[C02]: what a rank throws reaches the others, processes and threads") {
  const auto program = [](Job& job) {
    job.meet(first_ranks(job.size()), 20);
    job.enter("barrier");
    if (job.rank() == 1) {
      job.fail("boom 17");
      return;
    }
    wait_for_ever(job, first_ranks(job.size()));
  };
  const auto endings = run_jobs(3, program);
  const auto texts = run_threads(3, program);
  for (const std::size_t r : {0, 2}) {
    CHECK_MESSAGE(contains(endings[r].text, "pleat[C02]: rank 1 failed after barrier (boom 17)"), endings[r].text);
    CHECK_MESSAGE(contains(texts[r], "pleat[C02]: rank 1 failed after barrier (boom 17)"), texts[r]);
  }
}
TEST_CASE("[C03]: a rank that has returned is not waited for") {
  const auto program = [](Job& job) {
    job.enter("split");
    if (job.rank() != 1) job.meet(first_ranks(job.size()), 20);
  };
  const auto endings = run_jobs(2, program);
  const auto texts = run_threads(2, program);
  for (const std::string& text : {endings[0].text, texts[0]}) {
    CHECK_MESSAGE(contains(text, "pleat[C03]: rank 1 has returned, while rank 0 waits for it in split"), text);
  }
  CHECK(endings[0].after < 5s);
  CHECK(endings[1].text == "returned");
}
TEST_CASE("[C03]: a rank that leaves has returned, however long its job is kept") {
  const auto texts = run_threads(
      2,
      [](Job& job) {
        job.enter("split");
        if (job.rank() == 0) job.meet(first_ranks(2), 20);
        job.leave();
        std::this_thread::sleep_for(2s);
      },
      500ms);
  CHECK_MESSAGE(contains(texts[0], "pleat[C03]: rank 1 has returned, while rank 0 waits for it in split"), texts[0]);
  CHECK(texts[1] == "returned");
}
TEST_CASE("a rank that has returned is nobody's failure while nobody waits for it") {
  const auto endings = run_jobs(2, [](Job& job) {
    job.meet(first_ranks(2), 20);
    if (job.rank() == 1) return;
    for (int i = 0; i < 50; ++i) {
      ::usleep(2000);
      job.check();
    }
  });
  for (const Ending& ending : endings) CHECK_MESSAGE(ending.text == "returned", ending.text);
}
TEST_CASE("what a rank has said before its farewell still arrives") {
  const auto endings = run_jobs(2, [](Job& job) {
    if (job.rank() == 0) ::usleep(100000);
    job.meet(first_ranks(2), 20, std::string(100000, 'm'));
    const auto texts = job.meet(first_ranks(2), 21, "last");
    if (texts[1] != "last") throw std::runtime_error("lost");
  });
  for (const Ending& ending : endings) CHECK_MESSAGE(ending.text == "returned", ending.text);
}
TEST_CASE("[C04]: of those waited for, the one that answers nothing is named") {
  const auto program = [](Job& job) {
    job.meet(first_ranks(3), 20);
    job.enter("all_to_all");
    if (job.rank() == 2) {
      std::this_thread::sleep_for(2s);  // hangs, and is alive
      return;
    }
    wait_for_ever(job, first_ranks(3));
  };
  const auto endings = run_jobs(3, program, 400ms);
  const auto texts = run_threads(3, program, 400ms);
  for (const std::size_t r : {0, 1}) {
    for (const std::string& text : {endings[r].text, texts[r]}) {
      CHECK_MESSAGE(contains(text, "pleat[C04]"), text);
      CHECK_MESSAGE(contains(text, "all_to_all for rank 2, which neither waits nor checks"), text);
    }
    CHECK(endings[r].after < 2s);
  }
}
TEST_CASE("[C04]: peers that wait for something else are named with it") {
  const auto texts = run_threads(
      2,
      [](Job& job) {
        job.enter(job.rank() == 0 ? "broadcast" : "barrier");
        if (job.rank() == 0) wait_for_ever(job, first_ranks(2));
        for (int i = 0; i < 600; ++i) {
          std::this_thread::sleep_for(1ms);
          job.check();
        }
      },
      200ms);
  CHECK_MESSAGE(contains(texts[0], "waited 200 ms in broadcast for rank 1 (in barrier)"), texts[0]);
  CHECK_MESSAGE(contains(texts[1], "pleat[C02]: rank 0 gave up"), texts[1]);
}
TEST_CASE("[C04]: without a link a deadline still ends a wait") {
  Job job(0, 2, 50ms);
  job.enter("all_gather");
  CHECK_THROWS_WITH_AS(
      wait_for_ever(job, first_ranks(2)),
      "pleat[C04]: rank 0 waited 50 ms in all_gather for rank 1, of which nothing is known without a link",
      pleat::comm_error);
}
TEST_CASE("[C04]: a peer that owes several messages is named once") {
  const auto texts = run_threads(
      2,
      [](Job& job) {
        job.enter("all_to_all");
        const Job::Exchange exchanges[] = {{1, 30}, {1, 31}};
        if (job.rank() == 0) job.exchange(exchanges, {});
        std::this_thread::sleep_for(1s);
      },
      100ms);
  CHECK_MESSAGE(contains(texts[0], "in all_to_all for rank 1, which"), texts[0]);
}
TEST_CASE("the end comes once, and everything throws it afterwards") {
  Job job(0, 1, 10s);
  int ends = 0;
  job.on_end([&] {
    ++ends;
    throw std::runtime_error("nobody hears this");
  });
  job.enter("exchange");
  job.fail("first");
  job.fail("second");
  CHECK(ends == 1);
  const char* text = "pleat[C02]: rank 0 failed after exchange (first)";
  CHECK_THROWS_WITH_AS(job.enter("barrier"), text, pleat::comm_error);
  CHECK_THROWS_WITH_AS(job.check(), text, pleat::comm_error);
  CHECK_THROWS_WITH_AS(wait_for_ever(job, {}), text, pleat::comm_error);
}
TEST_CASE("meetings of parts of a job do not meet each other's") {
  const auto program = [](Job& job) {
    const std::vector<int> low{0, 1}, high{2, 3}, odd{1, 3}, even{0, 2};
    const auto& half = job.rank() < 2 ? low : high;
    const auto& stride = job.rank() % 2 == 0 ? even : odd;
    for (std::uint64_t round = 0; round < 50; ++round) {
      const std::string mine = std::to_string(job.rank()) + "/" + std::to_string(round);
      const auto a = job.meet(half, 100, mine);
      const auto b = job.meet(stride, 101 + round % 3, mine);
      for (std::size_t i = 0; i < 2; ++i) {
        const std::string tail = "/" + std::to_string(round);
        if (a[i] != std::to_string(half[i]) + tail || b[i] != std::to_string(stride[i]) + tail) {
          throw std::runtime_error("a message of another meeting");
        }
      }
    }
  };
  for (const Ending& ending : run_jobs(4, program)) CHECK_MESSAGE(ending.text == "returned", ending.text);
  for (const std::string& text : run_threads(4, program)) CHECK_MESSAGE(text == "returned", text);
}

}  // namespace
