// The MoE layer on ranks with GPUs: against one rank in float64, with both transports, under delays, noise and budgets,
// and beside what else a GPU and its links may be busy with.
#pragma once

#include <cstdio>

#include <pleat/comm/mesh_comms.hpp>

#include <support/repeats.hpp>
#include <support/watchdog.hpp>

#include "moe_rank.cuh"

namespace moe_gpu_testing {

struct Outcome {
  int cases = 0;
  double worst = 0;
};

template <class Backend, class T>
Answer<T> run_once(int ranks, const Problem<T>& p, const moe::DispatchOptions& options, unsigned seed) {
  const moe::LayerPlan plan = plan_of(p.sizes, ranks, most_tokens(p.tokens), dtype_of<T>, options);
  Answer<T> answer = poisoned(p);
  Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
    LayerRank<Backend, T> rank(world, plan, p, {seed + static_cast<unsigned>(world.rank()), nullptr});
    rank.run();
    rank.run();
    rank.wait();
    rank.check();
    rank.download(answer);
  });
  return answer;
}

/// Against one rank in float64; both transports, and both senders to peers, give the same bits.
template <class Backend, class T>
Outcome check_layer(int ranks) {
  Outcome outcome;
  const Sizes all_sizes[] = {{.hidden = 64, .inner = 48, .experts = 8 * ranks, .k = 4},
                             {.hidden = 36, .inner = 20, .experts = 2 * ranks, .k = 2},
                             {.hidden = 72, .inner = 64, .experts = ranks * 3, .k = 3}};
  for (const Sizes& sizes : all_sizes) {
    Problem<T> p(sizes, uneven_tokens(ranks), draw_seed());
    mask(p, 5, 6);
    const Answer<double> expected = moe_testing::solve(p);
    std::optional<Answer<T>> first;
    const moe::DispatchOptions ways[] = {{.transport = Transport::peer, .send_by = moe::SendBy::stores},
                                         {.transport = Transport::peer, .send_by = moe::SendBy::copies},
                                         {.transport = Transport::collective}};
    for (const moe::DispatchOptions& way : ways) {
      const Answer<T> answer = run_once<Backend>(ranks, p, way, std::random_device{}());
      const double off = moe_testing::worst(answer, expected);
      require(off < gpu_tolerance<T>(), name_of(way.transport), " ", name_of(way.send_by), ", experts ", sizes.experts,
              ": off by ", std::to_string(off).c_str(), "; y ",
              std::to_string(moe_testing::relative(answer.y, expected.y)).c_str(), " dx ",
              std::to_string(moe_testing::relative(answer.dx, expected.dx)).c_str(), " dlogits ",
              std::to_string(moe_testing::relative(answer.dlogits, expected.dlogits)).c_str(), " dgate ",
              std::to_string(moe_testing::relative(answer.dgate, expected.dgate)).c_str(), " ddown ",
              std::to_string(moe_testing::relative(answer.ddown, expected.ddown)).c_str());
      if (!first) first = answer;
      require(answer == *first, "the bits depend on what moves rows");
      outcome.worst = std::max(outcome.worst, off);
      ++outcome.cases;
    }
  }
  return outcome;
}

/// The ep groups of a folded mesh, side by side in one arena: each group's layer against one rank in float64.
template <class Backend, class T, folded_mesh Mesh>
Outcome check_folded(Mesh mesh) {
  const int ranks = mesh.ep, groups = mesh.expert_dp;
  const Sizes sizes{.hidden = 64, .inner = 48, .experts = 4 * ranks, .k = 3};
  std::vector<std::int64_t> tokens = uneven_tokens(ranks);
  std::vector<Problem<T>> problems;
  std::vector<Answer<T>> answers;
  for (int group = 0; group < groups; ++group) {
    problems.emplace_back(sizes, tokens, draw_seed());
    answers.push_back(poisoned(problems.back()));
    std::rotate(tokens.begin(), tokens.begin() + 1, tokens.end());
  }
  Outcome outcome;
  for (const moe::SendBy send_by : {moe::SendBy::stores, moe::SendBy::copies}) {
    const moe::LayerPlan plan =
        plan_of(sizes, ranks, 129, dtype_of<T>, {.transport = Transport::peer, .send_by = send_by});
    Backend::run(ranks * groups, 60s, [&](typename Backend::comm_type& world) {
      const MeshComms comms(mesh, world);
      const auto group = static_cast<std::size_t>(coordinate(comms.mesh(), world.rank()).expert_dp);
      LayerRank<Backend, T> rank(comms.world(), comms.template get<Axis::ep>(), plan, problems[group],
                                 {static_cast<unsigned>(world.rank()), nullptr});
      rank.run();
      rank.wait();
      rank.check();
      rank.download(answers[group]);
    });
    for (std::size_t group = 0; group < answers.size(); ++group) {
      const double off = moe_testing::worst(answers[group], moe_testing::solve(problems[group]));
      require(off < gpu_tolerance<T>(), "group ", static_cast<int>(group), " is off by ", std::to_string(off).c_str());
      outcome.worst = std::max(outcome.worst, off);
      ++outcome.cases;
    }
  }
  return outcome;
}

