// The leaves of dispatch and combine on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <pleat/core/host/executor.hpp>
#include <pleat/moe/dispatch_plan.hpp>
#include <pleat/moe/routed.hpp>

namespace pleat::inline v0::moe::detail {

/// Calls f(source, slot, number) for every row that came from the group's ranks, in (source, slot) order.
template <class F>
void each_received(const DispatchPlan& plan, const DispatchRecord& r, const F& f) {
  for (int source = 0; source < plan.ranks; ++source) {
    for (std::int64_t slot = 0; slot < r.recv_counts[source]; ++slot) {
      f(source, slot, source * plan.shape.max_tokens + slot);
    }
  }
}

/// The same for rows of some sources: f(payload, number).
template <class F>
void each_payload(const DispatchPlan& plan, const DispatchRecord& r, const SourceRows& in, const F& f) {
  const std::size_t bytes = static_cast<std::size_t>(plan.shape.hidden) * size_bytes(plan.shape.dtype);
  each_received(plan, r, [&](int source, std::int64_t slot, std::int64_t number) {
    if ((source == in.rank) != in.are_own) return;
    f(in.are_own ? static_cast<const std::byte*>(in.tokens) + static_cast<std::size_t>(r.own_tokens[slot]) * bytes
                 : in.table.payload(source, slot),
      number);
  });
}

/// Calls f(entry) for the entries of a received row, in ascending expert order.
template <class F>
void each_entry(const DispatchPlan& plan, const DispatchRecord& r, std::int64_t number, const F& f) {
  const std::int64_t first = number * plan.max_entries();
  for (std::int64_t entry = first; entry < first + plan.max_entries() && r.entry_rows[entry] >= 0; ++entry) f(entry);
}

/// Zeroes the pad rows of an expert-major array.
inline void zero_pads(const DispatchPlan& plan, const DispatchRecord& r, std::byte* rows, std::size_t row_bytes) {
  for (int e = 0; e < plan.experts_local(); ++e) {
    const auto pads = static_cast<std::size_t>(r.offsets[e + 1] - r.ends[e]);
    std::memset(rows + static_cast<std::size_t>(r.ends[e]) * row_bytes, 0, pads * row_bytes);
  }
}

inline std::size_t payload_bytes(const DispatchPlan& plan) {
  return static_cast<std::size_t>(plan.shape.hidden) * size_bytes(plan.shape.dtype);
}

/// Calls f(local expert, choice) for the routed choices in a row's header that rank `rank` hosts, in ascending order.
template <class F>
void each_hosted(const DispatchPlan& plan, int rank, const std::byte* header, const F& f) {
  const auto* ids = reinterpret_cast<const std::int32_t*>(header + plan.ids_offset_bytes());
  const std::int32_t first = rank * plan.experts_local();
  for (std::int32_t last = first - 1;;) {
    int best = -1;
    for (int j = 0; j < plan.shape.k; ++j) {
      const bool hosted = ids[j] > last && ids[j] < first + plan.experts_local();
      if (hosted && is_routed(ids, j, plan.shape.experts) && (best < 0 || ids[j] < ids[best])) best = j;
    }
    if (best < 0) return;
    last = ids[best];
    f(last - first, best);
  }
}

/// Calls f(token, row) for every row that is sent, in the order of tokens.
template <class F>
void each_sent(const DispatchPlan& plan, std::int64_t tokens, const DispatchRecord& r, const F& f) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int i = 0; i < plan.max_sends(); ++i) {
      const SentRow& sent = r.sent[t * plan.max_sends() + i];
      if (sent.rank < 0) break;
      f(t, sent);
    }
  }
}

/// to[elems] = sum over terms of weight * row, in the order in which `each_term(add)` calls add(weight, row).
template <class T, class Terms>
void weighted_sum(T* to, std::int64_t elems, const Terms& each_term) {
  using Acc = accumulator_t<T>;
  constexpr std::int64_t block = 64;
  Acc sums[block];
  for (std::int64_t first = 0; first < elems; first += block) {
    const std::int64_t count = std::min(block, elems - first);
    std::fill_n(sums, count, Acc{0});
    each_term([&](Acc weight, const T* row) {
      for (std::int64_t i = 0; i < count; ++i) sums[i] += weight * static_cast<Acc>(row[first + i]);
    });
    for (std::int64_t i = 0; i < count; ++i) to[first + i] = static_cast<T>(sums[i]);
  }
}

