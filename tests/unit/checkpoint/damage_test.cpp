// What is damaged, missing or another model's ends in an error with an id, on every rank alike, before a byte of the
// model is overwritten.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "support/repeats.hpp"
#include "unit/checkpoint/sample_model.hpp"

using namespace checkpoint_testing;
using checkpoint::Catalog;

namespace {
const RuntimeMesh saved_on(MeshDegrees{1, 2, 2, 2, 1});
const RuntimeMesh loaded_on(MeshDegrees{2, 1, 2, 1, 1});

/// A checkpoint whose files tests replace.
struct Saved {
  TemporaryFolder root;
  std::string folder, index;
  Saved() {
    save_sample(root, saved_on, 5);
    folder = checkpoint::step_folder(root, 5);
    index = read_file(folder + "/index.json");
  }
  /// Loads with other text in a file. The same error on every rank, and nothing overwritten.
  void expect(const char* id, const char* part, const std::string& name, const std::string& text) {
    const std::string path = folder + '/' + name, before = read_file(path);
    write_file(path, text);
    expect_load_error(id, part);
    write_file(path, before);
  }
  void expect_load_error(const char* id, const char* part) const {
    std::string first;
    for (int rank = 0; rank < loaded_on.world_size; ++rank) {
      const Model model = sample_model(loaded_on);
      RankMemory memory(model, loaded_on, rank, 0x5a);
      const HostBuffer staging(checkpoint::min_staging_bytes);
      const std::string text = error_of([&] {
        checkpoint::load(checkpoint::open(folder), model, loaded_on, rank, memory.units(), staging.block(),
                         HostExecutor{}, {});
      });
      CAPTURE(text);
      CHECK(text.find(id) != std::string::npos);
      CHECK(text.find(part) != std::string::npos);
      CHECK(memory.untouched(0x5a));
      if (rank == 0) first = text;
      CHECK(text == first);
    }
  }
};
std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}
std::string with_header(const std::string& text, std::size_t data_bytes = 0) {
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(text.size() >> (8 * i));
  return file + text + std::string(data_bytes, 'x');
}
void expect_header_error(const char* id, const char* part, const std::string& file) {
  const TemporaryFolder root;
  const std::string path = static_cast<const std::string&>(root) + "/model.safetensors";
  write_file(path, file);
  expect_error(id, part, [&] { checkpoint::open_hugging_face(root); });
}
}  // namespace

TEST_CASE("headers that are malformed") {
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"a\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
  };
  CHECK(error_of([&] { expect_header_error("", "", with_header(entry("F32", "[2]", "[0,8]"), 8)); }) == "");
  expect_header_error("pleat[K02]", "ends at byte 3", "abc");
  expect_header_error("pleat[K02]", "says that its header has", std::string(8, '\xff') + "{}");
  expect_header_error("pleat[K02]", "says that its header has 1", std::string("\1\0\0\0\0\0\0\0", 8));
  expect_header_error("pleat[K01]", "expected '{' at byte 0", with_header("[]"));
  expect_header_error("pleat[K01]", "the end at byte 2", with_header("{}x"));
  expect_header_error("pleat[K01]", "a whole number", with_header(entry("F32", "[-2]", "[0,8]"), 8));
  expect_header_error("pleat[K01]", "a whole number", with_header(entry("F32", "[2.0]", "[0,8]"), 8));
  expect_header_error("pleat[K01]", "below 2^63", with_header(entry("F32", "[9223372036854775808]", "[0,8]"), 8));
  expect_header_error("pleat[K01]", "'F33'", with_header(entry("F33", "[2]", "[0,8]"), 8));
  expect_header_error("pleat[K01]", "1 data_offsets", with_header(entry("F32", "[2]", "[8]"), 8));
  expect_header_error("pleat[K01]", "two tensors a",
                      with_header(replaced(entry("F32", "[2]", "[0,8]"), "}}",
                                           "},\"a\":{\"dtype\":\"F32\",\"shape\":[0],"
                                           "\"data_offsets\":[8,8]}}"),
                                  8));
  expect_header_error("pleat[K01]", "fewer levels", with_header("{\"a\":{\"x\":" + std::string(10000, '[')));
  expect_header_error("pleat[K02]", "must begin at 0", with_header(entry("F32", "[2]", "[4,12]"), 12));
  expect_header_error("pleat[K02]", "2 elements of F32", with_header(entry("F32", "[2]", "[0,4]"), 4));
  expect_header_error("pleat[K02]", "-1 elements of F32",
                      with_header(entry("F32", "[4294967296,4294967296]", "[0,0]")));
  expect_header_error("pleat[K02]", "lies at bytes 8 to 0", with_header(entry("F32", "[2]", "[8,0]"), 8));
  expect_header_error("pleat[K02]", "truncated", with_header(entry("F32", "[2]", "[0,8]"), 7));
  expect_header_error("pleat[K02]", "not written to its end", with_header(entry("F32", "[2]", "[0,8]"), 9));
}

