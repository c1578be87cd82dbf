// The host kernel against its contract: what it writes, how calls resume, and the numbers at the edges.
#include <pleat/attention/host/leaf.hpp>

#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include <sys/mman.h>

#include <doctest/doctest.h>

#include "unit/attention/oracle.hpp"

namespace {

using namespace pleat;
using Leaf = attention_leaf<host_device>;
using Work = std::vector<Rectangle>;

const double nan = std::numeric_limits<double>::quiet_NaN();
const double infinity = std::numeric_limits<double>::infinity();

/// Tensors of one call with as many queries as wanted, in type T; results start as NaN.
template <class T>
struct Case {
  using A = accumulator_t<T>;

  Case(std::int64_t queries, std::int64_t keys, int q_heads, int kv_heads, int qk_dim, int v_dim,
       std::int64_t batch = 1)
      : scale(1 / std::sqrt(static_cast<double>(qk_dim))) {
    const auto make = [&](auto& values, std::int64_t tokens, int heads, int dim) {
      values.resize(static_cast<std::size_t>(batch * tokens * heads * dim));
      using Value = typename std::remove_reference_t<decltype(values)>::value_type;
      std::fill(values.begin(), values.end(), Value(static_cast<float>(nan)));
      return TensorRef(values.data(), {batch, tokens, heads, dim});
    };
    q = make(q_data, queries, q_heads, qk_dim);
    k = make(k_data, keys, kv_heads, qk_dim);
    v = make(v_data, keys, kv_heads, v_dim);
    out = make(out_data, queries, q_heads, v_dim);
    dout = make(dout_data, queries, q_heads, v_dim);
    o_acc = make(o_acc_data, queries, q_heads, v_dim);
    dq = make(dq_data, queries, q_heads, qk_dim);
    dk = make(dk_data, keys, kv_heads, qk_dim);
    dv = make(dv_data, keys, kv_heads, v_dim);
    lse_data.assign(static_cast<std::size_t>(batch * queries * q_heads), static_cast<A>(nan));
    delta_data = lse_data;
    lse = TensorRef(lse_data.data(), {batch, q_heads, queries});
    delta = TensorRef(delta_data.data(), {batch, q_heads, queries});
  }
  void draw(unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (auto* values : {&q_data, &k_data, &v_data, &dout_data}) {
      for (T& value : *values) value = T(normal(generator));
    }
  }
  void forward(const Work& work, bool first = true, bool last = true) {
    Leaf::forward(AttentionForward{q, k, v, work, scale, o_acc, lse, out, first, last}, {});
  }
  void backward(const Work& work, bool accumulate_dq = false, bool accumulate_dk = false, bool accumulate_dv = false) {
    Leaf::delta(delta, out, dout, {});
    Leaf::backward(
        {q, k, v, dout, lse, delta, work, scale, dq, dk, dv, accumulate_dq, accumulate_dk, accumulate_dv, true}, {});
  }