/// The same bits a hundred times: with delays, beside collectives and kernels that take multiprocessors away, whatever
/// the budget and what sends rows, and when a rank is 10 ms late, so that whatever the others do not wait for is long
/// overwritten.
template <class Backend, class T>
Outcome check_bits(int ranks, int runs_per_budget) {
  using Buffer = typename Backend::Buffer;
  Problem<T> p({.hidden = 136, .inner = 64, .experts = 8 * ranks, .k = 8}, uneven_tokens(ranks), draw_seed());
  std::optional<Answer<T>> first;
  Outcome outcome;
  for (const int max_ctas : {0, 1, 5, 40}) {
    const moe::LayerPlan plan = plan_of(p.sizes, ranks, most_tokens(p.tokens), dtype_of<T>,
                                        {.transport = Transport::peer,
                                         .send_by = max_ctas % 2 == 0 ? moe::SendBy::copies : moe::SendBy::stores,
                                         .max_ctas = max_ctas});
    std::vector<Answer<T>> answers(static_cast<std::size_t>(runs_per_budget), poisoned(p));
    Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
      std::mt19937 random(std::random_device{}());
      const CudaStream noise;
      auto side = world.split(0, world.rank());
      constexpr std::size_t noise_elems = std::size_t{1} << 18;
      Buffer from(noise_elems * sizeof(float)), to(noise_elems * sizeof(float) * static_cast<std::size_t>(ranks));
      LayerRank<Backend, T> rank(world, plan, p, {static_cast<unsigned>(random()), nullptr});
      for (Answer<T>& answer : answers) {
        rank.poison();
        templates_testing::spin<<<static_cast<unsigned>(1 + random() % 200), 1024, 0, noise>>>(random() % 100'000);
        check_launch("spin");
        side.all_gather(from.block().data, to.block().data, noise_elems, DType::f32, noise);
        if (const auto i = &answer - answers.data(); i % 5 == 0 && i / 5 % ranks == world.rank()) {
          templates_testing::spin<<<1, 1, 0, rank.stream()>>>(10'000'000);
          check_launch("spin");
        }
        rank.run();
        rank.wait();
        rank.download(answer);
      }
      rank.check();
      side.wait(noise);
    });
    for (const Answer<T>& answer : answers) {
      if (!first) first = answer;
      require(answer == *first, "run ", outcome.cases, " with max_ctas=", max_ctas, " has other bits");
      ++outcome.cases;
    }
  }
  return outcome;
}

/// A product that takes every multiprocessor, on a stream of its own.
class WholeDeviceProduct {
 public:
  void enqueue() { experts::down(plan_, rows_.data(), offset(), matrix_, results_.data(), stream_); }

 private:
  using experts = moe_leaf<cuda_device>;
  static constexpr std::int64_t rows = 4096, width = 4096;
  const std::int64_t* offset() {
    if (!is_ready_) {
      const std::int64_t ends[] = {0, rows};
      testing_support::copy_now(offsets_.data(), ends, sizeof ends);
      for (const CudaBuffer* buffer : {&rows_, &weights_}) {
        check_cuda(cudaMemsetAsync(buffer->data(), 0x3c, buffer->size_bytes(), stream_), "cudaMemsetAsync");
      }
      is_ready_ = true;
    }
    return reinterpret_cast<const std::int64_t*>(offsets_.data());
  }