TEST_CASE("names are kept whatever is in them") {
  const std::string name = "a\"\\\n\x01/\xc3\xa9";
  const std::string text = "{" + checkpoint::quoted_json(name) + ":1}", where = "test";
  checkpoint::JsonReader json(text, where);
  json.object([&](const std::string& key) {
    CHECK(key == name);
    CHECK(json.integer() == 1);
  });
  const std::string escaped = R"("\u00e9\ud83d\ude00\/\t")";
  CHECK(checkpoint::JsonReader(escaped, where).string() == "\xc3\xa9\xf0\x9f\x98\x80/\t");
  for (const std::string bad : {R"("\ud83d")", R"("\ude00")", R"("\u12g4")", R"("\x")", "\"\n\"", "\"a"}) {
    expect_error("pleat[K01]", "expected", [&] { checkpoint::JsonReader(bad, where).string(); });
  }
}

TEST_CASE("checkpoints that are damaged") {
  Saved saved;
  const std::string file = "rank-000001.safetensors", bytes = read_file(saved.folder + '/' + file);
  saved.expect("pleat[K02]", "truncated", file, bytes.substr(0, bytes.size() - 1));
  saved.expect("pleat[K02]", "not written to its end", file, bytes + "x");
  saved.expect("pleat[K02]", "", file, "");
  saved.expect("pleat[K05]", "disagree about tensor", file, replaced(bytes, "embedding.tokens[", "embedding.tokenz["));
  saved.expect("pleat[K05]", "disagree about tensor", "rank-000000.safetensors", bytes);
  const std::string& index = saved.index;
  saved.expect("pleat[K01]", "index.json is not JSON", "index.json", index.substr(0, index.size() / 2));
  saved.expect("pleat[K03]", "'another'", "index.json", replaced(index, "pleat-checkpoint-1", "another"));
  saved.expect("pleat[K03]", "twice", "index.json", replaced(index, "\"position\"", "\"step\""));
  saved.expect("pleat[K03]", "cannot be", "index.json", replaced(index, "\"F32\"", "\"F99\""));
  saved.expect("pleat[K06]", "'../rank", "index.json", replaced(index, "rank-000001", "../rank-000001"));
  saved.expect("pleat[K06]", "'/etc/passwd'", "index.json", replaced(index, file, "/etc/passwd"));
  saved.expect("pleat[K06]", "'..'", "index.json", replaced(index, file, ".."));
  saved.expect("pleat[K07]", "No such file", "index.json", replaced(index, file, "other"));

  // The chunks of one tensor.
  Catalog catalog = checkpoint::open(saved.folder);
  const auto expect_chunks = [&](const char* id, const char* part, auto change) {
    Catalog changed = catalog;
    change(changed.tensors.at("embedding.tokens").chunks);
    saved.expect(id, part, "index.json", checkpoint::make_index(changed));
  };
  REQUIRE(catalog.tensors.at("embedding.tokens").chunks.size() > 2);
  expect_chunks("pleat[K04]", "are missing", [](auto& chunks) { chunks.erase(chunks.begin() + 1); });
  expect_chunks("pleat[K04]", "are there twice", [](auto& chunks) { chunks.push_back(chunks[1]); });
  expect_chunks("pleat[K04]", "end at element", [](auto& chunks) { chunks.pop_back(); });
  expect_chunks("pleat[K03]", "no such bytes", [](auto& chunks) { chunks[0].file = 99; });
  expect_chunks("pleat[K03]", "no such bytes", [](auto& chunks) { chunks[0].offset_bytes = 1 << 30; });
  expect_chunks("pleat[K05]", "disagree", [](auto& chunks) { chunks[0].offset_bytes -= 4; });
  expect_chunks("pleat[K05]", "disagree", [](auto& chunks) { std::swap(chunks[0].file, chunks[1].file); });

  // A link in place of a file leaves the folder too.
  const std::string path = saved.folder + '/' + file;
  REQUIRE(::unlink(path.c_str()) == 0);
  REQUIRE(::symlink("/etc/passwd", path.c_str()) == 0);
  saved.expect_load_error("pleat[K07]", "open of");
  REQUIRE(::unlink(path.c_str()) == 0);
  saved.expect_load_error("pleat[K07]", "No such file");
}

