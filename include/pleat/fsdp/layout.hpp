// The layout of a unit: where each parameter lies in one flat buffer, and which elements each rank's shard holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <pleat/core/dtype.hpp>
#include <pleat/core/error.hpp>

namespace pleat::inline v0::fsdp {

/// What a unit may have at most, experts and padding included: its bytes stay far inside 64 bits.
inline constexpr std::int64_t max_unit_elems = std::int64_t{1} << 56;

/// What no shard boundary may cut. A row is one index of all axes but the last (one element where there is one axis or
/// none), a matrix one index of all axes but the last two. A granule larger than an equal share of the unit falls back
/// to rows when `or_rows` is set; otherwise it is an error (F01).
struct Granule {
  enum class Kind : unsigned char { element, rows, matrix, whole };

  Kind kind = Kind::element;
  std::int64_t block_rows = 1;
  bool or_rows = false;

  /// A boundary may be anywhere; between rows; between blocks of `k` rows; between matrices; around the parameter
  /// alone. `or_else_rows`: between rows where that is more than an equal share.
  static constexpr Granule element() { return {}; }
  static constexpr Granule row() { return {Kind::rows}; }
  static constexpr Granule rows(std::int64_t k) { return {Kind::rows, k}; }
  static constexpr Granule matrix() { return {Kind::matrix}; }
  static constexpr Granule whole() { return {Kind::whole}; }
  constexpr Granule or_else_rows() const { return {kind, block_rows, true}; }

  constexpr std::int64_t elems(std::span<const std::int64_t> shape) const;
};

/// What updates a parameter. Muon is for matrices in the middle of a model: embeddings, heads, routers, norms and
/// biases stay with AdamW.
enum class Optimizer : unsigned char { adamw, muon };

/// One parameter of a unit.
struct ParamSpec {
  std::string name = {};
  /// Extents, empty for a scalar; of one expert in an expert unit.
  std::vector<std::int64_t> shape = {};
  Granule granule = {};
  /// Gathered like the others, but without gradient and never updated.
  bool frozen = false;
  /// An earlier parameter of the unit whose storage, gradient and flags this one shares; -1 for none.
  int tied_to = -1;
  bool weight_decay = true;
  Optimizer optimizer = Optimizer::adamw;
  /// How many pipeline stages hold this parameter with the same gradient (a tied embedding: 2). The norm counts it
  /// once.
  int copies = 1;
};

/// How a unit is laid out; the same on every rank.
struct LayoutOptions {
  /// Experts of this rank, each with parameters of the given shapes: the unit holds everything of expert 0, then
  /// everything of expert 1. 0 for a unit without experts.
  std::int64_t experts_local = 0;
  /// Segments start at multiples of this; an equal share of the unit is a multiple too.
  std::int64_t alignment_elems = 128;
  /// Boundaries b[0..shard_count] in place of the equal split: 0 first, ascending, the last at or past the end of the
  /// last parameter. Borrowed for the call. A boundary inside a granule moves up to its end, as with the equal split.
  std::span<const std::int64_t> boundaries = {};
};

/// A parameter's place in the unit's buffer.
struct ParamPlace {
  ParamSpec spec;
  /// Where its elements begin, for expert 0; expert e's lie e * UnitLayout::expert_stride further.
  std::int64_t offset = 0;
  /// Elements of one expert, or of the parameter that is no expert's.
  std::int64_t elems = 0;
  std::int64_t granule_elems = 1;
};

/// A contiguous part of a parameter that a shard holds. `param_begin` counts in the parameter's own row-major
/// [experts_local, shape...]; `shard_begin` counts from the start of the shard.
struct Piece {
  int param = 0;
  std::int64_t param_begin = 0;
  std::int64_t shard_begin = 0;
  std::int64_t elems = 0;
  friend constexpr bool operator==(const Piece&, const Piece&) = default;
};

/// A range of elements.
struct Range {
  std::int64_t begin = 0;
  std::int64_t elems = 0;
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

/// The one definition of a unit's geometry, in elements, so that it serves every dtype. A value: pure, without pointers
/// and the same on every rank. Padding between parameters and at the end belongs to shards, but to no piece.
struct UnitLayout {
  std::vector<ParamPlace> params;
  std::int64_t experts_local = 0;  // 0: no expert unit
  std::int64_t expert_stride = 0;  // elements from an expert's parameters to the next expert's
  std::vector<std::int64_t> boundaries;