  const CudaStream stream_;
  const CudaBuffer rows_{rows * width * 2}, weights_{width * width * 2}, results_{rows * width * 2}, offsets_{16};
  const moe::ExpertPlan plan_ = moe::plan(moe::ExpertShape{1, width, width, rows, DType::bf16});
  const TensorRef matrix_ = moe::expert_matrix(reinterpret_cast<bfloat16*>(weights_.data()), 1, width, width,
                                               width* width, CudaExecutor{}.device());
  bool is_ready_ = false;
};

/// Beside products that take every multiprocessor and collectives, each on a stream of its own: the bits of a quiet
/// device, and nobody waits for ever, with either transport.
template <class Backend, class T>
Outcome check_beside(int ranks, int runs) {
  using Buffer = typename Backend::Buffer;
  const Problem<T> p({.hidden = 512, .inner = 128, .experts = 8 * ranks, .k = 8}, uneven_tokens(ranks), draw_seed());
  Outcome outcome;
  std::optional<Answer<T>> quiet;
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const moe::LayerPlan plan = plan_of(p.sizes, ranks, most_tokens(p.tokens), dtype_of<T>, {.transport = transport});
    std::vector<Answer<T>> answers(static_cast<std::size_t>(runs) + 1, poisoned(p));
    Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
      const CudaStream traffic;
      auto side = world.split(0, world.rank());
      constexpr std::size_t elems = std::size_t{1} << 20;
      Buffer from(elems * sizeof(float)), to(elems * sizeof(float) * static_cast<std::size_t>(ranks));
      WholeDeviceProduct product;
      LayerRank<Backend, T> rank(world, plan, p, {});
      for (Answer<T>& answer : answers) {
        rank.poison();
        const bool is_quiet = &answer == answers.data();
        for (int i = 0; i < 4 && !is_quiet; ++i) {
          product.enqueue();
          side.all_gather(from.block().data, to.block().data, elems, DType::f32, traffic);
        }
        rank.run();
        rank.wait();
        rank.download(answer);
      }
      rank.check();
      side.wait(traffic);
    });
    for (const Answer<T>& answer : answers) {
      if (!quiet) quiet = answer;
      require(answer == *quiet, "run ", outcome.cases, " beside a product and a collective has other bits, ",
              name_of(transport));
      ++outcome.cases;
    }
  }
  return outcome;
}

/// What only some ranks see ends in the same error on every rank.
template <class Backend>
Outcome check_errors(int ranks) {
  Outcome outcome;
  const Problem<float> p({.hidden = 16, .inner = 16, .experts = 2 * ranks, .k = 2}, uneven_tokens(ranks), 3);
  const auto texts = [&](std::int64_t max_tokens, const moe::DispatchOptions& options) {
    const moe::LayerPlan plan = plan_of(p.sizes, ranks, max_tokens, DType::f32, options);
    std::vector<std::string> all(static_cast<std::size_t>(ranks));
    Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
      LayerRank<Backend, float> rank(world, plan, p, {});
      rank.run();
      rank.wait();
      std::string& text = all[static_cast<std::size_t>(world.rank())];
      try {
        text = "dropped " + std::to_string(rank.check().dropped_rows);
      } catch (const shape_error& e) {
        text = e.what();
      }
      share(GroupComm(world), all);
    });
    for (const std::string& text : all) {
      require(text == all[0], "ranks differ: '", text.c_str(), "' and '", all[0].c_str(), "'");
    }
    ++outcome.cases;
    return all[0];
  };
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const std::string many = texts(69, {.transport = transport});
    require(many.find("pleat[E08]: rank 0 of the ep group") == 0, "too many tokens: ", many.c_str());
    const std::string full = texts(129, {.transport = transport, .overflow = moe::Overflow::error, .max_rows = 3});
    require(full.find("pleat[E10]: rank 0 of the ep group") == 0, "too many rows: ", full.c_str());
    const std::string dropped =
        texts(129, {.transport = transport, .overflow = moe::Overflow::drop_lowest, .max_rows = 3});
    std::int64_t choices = 0;
    for (const std::int32_t id : p.ids) choices += id >= 0;
    require(dropped == "dropped " + std::to_string(choices - 3 * ranks), "dropped rows: ", dropped.c_str());
  }
  return outcome;
}

