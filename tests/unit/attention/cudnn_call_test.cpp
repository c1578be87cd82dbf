// What cuDNN is asked for, and what it is not: rectangles, strides and dtypes; and how partial results are joined.
#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include <pleat/attention/cuda/cudnn_call.hpp>

#include "unit/attention/expect_error.hpp"

namespace {

using namespace pleat;

struct Example {
  alignas(128) std::byte memory[1 << 16] = {};
  std::vector<Rectangle> work{{0, 32, 0, 32, 0}};
  AttentionForward forward;

  Example() {
    forward.q = tensor(32, 4, 64);
    forward.k = tensor(32, 2, 64);
    forward.v = tensor(32, 2, 64);
    forward.out = tensor(32, 4, 64);
    forward.o_acc = TensorRef(memory, DType::f32, {1, 32, 4, 64});
    forward.lse = TensorRef(memory, DType::f32, {1, 4, 32});
    forward.work = work;
  }
  TensorRef tensor(std::int64_t tokens, std::int64_t heads, std::int64_t dim, DType dtype = DType::bf16) {
    return TensorRef(memory, dtype, {1, tokens, heads, dim});
  }
  AttentionBackward backward() {
    AttentionBackward a;
    a.q = forward.q, a.k = forward.k, a.v = forward.v, a.dout = forward.out, a.out = forward.out;
    a.work = work;
    return a;
  }
};

template <class F>
std::string refusal(F f) {
  try {
    f();
  } catch (const shape_error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a diagonal through a corner is a mask of cuDNN, another is refused") {
  CHECK(cudnn::mask_of({0, 8, 4, 9}) == cudnn::Mask::full);
  CHECK(cudnn::mask_of({0, 8, 4, 12, 0}) == cudnn::Mask::top_left);
  CHECK(cudnn::mask_of({0, 8, 4, 8, 0}) == cudnn::Mask::top_left);
  CHECK(cudnn::mask_of({0, 8, 4, 14, 2}) == cudnn::Mask::bottom_right);
  for (const Rectangle& r : {Rectangle{0, 8, 4, 14, 1}, Rectangle{0, 8, 0, 4, -4}, Rectangle{0, 8, 0, 8, -1}}) {
    CHECK(refusal([&] { cudnn::mask_of(r); }).find("pleat[A13]: cuDNN has no mask for 8 queries") == 0);
  }
}

TEST_CASE("a call is asked for by the rows of its rectangle") {
  Example e;
  const cudnn::Call whole = cudnn::call_of(e.forward, e.work.front());
  CHECK(cudnn::is_whole(e.forward));
  CHECK(whole.q == cudnn::Strides{32 * 4 * 64, 4 * 64, 64});
  CHECK(whole.q_tokens == 32);

  e.work = {{8, 24, 0, 16}, {8, 24, 16, 32, 0}};
  e.forward.work = e.work;
  CHECK_FALSE(cudnn::is_whole(e.forward));
  const cudnn::Call first = cudnn::call_of(e.forward, e.work[0]), second = cudnn::call_of(e.forward, e.work[1]);
  CHECK(first.q_tokens == 16);
  CHECK(first.out == cudnn::packed(16, 4, 64));
  CHECK(first != second);  // another mask
  CHECK(first < second);
  cudnn::Call same = second;
  same.mask = first.mask;
  CHECK(same == first);
  CHECK(cudnn::call_of(e.backward(), e.work[0]) != first);

  e.work = {{0, 32, 0, 32, 0}};
  e.forward.work = e.work;
  e.forward.last = false;
  CHECK_FALSE(cudnn::is_whole(e.forward));
}

TEST_CASE("what cuDNN cannot do is refused before it is asked") {
  Example e;
  const auto refused = [&](const char* text) {
    const std::string said = refusal([&] { cudnn::call_of(e.forward, e.work.front()); });
    CAPTURE(said);
    CHECK(said.find("pleat[A13]") == 0);
    CHECK(said.find(text) != std::string::npos);
    e = Example();
    e.forward.work = e.work;
  };
  e.forward.q = e.tensor(32, 4, 60);
  refused("multiples of 8 up to 256, not qk_dim=60");
  e.forward.q = e.tensor(32, 4, 64, DType::f32);
  refused("bf16 and f16, not f32");
  e.forward.max_ctas = 100;
  refused("max_ctas must be 0, not 100");
  e.forward.k = TensorRef(e.memory + 2, DType::bf16, {1, 32, 2, 64});
  refused("k has strides");
  AttentionBackward backward = e.backward();
  backward.out = {};
  CHECK(refusal([&] { cudnn::call_of(backward, e.work.front()); }).find("set AttentionBackward::out") !=
        std::string::npos);
}

TEST_CASE("partial results are joined by what they weigh; two empty ones stay empty") {
  const float nothing = -INFINITY;
  const cudnn::Weights none = cudnn::merge(nothing, nothing);
  CHECK(none.running == 0);
  CHECK(none.partial == 0);
  CHECK(none.lse == nothing);
  const cudnn::Weights first = cudnn::merge(nothing, 3);
  CHECK(first.running == 0);
  CHECK(first.partial == 1);
  CHECK(first.lse == 3);
  CHECK(cudnn::merge(-5, nothing).running == 1);
  const cudnn::Weights both = cudnn::merge(200, 201);
  CHECK(both.running == doctest::Approx(1 / (1 + std::exp(1.0))));
  CHECK(both.running + both.partial == doctest::Approx(1));
  CHECK(both.lse == doctest::Approx(200 + std::log(1 + std::exp(1.0))));
}
