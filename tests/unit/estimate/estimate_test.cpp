// Estimates against the plans that would be bound, against published numbers, and against what repeats in a long step.
#include <doctest/doctest.h>
#include <random>
#include <sstream>

#include "../../../examples/mesh_plan/check.hpp"
#include "support/json.hpp"

using namespace pleat;
using namespace pleat::estimate;
using testing_support::Json;

namespace {
Job small_job() {
  Job job;
  job.model = {.layers = 9,
               .hidden = 64,
               .vocabulary = 500,
               .heads = 4,
               .kv_heads = 2,
               .qk_dim = 16,
               .v_dim = 16,
               .qk_norm = true,
               .experts = 8,
               .top_k = 2,
               .inner = 48,
               .shared_experts = 1,
               .dense_layers = 1,
               .dense_inner = 160};
  job.world = 16;
  job.sequence = 64;
  job.batch = 64;
  return job;
}
template <class F>
void check_id(const char* id, F f) {
  std::string text = "nothing was thrown";
  try {
    f();
  } catch (const error& e) {
    text = e.what();
  }
  CHECK_MESSAGE(text.find(id) != std::string::npos, text);
}
/// What all units of a rank take, listed one by one.
double listed_bytes(const Job& job, const RuntimeMesh& mesh, std::span<const Chunk> chunks) {
  const auto units = units_of(job.model, chunks, job.model.experts / mesh.ep, job.optimizer);
  const fsdp::Plan plan =
      fsdp::plan(units, fsdp::group_sizes(mesh),
                 {.compute = job.compute,
                  .gradient = job.gradient,
                  .transport = transport_of(mesh, job.domain, {GroupUse::dense_shard, GroupUse::expert_shard}),
                  .prefetch = job.prefetch});
  const Footprint shards = plan.footprint();
  const Footprint updates = optim::plan_optimizer(plan.layouts, plan.kinds, plan.master).footprint();
  return static_cast<double>(shards.persistent + shards.symmetric + updates.persistent + updates.scratch);
}
}  // namespace