/// Takes the entries of the smallest weight off the lists until max_rows are left, and says how many in r.dropped. NaN
/// is the smallest; of equal weights the later goes.
inline void drop_entries(const DispatchPlan& plan, const DispatchRecord& r) {
  *r.dropped = 0;
  if (!plan.may_drop()) return;
  dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
    using Acc = typename decltype(type)::type;
    auto* weights = static_cast<Acc*>(r.entry_weights);
    std::vector<std::int64_t> entries;
    each_received(plan, r, [&](int, std::int64_t, std::int64_t number) {
      each_entry(plan, r, number, [&](std::int64_t entry) { entries.push_back(entry); });
    });
    const std::int64_t most = plan.max_rows(used_rows(r));
    const std::int64_t dropped = static_cast<std::int64_t>(entries.size()) - most;
    if (dropped <= 0) return;
    *r.dropped = dropped;
    std::stable_sort(entries.begin(), entries.end(), [&](std::int64_t a, std::int64_t b) {
      if (std::isnan(weights[a]) || std::isnan(weights[b])) return !std::isnan(weights[a]) && std::isnan(weights[b]);
      return weights[a] > weights[b];
    });
    std::for_each(entries.begin() + most, entries.end(), [&](std::int64_t entry) { r.entry_rows[entry] = -2; });
    each_received(plan, r, [&](int, std::int64_t, std::int64_t number) {
      const std::int64_t first = number * plan.max_entries(), end = first + plan.max_entries();
      std::int64_t kept = first;
      for (std::int64_t entry = first; entry < end && r.entry_rows[entry] != -1; ++entry) {
        if (r.entry_rows[entry] == -2) continue;
        r.entry_rows[kept] = r.entry_rows[entry];
        r.entry_choice[kept] = r.entry_choice[entry];
        weights[kept++] = weights[entry];
      }
      if (kept < end) r.entry_rows[kept] = -1;
    });
  });
}

struct HostDispatchLeaf {
  /// Which rows go where: r.sent, r.own_tokens, r.send_counts. Too many tokens are a count below 0 for every rank.
  static void plan_sends(const DispatchPlan& plan, int rank, std::int64_t tokens, std::int64_t planned_tokens,
                         const std::int32_t* ids, const DispatchRecord& r, const PlanScratch&, DispatchStatus* status,
                         HostStream) {
    std::fill_n(r.send_counts, plan.ranks, planned_tokens < tokens ? -tokens : 0);
    for (std::int64_t t = 0; t < planned_tokens; ++t) {
      const std::int32_t* token_ids = ids + t * plan.shape.k;
      SentRow* sent = r.sent + t * plan.max_sends();
      int count = 0;
      const auto add = [&](std::int32_t to) {
        int at = 0;
        while (at < count && sent[at].rank < to) ++at;
        if (at < count && sent[at].rank == to) return;
        std::copy_backward(sent + at, sent + count, sent + count + 1);
        sent[at].rank = to;
        ++count;
      };
      for (int p = 0; p < plan.ranks && plan.sends_all(); ++p) add(p);
      for (int j = 0; j < plan.shape.k; ++j) {
        if (is_routed(token_ids, j, plan.shape.experts)) {
          add(token_ids[j] / plan.experts_local());
        } else {
          ++status->unrouted_choices;
        }
      }
      for (int i = 0; i < count; ++i) {
        sent[i].slot = static_cast<std::int32_t>(r.send_counts[sent[i].rank]++);
        if (sent[i].rank == rank) r.own_tokens[sent[i].slot] = static_cast<std::int32_t>(t);
      }
      if (count < plan.max_sends()) sent[count].rank = -1;
    }
  }

  /// before[p] = sum of the counts of the ranks before p; a count below 0 is no row.
  static void sum_before(int ranks, const std::int64_t* counts, std::int64_t* before, HostStream) {
    std::int64_t sum = 0;
    for (int p = 0; p < ranks; ++p) {
      before[p] = sum;
      sum += std::max<std::int64_t>(counts[p], 0);
    }
  }

  /// Writes a header for every row that is sent, and the counts beside the rows.
  static void pack_headers(const DispatchPlan& plan, std::int64_t tokens, const std::int32_t* ids, const void* weights,
                           const DispatchRecord& r, const RowTable& out, HostStream) {
    for (int p = 0; p < plan.ranks && out.counts != nullptr; ++p) *out.counts[p] = r.send_counts[p];
    const std::size_t weight_bytes = plan.ids_offset_bytes(), k = static_cast<std::size_t>(plan.shape.k);
    each_sent(plan, tokens, r, [&](std::int64_t token, const SentRow& sent) {
      std::byte* header = out.header(sent.rank, sent.slot);
      const auto row = static_cast<std::size_t>(token);
      const auto number = static_cast<std::int32_t>(token);
      std::memcpy(header, static_cast<const std::byte*>(weights) + row * weight_bytes, weight_bytes);
      std::memcpy(header + weight_bytes, ids + row * k, k * sizeof(std::int32_t));
      std::memcpy(header + weight_bytes + k * sizeof(std::int32_t), &number, sizeof(number));
    });
  }

