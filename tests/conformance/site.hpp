// What the conformance suites share: a backend's description, one rank's side of a check, data that tells its origin.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <pleat/comm/communicator.hpp>
#include <pleat/comm/group_comm.hpp>
#include <pleat/core/block.hpp>

#include <doctest/doctest.h>

#include <support/repeats.hpp>
#include <support/watchdog.hpp>

namespace conformance {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using testing_support::repeats;

inline constexpr int sizes[] = {1, 2, 3, 4, 5, 8};
inline constexpr int largest_size = 8;

/// What a backend has, what its communicator notices, and what a run of it costs.
struct Traits {
  /// Whether calls and messages that do not agree are refused (C05, C06): ranks that meet on the host can tell.
  bool compares_calls = true;
  /// Whether `await` itself fails, and names its signal. Where a stream waits, its next operation fails.
  bool awaits_on_host = true;
  /// Long enough to begin a run in.
  milliseconds short_deadline{30};
  int random_failures = 25;
};

/// A value that all ranks of a check share, of a backend whose ranks are threads.
template <class T>
struct InProcess {
  T* operator->() { return &value; }
  T value{};
};

/// What a suite needs to know of a backend. Ranks are threads of this process, or processes that go through the suite
/// together: what a check's ranks share is a `Shared`, and not a local.
///
/// - `run(ranks, deadline, f)` calls `f(comm)` on every rank, or on this process's, perhaps in a world that has run
///   before, and throws as `pleat::run_ranks` does. `run_anew` makes a world, which a rank leaves when `f` returns.
/// - `Shared<T>()`: one value of a trivially copyable type or atomics for all ranks, `T{}` at first, with `->`.
/// - `traits`: see Traits. Optional: `has_size(ranks)`, whether there are worlds of that size.
/// - `Stream`: one rank's stream, `get()` of `comm_type::stream_type`.
/// - `Buffer(bytes)`: device memory filled with 0xff, with `block()`, `upload(source)` and `download(target)` of all of
///   its bytes; both wait for the whole device.
/// - `status(comm)`: a function that says what each rank did last.
template <class B>
concept backend = pleat::communicator<typename B::comm_type> &&
    requires(typename B::comm_type& comm, const typename B::Stream& stream, typename B::Buffer& buffer,
             std::byte* bytes, void (*f)(typename B::comm_type&)) {
  { stream.get() } -> std::same_as<typename B::comm_type::stream_type>;
  { buffer.block() } -> std::same_as<pleat::Block>;
  buffer.upload(bytes);
  buffer.download(bytes);
  B::run(1, 1ms, f);
  B::run_anew(1, 1ms, f);
  { B::traits } -> std::convertible_to<Traits>;
  typename B::template Shared<std::atomic<int>>;
  { B::status(comm) } -> std::same_as<std::function<std::string()>>;
};

inline constexpr pleat::DType dtypes[] = {pleat::DType::f64, pleat::DType::f32, pleat::DType::bf16,
                                          pleat::DType::i64, pleat::DType::i32, pleat::DType::u8};

using Bytes = std::vector<std::byte>;

/// Bits that look random, the same for the same `seed`. source: Vigna's splitmix64, prng.di.unimi.it.
constexpr std::uint64_t mixed(std::uint64_t seed) {
  seed += 0x9e3779b97f4a7c15U;
  seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9U;
  seed = (seed ^ (seed >> 27)) * 0x94d049bb133111ebU;
  return seed ^ (seed >> 31);
}
/// Bytes that no other (from, to, tag) has; of any dtype, NaNs among them.
inline Bytes pattern(std::size_t bytes, int from, int to = 0, unsigned tag = 0) {
  const std::uint64_t origin = mixed(mixed(mixed(tag) + static_cast<unsigned>(from)) + static_cast<unsigned>(to));
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; i += sizeof(std::uint64_t)) {
    const std::uint64_t word = mixed(origin + i);
    std::memcpy(data.data() + i, &word, std::min(sizeof word, bytes - i));
  }
  return data;
}
inline void append(Bytes& all, const Bytes& more) {
  all.insert(all.end(), more.begin(), more.end());
}

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw std::runtime_error(pleat::message_of("check failed: ", parts...).c_str());
}
template <class... Parts>
void require_equal(const Bytes& found, const Bytes& expected, const Parts&... parts) {
  require(found.size() == expected.size(), parts..., ": ", found.size(), " bytes instead of ", expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    require(found[i] == expected[i], parts..., ": byte ", i, " is ", static_cast<int>(found[i]), " instead of ",
            static_cast<int>(expected[i]));
  }
}