  /// Elements of the unit's buffer, padding included; ranks that share it; where a rank's shard begins, how long it is,
  /// and how long the longest.
  PLEAT_VECTOR_CONSTEXPR std::int64_t total_elems() const { return boundaries.back(); }
  PLEAT_VECTOR_CONSTEXPR int shard_count() const { return static_cast<int>(boundaries.size()) - 1; }
  PLEAT_VECTOR_CONSTEXPR std::int64_t shard_begin(int rank) const { return boundaries[static_cast<std::size_t>(rank)]; }
  PLEAT_VECTOR_CONSTEXPR std::int64_t shard_elems(int rank) const { return shard_begin(rank + 1) - shard_begin(rank); }
  PLEAT_VECTOR_CONSTEXPR std::int64_t max_shard_elems() const {
    std::int64_t most = 0;
    for (int r = 0; r < shard_count(); ++r) most = std::max(most, shard_elems(r));
    return most;
  }
  /// The parameter whose storage `param` uses: itself, or what it is tied to.
  PLEAT_VECTOR_CONSTEXPR int storage_of(int param) const {
    const int tied_to = place(param).spec.tied_to;
    return tied_to < 0 ? param : storage_of(tied_to);
  }
  /// All of a parameter on one ep rank: [shape...], or [experts_local, shape...] in an expert unit.
  PLEAT_VECTOR_CONSTEXPR std::vector<std::int64_t> full_shape(int param) const {
    std::vector<std::int64_t> shape = place(param).spec.shape;
    if (experts_local != 0) shape.insert(shape.begin(), experts_local);
    return shape;
  }
  PLEAT_VECTOR_CONSTEXPR const ParamPlace& place(int param) const { return params[static_cast<std::size_t>(param)]; }
  PLEAT_VECTOR_CONSTEXPR bool trains() const {
    return std::any_of(params.begin(), params.end(), [](const ParamPlace& p) { return !p.spec.frozen; });
  }
  /// How many parts of the buffer hold the unit's parameters: one per expert and parameter.
  PLEAT_VECTOR_CONSTEXPR std::int64_t block_count() const { return std::max<std::int64_t>(experts_local, 1); }

  /// Calls f(param, expert, begin) for each part of the buffer that has storage, ascending.
  template <class F>
  PLEAT_VECTOR_CONSTEXPR void for_each_segment(F f) const {
    for_each_segment_of(0, block_count(), f);
  }
  /// The same for the parts of experts that have elements in [first, last), and for all of a unit without experts.
  template <class F>
  PLEAT_VECTOR_CONSTEXPR void for_each_segment(std::int64_t first, std::int64_t last, F f) const {
    if (expert_stride == 0) return for_each_segment(f);
    for_each_segment_of(first / expert_stride, std::min(block_count(), (last + expert_stride - 1) / expert_stride), f);
  }

  /// What the shard of `rank` holds, ascending.
  PLEAT_VECTOR_CONSTEXPR std::vector<Piece> pieces(int rank) const {
    const std::int64_t shard_first = shard_begin(rank);
    const std::int64_t shard_last = shard_begin(rank + 1);
    std::vector<Piece> held;
    for_each_segment(shard_first, shard_last, [&](int p, std::int64_t expert, std::int64_t begin) {
      const std::int64_t elems = place(p).elems;
      const std::int64_t first = std::max(begin, shard_first);
      const std::int64_t last = std::min(begin + elems, shard_last);
      if (first < last) held.push_back({p, expert * elems + first - begin, first - shard_first, last - first});
    });
    return held;
  }