  /// Writes the row of every token to each of its ranks but `rank`.
  static void pack(const DispatchPlan& plan, int rank, std::int64_t tokens, const void* x, const DispatchRecord& r,
                   const RowTable& out, HostStream) {
    const std::size_t bytes = payload_bytes(plan);
    each_sent(plan, tokens, r, [&](std::int64_t token, const SentRow& sent) {
      if (sent.rank == rank) return;
      std::memcpy(out.payload(sent.rank, sent.slot),
                  static_cast<const std::byte*>(x) + static_cast<std::size_t>(token) * bytes, bytes);
    });
  }

  /// From the counts and headers that came to rank `rank`: where every row goes, expert by expert, and which entries
  /// find no place. Notes the first poisoned rank.
  static void plan_rows(const DispatchPlan& plan, int rank, const RowTable& in, const DispatchRecord& r,
                        const PlanScratch&, DispatchStatus* status, HostStream) {
    for (int p = 0; p < plan.ranks; ++p) {
      const std::int64_t count = in.counts == nullptr ? r.recv_counts[p] : *in.counts[p];
      r.recv_counts[p] = std::max<std::int64_t>(count, 0);
      if (count >= 0 || status->poisoned_rank != 0) continue;
      status->poisoned_rank = p + 1;
      status->poisoned_tokens = -count;
    }
    const std::size_t weight_bytes = size_bytes(plan.accumulator());
    each_received(plan, r, [&](int source, std::int64_t slot, std::int64_t number) {
      const std::byte* header = in.header(source, slot);
      std::int64_t entry = number * plan.max_entries();
      each_hosted(plan, rank, header, [&](int expert, int choice) {
        r.entry_rows[entry] = expert;  // until it has a row
        r.entry_choice[entry] = choice;
        std::memcpy(static_cast<std::byte*>(r.entry_weights) + static_cast<std::size_t>(entry) * weight_bytes,
                    header + static_cast<std::size_t>(choice) * weight_bytes, weight_bytes);
        ++entry;
      });
      if (entry < (number + 1) * plan.max_entries()) r.entry_rows[entry] = -1;
    });
    drop_entries(plan, r);

    std::fill_n(r.ends, plan.experts_local(), std::int64_t{0});
    each_received(plan, r, [&](int, std::int64_t, std::int64_t number) {
      each_entry(plan, r, number, [&](std::int64_t entry) { ++r.ends[r.entry_rows[entry]]; });
    });
    r.offsets[0] = used_rows(r);
    for (int e = 0; e < plan.experts_local(); ++e) {
      const std::int64_t alignment = plan.options.row_alignment, count = r.ends[e];
      r.ends[e] = r.offsets[e];
      r.offsets[e + 1] = r.offsets[e] + (count + alignment - 1) / alignment * alignment;
    }
    if (r.used_rows != nullptr) *r.used_rows = r.offsets[plan.experts_local()];
    each_received(plan, r, [&](int, std::int64_t, std::int64_t number) {
      each_entry(plan, r, number, [&](std::int64_t entry) { r.entry_rows[entry] = r.ends[r.entry_rows[entry]]++; });
    });
  }

  /// Copies rows to the places of their experts; with own rows, zeroes pad rows.
  static void expand(const DispatchPlan& plan, const SourceRows& in, const DispatchRecord& r, HostStream) {
    const std::size_t bytes = payload_bytes(plan);
    each_payload(plan, r, in, [&](const std::byte* payload, std::int64_t number) {
      each_entry(plan, r, number, [&](std::int64_t entry) {
        std::memcpy(r.rows + static_cast<std::size_t>(r.entry_rows[entry]) * bytes, payload, bytes);
      });
    });
    if (in.are_own) zero_pads(plan, r, r.rows, bytes);
  }