  double scale;
  std::vector<T> q_data, k_data, v_data, out_data, dout_data;
  std::vector<A> o_acc_data, lse_data, delta_data, dq_data, dk_data, dv_data;
  TensorRef q, k, v, out, dout, o_acc, lse, delta, dq, dk, dv;
};

template <class T>
std::vector<double> doubles(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
template <class T>
bool all_zero(const std::vector<T>& values) {
  return std::all_of(values.begin(), values.end(), [](T value) { return static_cast<float>(value) == 0; });
}

/// One query head per kv head; scores `scores[query][key]` by qk_dim 1 and keys as given; scale 1.
Case<double> with_keys(double query, const std::vector<double>& keys) {
  Case<double> c(1, static_cast<std::int64_t>(keys.size()), 1, 1, 1, 1);
  c.scale = 1;
  c.q_data[0] = query;
  c.k_data = keys;
  for (std::size_t j = 0; j < keys.size(); ++j) c.v_data[j] = static_cast<double>(j + 1);
  c.k = TensorRef(c.k_data.data(), {1, static_cast<std::int64_t>(keys.size()), 1, 1});
  return c;
}

TEST_CASE("a causal square is attention by the definition, all outputs and gradients") {
  const oracle::Problem p{.batch = 2, .tokens = 150, .q_heads = 4, .kv_heads = 2, .qk_dim = 12, .v_dim = 7};
  Case<double> c(p.tokens, p.tokens, p.q_heads, p.kv_heads, p.qk_dim, p.v_dim, p.batch);
  c.draw(3);
  const oracle::Outputs want = oracle::solve(p, {c.q_data, c.k_data, c.v_data, c.dout_data});
  const Work work{{0, p.tokens, 0, p.tokens, 0}};
  c.forward(work);
  c.backward(work);
  CHECK(oracle::relative_max(c.out_data, want.out) < 1e-13);
  CHECK(oracle::relative_max(c.dq_data, want.dq) < 1e-13);
  CHECK(oracle::relative_max(c.dk_data, want.dk) < 1e-13);
  CHECK(oracle::relative_max(c.dv_data, want.dv) < 1e-13);
}

TEST_CASE("keys taken in over several calls give what one call gives; out is written by the last only") {
  Case<double> whole(9, 150, 2, 1, 8, 8), parts(9, 150, 2, 1, 8, 8);
  whole.draw(4);
  parts.draw(4);
  whole.forward({{0, 9, 0, 150}});
  parts.forward({{0, 9, 0, 70}}, true, false);
  parts.forward({}, false, false);
  parts.forward({{0, 4, 70, 150}}, false, false);
  CHECK(std::isnan(parts.out_data[0]));
  parts.forward({{4, 9, 70, 71}, {4, 9, 71, 150}}, false, true);
  CHECK(oracle::relative_max(parts.out_data, whole.out_data) < 1e-14);
  CHECK(oracle::relative_max(parts.lse_data, whole.lse_data) < 1e-14);
}

TEST_CASE("partial results whose LSE are far apart merge") {  // TE#716, EasyContext#14
  for (const auto& [first, second] : {std::pair{200.0, 0.0}, {0.0, 200.0}, {1e4, -1e4}, {-1e4, 1e4}}) {
    Case<double> c = with_keys(1, {first, second});
    c.forward({{0, 1, 0, 1}}, true, false);
    CHECK(c.lse_data[0] == first);
    c.forward({{0, 1, 1, 2}}, false, true);
    CHECK(c.lse_data[0] == std::max(first, second));  // the other adds less than half an ulp
    CHECK(c.out_data[0] == doctest::Approx(first > second ? 1 : 2));
    c.dout_data[0] = 1;
    c.backward({{0, 1, 0, 2}});
    for (const auto* gradient : {&c.dq_data, &c.dk_data, &c.dv_data}) {
      for (const double g : *gradient) CHECK(std::isfinite(g));
    }
  }
}

TEST_CASE("two empty partial results merge to an empty one: output 0, LSE -inf, gradients 0") {  // FlashInfer#4401
  Case<float> c(3, 4, 2, 1, 8, 5);
  c.draw(5);
  c.forward({}, true, false);
  c.forward({{0, 3, 0, 4, -9}}, false, true);  // a rectangle of which no query sees a key
  CHECK(all_zero(c.out_data));
  for (const float lse : c.lse_data) CHECK(lse == -infinity);
  c.backward({{0, 3, 0, 4, -9}});
  CHECK((all_zero(c.dq_data) && all_zero(c.dk_data) && all_zero(c.dv_data)));
}

TEST_CASE("scores of -inf count as unseen keys") {
  Case<double> c = with_keys(1, {-infinity, -infinity, 2});
  c.forward({{0, 1, 0, 2}}, true, true);
  CHECK(c.out_data[0] == 0);
  CHECK(c.lse_data[0] == -infinity);
  c.dout_data[0] = 1;
  c.backward({{0, 1, 0, 2}});
  CHECK((c.dk_data[0] == 0 && c.dv_data[1] == 0));
  c.forward({{0, 1, 0, 2}}, true, false);
  c.forward({{0, 1, 1, 3}}, false, true);
  CHECK(c.out_data[0] == 3);
  CHECK(c.lse_data[0] == 2);
}

TEST_CASE("a NaN is not hidden") {
  Case<double> c = with_keys(1, {0, nan});
  c.forward({{0, 1, 0, 2}});
  CHECK(std::isnan(c.out_data[0]));
  CHECK(std::isnan(c.lse_data[0]));
}

TEST_CASE("four queries, two keys, bottom-right causal: two rows are empty") {  // FlashInfer#4401
  Case<double> c(4, 2, 1, 1, 4, 3);
  c.draw(6);
  const Work work{{0, 4, 0, 2, -2}};
  c.forward(work);
  c.backward(work);
  for (std::size_t row = 0; row < 4; ++row) {
    CHECK((c.lse_data[row] == -infinity) == (row < 2));
    for (std::size_t d = 0; d < 3; ++d) {
      CHECK((c.out_data[row * 3 + d] == 0) == (row < 2));
      if (row == 2) CHECK(c.out_data[row * 3 + d] == c.v_data[d]);  // sees the first key only
    }
    for (std::size_t d = 0; d < 4; ++d) {
      CHECK(std::isfinite(c.dq_data[row * 4 + d]));
      if (row < 2) CHECK(c.dq_data[row * 4 + d] == 0);
    }
  }
}

TEST_CASE("all logits -6e4") {  // FlashInfer#4401
  Case<float> c(2, 5, 1, 1, 1, 1);
  c.scale = 1;
  for (float& q : c.q_data) q = -300;
  for (float& k : c.k_data) k = 200;
  for (std::size_t j = 0; j < 5; ++j) c.v_data[j] = static_cast<float>(j);
  c.forward({{0, 2, 0, 5}});
  CHECK(c.out_data[0] == doctest::Approx(2));
  CHECK(c.lse_data[0] == doctest::Approx(-6e4 + std::log(5.0)));
}

TEST_CASE_TEMPLATE("q = 0 with L keys: LSE = ln L", T, double, float, bfloat16, float16) {  // attention-gym#200
  for (const std::int64_t keys : {1, 2, 63, 64, 65, 200}) {
    Case<T> c(1, keys, 1, 1, 8, 8);
    c.draw(7);
    std::fill(c.q_data.begin(), c.q_data.end(), T(0.0f));
    c.forward({{0, 1, 0, keys}});
    CHECK(static_cast<double>(c.lse_data[0]) == doctest::Approx(std::log(static_cast<double>(keys))).epsilon(1e-6));
  }
}

TEST_CASE("query lengths 0,1,0,1 with key lengths 0,3,0,5") {  // FA#2470
  for (const bool causal : {false, true}) {
    Case<double> c(2, 8, 2, 1, 4, 4);
    c.draw(8);
    const Work work{{0, 1, 0, 3, causal ? 2 : Rectangle::full}, {1, 2, 3, 8, causal ? 4 : Rectangle::full}};
    c.forward(work);
    c.backward(work);
    for (const std::int64_t query : {0, 1}) {
      const std::int64_t first = query == 0 ? 0 : 3, last = query == 0 ? 3 : 8;
      Case<double> one(1, last - first, 2, 1, 4, 4);
      std::copy_n(c.q_data.begin() + query * 8, 8, one.q_data.begin());
      std::copy_n(c.dout_data.begin() + query * 8, 8, one.dout_data.begin());
      std::copy(c.k_data.begin() + first * 4, c.k_data.begin() + last * 4, one.k_data.begin());
      std::copy(c.v_data.begin() + first * 4, c.v_data.begin() + last * 4, one.v_data.begin());
      one.forward({{0, 1, 0, last - first}});
      one.backward({{0, 1, 0, last - first}});
      CHECK(std::equal(one.out_data.begin(), one.out_data.end(), c.out_data.begin() + query * 8));
      CHECK(std::equal(one.dq_data.begin(), one.dq_data.end(), c.dq_data.begin() + query * 8));
      CHECK(std::equal(one.dk_data.begin(), one.dk_data.end(), c.dk_data.begin() + first * 4));
      CHECK(std::equal(one.dv_data.begin(), one.dv_data.end(), c.dv_data.begin() + first * 4));
    }
  }
  Case<double> none(2, 0, 2, 1, 4, 4);  // all keys empty
  none.draw(8);
  none.forward({});
  none.backward({});
  CHECK((all_zero(none.out_data) && all_zero(none.dq_data)));
}

TEST_CASE("gradients accumulate one by one; dk and dv take a finished contribution, added once") {
  const Work work{{0, 6, 0, 5, 2}, {3, 9, 5, 7}, {6, 9, 0, 3}};  // keys 0..2 stand in two rectangles
  Case<float> fresh(9, 7, 4, 2, 8, 6);
  fresh.draw(9);
  fresh.forward(work);
  fresh.backward(work);
  for (int which = 0; which < 3; ++which) {
    Case<float> onto(9, 7, 4, 2, 8, 6);
    onto.draw(9);
    onto.forward(work);
    std::vector<float>& sum = which == 0 ? onto.dq_data : which == 1 ? onto.dk_data : onto.dv_data;
    const std::vector<float>& part = which == 0 ? fresh.dq_data : which == 1 ? fresh.dk_data : fresh.dv_data;
    std::vector<float> expected(part);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      sum[i] = 1000 + static_cast<float>(i);
      expected[i] += sum[i];
    }
    onto.backward(work, which == 0, which == 1, which == 2);
    if (which == 0) {
      CHECK(oracle::relative_max(doubles(sum), doubles(expected)) < 1e-6);
    } else {
      CHECK(same_bits(sum, expected));
    }
    CHECK((which == 0 || same_bits(onto.dq_data, fresh.dq_data)));
    CHECK((which == 1 || same_bits(onto.dk_data, fresh.dk_data)));
    CHECK((which == 2 || same_bits(onto.dv_data, fresh.dv_data)));
  }
}

TEST_CASE("offsets pass 2^31: 225,304 rows of stride 9,728") {  // FA#2611
  const std::int64_t rows = 225304, stride = 9728;
  const auto bytes = static_cast<std::size_t>(rows * stride) * sizeof(bfloat16);
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(pages != MAP_FAILED);
  const auto far_view = [&](int first) {
    TensorRef t(static_cast<bfloat16*>(pages) + first, dtype_of<bfloat16>, {});
    for (const auto& [extent, step] : {std::pair{std::int64_t{1}, rows * stride}, {rows, stride}, {1, 8}, {8, 1}}) {
      t.push_extent(extent, step);
    }
    return t;
  };
  Case<bfloat16> far(rows, rows, 1, 1, 8, 8), near(2, 2, 1, 1, 8, 8);
  near.draw(10);
  far.q = far_view(0);
  far.k = far_view(8);
  far.v = far_view(16);
  far.dout = far_view(24);
  far.out = far_view(32);
  for (std::int64_t row = 0; row < 2; ++row) {
    const std::int64_t at = (rows - 2 + row) * stride;
    for (const auto& [wide, narrow] :
         {std::pair{far.q, near.q}, {far.k, near.k}, {far.v, near.v}, {far.dout, near.dout}}) {
      std::copy_n(narrow.as<bfloat16>() + row * 8, 8, wide.as<bfloat16>() + at);
    }
  }
  near.forward({{0, 2, 0, 2, 0}});
  near.backward({{0, 2, 0, 2, 0}});
  // Only the last two rows are touched, so only their pages exist: each call gets views of these rows.
  const auto last_two = [&](const TensorRef& t) {
    TensorRef rows_of(t.as<bfloat16>() + (rows - 4) * stride, t.dtype(), {});
    for (int axis = 0; axis < 4; ++axis) rows_of.push_extent(axis == 1 ? 4 : t.extent(axis), t.stride(axis));
    return rows_of;
  };
  const Work work{{rows - 2, rows, rows - 2, rows, 0}};
  Leaf::forward(AttentionForward{far.q, far.k, far.v, work, far.scale, far.o_acc, far.lse, far.out, true, false}, {});
  const TensorRef acc(far.o_acc_data.data() + (rows - 4) * 8, {1, 4, 1, 8});
  Leaf::store(last_two(far.out), {&acc, 1}, {});
  far.delta = TensorRef(far.delta_data.data() + rows - 4, {1, 1, 4});
  Leaf::delta(far.delta, last_two(far.out), last_two(far.dout), {});
  far.delta = TensorRef(far.delta_data.data(), {1, 1, rows});
  Leaf::backward({far.q, far.k, far.v, far.dout, far.lse, far.delta, work, far.scale, far.dq, far.dk, far.dv, false,
                  false, false, true},
                 {});
  for (const std::int64_t row : {0, 1}) {
    CHECK(std::equal(near.out_data.begin() + row * 8, near.out_data.begin() + row * 8 + 8,
                     far.out.as<bfloat16>() + (rows - 2 + row) * stride));
  }
  for (const auto& [a, b] :
       {std::pair{&near.dq_data, &far.dq_data}, {&near.dk_data, &far.dk_data}, {&near.dv_data, &far.dv_data}}) {
    CHECK(std::equal(a->begin(), a->end(), b->end() - 16));
  }
  munmap(pages, bytes);
}

TEST_CASE("A06: a head dim that the host kernel has no room for") {
  Case<float> c(1, 1, 1, 1, 1025, 4);
  c.draw(11);
  c.forward({{0, 1, 0, 1}});
  CHECK(c.out_data[0] == c.v_data[0]);
  std::string text;
  try {
    c.backward({{0, 1, 0, 1}});
  } catch (const shape_error& e) {
    text = e.what();
  }
  CHECK(text.find("pleat[A06]: qk_dim=1025, v_dim=4") == 0);
  CHECK(text.find("1024") != std::string::npos);
}

}  // namespace
