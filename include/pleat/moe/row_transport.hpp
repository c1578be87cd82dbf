// The two ways for rows between ranks have one interface: dispatch writes its exchanges once.
#pragma once

#include <concepts>

#include <pleat/moe/dispatch_saved.hpp>

namespace pleat::inline v0::moe {

/// One exchange of rows of a kind is `open`, leaves that write where it says, `deliver`, leaves that read where that
/// says, `release`; all ordered on `s`, and called by all ranks of the group in the same order.
/// - `open`: where my rows go at each rank; what follows may write there.
/// - `deliver`: what I wrote is complete; where the rows from each rank lie, which what follows may read.
/// - `release`: they have been read.
template <class T>
concept row_transport = requires(T& t, RowKind kind, DispatchSaved& saved, typename T::Stream s) {
  { t.open(kind, saved, s) } -> std::same_as<RowTable>;
  { t.deliver(kind, saved, s) } -> std::same_as<RowTable>;
  t.release(kind, s);
};

}  // namespace pleat::inline v0::moe