template <class Error, class F>
void require_throws(F f, const char* text) {
  try {
    f();
  } catch (const Error& e) {
    return require(std::string(e.what()).find(text) != std::string::npos, "`", e.what(), "` does not contain ", text);
  }
  require(false, "nothing was thrown instead of ", text);
}

/// A check runs on the communicator itself, or on a GroupComm over it.
struct Whole {
  template <class Comm>
  static Comm& of(Comm& world) {
    return world;
  }
};
struct Handle {
  template <class Comm>
  static pleat::GroupComm<Comm> of(Comm& world) {
    return pleat::GroupComm<Comm>(world);
  }
};

/// One rank's side of a check: its communicator, its stream, and the way between host and device.
template <class Backend, class Comm>
class Site {
 public:
  using Buffer = typename Backend::Buffer;

  Site(typename Backend::comm_type& world, Comm& group)
      : comm(group), random(static_cast<unsigned>(world.rank()) + 1), world_(world) {}

  int rank() const { return comm.rank(); }
  int size() const { return comm.size(); }
  auto s() const { return stream_.get(); }
  /// Waits for the work on the stream, and throws if it failed.
  void finish() { world_.wait(s()); }

  Buffer upload(const Bytes& data) const {
    Buffer buffer(data.size());
    buffer.upload(data.data());
    return buffer;
  }
  Bytes download(const Buffer& buffer) {
    finish();
    Bytes data(buffer.block().size_bytes);
    buffer.download(data.data());
    return data;
  }
  /// Goes on at some other time than the peers.
  void dawdle() {
    const auto pause = random() % 8;
    if (pause < 4) return;
    if (pause < 7) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }

  Comm& comm;
  std::minstd_rand random;

 private:
  typename Backend::comm_type& world_;
  typename Backend::Stream stream_;
};

/// Runs `f(site)` on `ranks` ranks under a watchdog; `anew` in a world of its own, with that deadline.
template <backend Backend, class View, class F>
void on_ranks(const std::string& name, int ranks, F f, std::optional<milliseconds> anew = {}) {
  testing_support::Watchdog watchdog(name + " on " + std::to_string(ranks) + " ranks");
  const auto on_rank = [&](typename Backend::comm_type& world) {
    if (world.rank() == 0) watchdog.watch(Backend::status(world));
    auto&& comm = View::of(world);
    Site<Backend, std::remove_reference_t<decltype(comm)>> site(world, comm);
    f(site);
  };
  anew ? Backend::run_anew(ranks, *anew, on_rank) : Backend::run(ranks, 60s, on_rank);
}

/// Whether the backend makes worlds of so many ranks: all, if it does not say.
template <backend Backend>
bool has_size(int ranks) {
  if constexpr (requires { Backend::has_size(ranks); }) return Backend::has_size(ranks);
  return true;
}

/// Runs one check at every size that the backend has and reports it by name. Where PLEAT_TEST_PART is set, only checks
/// whose names have it: a suite that takes long may run in parts, side by side.
template <backend Backend, class F>
void at_all_sizes(const std::string& name, F check) {
  const char* const part = std::getenv("PLEAT_TEST_PART");
  if (part != nullptr && name.find(part) == std::string::npos) return;
  for (const int ranks : sizes) {
    if (!has_size<Backend>(ranks)) continue;
    if (testing_support::is_quick() && (ranks == 3 || ranks == 8)) continue;  // others are odd, or a multiple of 4
    std::string failure;
    try {
      check(name, ranks);
    } catch (const std::exception& e) {
      failure = e.what();
    }
    CHECK_MESSAGE(failure.empty(), name, " on ", ranks, " ranks: ", failure);
  }
}
template <backend Backend, class View, class F>
void at_all_sizes_on_ranks(const std::string& name, F f) {
  at_all_sizes<Backend>(name, [&](const std::string& label, int ranks) { on_ranks<Backend, View>(label, ranks, f); });
}

}  // namespace conformance
