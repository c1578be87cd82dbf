// What one mesh saves, every other mesh loads, bit for bit.
#include <doctest/doctest.h>

#include <thread>

#include <pleat/comm/run_ranks.hpp>

#include "support/json.hpp"
#include "unit/checkpoint/sample_model.hpp"

using namespace checkpoint_testing;

namespace {
RuntimeMesh mesh_of(int pp, int dp, int cp, int ep, int replicas = 1) {
  return RuntimeMesh(MeshDegrees{pp, dp, cp, ep, replicas});
}
}  // namespace

TEST_CASE("a checkpoint of any mesh loads on any other and on one rank") {
  const std::vector<RuntimeMesh> meshes = {mesh_of(1, 1, 1, 1),    mesh_of(2, 4, 4, 2),    mesh_of(1, 8, 4, 8),
                                           mesh_of(1, 4, 2, 4),    mesh_of(4, 2, 1, 2),    mesh_of(2, 2, 2, 2, 2),
                                           mesh_of(1, 8, 1, 2, 4), mesh_of(4, 1, 3, 1, 3), mesh_of(2, 3, 1, 1)};
  for (const RuntimeMesh& from : meshes) {
    const TemporaryFolder root;
    save_sample(root, from, 7);
    const std::string folder = checkpoint::step_folder(root, 7);
    const checkpoint::Catalog catalog = checkpoint::open(folder);
    CHECK(catalog.values.at("position") == 700);
    CHECK(catalog.values.at("step") == 7);
    CHECK(static_cast<int>(catalog.files.size()) == from.world_size / from.replicas);
    for (const RuntimeMesh& to : meshes) {
      CAPTURE(message_of(from, " to ", to).c_str());
      // All ranks of small meshes; of others, a rank of each stage and coordinate, for time.
      const int stride = to.world_size > 8 ? 5 : 1;
      for (int rank = 0; rank < to.world_size; rank += stride) CHECK(load_sample(folder, to, rank, 7) == 0);
    }
  }
}

TEST_CASE("ranks that are threads write at the same time, each on a thread of its own beside the next steps") {
  const TemporaryFolder root;
  const RuntimeMesh mesh = mesh_of(2, 2, 2, 2, 2);
  run_ranks(mesh.world_size, [&](ThreadComm& world) {
    const Model model = sample_model(mesh);
    const checkpoint::Saver saver(model, mesh, world.rank(), root, "run");
    RankMemory memory(model, mesh, world.rank(), 0xff);
    for (std::int64_t step = 1; step <= 3; ++step) {
      memory.set(step);
      const HostBuffer host(saver.footprint().pinned_host, 0xff);
      saver.snapshot(memory.units(), host.block(), HostExecutor{}, {});
      std::thread writer([&] {
        saver.write(step, host.block());
        if (world.rank() == 0) saver.commit(step, {}, 60);
      });
      memory.set(-step);  // the next step: the snapshot keeps its values
      writer.join();
    }
  });
  CHECK(checkpoint::steps(root) == std::vector<std::int64_t>{1, 2, 3});
  for (std::int64_t step = 1; step <= 3; ++step) {
    CHECK(load_sample(checkpoint::step_folder(root, step), mesh_of(1, 1, 1, 1), 0, step) == 0);
  }
  checkpoint::prune(root, 1);
  CHECK(checkpoint::steps(root) == std::vector<std::int64_t>{3});
  CHECK(checkpoint::names_in(root).size() == 1);
}

