// The two ways for rows between ranks have one interface: dispatch writes its exchanges once.
#pragma once

#include <concepts>

#include <pleat/moe/dispatch_saved.hpp>

namespace pleat::inline v0::moe {

/// One exchange of rows of a kind, called by all ranks of the group in the same order:
/// - `open`: where my rows go at each rank; what follows on `s` may write there.
/// - `copy_all`: the rows of all tokens to all other ranks, where the plan sends all.
/// - `send_headers` and `send`: what `s` has written is complete: the headers of tokens with the counts beside
///   them; the rows. Where `sends_ahead`, the receiver need not wait for the rows to read the headers, and `send` may
///   come on another stream.
/// - `receive_headers` and `receive`: where those from each rank lie, which what follows on `s` may read.
/// - `release`: they have been read.
template <class T>
concept row_transport = requires(T& t, RowKind kind, DispatchSaved& saved, const void* x, std::int64_t tokens,
                                 typename T::stream_type s) {
  { T::sends_ahead } -> std::convertible_to<bool>;
  { t.open(kind, saved, s) } -> std::same_as<RowTable>;
  t.copy_all(kind, x, tokens, s);
  t.send_headers(s);
  t.send(kind, s);
  { t.receive_headers(saved, s) } -> std::same_as<RowTable>;
  { t.receive(kind, saved, s) } -> std::same_as<RowTable>;
  t.release(kind, s);
};

}  // namespace pleat::inline v0::moe