/// The least rows of an arena that holds all problems' layers, by their real choices.
template <class T>
std::int64_t arena_rows_of(const std::vector<Problem<T>>& problems, int ranks, std::int64_t alignment) {
  const int local = problems[0].sizes.experts / ranks;
  std::int64_t most = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    std::int64_t rows = (alignment - 1) * local;
    for (const Problem<T>& p : problems) {
      for (int expert = rank * local; expert < (rank + 1) * local; ++expert) {
        rows += (std::count(p.ids.begin(), p.ids.end(), expert) + alignment - 1) / alignment * alignment;
      }
    }
    most = std::max(most, rows);
  }
  return (most + alignment - 1) / alignment * alignment;
}

/// Three layers share an arena that just holds them: gradients against one rank in float64, and an arena that is a bit
/// too small is an error on every rank.
template <class Backend, class T>
Outcome check_arena(int ranks) {
  const Sizes sizes{.hidden = 64, .inner = 48, .experts = 4 * ranks, .k = 4};
  std::vector<Problem<T>> problems;
  std::vector<Answer<T>> answers;
  std::vector<std::int64_t> tokens = uneven_tokens(ranks);
  for (unsigned i = 0; i < 3; ++i) {
    problems.emplace_back(sizes, tokens, draw_seed());
    mask(problems.back(), i, 5);
    answers.push_back(poisoned(problems.back()));
    std::rotate(tokens.begin(), tokens.begin() + 1, tokens.end());
  }
  constexpr std::int64_t alignment = 16;
  Outcome outcome;
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const std::int64_t least = arena_rows_of(problems, ranks, alignment);
    for (const std::int64_t arena_rows : {least, least - 4 * alignment * 4}) {
      const moe::LayerPlan plan = plan_of(sizes, ranks, 129, dtype_of<T>,
                                          {.transport = transport,
                                           .row_alignment = alignment,
                                           .overflow = moe::Overflow::error,
                                           .arena_rows = arena_rows});
      std::vector<std::string> texts(static_cast<std::size_t>(ranks));
      Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
        LayerRank<Backend, T> rank(world, plan, problems[0], {static_cast<unsigned>(world.rank()), nullptr}, 3);
        std::vector<Answer<T>> own;
        for (std::size_t i = 0; i < 3; ++i) {
          rank.load(problems[i]);
          rank.forward(i);
          rank.wait();
        }
        require(rank.used_rows() <= arena_rows, "rows past the arena's end");
        for (std::size_t i = 3; i-- > 0;) {
          rank.load(problems[i]);
          rank.backward(i);
          rank.wait();
          if (arena_rows == least) rank.download(answers[i]);
        }
        require(rank.used_rows() == 0, "rows in use after the step: ", rank.used_rows());
        try {
          rank.check();
        } catch (const shape_error& e) {
          texts[static_cast<std::size_t>(world.rank())] = e.what();
        }
        share(GroupComm(world), texts);
      });
      for (const std::string& text : texts) {
        require(text == texts[0], "ranks differ: '", text.c_str(), "' and '", texts[0].c_str(), "'");
      }
      require((texts[0].find("pleat[E10]") == 0) == (arena_rows != least), "arena_rows=", arena_rows, ", least ", least,
              ": ", texts[0].c_str());
      ++outcome.cases;
    }
    for (std::size_t i = 0; i < 3; ++i) {
      Answer<double> expected = moe_testing::solve(problems[i]);
      const double off = std::max({moe_testing::relative(answers[i].dx, expected.dx),
                                   moe_testing::relative(answers[i].dlogits, expected.dlogits),
                                   moe_testing::relative(answers[i].dgate, expected.dgate),
                                   moe_testing::relative(answers[i].dup, expected.dup),
                                   moe_testing::relative(answers[i].ddown, expected.ddown)});
      require(off < gpu_tolerance<T>(), "layer ", static_cast<int>(i), " is off by ", std::to_string(off).c_str());
      outcome.worst = std::max(outcome.worst, off);
    }
  }
  return outcome;
}

