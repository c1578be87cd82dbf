// The world of ranks that are processes which go through the same checks together, and how a check ended on all of
// them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include <pleat/comm/run_ranks.hpp>

#include <support/shared_page.hpp>

namespace testing_support {

/// This rank's side. All make the same calls. One check after another runs in the same world, until one fails. `Comm`:
/// NcclComm or MpiComm.
template <class Comm>
class ProcessWorld {
 public:
  using Check = std::function<void(Comm&)>;
  /// Makes a world of all processes, whose deadline is given.
  using Make = std::function<Comm(std::chrono::milliseconds)>;

  explicit ProcessWorld(Make make) : make_(std::move(make)) {}

  void run(const Check& check) {
    if (!world_) world_.emplace(make_(std::chrono::seconds(20)));
    run_in(check, false);
  }
  void run_anew(const Check& check, std::chrono::milliseconds deadline) {
    end();
    world_.emplace(make_(deadline));
    run_in(check, true);
  }
  void end() { world_.reset(); }

 private:
  static constexpr int most_ranks = 8;

  /// How a check ended on one rank.
  struct Report {
    enum class Kind { returned, comm_error, other, no_exception } kind;
    char text[pleat::Message::capacity_bytes];     // of the exception
    char failure[pleat::Message::capacity_bytes];  // what the rank told the others
  };
  struct Reports {
    Report of_rank[most_ranks];
    std::atomic<int> arrived;
  };

  /// Throws what run_ranks would throw: what all threw alike, the error of a communicator, or rank_error.
  void run_in(const Check& check, bool leaves) {
    const int rank = world_->rank(), ranks = world_->size();
    const Shared<Reports> reports;
    Report& mine = reports->of_rank[rank];
    std::exception_ptr error;
    const auto fail = [&](typename Report::Kind kind, const char* text) {
      mine.kind = kind;
      copy(mine.text, text);
      world_->abandon(text);
      copy(mine.failure, world_->job().failure().c_str());
      error = std::current_exception();
    };
    try {
      check(*world_);
    } catch (const pleat::comm_error& e) {
      fail(Report::Kind::comm_error, e.what());
    } catch (const std::exception& e) {
      fail(Report::Kind::other, e.what());
    } catch (...) {
      fail(Report::Kind::no_exception, "an exception that is no std::exception");
    }
    if (leaves || error) end();
    reports->arrived.fetch_add(1);
    while (reports->arrived.load() < ranks) std::this_thread::sleep_for(std::chrono::microseconds(50));
    const Report *const all = reports->of_rank, *const last = all + ranks;
    const auto is = [](auto kind) { return [kind](const Report& report) { return report.kind == kind; }; };
    if (std::all_of(all, last, is(Report::Kind::returned))) return;
    end();
    const auto same_text = [&](const Report& report) { return std::string_view(report.text) == all[0].text; };
    if (error && std::all_of(all, last, same_text)) std::rethrow_exception(error);
    const Report* cause = std::find_if(all, last, [](const Report& r) { return r.kind > Report::Kind::comm_error; });
    if (cause == last) {
      cause = std::find_if(all, last, is(Report::Kind::comm_error));
      throw pleat::comm_error(pleat::message_of(static_cast<const char*>(cause->text)));
    }
    const int cause_rank = static_cast<int>(cause - all);
    try {
      if (cause_rank == rank) std::rethrow_exception(error);
      if (cause->kind == Report::Kind::no_exception) throw cause_rank;
      throw std::runtime_error(cause->text);
    } catch (...) {
      throw pleat::rank_error(pleat::message_of(static_cast<const char*>(cause->failure)), cause_rank);
    }
  }
  static void copy(char (&to)[pleat::Message::capacity_bytes], const char* from) {
    std::snprintf(to, sizeof to, "%s", from);
  }

  Make make_;
  std::optional<Comm> world_;
};

}  // namespace testing_support
