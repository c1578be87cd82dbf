// Whether the ranks of a group have planned the same operation: they compare what its plan consists of when they bind.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include <pleat/comm/group_comm.hpp>
#include <pleat/core/block.hpp>
#include <pleat/core/carve.hpp>

namespace pleat::inline v0 {

/// A hash of numbers in their order: equal for equal lists, different for others but for accidents of 2^-64. For what
/// of a plan is too long to be compared number by number.
class PlanHash {
 public:
  /// One more number.
  constexpr PlanHash& add(std::int64_t number) {
    hash_ = (hash_ ^ static_cast<std::uint64_t>(number)) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 32;
    return *this;
  }
  /// A list of numbers and its length.
  template <class Numbers>
  constexpr PlanHash& add_all(const Numbers& numbers) {
    for (const auto& number : numbers) add(static_cast<std::int64_t>(number));
    return add(static_cast<std::int64_t>(std::size(numbers)));
  }
  /// The hash so far.
  constexpr std::int64_t value() const { return static_cast<std::int64_t>(hash_); }

 private:
  std::uint64_t hash_ = 0x243f6a8885a308d3u;
};

/// One number of a plan that all ranks of the group must share; the name, a string literal, stands in errors, as does
/// the value's own name where its type has a `name_of`.
class PlanField {
 public:
  template <class T>
  requires std::is_integral_v<T> || std::is_enum_v<T>
  constexpr PlanField(const char* name, T value)
      : name_(name), bits_(static_cast<std::int64_t>(value)), append_([](Message& message, std::int64_t bits) {
          if constexpr (requires(T t) { name_of(t); }) {
            message.append(name_of(static_cast<T>(bits)));
          } else if constexpr (std::is_enum_v<T>) {
            message.append(bits);
          } else {
            message.append(static_cast<T>(bits));
          }
        }) {}
  constexpr PlanField(const char* name, double value)
      : name_(name),
        bits_(std::bit_cast<std::int64_t>(value)),
        append_([](Message& message, std::int64_t bits) { message.append(std::bit_cast<double>(bits)); }) {}
  constexpr PlanField(const char* name, const PlanHash& hash) : PlanField(name, hash.value()) {}

  /// The value, as ranks compare it.
  constexpr std::int64_t bits() const { return bits_; }
  /// "name=value" for the value that a rank has here.
  void append_to(Message& message, std::int64_t bits) const { append_(message.append(name_).append('='), bits); }

 private:
  const char* name_;
  std::int64_t bits_;
  void (*append_)(Message&, std::int64_t);
};

namespace detail {
/// What a rank tells the others.
struct PlanRecord {
  static constexpr std::size_t most_fields = 24, name_chars = 40;
  char operation[name_chars] = {};  // ends in 0
  std::int64_t values[most_fields] = {};
};
static_assert(std::is_trivially_copyable_v<PlanRecord>);
}  // namespace detail

/// Bytes of scratch that `agree_on` takes.
constexpr std::size_t agreement_bytes(int ranks) {
  Carver memory;
  memory.take<detail::PlanRecord>(ranks > 1 ? static_cast<std::size_t>(ranks) : 0);
  return memory.used_bytes();
}

/// Collective over the group, at bind: fails on every rank alike when the ranks bind different operations, or one that
/// they have planned differently. `operation`, of up to 39 characters, and `fields` are of this rank's plan; every rank
/// gives the same fields in the same order. `scratch`: `agreement_bytes(group.size())` of the device, free when it
/// returns. One all_gather of a few hundred bytes on `s`, which is waited for. A group of one has nothing to compare.
/// Errors: comm_error C36 with what differs, as one rank and the first one have it; T02; those of the communicator.
template <communicator Comm, std::size_t count>
void agree_on(const char* operation, const std::array<PlanField, count>& fields, const GroupComm<Comm>& group,
              Block scratch, typename Comm::stream_type s) {
  using detail::PlanRecord;
  static_assert(count <= PlanRecord::most_fields);
  if (group.size() == 1) return;
  PlanRecord mine;
  std::memcpy(mine.operation, operation, std::min(std::strlen(operation), PlanRecord::name_chars - 1));
  for (std::size_t i = 0; i < count; ++i) mine.values[i] = fields[i].bits();

  const auto ranks = static_cast<std::size_t>(group.size());
  PlanRecord* const all = Carver(scratch).take<PlanRecord>(ranks);
  PlanRecord* const own = all + group.rank();
  const executor_for<typename Comm::device_type> executor;
  executor.copy(own, &mine, sizeof mine, s);
  group.all_gather(own, all, sizeof mine, DType::u8, s);
  group.wait(s);  // with the deadline; what follows may block without one
  std::vector<PlanRecord> records(ranks);
  executor.copy(records.data(), all, ranks * sizeof mine, s);
  group.wait(s);

  const PlanRecord& first = records.front();
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    const PlanRecord& other = records[rank];
    if (std::memcmp(&other, &first, sizeof first) == 0) continue;
    const int first_rank = group.ranks()[0], other_rank = group.ranks()[static_cast<int>(rank)];
    if (std::strcmp(other.operation, first.operation) != 0) {
      fail<comm_error>("pleat[C36]: rank ", other_rank, " binds ", other.operation, ", rank ", first_rank, " ",
                       first.operation, "; bind the same operations in the same order on every rank of ",
                       group.ranks());
    }
    Message there, here;
    for (std::size_t i = 0; i < count; ++i) {
      if (other.values[i] == first.values[i]) continue;
      fields[i].append_to(there.append(there.size() == 0 ? "" : ", "), other.values[i]);
      fields[i].append_to(here.append(here.size() == 0 ? "" : ", "), first.values[i]);
    }
    fail<comm_error>("pleat[C36]: rank ", other_rank, " binds ", operation, " with ", there, ", rank ", first_rank,
                     " with ", here, "; plan alike on every rank of ", group.ranks());
  }
}

}  // namespace pleat::inline v0
