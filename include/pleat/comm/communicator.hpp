// The communicator concept: a group of ranks and the means to move bytes between them.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>

#include <pleat/core/device.hpp>
#include <pleat/core/dtype.hpp>

namespace pleat::inline v0 {

/// One message of a point-to-point batch to `peer`, a rank of the group.
struct Send {
  const void* data;
  std::size_t elems;
  int peer;
};
/// One message of a point-to-point batch from `peer`.
struct Recv {
  void* data;
  std::size_t elems;
  int peer;
};
/// Element counts, one per rank of the group in rank order; host memory, read during the call only.
using Counts = std::span<const std::size_t>;

/// A communicator. Operations return nothing: what goes wrong is thrown. All counts are in elements of `dtype`; buffers
/// are the device's, borrowed until the work is done.
///
/// A dtype that is none is refused (T01), and so are more bytes than memory can have (C05), before any peer is met.
///
/// Every rank of the group calls each collective, in the same order, with the same dtype and counts that agree; a rank
/// that breaks this gives every rank a comm_error (C05) where the backend can see it. On the host an operation is
/// complete on return. On a CUDA device it is ordered on `s`; the call may block until the peers enter it, never for
/// the GPU.
///
/// - `split(color, key)`: collective. The ranks of one color form a new group, ordered by key, then by rank.
/// - `all_gather(in, out, elems, dtype, s)`: out[r * elems ...] = in of rank r. In place when in == out + rank * elems.
/// - `all_gather_v(in, out, n, dtype, s)`: n[r] elements of rank r, packed in rank order; in place as above.
/// - `all_to_all(in, out, elems, dtype, s)`: block p of `in` goes to rank p; block p of `out` comes from rank p. No
///   aliasing.
/// - `all_to_all_v(in, send, out, recv, dtype, s)`: the same with send[p] and recv[p] elements, both packed in order.
/// - `broadcast(buffer, elems, root, dtype, s)`: buffer of root to all.
/// - `exchange(tx, rx, dtype, s)`: a batch of messages, any number per peer, to oneself too. My k-th send to a peer is
///   its k-th receive from me, across batches. Only the ranks that take part call. An unmatched part hangs until the
///   deadline, so schedules are checked by simulation first.
/// - `barrier(s)`: nobody leaves before everybody has entered.
/// - `wait(s)`: blocks until the work on `s` is done, with a deadline. On CUDA failures surface here and in `check()`;
///   on the host any operation throws.
///
/// Failure of a rank ends every operation that waits for it with a comm_error that names the rank and the operation.
template <class C>
concept communicator = std::movable<C> &&
    requires(C& c, const C& k, typename C::stream_type s, const void* in, void* out, std::size_t elems, Counts n,
             std::span<const Send> tx, std::span<const Recv> rx, DType t, int i) {
  typename C::device_type;
  { k.rank() }
  noexcept->std::same_as<int>;
  { k.size() }
  noexcept->std::same_as<int>;
  { c.split(i, i) } -> std::same_as<C>;
  { c.all_gather(in, out, elems, t, s) } -> std::same_as<void>;
  { c.all_gather_v(in, out, n, t, s) } -> std::same_as<void>;
  { c.all_to_all(in, out, elems, t, s) } -> std::same_as<void>;
  { c.all_to_all_v(in, n, out, n, t, s) } -> std::same_as<void>;
  { c.broadcast(out, elems, i, t, s) } -> std::same_as<void>;
  { c.exchange(tx, rx, t, s) } -> std::same_as<void>;
  { c.barrier(s) } -> std::same_as<void>;
  { c.wait(s) } -> std::same_as<void>;
};

/// A refinement a caller opts into: the backend's own sums, in an order of its own. `reduce_scatter(in, out, elems,
/// dtype, s)`: out = sum over ranks of block `rank` of in; `all_reduce(buffer, elems, dtype, s)`.
template <class C>
concept native_reductions = communicator<C> &&
    requires(C& c, typename C::stream_type s, const void* in, void* out, std::size_t elems, DType t) {
  c.reduce_scatter(in, out, elems, t, s);
  c.all_reduce(out, elems, t, s);
};

}  // namespace pleat::inline v0