TEST_CASE("reads are the fewest there are: rows of one world to rows of another") {
  const testing_support::Json cases = testing_support::Json::facts("fsdp.json")["ckpt_reshard"];
  for (const testing_support::Json& fact : cases.array()) {
    const std::int64_t rows = fact["dim0"].integer();
    const auto model_on = [&](int ranks) {
      const std::int64_t each = (rows + ranks - 1) / ranks;
      std::vector<std::int64_t> boundaries;
      for (int r = 0; r <= ranks; ++r) boundaries.push_back(2 * std::min(r * each, rows));
      Unit unit{.name = "unit"};
      const fsdp::ParamSpec spec{.name = "rows", .shape = {rows, 2}};
      unit.layout = fsdp::plan_unit(std::span(&spec, 1), ranks, {.alignment_elems = 1, .boundaries = boundaries});
      return Model{{{unit}}, {}};
    };
    const int from = static_cast<int>(fact["from_world"].integer()), to = static_cast<int>(fact["to_world"].integer());
    const checkpoint::Catalog catalog = checkpoint::plan_catalog(model_on(from), mesh_of(1, from, 1, 1));
    for (int rank = 0; rank < to; ++rank) {
      const std::vector<checkpoint::Read> reads =
          checkpoint::plan_reads(catalog, model_on(to), mesh_of(1, to, 1, 1), rank);
      const testing_support::Json& wanted = fact["reads_per_dst_rank"][rank];
      REQUIRE(reads.size() == wanted.size());
      for (std::size_t i = 0; i < reads.size(); ++i) {
        const std::int64_t source = wanted[i]["src_rank"].integer();
        CHECK(catalog.files[static_cast<std::size_t>(reads[i].file)].name ==
              "rank-00000" + std::to_string(source) + ".safetensors");
        CHECK(reads[i].elems == 2 * wanted[i]["rows"].integer());
        CHECK(reads[i].at == 2 * wanted[i]["dst_row_off"].integer());
        const std::uint64_t first =
            catalog.tensors.at("unit.rows").chunks[static_cast<std::size_t>(source)].offset_bytes;
        CHECK(reads[i].offset_bytes == first + 8 * static_cast<std::uint64_t>(wanted[i]["src_row_off"].integer()));
      }
    }
  }
}

TEST_CASE("the planner knows a checkpoint before it is written") {
  const TemporaryFolder root;
  const RuntimeMesh mesh = mesh_of(2, 2, 2, 2);
  save_sample(root, mesh, 1);
  checkpoint::Catalog planned = checkpoint::plan_catalog(sample_model(mesh), mesh);
  planned.values = {{"position", 100}, {"step", 1}};
  CHECK(checkpoint::make_index(planned) == read_file(checkpoint::step_folder(root, 1) + "/index.json"));
  // Nothing is read twice, and nothing that another rank saves alike is written twice.
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : planned.tensors) {
    bytes +=
        static_cast<std::uint64_t>(checkpoint::checked_elems(tensor.shape)) * checkpoint::element_bytes(tensor.dtype);
  }
  std::uint64_t written = 0;
  for (int rank = 0; rank < mesh.world_size; ++rank) {
    written += checkpoint::Saver(sample_model(mesh), mesh, rank, root, "run").footprint().pinned_host;
  }
  CHECK(bytes == written);
}

TEST_CASE("Python reads the files: an own reader, and the safetensors package where it is installed") {
  const TemporaryFolder root;
  save_sample(root, mesh_of(2, 2, 2, 2, 2), 3);
  const std::string folder = checkpoint::step_folder(root, 3), out = static_cast<const std::string&>(root) + "/whole";
  const std::string script = PLEAT_FACTS_DIR "/../unit/checkpoint/read_checkpoint.py";
  const char* const python = std::getenv("PLEAT_TEST_PYTHON");
  const std::string command =
      std::string(python == nullptr ? "python3" : python) + " '" + script + "' '" + folder + "' '" + out + "'";
  REQUIRE(std::system(command.c_str()) == 0);

  // The script wrote all tensors one after the other in the order of their names.
  std::string wanted;
  for (const auto& [name, tensor] : checkpoint::open(folder).tensors) {
    for (std::int64_t i = 0; i < checkpoint::checked_elems(tensor.shape); ++i) {
      const std::uint64_t value = value_of(name, i, 3);
      wanted.append(reinterpret_cast<const char*>(&value), checkpoint::element_bytes(tensor.dtype));
    }
  }
  CHECK(read_file(out) == wanted);
}