 private:
  template <class F>
  PLEAT_VECTOR_CONSTEXPR void for_each_segment_of(std::int64_t first_block, std::int64_t past_block, F f) const {
    for (std::int64_t e = first_block; e < past_block; ++e) {
      for (int p = 0; p < static_cast<int>(params.size()); ++p) {
        if (place(p).spec.tied_to < 0) f(p, e, place(p).offset + e * expert_stride);
      }
    }
  }
};

/// A trainable part of a shard, as device code reads it; `begin` counts from the start of the shard.
struct UpdatePiece {
  std::int64_t begin;
  std::int64_t elems;
  /// Its squares' weight in the gradient norm: one over the number of ranks that hold the same gradient.
  double norm_weight;
  bool weight_decay;
  Optimizer optimizer;
  /// Where its part of the optimizer's state begins: each optimizer keeps the elements it updates and no others.
  std::int64_t state_begin;
};

/// Ranges of the shard that hold the trainable pieces among `pieces` and nothing frozen. Padding between two of them
/// belongs to their range: it may be summed, since nobody reads it.
PLEAT_VECTOR_CONSTEXPR std::vector<Range> trainable_ranges(const UnitLayout& unit, std::span<const Piece> pieces) {
  std::vector<Range> ranges;
  bool is_joined = false;
  for (const Piece& piece : pieces) {
    const bool is_frozen = unit.place(piece.param).spec.frozen;
    if (!is_frozen && is_joined) ranges.back().elems = piece.shard_begin + piece.elems - ranges.back().begin;
    if (!is_frozen && !is_joined) ranges.push_back({piece.shard_begin, piece.elems});
    is_joined = !is_frozen;
  }
  return ranges;
}

/// The trainable pieces among `held`, what a rank holds of `unit`. The state of each optimizer is dense but for gaps
/// that keep elements at the place within 8 that they have in the shard, for wide accesses to both.
PLEAT_VECTOR_CONSTEXPR std::vector<UpdatePiece> update_pieces(const UnitLayout& unit, std::span<const Piece> held,
                                                              int replicas) {
  constexpr std::int64_t width = 8;
  std::int64_t state_ends[] = {0, 0};
  std::vector<UpdatePiece> pieces;
  for (const Piece& piece : held) {
    const ParamSpec& spec = unit.place(piece.param).spec;
    if (spec.frozen) continue;
    std::int64_t& end = state_ends[static_cast<std::size_t>(spec.optimizer)];
    const std::int64_t shift = (piece.shard_begin - end) % width;
    const std::int64_t begin = end + (shift < 0 ? shift + width : shift);
    end = begin + piece.elems;
    pieces.push_back(
        {piece.shard_begin, piece.elems, 1.0 / (replicas * spec.copies), spec.weight_decay, spec.optimizer, begin});
  }
  return pieces;
}
/// Elements that the state of `optimizer` takes for a shard of the unit: the most of any rank.
PLEAT_VECTOR_CONSTEXPR std::int64_t max_state_elems(const UnitLayout& unit, Optimizer optimizer) {
  const bool is_used = std::any_of(unit.params.begin(), unit.params.end(), [&](const ParamPlace& p) {
    return !p.spec.frozen && p.spec.optimizer == optimizer;
  });
  // A piece's state begins no later than the piece, so that a state is never longer than its shard.
  const std::int64_t bound = is_used ? unit.max_shard_elems() : 0;
  std::int64_t most = 0;
  for (int r = 0; r < unit.shard_count() && most < bound; ++r) {
    for (const UpdatePiece& piece : update_pieces(unit, unit.pieces(r), 1)) {
      if (piece.optimizer == optimizer) most = std::max(most, piece.state_begin + piece.elems);
    }
  }
  return most;
}

/// The product of the extents.
constexpr std::int64_t elems_of(std::span<const std::int64_t> shape) {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) product *= extent;
  return product;
}
constexpr std::int64_t Granule::elems(std::span<const std::int64_t> shape) const {
  const auto trailing = [&](std::size_t axes) { return elems_of(shape.last(std::min(axes, shape.size()))); };
  const std::int64_t row = shape.size() < 2 ? 1 : trailing(1);
  switch (kind) {
    case Kind::element:
      return 1;
    case Kind::rows:
      return row == 0 ? 0 : std::min(block_rows, elems_of(shape) / row) * row;
    case Kind::matrix:
      return trailing(2);
    case Kind::whole:
      return elems_of(shape);
  }
  return 1;
}

namespace detail {
constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// a * b elements of `what`. Errors: shape_error F03 when a unit cannot have them.
constexpr std::int64_t checked_elems(const std::string& what, std::int64_t a, std::int64_t b) {
  if (a != 0 && b > max_unit_elems / a) {
    fail<shape_error>("pleat[F03]: ", what, " would have ", a, " x ", b, " elements; a unit has at most ",
                      max_unit_elems, ", experts and padding included");
  }
  return a * b;
}

PLEAT_VECTOR_CONSTEXPR void check_spec(std::span<const ParamSpec> specs, std::size_t i) {
  const ParamSpec& spec = specs[i];
  std::int64_t elems = 1;
  for (const std::int64_t extent : spec.shape) {
    if (extent < 0)
      fail<shape_error>("pleat[F03]: parameter ", spec.name, " has an extent of ", extent, "; extents are 0 or more");
    elems = checked_elems("parameter " + spec.name, elems, std::max<std::int64_t>(extent, 1));
  }
  if (spec.granule.block_rows < 1 || spec.copies < 1) {
    fail<shape_error>("pleat[F03]: parameter ", spec.name, " has a granule of ", spec.granule.block_rows, " rows and ",
                      spec.copies, " copies; both are 1 or more");
  }
  if (spec.granule.kind > Granule::Kind::whole || spec.optimizer > Optimizer::muon) {
    fail<shape_error>("pleat[F03]: parameter ", spec.name, " has a granule of kind ",
                      static_cast<int>(spec.granule.kind), " and optimizer ", static_cast<int>(spec.optimizer),
                      "; valid kinds: element rows matrix whole; valid optimizers: adamw muon");
  }
  if (spec.tied_to == -1) return;
  if (spec.tied_to < 0 || spec.tied_to >= static_cast<int>(i) ||
      specs[static_cast<std::size_t>(spec.tied_to)].shape != spec.shape) {
    fail<shape_error>("pleat[F04]: parameter ", spec.name, " (number ", i, " of its unit) is tied to number ",
                      spec.tied_to, "; it must be one of the parameters before it, of the same shape, or -1 for none");
  }
}

/// The first place at or above `boundary` that is inside no granule.
PLEAT_VECTOR_CONSTEXPR std::int64_t outside_granules(const UnitLayout& unit, std::int64_t boundary) {
  std::int64_t moved = boundary;
  unit.for_each_segment(boundary, boundary + 1, [&](int p, std::int64_t, std::int64_t begin) {
    const ParamPlace& place = unit.place(p);
    if (boundary <= begin || boundary >= begin + place.elems) return;
    moved = begin + std::min(round_up(boundary - begin, place.granule_elems), place.elems);
  });
  return moved;
}
}  // namespace detail

/// Lays a unit out for `shard_count` ranks: parameters in order at aligned offsets, equal shards unless granules or the
/// caller say otherwise. Pure.
/// Errors: shape_error F01 for a granule larger than an equal share, F02 for boundaries of the caller that do not cover
/// the unit, F03 for extents, experts, counts or an alignment that cannot be and for more than max_unit_elems, F04 for
/// a tie that does not fit.
PLEAT_VECTOR_CONSTEXPR UnitLayout plan_unit(std::span<const ParamSpec> specs, int shard_count,
                                            const LayoutOptions& options = {}) {
  const std::int64_t alignment = options.alignment_elems;
  constexpr std::int64_t most_experts = std::numeric_limits<int>::max();
  if (shard_count < 1 || alignment < 1 || alignment > max_unit_elems || options.experts_local < 0 ||
      options.experts_local > most_experts) {
    fail<shape_error>("pleat[F03]: a unit over ", shard_count, " ranks with an alignment of ", alignment,
                      " elements and experts_local=", options.experts_local,
                      "; ranks are 1 or more, the alignment is 1 to ", max_unit_elems, ", experts_local 0 to ",
                      most_experts);
  }
  UnitLayout unit;
  std::int64_t end = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    detail::check_spec(specs, i);
    ParamPlace place{specs[i], detail::round_up(end, alignment), elems_of(specs[i].shape), 1};
    if (specs[i].tied_to >= 0) {
      const ParamPlace& target = unit.place(unit.storage_of(specs[i].tied_to));
      place.offset = target.offset;
      place.spec.frozen = target.spec.frozen;
      place.spec.optimizer = target.spec.optimizer;
    } else {
      end = detail::checked_elems("a unit", place.offset + place.elems, 1);
    }
    unit.params.push_back(std::move(place));
  }
  unit.experts_local = options.experts_local;
  unit.expert_stride = unit.experts_local == 0 ? 0 : detail::round_up(end, alignment);
  end += detail::checked_elems("a unit of experts", unit.block_count(), unit.expert_stride) - unit.expert_stride;
  const std::int64_t share =
      detail::round_up(end, detail::checked_elems("a unit of aligned shards", alignment, shard_count)) / shard_count;
  detail::checked_elems("a unit of shards", share, shard_count);