TEST_CASE("another model, another mesh, too little memory") {
  const Saved saved;
  const Catalog catalog = checkpoint::open(saved.folder);
  const RuntimeMesh one(MeshDegrees{1, 1, 1, 1, 1});
  const auto check = [&](auto change, const checkpoint::LoadOptions& options = {}) {
    Model model = sample_model(one);
    change(model);
    return [&catalog, &one, model, options] { checkpoint::check_tensors(catalog, model, one, options); };
  };
  const auto params = [](Model & m) -> auto& {
    return m.stages[0][0].layout.params;
  };
  expect_error("pleat[K09]", "has no tensor", check([&](Model& m) { params(m)[0].spec.name = "other"; }));
  expect_error("pleat[K09]", "is F32 [11 6] and the model's is F32 [6 11]", check([&](Model& m) {
                 params(m)[0].spec.shape = {6, 11};
               }));
  expect_error("pleat[K09]", "dtypes must be the same", check([&](Model& m) { m.stages[0][0].dtype = DType::f64; }));
  expect_error("pleat[K09]", "has a tensor adamw.first/layers.3", check([](Model& m) { m.stages[0].resize(10); }));
  expect_error("pleat[K09]", "allow_unused", check([](Model& m) { m.states.clear(); }));
  CHECK(error_of(check([](Model& m) { m.states.clear(); }, {.allow_unused = true})) == "");
  expect_error("pleat[K08]", "is laid out for 1 ranks",
               [&] { checkpoint::saving_stages(sample_model(one), saved_on); });
  expect_error("pleat[K08]", "1 stages", [&] { checkpoint::saving_stages(sample_model(one), loaded_on); });
  expect_error("pleat[K08]", "two parameters", check([](Model& m) { m.stages[0][1].name = m.stages[0][4].name; }));
  expect_error("pleat[K08]", "set experts_local", [&] {
    Model m = sample_model(saved_on);
    m.stages[0][2].layout.experts_local = 0;
    checkpoint::saving_stages(m, saved_on);
  });

  const Model model = sample_model(one);
  RankMemory memory(model, one, 0, 0x5a);
  const HostBuffer staging(checkpoint::min_staging_bytes);
  const auto load = [&](std::span<const UnitMemory> units, Block block) {
    return [&, units, block] { checkpoint::load(catalog, model, one, 0, units, block, HostExecutor{}, {}); };
  };
  expect_error("pleat[K10]", "0 bytes of staging", load(memory.units(), Block{}));
  expect_error("pleat[K10]", "lacks the masters of unit", load(memory.units().first(2), staging.block()));
  std::vector<UnitMemory> without(memory.units().begin(), memory.units().end());
  without[1].states.clear();
  expect_error("pleat[K10]", "lacks a state of unit 1", load(without, staging.block()));
  CHECK(memory.untouched(0x5a));
}

TEST_CASE("saves that cannot be") {
  const Saved saved;
  const RuntimeMesh one(MeshDegrees{1, 1, 1, 1, 1});
  const Model model = sample_model(one);
  expect_error("pleat[K06]", "the run names the file '../x'",
               [&] { checkpoint::Saver(model, one, 0, saved.root, "../x"); });
  const checkpoint::Saver saver(model, one, 0, saved.root, "late");
  const HostBuffer host(saver.footprint().pinned_host);
  const RankMemory memory(model, one, 0, 0);
  expect_error("pleat[K10]", "for a snapshot of", [&] { saver.snapshot(memory.units(), Block{}, HostExecutor{}, {}); });
  expect_error("pleat[K11]", "there is a checkpoint", [&] { saver.write(5, host.block()); });
  expect_error("pleat[K11]", "there is a checkpoint", [&] { saver.commit(5, {}); });
  expect_error("pleat[K12]", "rank-000000", [&] { saver.commit(6, {}, 0.01); });
  expect_error("pleat[K07]", "mkdir",
               [&] { checkpoint::Saver(model, one, 0, "/proc/nowhere", "run").write(6, host.block()); });
  CHECK(checkpoint::latest(saved.root) == 5);
  checkpoint::clean(saved.root);
  CHECK(checkpoint::names_in(saved.root).size() == 1);
}

namespace {

/// Files with a few edits each, from a seed that failures show.
class Mutations {
 public:
  explicit Mutations(std::uint64_t seed) : random_(seed) {}