  /// dout = weight * dy of the row's token, and r.entry_dweights = <dy, out>; of which rows: as `expand`.
  static void expand_gradient(const DispatchPlan& plan, const SourceRows& in, const void* out, const DispatchRecord& r,
                              void* dout, HostStream) {
    dispatch_dtype(FloatTypes{}, plan.shape.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      using Acc = accumulator_t<T>;
      const std::int64_t hidden = plan.shape.hidden;
      each_payload(plan, r, in, [&](const std::byte* payload, std::int64_t number) {
        const auto* dy = reinterpret_cast<const T*>(payload);
        each_entry(plan, r, number, [&](std::int64_t entry) {
          const std::int64_t row = r.entry_rows[entry];
          const Acc weight = static_cast<const Acc*>(r.entry_weights)[entry];
          const T* from = static_cast<const T*>(out) + row * hidden;
          T* to = static_cast<T*>(dout) + row * hidden;
          Acc dot = 0;
          for (std::int64_t h = 0; h < hidden; ++h) {
            dot += static_cast<Acc>(dy[h]) * static_cast<Acc>(from[h]);
            to[h] = static_cast<T>(weight * static_cast<Acc>(dy[h]));
          }
          static_cast<Acc*>(r.entry_dweights)[entry] = dot;
        });
      });
      if (in.are_own) zero_pads(plan, r, static_cast<std::byte*>(dout), payload_bytes(plan));
    });
  }

  /// One row per received row: the sum over its experts, weighted and with the count of dropped entries beside them, or
  /// plain and with the gradients of the weights.
  static void sum_experts(const DispatchPlan& plan, const void* expert_rows, bool weighted, const DispatchRecord& r,
                          const RowTable& out, HostStream) {
    for (int p = 0; p < plan.ranks && weighted && out.counts != nullptr; ++p) *out.counts[p] = *r.dropped;
    dispatch_dtype(FloatTypes{}, plan.shape.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      using Acc = accumulator_t<T>;
      each_received(plan, r, [&](int source, std::int64_t slot, std::int64_t number) {
        weighted_sum(reinterpret_cast<T*>(out.payload(source, slot)), plan.shape.hidden, [&](const auto& add) {
          each_entry(plan, r, number, [&](std::int64_t entry) {
            add(weighted ? static_cast<const Acc*>(r.entry_weights)[entry] : Acc{1},
                static_cast<const T*>(expert_rows) + r.entry_rows[entry] * plan.shape.hidden);
          });
        });
        if (weighted) return;
        auto* dweights = reinterpret_cast<Acc*>(out.header(source, slot));
        std::fill_n(dweights, plan.shape.k, Acc{0});
        each_entry(plan, r, number, [&](std::int64_t entry) {
          dweights[r.entry_choice[entry]] = static_cast<const Acc*>(r.entry_dweights)[entry];
        });
      });
    });
  }

  /// One row per token: the residual, where there is one, and the sum over the ranks that answered; the same of the
  /// headers' weight gradients where asked. With a status, notes what each rank dropped.
  static void sum_sources(const DispatchPlan& plan, std::int64_t tokens, const RowTable& in, const DispatchRecord& r,
                          const void* residual, void* y, void* dweights, DispatchStatus* status, HostStream) {
    for (int p = 0; p < plan.ranks && status != nullptr && plan.may_drop(); ++p) {
      const std::int64_t dropped = in.counts == nullptr ? r.all_dropped[p] : *in.counts[p];
      status->dropped_rows += dropped;
      if (dropped == 0 || status->overflow_rank != 0) continue;
      status->overflow_rank = p + 1;
      status->overflow_rows = dropped;
    }
    dispatch_dtype(FloatTypes{}, plan.shape.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      using Acc = accumulator_t<T>;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const SentRow* first = r.sent + t * plan.max_sends();
        const SentRow* last = std::find_if(first, first + plan.max_sends(), [](SentRow s) { return s.rank < 0; });
        weighted_sum(static_cast<T*>(y) + t * plan.shape.hidden, plan.shape.hidden, [&](const auto& add) {
          if (residual != nullptr) add(Acc{1}, static_cast<const T*>(residual) + t * plan.shape.hidden);
          for (const SentRow* s = first; s != last; ++s)
            add(Acc{1}, reinterpret_cast<const T*>(in.payload(s->rank, s->slot)));
        });
        if (dweights == nullptr) continue;
        Acc* dw = static_cast<Acc*>(dweights) + t * plan.shape.k;
        for (int j = 0; j < plan.shape.k; ++j) {
          Acc sum = 0;
          for (const SentRow* s = first; s != last; ++s)
            sum += reinterpret_cast<const Acc*>(in.header(s->rank, s->slot))[j];
          dw[j] = sum;
        }
      }
    });
  }
};

}  // namespace pleat::inline v0::moe::detail
