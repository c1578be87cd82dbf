// The plan of Muon: which matrices there are, who orthogonalizes each, and what memory that takes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/mesh/concept.hpp>
#include <pleat/optim/muon_leaf.hpp>
#include <pleat/optim/option_checks.hpp>

namespace pleat::inline v0::optim {

/// A matrix of a unit: one expert's, or one leading index of its parameter.
struct MuonMatrix {
  int unit;
  std::int64_t begin;  // in the unit's buffer
  std::int64_t rows, cols;
  bool weight_decay;
  int owner = -1;  // the rank of the shard group that orthogonalizes it

  constexpr std::int64_t elems() const { return rows * cols; }
  /// Its elements in the unit's buffer.
  constexpr fsdp::Range range() const { return {begin, elems()}; }
  /// Multiply-adds of one iteration: two products with the matrix and one of A with itself.
  constexpr double cost() const {
    const auto small = static_cast<double>(std::min(rows, cols)), large = static_cast<double>(std::max(rows, cols));
    return small * small * (2 * large + small);
  }
  double scale(MuonForm form) const {
    const auto r = static_cast<double>(rows), c = static_cast<double>(cols);
    return form == MuonForm::keller ? std::sqrt(std::max(1.0, r / c)) : 0.2 * std::sqrt(std::max(r, c));
  }
  /// What `rank` holds of it, counted from the matrix's beginning; empty ranges begin anywhere.
  PLEAT_VECTOR_CONSTEXPR fsdp::Range held(const fsdp::UnitLayout& layout, int rank) const {
    const std::int64_t first = std::max(begin, layout.shard_begin(rank));
    const std::int64_t last = std::min(begin + elems(), layout.shard_begin(rank + 1));
    return {first - begin, std::max<std::int64_t>(last - first, 0)};
  }
};

/// Matrices of one kind that are exchanged and orthogonalized together, ascending by shape.
struct MuonRound {
  Param kind;
  std::vector<MuonMatrix> matrices;
};

/// What every rank computes alike. A value without pointers.
struct MuonPlan {
  std::vector<fsdp::UnitLayout> units;
  DType master = DType::f32;
  MuonOptions options;
  std::vector<std::int64_t> state_elems;  // [unit]: momentum of a shard, the most of any rank
  std::vector<MuonRound> rounds;
  /// The most of any rank and round, in elements of the product's dtype: matrices it owns, and pieces it sends away.
  std::int64_t owned_elems = 0, sent_elems = 0;
  std::size_t work_bytes = 0;    // of Newton-Schulz
  std::size_t table_pieces = 0;  // the most pieces of a rank, all rounds together

  /// Where a piece lies among those a rank sends: at the place within 8 elements that it has in its shard.
  static constexpr std::int64_t sent_slot_elems(std::int64_t elems) { return MatrixBatch::padded(elems + 7); }