  std::size_t below(std::size_t n) { return static_cast<std::size_t>(random_() % n); }
  /// Edits what loads judge: all of an index, the header of other files.
  std::string mutate(std::string text, bool is_index) {
    std::size_t judged = text.size();
    if (!is_index) {
      judged = 8;
      for (std::size_t i = 0; i < 8; ++i)
        judged += static_cast<std::size_t>(static_cast<unsigned char>(text[i])) << (8 * i);
    }
    for (std::size_t edits = 1 + below(3); edits-- != 0 && !text.empty();) {
      const std::size_t at = below(std::min(judged, text.size())), many = 1 + below(40);
      constexpr std::string_view tokens[] = {
          "0", "1", "-", "9223372036854775807", "[", "]", "{", "}", "\"", "\\", ",", ":", " ", "F64", "\\u", "1e9"};
      switch (below(6)) {
        case 0:
          text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
          break;
        case 1:
          text[at] = static_cast<char>(random_());
          break;
        case 2:
          text.erase(at, many);
          break;
        case 3:
          text.insert(at, text.substr(below(text.size()), many));
          break;
        case 4:
          text.insert(at, tokens[below(std::size(tokens))]);
          break;
        default:
          text.resize(at);
      }
    }
    return text;
  }

 private:
  std::mt19937_64 random_;
};

/// Replaces a file of `folder` by a mutation, calls `load()`, which returns an error's text, and puts the file back, so
/// often as PLEAT_TEST_FUZZ says, or `usual` times; then more than half must have been refused, all of them with an id.
template <class Load>
void fuzz(const std::string& what, int usual, const std::string& folder, const std::vector<std::string>& names,
          Load load) {
  const char* const asked = std::getenv("PLEAT_TEST_FUZZ");
  const int rounds = asked == nullptr ? testing_support::repeats(usual) : std::atoi(asked);
  const auto seed = std::random_device{}();
  CAPTURE(seed);
  Mutations mutations(seed);
  int refused = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < rounds; ++round) {
    const std::string path = folder + '/' + names[mutations.below(names.size())], before = read_file(path);
    write_file(path, mutations.mutate(before, path.ends_with("json")));
    const std::string error = load();
    write_file(path, before);
    if (error.empty()) continue;
    ++refused;
    REQUIRE(error.starts_with("pleat[K"));
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  MESSAGE(what, ": ", rounds, " mutated files, ", refused, " refused, seed ", seed, ", ", took.count(), " s");
  CHECK(refused > rounds / 2);
}
}  // namespace

TEST_CASE("fuzz: a load of mutated files is right or ends in an error that leaves the model as it was") {
  const Saved saved;
  std::vector<std::string> names = {"index.json"};
  for (const auto& file : checkpoint::open(saved.folder).files) names.push_back(file.name);
  const RuntimeMesh one(MeshDegrees{1, 1, 1, 1, 1});
  const Model model = sample_model(one);
  const HostBuffer staging(checkpoint::min_staging_bytes);
  fuzz("checkpoints", 1500, saved.folder, names, [&] {
    RankMemory memory(model, one, 0, 0x5a);
    const std::string error = error_of([&] {
      checkpoint::load(checkpoint::open(saved.folder), model, one, 0, memory.units(), staging.block(), HostExecutor{},
                       {});
    });
    if (error.empty()) {
      REQUIRE(memory.wrong(5) == 0);
    } else {
      REQUIRE(memory.untouched(0x5a));
    }
    return error;
  });
}

TEST_CASE("fuzz: mutated files of Hugging Face are a catalog whose chunks lie in them, or an error") {
  const TemporaryFolder folder;
  const std::string root = folder;
  const std::string entry = ":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}";
  write_file(root + "/one", with_header("{\"a\"" + entry, 24));
  write_file(root + "/two", with_header("{\"b\"" + entry, 24));
  write_file(root + "/model.safetensors.index.json",
             R"({"metadata": {"x": 1}, "weight_map": {"a": "one", "b": "two"}})");
  fuzz("files of Hugging Face", 500, root, {"model.safetensors.index.json", "one", "two"}, [&] {
    return error_of([&] {
      const Catalog catalog = checkpoint::open_hugging_face(root);
      for (const auto& [name, tensor] : catalog.tensors) {
        const checkpoint::Chunk& chunk = tensor.chunks.at(0);
        const auto& file = catalog.files.at(static_cast<std::size_t>(chunk.file));
        CHECK(chunk.offset_bytes + static_cast<std::uint64_t>(chunk.elems) <= file.size_bytes);
      }
    });
  });
}
