// The plan of a ring: errors that every rank sees alike, defaults, memory, and which rows travel.
#include <pleat/attention/ring_plan.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/executor.hpp>

#include <random>
#include <string>

#include <doctest/doctest.h>

#include "unit/attention/expect_error.hpp"

namespace {

using namespace pleat;

ring::Shape shape(std::int64_t tokens, std::vector<std::int64_t> cu_seqlens = {}) {
  return {.batch = 2,
          .tokens = tokens,
          .q_heads = 8,
          .kv_heads = 2,
          .qk_dim = 192,
          .v_dim = 128,
          .dtype = DType::bf16,
          .cu_seqlens = std::move(cu_seqlens)};
}

TEST_CASE("A01: heads that do not divide") {
  ring::Shape wrong = shape(16);
  wrong.kv_heads = 3;
  expect_error<shape_error>("pleat[A01]: kv_heads=3 must divide q_heads=8; valid kv_heads: 1 2 4 8",
                            [&] { ring::plan(2, wrong); });
  wrong.kv_heads = 0;
  expect_error<shape_error>("pleat[A01]: kv_heads=0", [&] { ring::plan(2, wrong); });
}

TEST_CASE("A02: extents that cannot be") {
  ring::Shape wrong = shape(16);
  wrong.v_dim = 0;
  expect_error<shape_error>("pleat[A02]: cp=2, qk_dim=192 and v_dim=0", [&] { ring::plan(2, wrong); });
  expect_error<shape_error>("pleat[A02]: cp=0", [&] { ring::plan(0, shape(16)); });
  expect_error<shape_error>("pleat[A02]: cp=1073741824, ", [&] { ring::plan(1 << 30, shape(16)); });
  const std::int64_t huge = std::int64_t{1} << 62;
  for (const ring::Shape& large : {shape(huge), shape(huge, {0, huge})}) {
    for (const std::int64_t batch : {std::int64_t{0}, std::int64_t{2}, huge}) {
      ring::Shape too_large = large;
      too_large.batch = batch;
      const std::string text = "pleat[A02]: batch=" + std::to_string(batch) + " tokens=4611686018427387904 q_heads=8";
      expect_error<shape_error>(text, [&] { ring::plan(4, too_large); });
    }
  }
}

TEST_CASE("A19, T01: options and dtypes that cannot be") {
  const auto expect = [&](const std::string& text, const ring::Options& options) {
    expect_error<shape_error>(text, [&] { ring::plan(2, shape(16), options); });
  };
  expect("pleat[A19]: a ring with scale=nan", {.scale = std::nan("")});
  expect("pleat[A19]: a ring with scale=inf", {.scale = std::numeric_limits<double>::infinity()});
  expect("pleat[A19]: a ring with scale=1, max_ctas=-1", {.max_ctas = -1});
  expect("pleat[A19]: a ring with scale=1, max_ctas=0, layout=9", {.layout = static_cast<ring::Layout>(9)});
  expect("pleat[A19]: a ring with scale=1, max_ctas=0, layout=0, transport=7",
         {.transport = static_cast<Transport>(7)});
  expect("pleat[A19]: a ring with scale=1, max_ctas=0, layout=0, transport=0 and launches=9",
         {.launches = static_cast<ring::Launches>(9)});
  for (const DType dtype : {DType::i32, DType::u8, static_cast<DType>(77)}) {
    ring::Shape wrong = shape(16);
    wrong.dtype = dtype;
    expect_error<shape_error>("pleat[T01]: dtype", [&] { ring::plan(2, wrong); });
  }
}

TEST_CASE("the largest plan: spans and sizes do not overflow") {
  ring::Shape large = shape(std::int64_t{1} << 45);  // 2^56 = 2 * 2^45 * 8 * 2^7
  large.qk_dim = 128;
  const ring::Plan plan = ring::plan(64, large, {.transport = Transport::peer});
  const std::size_t head_rows = 2 * (std::size_t{1} << 39);  // of a rank and a head
  CHECK(plan.spans.back() == TokenSpans({63 * (1LL << 38), 64 * (1LL << 38)}, {64 * (1LL << 38), 65 * (1LL << 38)}));
  CHECK(plan.footprint().saved == head_rows * 8 * 4);
  CHECK(plan.footprint().symmetric == 2 * head_rows * 2 * (128 + 128) * (2 + 4));
  CHECK(ring::plan(1, large).footprint().saved == head_rows * 64 * 8 * 4);
}

TEST_CASE("A03: documents past the end of the stream") {
  expect_error<shape_error>("pleat[A03]: cu_seqlens (0 9 17)", [&] { ring::plan(2, shape(16, {0, 9, 17})); });
  expect_error<shape_error>("pleat[A03]: cu_seqlens (0 9 8)", [&] {
    ring::plan(2, shape(16)).documents(std::vector<std::int64_t>{0, 9, 8});
  });
}

TEST_CASE("M07: a dense zigzag needs a multiple of 2 cp; packed, contiguous and single-rank sequences do not") {
  expect_error<mesh_error>("pleat[M07]: sequence=5", [&] { ring::plan(2, shape(5)); });
  CHECK_NOTHROW(ring::plan(2, shape(4)));
  CHECK_NOTHROW(ring::plan(2, shape(5, {0, 5})));
  CHECK_NOTHROW(ring::plan(2, shape(5), {.causal = false}));
  CHECK_NOTHROW(ring::plan(2, shape(5), {.layout = ring::Layout::contiguous}));
  CHECK_NOTHROW(ring::plan(1, shape(5)));
  expect_error<mesh_error>("pleat[M07]",
                           [&] { ring::plan(2, shape(5), {.causal = false, .layout = ring::Layout::zigzag}); });
}

TEST_CASE("defaults: zigzag when causal, contiguous when not; scale 1 / sqrt(qk_dim)") {
  CHECK(ring::plan(2, shape(16)).layout == ring::Layout::zigzag);
  CHECK(ring::plan(2, shape(16), {.causal = false}).layout == ring::Layout::contiguous);
  CHECK(ring::plan(2, shape(16)).scale == doctest::Approx(1 / std::sqrt(192.0)));
  CHECK(ring::plan(2, shape(16), {.scale = 0.5}).scale == 0.5);
  CHECK(std::string(name_of(ring::Layout::zigzag)) == "zigzag");
  CHECK(std::string(name_of(ring::Layout::contiguous)) == "contiguous");
}

TEST_CASE("a plan says what it chose") {
  const ring::Options options{.causal = false, .transport = Transport::peer, .deterministic = false};
  CHECK(std::string(message_of(ring::plan(3, shape(18))).c_str()) ==
        "ring cp=3 causal zigzag collective deterministic");
  CHECK(std::string(message_of(ring::plan(3, shape(18), options)).c_str()) ==
        "ring cp=3 full contiguous peer non-deterministic");
  CHECK(
      std::string(message_of(ring::plan(3, shape(18), {.transport = Transport::peer, .launches = ring::Launches::one}))
                      .c_str()) == "ring cp=3 causal zigzag peer deterministic forward in one launch");
}

TEST_CASE("A22: one launch without peers, over too many ranks, or of latents; a plan that chooses takes what it may") {
  const ring::Options one{.transport = Transport::peer, .launches = ring::Launches::one};
  const auto chosen = [](int cp, const ring::Shape& s, Transport transport) {
    return ring::plan(cp, s, {.transport = transport, .launches = std::nullopt}).launches;
  };
  const std::int64_t many = std::int64_t{1} << 22;
  const ring::Shape packed = shape(16, {0, 7, 16}), large = shape(many, {0, many / 2, many});
  ring::Shape latents = packed;
  latents.latent_dim = 64;
  expect_error<shape_error>("pleat[A22]: one launch for cp=2 by collective transport with latent_dim=0",
                            [&] { ring::plan(2, shape(16), {.launches = ring::Launches::one}); });
  expect_error<shape_error>("pleat[A22]: one launch for cp=9 by peer transport",
                            [&] { ring::plan(9, shape(18), one); });
  expect_error<shape_error>("pleat[A22]: one launch for cp=2 by peer transport with latent_dim=64",
                            [&] { ring::plan(2, latents, one); });
  CHECK(chosen(2, packed, Transport::peer) == ring::Launches::one);
  CHECK(chosen(2, shape(16), Transport::peer) == ring::Launches::per_step);  // one document
  CHECK(chosen(2, packed, Transport::collective) == ring::Launches::per_step);
  CHECK(chosen(9, packed, Transport::peer) == ring::Launches::per_step);
  CHECK(chosen(2, latents, Transport::peer) == ring::Launches::per_step);
  CHECK(chosen(2, large, Transport::peer) == ring::Launches::per_step);  // 5 GiB of another rank
  CHECK(ring::plan(2, large, one).launches == ring::Launches::one);
  CHECK(ring::plan(1, shape(16), {.launches = ring::Launches::one}).launches == ring::Launches::per_step);
}

TEST_CASE("one launch has memory for the blocks of all others, and lists a rank's work once more, as one") {
  const ring::Shape documents = shape(64, {0, 9, 9, 40, 57});
  for (const int cp : {2, 3, 8}) {
    const ring::Plan plan = ring::plan(cp, documents, {.transport = Transport::peer, .launches = ring::Launches::one});
    const ring::Plan steps = ring::plan(cp, documents, {.transport = Transport::peer});
    const std::size_t block = 2 * static_cast<std::size_t>(plan.max_local_tokens()) * 2 * 2;
    const auto padded = [](std::size_t bytes) { return (bytes + 127) / 128 * 128; };
    const auto others = static_cast<std::size_t>(cp) - 1;
    CHECK(plan.footprint().symmetric ==
          steps.footprint().symmetric + padded(others * block * 192) + padded(others * block * 128));
    CHECK(plan.footprint().channels == steps.footprint().channels + 2);  // free, and full of the one group of heads
    for (int rank = 0; rank < cp; ++rank) {
      const std::vector<Rectangle>& all = plan.work.all(rank).rectangles;
      CHECK(std::is_sorted(all.begin(), all.end(), [](const Rectangle& a, const Rectangle& b) {
        return a.q0 != b.q0 ? a.q0 < b.q0 : a.k0 < b.k0;
      }));
      std::size_t of_steps = 0;
      for (int step = 0; step < cp; ++step) {
        for (const BlockWork& part : plan.work.parts(rank, step)) {
          const std::int64_t first =
              step == 0 ? 0 : plan.local_tokens(rank) + plan.work.first_row(step) + part.keys.begin;
          for (Rectangle r : part.rectangles) {
            r.k0 += first;
            r.k1 += first;
            CHECK(std::count(all.begin(), all.end(), r) == 1);
            ++of_steps;
          }
        }
      }
      CHECK(all.size() == of_steps);
    }
  }
}

TEST_CASE("memory does not grow with cp beyond the local tokens: two slots for blocks, two for sums") {
  const std::size_t tokens = 64, batch = 2;  // per rank
  const std::size_t block = batch * tokens * 2 * (192 + 128);
  const std::size_t rows = batch * tokens * 8;
  for (const int cp : {2, 3, 8}) {
    for (const Transport transport : {Transport::collective, Transport::peer}) {
      const Footprint bytes = ring::plan(cp, shape(64 * cp), {.transport = transport}).footprint();
      const std::size_t slots = 2 * block * 2 + 2 * block * 4;
      const std::size_t words = 1 + 8 * batch * ((tokens + 63) / 64);
      const std::size_t backward = (words * 4 + 127) / 128 * 128 + rows * 4 + rows * 192 * 4 + block * 4;
      CHECK(bytes.symmetric == (transport == Transport::peer ? slots : 0));
      CHECK(bytes.scratch == backward + (transport == Transport::peer ? 0 : slots));
      CHECK(bytes.saved == rows * 4);
      // One a step, two halves, and all steps but the first in two slices where sums travel on.
      const int lists = cp + 2 + (cp > 2 ? 2 * (cp - 1) : 0);
      const std::size_t rectangles = static_cast<std::size_t>(lists) * sizeof(Rectangle);
      CHECK(bytes.persistent == (rectangles + 127) / 128 * 128);
      CHECK(bytes.pinned_host == bytes.persistent);
    }
  }
  CHECK(ring::plan(1, shape(64), {.transport = Transport::peer}).footprint().symmetric == 0);
}

TEST_CASE("uneven chunks are planned by the largest") {
  const ring::Plan plan = ring::plan(4, shape(11, {0, 11}));
  std::int64_t sum = 0;
  for (int rank = 0; rank < 4; ++rank) {
    sum += plan.local_tokens(rank);
    CHECK(plan.local_tokens(rank) <= plan.max_local_tokens());
  }
  CHECK(sum == 11);
}

TEST_CASE("rows of a block that have a gradient grow to what its readers need") {
  const ring::Plan dense = ring::plan(4, shape(32));
  for (int owner = 0; owner < 4; ++owner) {
    for (int step = 0; step < 4; ++step) {
      // Ranks after the owner read the first half of its keys, ranks before it all: steps 1 .. 3 - owner come first.
      const Runs expected({0, step == 0 ? 0 : step <= 3 - owner ? 4 : 8});
      CHECK(dense.work.summed_keys(owner, step) == expected);
    }
  }
  const ring::Plan apart = ring::plan(4, shape(32, {0, 4, 8, 12, 16, 20, 24, 28, 32}));
  for (int rank = 0; rank < 4; ++rank) {
    CHECK(apart.work.summed_keys(rank, 3).empty());  // no document spans two ranks: nothing travels
    CHECK(apart.work.last_step(rank) == 0);
  }
}

TEST_CASE("slices halve what all readers of a block read") {
  const ring::Plan dense = ring::plan(4, shape(64));
  CHECK(ring::plan(2, shape(64)).work.slices() == 1);
  CHECK(dense.work.slices() == 2);
  for (int owner = 0; owner < 4; ++owner) {  // of 16 rows later ranks read the first 8
    CHECK(dense.work.slice(owner, 0) == TokenSpan{0, owner == 3 ? 8 : 4});
    CHECK(dense.work.slice(owner, 1) == TokenSpan{owner == 3 ? 8 : 4, 16});
  }
}

TEST_CASE("a bound of the memory that packings take, for any documents, split and number of ranks") {
  std::mt19937 generator(std::random_device{}());
  for (const int cp : {1, 2, 3, 8}) {
    for (int trial = 0; trial < 60; ++trial) {
      std::vector<std::int64_t> documents{0};
      while (documents.back() < 300 && documents.size() < 40) {
        documents.push_back(std::min<std::int64_t>(300, documents.back() + generator() % (trial % 3 == 0 ? 20 : 200)));
      }
      const bool one = trial % 2 == 0;
      const ring::Plan plan = ring::plan(cp, shape(300, documents),
                                         {.causal = trial % 5 != 0,
                                          .transport = Transport::peer,
                                          .layout = trial % 4 < 2 ? ring::Layout::balanced : ring::Layout::zigzag,
                                          .launches = one ? ring::Launches::one : ring::Launches::per_step});
      CHECK(plan.work.placed_bytes() <= plan.most_placed_bytes(static_cast<std::int64_t>(documents.size()) - 1));
    }
  }
}

TEST_CASE("placed work is the same list on the host and in the memory that kernels read, halves and slices included") {
  const ring::Plan plan = ring::plan(3, {.tokens = 50, .qk_dim = 8, .v_dim = 8, .cu_seqlens = {0, 7, 7, 31, 45}});
  const HostBuffer staging(plan.work.placed_bytes(), 0xff), memory(plan.work.placed_bytes(), 0xff);
  for (int rank = 0; rank < 3; ++rank) {
    const ring::PlacedWork placed(plan.work, rank, staging.block(), memory.block(), HostExecutor(), HostStream());
    const auto check = [](const WorkView& view, const BlockWork& work) {
      CHECK(std::equal(view.begin(), view.end(), work.rectangles.begin(), work.rectangles.end()));
      CHECK(std::equal(view.begin(), view.end(), view.device));
    };
    for (int step = 0; step < 3; ++step) {
      for (std::size_t part = 0; part < plan.work.parts(rank, step).size(); ++part) {
        check(placed.part(step, part), plan.work.parts(rank, step)[part]);
      }
    }
    for (int step = 1; step < 3; ++step) {
      std::vector<Runs> of_parts(2), of_slices(2);  // the keys that are read, in each slice
      for (int slice = 0; slice < 2; ++slice) {
        const TokenSpan rows = plan.work.slice(plan.work.owner(rank, step), slice);
        for (const BlockWork& part : plan.work.parts(rank, step)) {
          of_parts[static_cast<std::size_t>(slice)].insert(intersection(part.keys, rows));
        }
        for (std::size_t i = 0; i < plan.work.sliced_parts(rank, step).size(); ++i) {
          const BlockWork& part = plan.work.sliced_parts(rank, step)[i];
          if (slice == 0) check(placed.sliced_part(step, i), part);
          CHECK((intersection(part.keys, rows).empty() || intersection(part.keys, rows) == part.keys));
          of_slices[static_cast<std::size_t>(slice)].insert(intersection(part.keys, rows));
        }
      }
      CHECK(of_parts == of_slices);
    }
    for (const int half : {0, 1}) check(placed.own_half(half), plan.work.own_half(rank, half));
    const std::int64_t tokens = plan.local_tokens(rank);
    CHECK(plan.work.own_half(rank, 0).keys == TokenSpan{0, tokens / 2});
    CHECK(plan.work.own_half(rank, 1).keys == TokenSpan{tokens / 2, tokens});
  }
}

}  // namespace