  const bool equal_split = options.boundaries.empty();
  for (ParamPlace& place : unit.params) {
    const ParamSpec& spec = place.spec;
    std::int64_t granule = std::min(spec.granule.elems(spec.shape), place.elems);
    if (equal_split && granule > share && spec.granule.or_rows)
      granule = std::min(Granule::row().elems(spec.shape), place.elems);
    if (equal_split && granule > share) {
      fail<shape_error>("pleat[F01]: a granule of parameter ", spec.name, " has ", granule, " elements, more than the ",
                        share, " of an equal share over ", shard_count,
                        " ranks; take a smaller granule, or_else_rows(), or fewer ranks");
    }
    place.granule_elems = std::max<std::int64_t>(granule, 1);
  }

  if (equal_split) {
    unit.boundaries.reserve(static_cast<std::size_t>(shard_count) + 1);
    for (int r = 0; r <= shard_count; ++r) unit.boundaries.push_back(r * share);
  } else {
    const auto given = options.boundaries;
    if (given.size() != static_cast<std::size_t>(shard_count) + 1 || given.front() != 0 || given.back() < end ||
        !std::is_sorted(given.begin(), given.end())) {
      fail<shape_error>("pleat[F02]: boundaries ", List<std::int64_t>{given.data(), given.size()},
                        " do not cover a unit of ", end, " elements over ", shard_count, " ranks; give ",
                        shard_count + 1, " ascending values from 0 to at least ", end);
    }
    detail::checked_elems("a unit of these boundaries", given.back(), 1);
    unit.boundaries.assign(given.begin(), given.end());
  }
  if (std::any_of(unit.params.begin(), unit.params.end(), [](const ParamPlace& p) { return p.granule_elems > 1; })) {
    for (std::int64_t& boundary : unit.boundaries) boundary = detail::outside_granules(unit, boundary);
  }
  return unit;
}

}  // namespace pleat::inline v0::fsdp
