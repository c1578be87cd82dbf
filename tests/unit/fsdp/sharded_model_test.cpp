// ShardedModel trains like one rank, whatever moves the shards, and all ranks choose alike what does.
#include <pleat/fsdp/sharded_model.hpp>

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>

namespace {

using namespace pleat;

constexpr int units = 3, frozen = 1, steps = 2, micro_batches = 2;
constexpr std::int64_t elems = 11;

std::vector<fsdp::UnitSpec> model() {
  std::vector<fsdp::UnitSpec> made;
  for (int u = 0; u < units; ++u) {
    made.push_back({.name = "unit", .params = {{.name = "w", .shape = {elems}, .frozen = u == frozen}}});
  }
  return made;
}
float weight(int unit, std::int64_t i) {
  return static_cast<float>(1000 * unit + static_cast<int>(i));
}
float gradient(int rank, int unit, int step, int micro, std::int64_t i) {
  return static_cast<float>((rank + 1) * (unit + 2) + 5 * step + 3 * micro + static_cast<int>(i));
}
/// On one rank, after `done` steps.
float trained(int ranks, int unit, int done, std::int64_t i) {
  float value = weight(unit, i);
  for (int step = 0; step < done && unit != frozen; ++step) {
    for (int micro = 0; micro < micro_batches; ++micro) {
      for (int r = 0; r < ranks; ++r) value -= gradient(r, unit, step, micro, i);
    }
  }
  return value;
}

template <class Arena>
void train(int ranks, const fsdp::ModelOptions& options, Transport expected) {
  run_ranks(ranks, [&](ThreadComm& world) {
    fsdp::ShardedModel<ThreadComm, Arena> op(world, model(), {}, options);
    CHECK(op.plan().transport == expected);
    for (int u = 0; u < units; ++u) {
      std::vector<float> values;
      for (std::int64_t i = 0; i < elems; ++i) values.push_back(weight(u, i));
      u == 0 ? op.load(u, 0, values) : op.load(u, 0, values.data());
    }
    int wrong = 0, calls = 0;
    const auto check = [&](const fsdp::UnitView& weights, int u, int step) {
      for (std::int64_t i = 0; i < elems; ++i) wrong += weights[0].as<float>()[i] != trained(ranks, u, step, i);
    };
    for (int step = 0; step < steps; ++step) {
      for (int micro = 0; micro < micro_batches; ++micro) {
        op.begin_step();
        for (int u = 0; u < units; ++u) op.forward(u, [&](const fsdp::UnitView& w) { check(w, u, step); });
        for (int u = units; u-- > 0;) {
          const auto write = [&](const fsdp::UnitView& w, auto& gradients) {
            ++calls;
            check(w, u, step);
            CHECK(gradients.trains(0) == (u != frozen));
            if (u == frozen) {  // dx flows back through it
              CHECK_THROWS_WITH_AS(std::ignore = gradients.write(0),
                                   doctest::Contains("pleat[F11]: parameter w of unit unit is frozen"), shape_error);
              return;
            }
            const auto [tensor, accumulates] = gradients.write(0);
            for (std::int64_t i = 0; i < elems; ++i) {
              float& to = tensor.template as<float>()[i];
              to = (accumulates ? to : 0) + gradient(world.rank(), u, step, micro, i);
            }
          };
          micro == 0 ? op.backward(u, write, [&](const fsdp::UnitView& w) { check(w, u, step); })
                     : op.backward(u, write);
        }
      }
      op.finish_step([&](const fsdp::ShardMemory& shard, int u) {
        CHECK((shard.gradient == nullptr) == (u == frozen));
        for (std::int64_t k = 0; k < shard.piece_count; ++k) {
          const fsdp::UpdatePiece& piece = shard.pieces[k];
          for (std::int64_t i = piece.begin; i < piece.begin + piece.elems; ++i) {
            static_cast<float*>(shard.master)[i] -= static_cast<const float*>(shard.gradient)[i];
          }
        }
      });
    }
    op.begin_step();
    for (int u = 0; u < units; ++u) op.forward(u, [&](const fsdp::UnitView& w) { check(w, u, steps); });
    op.wait();
    CHECK(wrong == 0);
    CHECK(calls == steps * micro_batches * units);
  });
}

/// Reaches nobody on one rank.
struct ShortArena : HostArena {
  ShortArena(const GroupComm<ThreadComm>& stage, std::size_t bytes) : HostArena(stage, bytes), rank(stage.rank()) {}
  bool reachable(const Group& group) const { return rank != 1 && HostArena::reachable(group); }
  int rank;
};

TEST_CASE("a sharded model trains as one rank does") {
  for (const int ranks : {1, 2, 3, 4}) {
    train<HostArena>(ranks, {.compute = DType::f32}, Transport::peer);
    train<HostArena>(ranks, {.compute = DType::f32, .transport = Transport::collective, .prefetch = 0},
                     Transport::collective);
  }
  train<HostArena>(4, {.compute = DType::f32, .replicas = 2}, Transport::peer);
}

TEST_CASE("a batch that throws is left out: the next step has its own gradients and no others") {
  for (const auto& [ranks, transport] :
       {std::pair{2, Transport::collective}, {2, Transport::peer}, {1, Transport::peer}}) {
    run_ranks(ranks, [&, transport = transport](ThreadComm& world) {
      fsdp::ShardedModel<ThreadComm, HostArena> op(world, model(), {}, {.compute = DType::f32, .transport = transport});
      for (int u = 0; u < units; ++u) op.load(u, 0, std::vector<float>(elems, 1));
      const auto pass = [&](int thrower, bool forward) {
        op.begin_step();
        for (int u = 0; u < units; ++u) {
          op.forward(u, [&](const fsdp::UnitView&) {
            if (forward && u == thrower) throw std::runtime_error("a bad batch");
          });
        }
        for (int u = units; u-- > 0;) {
          op.backward(u, [&](const fsdp::UnitView&, auto& gradients) {
            if (u == frozen) return;
            const auto [tensor, accumulates] = gradients.write(0);
            if (accumulates) fail<error>("a gradient was left over");
            std::fill_n(tensor.template as<float>(), elems, static_cast<float>(u + 1));
            if (!forward && u == thrower) throw std::runtime_error("a bad batch");
          });
        }
      };
      for (int thrower = 0; thrower < units; ++thrower) {
        for (const bool forward : {true, false}) {
          if (!forward && thrower == frozen) continue;
          CHECK_THROWS_WITH(pass(thrower, forward), "a bad batch");
          pass(-1, false);
          op.finish_step([&](const fsdp::ShardMemory& shard, int u) {
            for (std::int64_t k = 0; k < shard.piece_count; ++k) {
              const float* const at = static_cast<const float*>(shard.gradient) + shard.pieces[k].begin;
              CHECK(std::count(at, at + shard.pieces[k].elems, static_cast<float>(world.size() * (u + 1))) ==
                    shard.pieces[k].elems);
            }
          });
        }
      }
      op.wait();
    });
  }
}

TEST_CASE("an update that throws after it has written weights: what follows sees all that it has written") {
  for (const Transport transport : {Transport::collective, Transport::peer}) {
    for (const int ranks : {1, 2}) {
      run_ranks(ranks, [&](ThreadComm& world) {
        fsdp::ShardedModel<ThreadComm, HostArena> op(world, model(), {},
                                                     {.compute = DType::f32, .transport = transport});
        for (int u = 0; u < units; ++u) op.load(u, 0, std::vector<float>(elems, 1));
        int updates = 0;
        const auto update = [&](const fsdp::ShardMemory& shard, int u) {
          ++updates;
          std::fill_n(static_cast<float*>(shard.master), shard.elems, 5.0F);
          if (u == units - 1) throw std::runtime_error("a bad rate");
        };
        op.begin_step();
        for (int u = 0; u < units; ++u) {
          op.forward(u, [&](const fsdp::UnitView&) {
            CHECK_THROWS_WITH_AS(op.finish_step(update), doctest::Contains("pleat[F10]: weights changed while unit"),
                                 shape_error);
          });
        }
        CHECK(updates == 0);
        for (int u = units; u-- > 0;) op.backward(u, [](const fsdp::UnitView&, auto&) {});
        CHECK_THROWS_WITH(op.finish_step(update), "a bad rate");
        op.begin_step();
        for (int u = 0; u < units; ++u) {
          op.forward(u, [&](const fsdp::UnitView& w) {
            CHECK(std::count(w[0].as<float>(), w[0].as<float>() + elems, 5.0F) == elems);
          });
        }
        op.wait();
      });
    }
  }
}

TEST_CASE(
    "micro-batches add up on any number of ranks: by kernels that obey accumulate, and by kernels that only add") {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](ThreadComm& world) {
      fsdp::ShardedModel<ThreadComm, HostArena> op(world, model(), {}, {.compute = DType::f32});
      for (int u = 0; u < units; ++u) op.load(u, 0, std::vector<float>(elems, 1));
      for (const bool only_adds : {false, true}) {
        for (const float value : {1.0F, 10.0F}) {
          op.begin_step();
          for (int u = 0; u < units; ++u) op.forward(u, [](const fsdp::UnitView&) {});
          for (int u = units; u-- > 0;) {
            op.backward(u, [&](const fsdp::UnitView&, auto& gradients) {
              if (!gradients.trains(0)) return;
              if (only_adds) {
                float* const to = gradients.add_to(0).template as<float>();
                for (std::int64_t i = 0; i < elems; ++i) to[i] += value;
                return;
              }
              const auto [tensor, accumulate] = gradients.write(0);
              float* const to = tensor.template as<float>();
              for (std::int64_t i = 0; i < elems; ++i) to[i] = value + (accumulate ? to[i] : 0);
            });
          }
        }
        op.finish_step([&](const fsdp::ShardMemory& shard, int) {
          for (std::int64_t k = 0; k < shard.piece_count; ++k) {
            const float* const at = static_cast<const float*>(shard.gradient) + shard.pieces[k].begin;
            CHECK(std::count(at, at + shard.pieces[k].elems, 11.0F * static_cast<float>(ranks)) ==
                  shard.pieces[k].elems);
          }
        });
      }
      op.wait();
    });
  }
}