TEST_CASE("the presets have the published numbers of parameters") {
  CHECK(parameter_count(preset("qwen3-30b-a3b")) == 30'532'122'624);
  CHECK(parameter_count(preset("deepseek-v2-lite")) == 15'706'484'224);
}

TEST_CASE("rows go to a rank as often as it has one of their experts") {
  CHECK(share_of_rank(6, 3, 2) == doctest::Approx(1 - 6.0 / 15));  // C(4, 2) of C(6, 2) choices leave it out
  CHECK(share_of_rank(128, 2, 8) == doctest::Approx(0.997).epsilon(0.001));
  CHECK(share_of_rank(128, 4, 8) == doctest::Approx(0.905).epsilon(0.01));
  CHECK(share_of_rank(8, 8, 8) == 1);
  CHECK(share_of_rank(8, 1, 2) == 1);
}

TEST_CASE("shards take what the plans of all units say, of which few are listed") {
  Job job = small_job();
  for (const fsdp::Optimizer optimizer : {fsdp::Optimizer::adamw, fsdp::Optimizer::muon}) {
    job.optimizer = optimizer;
    for (const int domain : {2, 16}) {
      job.domain = domain;
      for (const RuntimeMesh& mesh : legal_meshes(job, {.pp = 1})) {
        CAPTURE(to_string(mesh));
        const std::vector<Chunk> chunks{chunk_of(job.model, 0, job.model.layers)};
        const ShardBytes b = ShardPlanner(job, mesh).bytes(chunks);
        const double all = b.parameters + b.gradients + b.slots + b.gradient_units + b.sums + b.adamw + b.muon;
        CHECK(all == doctest::Approx(listed_bytes(job, mesh, chunks)).epsilon(1e-12));
      }
    }
  }
}

TEST_CASE("what a long step does grows by as much with each micro-batch") {
  const UnitSizes sizes{{Param::dense, 5}, {Param::dense, 7}, {}, {{Param::dense, 2}, {Param::expert, 3}}};
  const std::vector<Chunk> chunks{{0, 2, true, false}, {0, 2, false, true}};
  for (const auto kind : {pipeline::Kind::one_f_one_b, pipeline::Kind::zb_v, pipeline::Kind::dualpipe_v}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      CAPTURE(name_of(kind));
      CAPTURE(ranks);
      const auto rank_units = RankUnits(std::span(chunks).first(kind == pipeline::Kind::one_f_one_b ? 1 : 2), sizes);
      const auto measures = [&](int micro_batches) {
        const pipeline::Schedule schedule = pipeline::make_schedule(kind, ranks, micro_batches);
        const pipeline::Program& program = schedule.programs.front();
        const auto gathers = GatherReplay(rank_units.sizes, {2, 2}, 1).run(unit_uses(program, rank_units));
        return std::array{simulate(schedule).makespan, double(sends(program)),
                          double(std::accumulate(gathers.begin(), gathers.end(), std::int64_t{0}))};
      };
      const auto period = static_cast<int>(Schedules::period(ranks)), last = 5 * period + 1;
      const auto enough = static_cast<int>(Schedules::enough(ranks, last));
      REQUIRE(enough < 3 * period);
      const auto few = measures(enough - period), more = measures(enough), most = measures(last);
      const auto expected = [&](std::size_t i) { return doctest::Approx(4 * more[i] - 3 * few[i]); };
      CHECK(most[0] == expected(0));
      CHECK(most[1] == expected(1));
      CHECK(most[2] == expected(2).epsilon(0.01));  // ZB-V puts weights' gradients off at changing places
      const auto places = [&](int n) {
        const Places p = count_places(pipeline::make_schedule(kind, ranks, n).programs.front());
        return std::array{p.held[0], p.held[1], p.deferred[0], p.deferred[1]};
      };
      CHECK(places(enough) == places(last));
    }
  }
}

TEST_CASE("places are held until weights have their gradients") {
  using pipeline::OpKind;
  const pipeline::Program program{{{OpKind::forward, {0, 0}, {}},
                                   {OpKind::input_backward, {}, {0, 0}},
                                   {OpKind::forward, {0, 1}, {}},
                                   {OpKind::weight_backward, {}, {0, 0}},
                                   {OpKind::overlapped, {1, 0}, {0, 1}}},
                                  {}};
  CHECK(count_places(program).held == std::array{2, 1});
  CHECK(count_places(program).deferred == std::array{1, 0});
  CHECK(lanes(program) == 2);
}

TEST_CASE("gathers are those of the order, with the slots that there are") {
  // Two layers of one unit each, one slot: nothing stays. Two slots: the last two units of a pass begin the next.
  const std::vector<UnitSize> units(4, UnitSize{Param::dense, 1});
  const std::vector<int> order{0, 1, 2, 3, 3, 2, 1, 0};
  CHECK(GatherReplay(units, {1, 0}, 0).run(order) == std::vector<std::int64_t>{2, 2, 2, 1});
  CHECK(GatherReplay(units, {2, 0}, 1).run(order) == std::vector<std::int64_t>{2, 2, 1, 1});
  CHECK(GatherReplay(units, {4, 0}, 3).run(order) == std::vector<std::int64_t>{1, 1, 1, 1});
  CHECK(GatherReplay(units, {0, 0}, 1).run(order) == std::vector<std::int64_t>{0, 0, 0, 0});  // a group of one
}

TEST_CASE("units come ahead of what computes with them, and their gradients leave behind it") {
  const fsdp::KindPlan roomy{.slots = 2, .gradient_units = 2}, narrow{.slots = 1, .gradient_units = 1};
  const std::array two{roomy, roomy}, one{narrow, narrow};
  const auto steps = [](double gather, double sum) { return std::vector<UnitStep>(4, {Param::dense, 3, gather, sum}); };
  CHECK(play(steps(0, 0), two) == 12);
  CHECK(play(steps(2, 0), two) == 12);      // hidden
  CHECK(play(steps(2, 0), one) == 12 + 6);  // each but the first waits for the one slot
  CHECK(play(steps(5, 0), two) == 15 + 3);  // the link is what takes time
  CHECK(play(steps(0, 2), two) == 12);
  CHECK(play(steps(0, 2), one) == 12 + 6);
  CHECK(play(steps(0, 5), two) == 3 + 15);  // the last sum is behind the pass that follows
  CHECK(play({}, two) == 0);
}

TEST_CASE("a step is expected to take no less than its bound, and more with slower operations") {
  Job job = small_job(), slow = job;
  job.model.hidden = slow.model.hidden = 512;
  for (double Rates::*rate : {&Rates::product, &Rates::rows, &Rates::shards, &Rates::gathers})
    slow.machine.rates.*rate /= 4;
  Planner planner(job), slower(slow);
  for (const RuntimeMesh& mesh : legal_meshes(job)) {
    CAPTURE(to_string(mesh));
    const StepTime made = planner.estimate(mesh).time;
    CHECK(made.seconds.expected >= made.seconds.bound);
    CHECK(slower.estimate(mesh).time.seconds.expected > made.seconds.expected);
    CHECK(slower.estimate(mesh).time.seconds.bound == made.seconds.bound);
  }
}

TEST_CASE("a million ranks, layers or micro-batches are planned like few") {
  Job job;
  job.model = preset("qwen3-30b-a3b");
  const RuntimeMesh few_ranks({.pp = 8, .dp = 4, .cp = 2, .ep = 8}),
      many_ranks({.pp = 8, .dp = 65536, .cp = 2, .ep = 8});
  job.world = few_ranks.world_size;
  job.batch = 4 * 64;
  Planner small(job);
  const Estimate of_few = small.estimate(few_ranks);
  Job large_job = job;
  large_job.world = many_ranks.world_size;
  CHECK(large_job.world == 1048576);
  large_job.batch = std::int64_t{65536} * 100'000;
  Planner large(large_job);
  const Estimate of_many = large.estimate(many_ranks);
  CHECK(of_many.micro_batches == 100'000);
  CHECK(large.schedules().ops() <= 2 * small.schedules().ops());
  CHECK(of_many.memory[Part::activations] == of_few.memory[Part::activations]);

  const ShardPlanner planner(large_job, many_ranks);
  CHECK(planner.listed_layers(std::vector<Chunk>{{0, 1'000'000, true, true}}) == planner.distinct_layers());
}

TEST_CASE("an estimate names the stage that takes most, and sorts what fits first") {
  Job job = small_job();
  job.gpu_bytes = 8 << 20;
  job.machine.context_bytes = job.machine.communicator_bytes = job.machine.kernels_bytes = 0;
  Planner planner(job);
  std::vector<Estimate> all;
  for (const RuntimeMesh& mesh : legal_meshes(job)) all.push_back(planner.estimate(mesh));
  CHECK(all.size() > 100);
  sort_estimates(all);
  CHECK(all.front().verdict == Verdict::fits);
  CHECK(all.back().verdict == Verdict::too_large);
  for (std::size_t i = 1; i < all.size(); ++i) CHECK(all[i - 1].verdict <= all[i].verdict);
  const Estimate piped = planner.estimate(parse_mesh("pp4-dp4-cp1-ep2"));
  CHECK(piped.worst_rank() == piped.worst_stage * 4);
  CHECK(piped.memory.total() ==
        doctest::Approx(std::accumulate(piped.memory.bytes.begin(), piped.memory.bytes.end(), 0.0)));

  // Half the experts per rank: half as many experts' shards' gathers, and the advice says by how much it is less.
  const Estimate made = planner.estimate(parse_mesh("pp1-dp16-cp1-ep1"));
  const std::vector<Advice> advice = advise(job, made);
  CHECK(!advice.empty());
  for (const Advice& a : advice) CHECK(a.total_bytes < made.memory.total());
  const Row row{made, advice};
  const Json json = Json::parse(to_json(job, {&row, 1}));
  CHECK(json["meshes"][0]["mesh"].text() == "pp1-dp16-cp1-ep1");
  CHECK(json["meshes"][0]["total_bytes"].number() == doctest::Approx(made.memory.total()));
  CHECK(json["ceilings"].size() == std::size(ceilings));
  CHECK(draw_text(job, {&row, 1}).find(advice.front().change) != std::string::npos);
  CHECK(detail_text(job, row).find("gradient units") != std::string::npos);
  CHECK(draw_svg(job, {&row, 1}).find("pp1-dp16-cp1-ep1") != std::string::npos);
}

TEST_CASE("links: a group in one domain takes NVLink, one over several shares it") {
  const RuntimeMesh mesh({.pp = 2, .dp = 8, .cp = 2, .ep = 4});
  const Links links(mesh, 8);
  CHECK(links.to_all(GroupUse::ep, 30).network == 0);
  const Bytes stage = links.to_all(GroupUse::dense_shard, 15);  // 16 ranks in two domains: 7 and 8 others
  CHECK(stage.nvlink == doctest::Approx(7));
  CHECK(stage.network == doctest::Approx(8));
  CHECK(links.to_next(GroupUse::pp, 5).network == 5);
  CHECK(links.to_next(GroupUse::cp, 5).nvlink == 5);
  CHECK(links.to_all(GroupUse::replica, 5).sum() == 0);
}

TEST_CASE("bad input is refused with an id") {
  Job job = small_job();
  check_id("[N01]", [] { preset("gpt-5"); });
  const auto with = [&](auto change) {
    return [=] {
      Job other = job;
      change(other);
      legal_meshes(other);
    };
  };
  check_id("[N02]", with([](Job& j) { j.model.layers = 0; }));
  check_id("[N02]", with([](Job& j) { j.model.dense_layers = 10; }));
  check_id("[N02]", with([](Job& j) { j.model.hidden = 1 << 30; }));
  check_id("[N03]", with([](Job& j) { j.world = 0; }));
  check_id("[N03]", with([](Job& j) { j.capacity = 0.5; }));
  check_id("[N03]", with([](Job& j) { j.gradient = DType::f16; }));
  check_id("[N04]", with([](Job& j) { j.batch = 1, j.sequence = 1; }));
  check_id("[N04]", [&] { Planner(job).estimate(parse_mesh("pp1-dp8-cp1-ep1")); });
  check_id("[N04]", [&] { Planner(job).estimate(parse_mesh("pp8-dp2-cp1-ep1")); });
  check_id("[A01]", with([](Job& j) {
             j.model.kv_heads = 3;
             Planner(j).estimate(parse_mesh("pp1-dp16-cp1-ep1"));
           }));

  using mesh_plan::Request, mesh_plan::read_measured;
  Request request;
  for (const auto& [name, value] : {std::pair{"layers", "many"},
                                    {"layers", "99999999999"},
                                    {"optimizer", "sgd"},
                                    {"gradients", "f8"},
                                    {"pp", "0"},
                                    {"network", "0"},
                                    {"gpu-gib", "-1"},
                                    {"gpu-gib", "0"},
                                    {"gpu-gib", "nan"},
                                    {"top", "0"},
                                    {"within", "nan"},
                                    {"time-within", "-1"},
                                    {"qk-norm", "2"}}) {
    check_id("[N05]", [&, name = name, value = value] { mesh_plan::set(request, name, value); });
  }
  CHECK_THROWS_AS(mesh_plan::set(request, "layer", "3"), mesh_plan::usage_error);
  const auto read = [&](const std::string& text) {
    std::istringstream in(text);
    return read_measured(in, request);
  };
  check_id("[N06]", [&] { read("mesh,sequence\npp1-dp2-cp1-ep1\n"); });
  check_id("[N06]", [&] { read("mesh,sequence\n# nothing\n"); });
  check_id("[N05]", [&] { read("mesh,peak-gib\npp1-dp2-cp1-ep1,x\n"); });
  check_id("[N05]", [&] { read(R"([{"layers": true}])"); });
  check_id("[N06]", [&] { read("[]"); });
  check_id("[N06]", [&] { read("an essay\n"); });
  for (const char* value : {"0", "-1", "nan", "inf", "1e13"}) {
    check_id("[N06]", [&] { read(std::string("mesh,peak-gib\npp1-dp2-cp1-ep1,") + value + "\n"); });
    check_id("[N06]", [&] { read(std::string("mesh,step-ms\npp1-dp2-cp1-ep1,") + value + "\n"); });
  }
  check_id("[N06]", [] { mesh_plan::open_measured("/nowhere.csv"); });
  check_id("[N06]", [] { mesh_plan::open_measured("."); });
  CHECK_THROWS_AS(mesh_plan::read({"--within", "5"}), mesh_plan::usage_error);
  check_id("[K01]", [&] { read(R"([{"mesh": "pp1-dp2-cp1-ep1"})"); });
}

TEST_CASE("measured runs are compared line by line") {
  mesh_plan::Request request;
  request.job = small_job();
  request.job.machine.context_bytes = request.job.machine.communicator_bytes = 0;
  std::istringstream in("mesh, batch, peak-gib\r\n\n# a comment\npp1-dp4-cp2-ep4, 8, 1\npp1-dp2-cp2-ep1,4,0.5\n");
  const std::vector<mesh_plan::Measured> measured = read_measured(in, request);
  REQUIRE(measured.size() == 2);
  CHECK(measured[0].request.job.batch == 8);
  CHECK(measured[0].request.job.world == 8);
  CHECK(measured[1].peak_gib == 0.5);
  const mesh_plan::Comparison made = compare(measured);
  CHECK(made.table.find("in 2 configurations") != std::string::npos);
  CHECK(made.worst_percent > 90);  // of a GiB and a half

  std::istringstream unmeasured("mesh,peak-gib,step-ms,batch\npp1-dp4-cp2-ep4,,7,8\n");
  const mesh_plan::Measured timed = read_measured(unmeasured, request).at(0);
  CHECK(!timed.peak_gib);
  CHECK(timed.step_ms == 7);

  // The same as JSON.
  std::istringstream json(R"( [{"mesh": "pp1-dp4-cp2-ep4", "batch": 8, "peak-gib": 1},
                               {"mesh": "pp1-dp2-cp2-ep1", "batch": "4", "peak-gib": 5e-1}])");
  CHECK(compare(read_measured(json, request)).table == made.table);
}