  /// What Muon keeps from step to step.
  struct Persistent {
    std::vector<std::byte*> momentum;  // [unit]
    MuonPiece* pieces;
  };
  Persistent carve(Carver& memory) const {
    Persistent made{};
    for (const std::int64_t elems : state_elems) {
      made.momentum.push_back(memory.take_bytes(static_cast<std::size_t>(elems) * size_bytes(master)));
    }
    made.pieces = memory.take<MuonPiece>(table_pieces);
    return made;
  }
  /// What a step works in.
  struct Scratch {
    std::byte* owned;
    std::byte* sent;
    Block work;
  };
  Scratch carve_scratch(Carver& memory) const {
    const auto bytes = [&](std::int64_t elems) {
      return static_cast<std::size_t>(elems) * size_bytes(options.product);
    };
    return {memory.take_bytes(bytes(owned_elems)),
            memory.take_bytes(bytes(sent_elems)),
            {memory.take_bytes(work_bytes), work_bytes}};
  }
  /// The largest of any rank.
  Footprint footprint() const {
    Carver persistent, scratch;
    carve(persistent);
    carve_scratch(scratch);
    int ranks = 1;
    for (const fsdp::UnitLayout& unit : units) ranks = std::max(ranks, unit.shard_count());
    return {.scratch = std::max(scratch.used_bytes(), agreement_bytes(ranks)), .persistent = persistent.used_bytes()};
  }
};

namespace detail {
/// Calls f(rank, range) for each rank that holds some of the matrix, ascending.
template <class F>
void for_each_holder(const MuonMatrix& matrix, const fsdp::UnitLayout& layout, F f) {
  const auto past = std::upper_bound(layout.boundaries.begin(), layout.boundaries.end(), matrix.begin);
  for (auto rank = static_cast<int>(past - layout.boundaries.begin()) - 1;
       rank < layout.shard_count() && layout.shard_begin(rank) < matrix.begin + matrix.elems(); ++rank) {
    const fsdp::Range held = matrix.held(layout, rank);
    if (held.elems > 0) f(rank, held);
  }
}

/// What the ranks of a group of a plan share.
inline auto agreement_of(const MuonPlan& plan) {
  PlanHash hash;
  std::size_t matrices = 0;
  for (const fsdp::UnitLayout& unit : plan.units) hash.add_all(unit.boundaries);
  for (const MuonRound& round : plan.rounds) {
    matrices += round.matrices.size();
    for (const MuonMatrix& m : round.matrices) {
      hash.add(m.unit).add(m.begin).add(m.rows).add(m.cols).add(m.weight_decay);
    }
  }
  const MuonOptions& o = plan.options;
  return std::array<PlanField, 11>{PlanField{"matrices", matrices},
                                   PlanField{"hash of matrices", hash},
                                   PlanField{"dtype of masters", plan.master},
                                   PlanField{"dtype of products", o.product},
                                   PlanField{"form", o.form},
                                   PlanField{"momentum", o.momentum},
                                   PlanField{"nesterov", o.nesterov},
                                   PlanField{"weight_decay", o.weight_decay},
                                   PlanField{"iterations", o.iterations},
                                   PlanField{"eps", o.eps},
                                   PlanField{"round_elems", o.round_elems}};
}

inline void append_matrices(std::vector<MuonMatrix>& matrices, int unit, const fsdp::UnitLayout& layout) {
  layout.for_each_segment([&](int p, std::int64_t, std::int64_t begin) {
    const fsdp::ParamSpec& spec = layout.place(p).spec;
    if (spec.frozen || spec.optimizer != fsdp::Optimizer::muon) return;
    if (spec.shape.size() < 2) {
      fail<shape_error>("pleat[F15]: parameter ", spec.name, " has ", spec.shape.size(),
                        " extents and is to be updated by Muon, which takes 2 or more: the last two are a matrix; "
                        "leave it to AdamW");
    }
    const std::int64_t rows = spec.shape[spec.shape.size() - 2], cols = spec.shape.back();
    for (std::int64_t at = 0; at < layout.place(p).elems; at += rows * cols) {
      matrices.push_back({unit, begin + at, rows, cols, spec.weight_decay});
    }
  });
}

/// Whole matrices stay where they are; each other one goes to the rank with the least to do so far, the dearest first.
inline void assign_owners(MuonRound& round, std::span<const fsdp::UnitLayout> units, int ranks) {
  std::vector<double> load(static_cast<std::size_t>(ranks));
  std::vector<MuonMatrix*> cut;
  for (MuonMatrix& matrix : round.matrices) {
    for_each_holder(matrix, units[static_cast<std::size_t>(matrix.unit)], [&](int rank, const fsdp::Range& held) {
      if (held.elems == matrix.elems()) matrix.owner = rank;
    });
    if (matrix.owner < 0) {
      cut.push_back(&matrix);
    } else {
      load[static_cast<std::size_t>(matrix.owner)] += matrix.cost();
    }
  }
  std::stable_sort(cut.begin(), cut.end(), [](auto* a, auto* b) { return a->cost() > b->cost(); });
  using Load = std::pair<double, int>;  // of equal loads the lowest rank is the least
  std::vector<Load> ranks_by_load;
  for (int r = 0; r < ranks; ++r) ranks_by_load.emplace_back(load[static_cast<std::size_t>(r)], r);
  std::make_heap(ranks_by_load.begin(), ranks_by_load.end(), std::greater<>{});
  for (MuonMatrix* matrix : cut) {
    std::pop_heap(ranks_by_load.begin(), ranks_by_load.end(), std::greater<>{});
    Load& least = ranks_by_load.back();
    least.first += matrix->cost();
    matrix->owner = least.second;
    std::push_heap(ranks_by_load.begin(), ranks_by_load.end(), std::greater<>{});
  }
}

/// Calls f(first, past) for each run of equal shapes among the matrices of a round that `rank` owns, as indices into
/// `owned`.
template <class F>
void for_each_batch(std::span<const MuonMatrix* const> owned, F f) {
  for (std::size_t first = 0; first < owned.size();) {
    std::size_t past = first + 1;
    while (past < owned.size() && owned[past]->rows == owned[first]->rows && owned[past]->cols == owned[first]->cols) {
      ++past;
    }
    f(first, past);
    first = past;
  }
}

inline std::vector<const MuonMatrix*> owned_by(const MuonRound& round, int rank) {
  std::vector<const MuonMatrix*> owned;
  for (const MuonMatrix& matrix : round.matrices) {
    if (matrix.owner == rank) owned.push_back(&matrix);
  }
  return owned;
}

/// Adds what a round takes of the memory of its ranks.
inline void count_memory(MuonPlan& plan, const MuonRound& round, std::span<std::size_t> pieces) {
  std::vector<std::int64_t> owned(pieces.size()), sent(pieces.size());
  for (const MuonMatrix& matrix : round.matrices) {
    owned[static_cast<std::size_t>(matrix.owner)] += MatrixBatch::padded(matrix.elems());
    for_each_holder(matrix, plan.units[static_cast<std::size_t>(matrix.unit)], [&](int rank, const fsdp::Range& held) {
      const auto r = static_cast<std::size_t>(rank);
      ++pieces[r];
      if (rank != matrix.owner) sent[r] += MuonPlan::sent_slot_elems(held.elems);
    });
  }
  plan.owned_elems = std::max(plan.owned_elems, *std::max_element(owned.begin(), owned.end()));
  plan.sent_elems = std::max(plan.sent_elems, *std::max_element(sent.begin(), sent.end()));
  std::vector<const MuonMatrix*> by_owner;
  for (const MuonMatrix& matrix : round.matrices) by_owner.push_back(&matrix);
  const auto is_before = [](auto* a, auto* b) { return a->owner < b->owner; };
  std::stable_sort(by_owner.begin(), by_owner.end(), is_before);
  for (auto from = by_owner.begin(); from != by_owner.end();) {
    const auto to = std::upper_bound(from, by_owner.end(), *from, is_before);
    const std::span<const MuonMatrix* const> mine(from, to);
    from = to;
    for_each_batch(mine, [&](std::size_t first, std::size_t past) {
      Carver work;
      MatrixBatch{nullptr, mine[first]->rows, mine[first]->cols, static_cast<std::int64_t>(past - first)}.carve(
          work, plan.options.product);
      plan.work_bytes = std::max(plan.work_bytes, work.used_bytes());
    });
  }
}
}  // namespace detail

/// Plans Muon for the parameters of `units` that it updates; `kinds` are the units' shard groups, `master` their dtype.
/// Pure. Errors: shape_error F15 for a parameter that is no matrix, F16 for options that cannot be.
inline MuonPlan plan_muon(std::span<const fsdp::UnitLayout> units, std::span<const Param> kinds, DType master,
                          const MuonOptions& options = {}) {
  if (options.iterations < 1 || options.round_elems < 1 || units.size() != kinds.size()) {
    fail<shape_error>("pleat[F16]: Muon with ", options.iterations, " iterations in rounds of ", options.round_elems,
                      " elements for ", units.size(), " units of ", kinds.size(),
                      " kinds; iterations and elements are 1 or more, and each unit has a kind");
  }
  detail::check_master("Muon", master);
  if (options.product != DType::f64 && options.product != DType::f32 && options.product != DType::bf16) {
    fail<shape_error>("pleat[F16]: Muon cannot multiply in ", options.product, "; valid dtypes: f64 f32 bf16");
  }
  if (!(options.momentum >= 0 && options.momentum < 1) || !detail::is_eps(options.eps, options.product) ||
      !detail::is_decay(options.weight_decay) || options.form > MuonForm::moonlight) {
    fail<shape_error>("pleat[F16]: Muon with momentum=", options.momentum, " eps=", options.eps,
                      " weight_decay=", options.weight_decay, " and form ", static_cast<int>(options.form),
                      "; momentum is 0 or more and below 1, eps is above 0 in sums of ", options.product,
                      " and at most 1, weight_decay is finite and 0 or more, the form is keller (0) or moonlight (1)");
  }
  MuonPlan plan{{units.begin(), units.end()}, master, options, {}, {}};
  for (const fsdp::UnitLayout& unit : units) plan.state_elems.push_back(max_state_elems(unit, fsdp::Optimizer::muon));
  for (const Param kind : {Param::dense, Param::expert}) {
    std::vector<MuonMatrix> matrices;
    int ranks = 1;
    for (std::size_t u = 0; u < units.size(); ++u) {
      if (kinds[u] != kind) continue;
      ranks = units[u].shard_count();
      detail::append_matrices(matrices, static_cast<int>(u), units[u]);
    }
    std::vector<std::size_t> pieces(static_cast<std::size_t>(ranks));
    for (auto first = matrices.begin(); first != matrices.end();) {
      auto past = first;
      for (std::int64_t elems = 0; past != matrices.end(); ++past) {
        elems += past->elems();
        if (past != first && (elems - 1) / ranks >= options.round_elems) break;
      }
      MuonRound round{kind, {first, past}};
      first = past;
      std::stable_sort(round.matrices.begin(), round.matrices.end(), [](const MuonMatrix& a, const MuonMatrix& b) {
        return a.rows != b.rows ? a.rows < b.rows : a.cols < b.cols;
      });
      detail::assign_owners(round, plan.units, ranks);
      detail::count_memory(plan, round, pieces);
      plan.rounds.push_back(std::move(round));
    }
    plan.table_pieces += *std::max_element(pieces.begin(), pieces.end());
  }
  return plan;
}

}  // namespace pleat::inline v0::optim