TEST_CASE("F22: a model that was moved from is refused, and may be assigned to; what it was moved to goes on") {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](ThreadComm& world) {
      using Model = fsdp::ShardedModel<ThreadComm, HostArena>;
      Model first(world, model(), {}, {.compute = DType::f32});
      const std::vector<float> ones(elems, 1);
      for (int u = 0; u < units; ++u) first.load(u, 0, ones);
      Model second(std::move(first));
      const auto text = doctest::Contains("pleat[F22]: sharded parameters are used after they were moved from");
      const auto nothing = [](const auto&...) {};
      Model& gone = first;
      std::vector<float> values(elems);
      CHECK_THROWS_WITH_AS(gone.load(0, 0, ones), text, shape_error);
      CHECK_THROWS_WITH_AS(gone.load(0, 0, ones.data()), text, shape_error);
      CHECK_THROWS_WITH_AS(gone.begin_step(), text, shape_error);
      CHECK_THROWS_WITH_AS(gone.forward(0, nothing), text, shape_error);
      CHECK_THROWS_WITH_AS(gone.backward(0, nothing), text, shape_error);
      CHECK_THROWS_WITH_AS(gone.finish_step(nothing), text, shape_error);
      CHECK_THROWS_WITH_AS(gone.wait(), text, shape_error);
      CHECK_THROWS_WITH_AS(std::ignore = gone.plan(), text, shape_error);
      Model::sharder_type& op = gone.sharder();
      CHECK_THROWS_WITH_AS(op.release(0, {}), text, shape_error);
      CHECK_THROWS_WITH_AS(op.gradient(0, {}), text, shape_error);
      CHECK_THROWS_WITH_AS(op.reduce(0, {}), text, shape_error);
      CHECK_THROWS_WITH_AS(op.finish_gradients({}), text, shape_error);
      CHECK_THROWS_WITH_AS(op.discard_gradients(), text, shape_error);
      CHECK_THROWS_WITH_AS(std::ignore = op.shards(), text, shape_error);
      CHECK_THROWS_WITH_AS(op.weights_changed({}), text, shape_error);
      CHECK_THROWS_WITH_AS(op.fork({}), text, shape_error);
      CHECK_THROWS_WITH_AS(op.export_master(0, 0, values, {}), text, shape_error);
      CHECK_THROWS_WITH_AS(op.export_gradient(0, 0, values, {}), text, shape_error);
      CHECK_THROWS_WITH_AS(std::ignore = op.gathers(), text, shape_error);
      gone = std::move(second);
      gone.begin_step();
      for (int u = 0; u < units; ++u) {
        gone.forward(u, [&](const fsdp::UnitView& w) {
          CHECK(std::count(w[0].as<float>(), w[0].as<float>() + elems, 1.0F) == elems);
        });
      }
      gone.wait();
    });
  }
}