/// Forward and backward are captured once, which a wait of the host would end, and replayed with other routings and
/// numbers of tokens that count, 0 among them; two layers, with an arena or without. Ranks with a GPU each.
template <class Backend, class T>
Outcome check_graph(int ranks, bool has_arena) {
  const Sizes sizes{.hidden = 64, .inner = 48, .experts = 8 * ranks, .k = 4};
  std::vector<Problem<T>> problems;
  std::vector<Answer<T>> answers;
  for (unsigned i = 0; i < 6; ++i) {
    problems.emplace_back(sizes, std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 64), draw_seed());
    mask(problems.back(), i, i == 3 ? 1 : i + 2);
    answers.push_back(poisoned(problems.back()));
  }
  moe::DispatchOptions options{.transport = Transport::peer,
                               .send_by = has_arena ? moe::SendBy::copies : moe::SendBy::stores};
  const std::int64_t own_rows = plan_of(sizes, ranks, 64, dtype_of<T>, options).dispatch.capacity_rows();
  if (has_arena) {
    options.overflow = moe::Overflow::error;
    options.arena_rows = 2 * own_rows;
  }
  const moe::LayerPlan plan = plan_of(sizes, ranks, 64, dtype_of<T>, options);
  Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
    LayerRank<Backend, T> rank(world, plan, problems[0], {}, 2);
    rank.run();
    rank.wait();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check_cuda(cudaStreamBeginCapture(rank.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    rank.run();
    check_cuda(cudaStreamEndCapture(rank.stream(), &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    for (std::size_t i = 0; i < problems.size(); ++i) {
      rank.load(problems[i]);
      check_cuda(cudaGraphLaunch(exec, rank.stream()), "cudaGraphLaunch");
      rank.wait();
      rank.download(answers[i]);
    }
    rank.check();
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
  });
  Outcome outcome;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const double off = moe_testing::worst(answers[i], moe_testing::solve(problems[i]));
    require(off < gpu_tolerance<T>(), "replay ", i, " is off by ", std::to_string(off).c_str());
    outcome.worst = std::max(outcome.worst, off);
    ++outcome.cases;
  }
  return outcome;
}

/// Prints a row of the table; whether it failed.
template <class Check>
bool fails(const char* backend, const char* what, int ranks, const Check& check) {
  const auto start = std::chrono::steady_clock::now();
  Outcome outcome;
  std::string failure;
  try {
    const testing_support::Watchdog watchdog(std::string(what) + " on " + backend, 90s);
    outcome = check();
  } catch (const std::exception& e) {
    failure = e.what();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("- %-6s  %-20s  %-18s  %2d ranks  %3d cases  worst %.1e  %5.1f s\n", failure.empty() ? "ok" : "FAILED",
              backend, what, ranks, outcome.cases, outcome.worst, took.count());
  if (!failure.empty()) std::printf("        %s\n", failure.c_str());
  std::fflush(stdout);
  return !failure.empty();
}

/// Returns how many failed.
template <class Backend>
int check_all(const char* backend, std::initializer_list<int> sizes, int runs_per_budget) {
  int failed = 0;
  for (const int ranks : sizes) {
    failed += fails(backend, "layer f64", ranks, [&] { return check_layer<Backend, double>(ranks); });
    failed += fails(backend, "layer bf16", ranks, [&] { return check_layer<Backend, bfloat16>(ranks); });
    failed += fails(backend, "arena f64", ranks, [&] { return check_arena<Backend, double>(ranks); });
    failed += fails(backend, "arena bf16", ranks, [&] { return check_arena<Backend, bfloat16>(ranks); });
    failed += fails(backend, "errors", ranks, [&] { return check_errors<Backend>(ranks); });
    failed += fails(backend, "bits", ranks, [&] { return check_bits<Backend, bfloat16>(ranks, runs_per_budget); });
    failed +=
        fails(backend, "beside bf16", ranks, [&] { return check_beside<Backend, bfloat16>(ranks, runs_per_budget); });
  }
  return failed;
}

}  // namespace moe_gpu_testing