TEST_CASE("C36: ranks that describe different models are told so, before anything is collective") {
  const auto refused = [](const char* text, std::vector<fsdp::UnitSpec> theirs, const fsdp::ModelOptions& options) {
    run_ranks(4, [&](ThreadComm& world) {
      const bool is_other = world.rank() == 2;
      CHECK_THROWS_WITH_AS((fsdp::ShardedModel<ThreadComm, HostArena>(world, is_other ? theirs : model(), {},
                                                                      is_other ? options : fsdp::ModelOptions{})),
                           doctest::Contains(text), comm_error);
    });
  };
  refused("pleat[C36]: rank 2 binds sharded model with units=2", {model()[0], model()[1]}, {});
  refused("with ep=2, rank 0 with ep=1", model(), {.ep = 2});
  refused("with replicas=2, rank 0 with replicas=1", model(), {.replicas = 2});
  refused("with transport=", model(), {.transport = Transport::collective});
  refused("pleat[C36]: rank 2 binds sharded parameters with prefetch=3", model(), {.prefetch = 3});
}

TEST_CASE("where one rank cannot reach its group, all take collectives; peer access that is forced is an error") {
  train<ShortArena>(3, {.compute = DType::f32}, Transport::collective);
  CHECK_THROWS_WITH(train<ShortArena>(3, {.compute = DType::f32, .transport = Transport::peer}, Transport::peer),
                    doctest::Contains("pleat[C29]: sharded parameters planned for 3 ranks"));
  train<ShortArena>(3, {.compute = DType::f32, .transport = Transport::collective}, Transport::collective);
}

}  // namespace
