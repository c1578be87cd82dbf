// The trainer's CUDA kernels against their host twins in float64: every operation, odd and real sizes, poisoned
// outputs, and the same bits twice. Exit code 77 without a GPU.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/executor.hpp>

#include <train_moe/cuda/ops.cuh>
#include <train_moe/host/ops.hpp>

#include <support/copy_now.hpp>

#include "skip.hpp"

namespace {

using Host = train_moe::ops<pleat::host_device>;
using Gpu = train_moe::ops<pleat::cuda_device>;
using train_moe::Rows;
using Reals = std::vector<double>;
using Ids = std::vector<std::int32_t>;
using pleat::bfloat16;

int failures = 0;
std::mt19937_64 generator{std::random_device{}()};

void report(const std::string& what, bool passes, const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  if (!passes) std::printf("FAILED  %-58s %s\n", what.c_str(), text);
  failures += !passes;
}

template <class T>
double real(T value) {
  if constexpr (std::is_same_v<T, bfloat16>) return static_cast<float>(value);
  return static_cast<double>(value);
}
/// Normal numbers that T holds exactly.
template <class T>
Reals draw(std::int64_t elems, double scale = 1, double mean = 0) {
  std::normal_distribution<double> normal(mean, scale);
  Reals values(static_cast<std::size_t>(elems));
  for (double& v : values) v = real(static_cast<T>(normal(generator)));
  return values;
}
Ids draw_ids(std::int64_t count, int limit) {
  // A few ids take most places, as in texts.
  std::uniform_real_distribution<double> uniform;
  Ids ids(static_cast<std::size_t>(count));
  for (auto& id : ids) id = static_cast<std::int32_t>(std::pow(uniform(generator), 3) * limit);
  return ids;
}

/// Device memory of T with NaNs, or with values.
template <class T>
struct Array {
  pleat::CudaBuffer buffer;
  std::size_t elems;
  explicit Array(std::int64_t count)
      : buffer(static_cast<std::size_t>(count + 1) * sizeof(T)), elems(static_cast<std::size_t>(count)) {
    poison();
  }
  explicit Array(const Reals& values) : Array(static_cast<std::int64_t>(values.size())) { set(values); }
  /// Over when it returns: kernels run on a stream that does not wait for the default one.
  void poison() {
    pleat::check_cuda(cudaMemset(buffer.data(), 0xff, buffer.size_bytes()), "cudaMemset");
    pleat::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void set(const Reals& values) {
    std::vector<T> narrow(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) narrow[i] = static_cast<T>(values[i]);
    testing_support::copy_now(data(), narrow.data(), values.size() * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(buffer.data()); }
  std::vector<T> raw() const {
    std::vector<T> values(elems);
    testing_support::copy_now(values.data(), data(), elems * sizeof(T));
    return values;
  }
  std::vector<std::byte> bytes() const {
    const std::vector<T> values = raw();
    std::vector<std::byte> copy(values.size() * sizeof(T));
    std::memcpy(copy.data(), values.data(), copy.size());
    return copy;
  }
  Reals get() const {
    Reals values;
    for (const T& v : raw()) values.push_back(real(v));
    return values;
  }
};
struct IdArray {
  pleat::CudaBuffer buffer;
  explicit IdArray(const Ids& ids) : buffer(ids.size() * 4 + 4) {
    testing_support::copy_now(buffer.data(), ids.data(), ids.size() * 4);
  }
  std::int32_t* data() const { return reinterpret_cast<std::int32_t*>(buffer.data()); }
};

double relative_l2(const Reals& got, const Reals& expected) {
  double off = 0, all = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    off += (got[i] - expected[i]) * (got[i] - expected[i]);
    all += expected[i] * expected[i];
  }
  return all == 0 ? std::sqrt(off) : std::sqrt(off / all);
}
/// Results of T are rounded once, sums are fp32.
template <class T>
double tolerance() {
  return std::is_same_v<T, bfloat16> ? 3e-3 : 2e-6;
}
template <class T>
void compare(const std::string& what, const Array<T>& got, const Reals& expected, double largest) {
  const Reals values = got.get();
  const double off = relative_l2(values, expected);
  report(what, off <= largest, "relative L2 %.2e", off);  // false for NaN
  if (off <= largest) return;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::abs(values[i] - expected[i]) <= 10 * largest * (std::abs(expected[i]) + 1e-3)) continue;
    std::printf("        first at %zu: %g, expected %g\n", i, values[i], expected[i]);
    return;
  }
}

/// The operations of both devices, and what they run on.
struct Devices {
  pleat::CudaStream stream;
  pleat::CudaBuffer workspace;
  Gpu gpu;
  Host host;
  explicit Devices(const train_moe::OpsShape& shape)
      : workspace(Gpu::workspace_bytes(shape)),
        gpu(shape, workspace.block(), stream),
        host(shape, pleat::Block{}, pleat::HostStream{}) {}

  /// Runs a call on the GPU twice, with poisoned workspace: the same bits of all results. `reset` comes before each.
  template <class F, class... T>
  void twice(const std::string& what, F call, const Array<T>&... results) {
    std::vector<std::vector<std::byte>> first;
    for (int run = 0; run < 2; ++run) {
      pleat::check_cuda(cudaMemset(workspace.data(), 0xff, workspace.size_bytes()), "cudaMemset");
      pleat::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      call();
      stream.synchronize();
      std::size_t i = 0;
      const auto look = [&](const auto& array) {
        if (run == 0) return first.push_back(array.bytes());
        report(what, array.bytes() == first[i], "other bits in result %g when repeated", static_cast<double>(i));
        ++i;
      };
      (look(results), ...);
    }
  }
};

template <class T>
constexpr const char* name = pleat::name_of(pleat::dtype_of<T>);
template <class... Extents>
std::string named(const char* dtype, const char* what, Extents... extents) {
  std::string text = std::string(dtype) + " " + what;
  ((text += " " + std::to_string(extents)), ...);
  return text;
}

/// Rows of `dim` with `gap` elements between them.
template <class T>
void test_norm(Devices& on, std::int64_t rows, std::int64_t dim, std::int64_t gap) {
  using A = pleat::accumulator_t<T>;
  const std::string what = named(name<T>, "norm", rows, dim, gap);
  const std::int64_t pitch = dim + gap;
  Reals x = draw<T>(rows * pitch, 2), w = draw<T>(dim, 0.3, 1), dy = draw<T>(rows * pitch),
        residual = draw<T>(rows * dim);
  Reals y = x, inverse(static_cast<std::size_t>(rows)), dx = dy, dw(static_cast<std::size_t>(dim));
  Array<T> gx(x), gw(w), gy(x), gdy(dy), gresidual(residual), gdx(rows * dim);
  Array<A> ginverse(rows), gdw(dim);
  on.host.rms_norm(Rows<const double>{x.data(), pitch}, w.data(), Rows<double>{y.data(), pitch}, inverse.data(), rows,
                   dim, 1e-6, {});
  on.twice(
      what,
      [&] {
        on.gpu.rms_norm(Rows<const T>{gx.data(), pitch}, gw.data(), Rows<T>{gy.data(), pitch}, ginverse.data(), rows,
                        dim, 1e-6, on.stream);
      },
      gy, ginverse);
  compare(what + " y", gy, y, tolerance<T>());
  compare(what + " inverse", ginverse, inverse, 2e-6);
  Reals in_place(residual);
  for (const bool adds : {false, true}) {
    Reals out(static_cast<std::size_t>(rows * dim));
    on.host.rms_norm_backward(Rows<const double>{dy.data(), pitch}, Rows<const double>{x.data(), pitch}, w.data(),
                              inverse.data(), Rows<const double>{adds ? residual.data() : nullptr, dim},
                              Rows<double>{out.data(), dim}, dw.data(), rows, dim, {});
    on.twice(
        what,
        [&] {
          gdx.poison(), gdw.poison();
          on.gpu.rms_norm_backward(Rows<const T>{gdy.data(), pitch}, Rows<const T>{gx.data(), pitch}, gw.data(),
                                   ginverse.data(), Rows<const T>{adds ? gresidual.data() : nullptr, dim},
                                   Rows<T>{gdx.data(), dim}, gdw.data(), rows, dim, on.stream);
        },
        gdx, gdw);
    compare(what + (adds ? " dx added" : " dx"), gdx, out, tolerance<T>());
    compare(what + " dweight", gdw, dw, 5e-6);
  }
  // dx over each of what it is made of
  Reals plain = dy;
  on.host.rms_norm_backward(Rows<const double>{dy.data(), pitch}, Rows<const double>{x.data(), pitch}, w.data(),
                            inverse.data(), Rows<const double>{x.data(), pitch}, Rows<double>{plain.data(), pitch},
                            dw.data(), rows, dim, {});
  for (const bool over_x : {false, true}) {
    Array<T> a(x), b(dy);
    Array<T>& over = over_x ? a : b;
    on.gpu.rms_norm_backward(Rows<const T>{b.data(), pitch}, Rows<const T>{a.data(), pitch}, gw.data(), ginverse.data(),
                             Rows<const T>{a.data(), pitch}, Rows<T>{over.data(), pitch}, gdw.data(), rows, dim,
                             on.stream);
    on.stream.synchronize();
    Reals got = over.get(), wanted = plain;
    for (std::int64_t i = 0; i < rows * pitch; ++i) {
      const bool between = i % pitch >= dim;
      if (between) wanted[static_cast<std::size_t>(i)] = (over_x ? x : dy)[static_cast<std::size_t>(i)];
    }
    compare(what + (over_x ? " dx over x" : " dx over dy"), over, wanted, tolerance<T>());
  }
}

template <class T>
void test_rotate(Devices& on, std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::int64_t gap) {
  const std::string what = named(name<T>, "rotate", heads, dim, gap);
  Ids positions(static_cast<std::size_t>(tokens));
  for (auto& p : positions) p = static_cast<std::int32_t>(generator() % 40000);
  const std::int64_t head_stride = dim + gap, token_stride = heads * head_stride + gap;
  Reals x = draw<T>(tokens * token_stride);
  Array<T> gx(x);
  const IdArray gpositions(positions);
  for (const int direction : {1, -1}) {
    on.host.rotate(x.data(), token_stride, head_stride, positions.data(), tokens, heads, dim, 1e6, direction, {});
    on.gpu.rotate(gx.data(), token_stride, head_stride, gpositions.data(), tokens, heads, dim, 1e6, direction,
                  on.stream);
    on.stream.synchronize();
    compare(what, gx, x, tolerance<T>());
    x = gx.get();
  }
}

template <class T>
void test_pointwise(Devices& on, std::int64_t elems) {
  const std::string what = named(name<T>, "pointwise", elems);
  Reals gate = draw<T>(elems, 3), up = draw<T>(elems), dact = draw<T>(elems), act(gate.size());
  Array<T> ggate(gate), gup(up), gact(elems);
  on.host.swiglu(gate.data(), up.data(), act.data(), elems, {});
  on.gpu.swiglu(ggate.data(), gup.data(), gact.data(), elems, on.stream);
  on.stream.synchronize();
  compare(what + " swiglu", gact, act, tolerance<T>());
  act = dact;
  gact.set(dact);
  on.host.swiglu_backward(gate.data(), up.data(), act.data(), elems, {});
  on.gpu.swiglu_backward(ggate.data(), gup.data(), gact.data(), elems, on.stream);
  on.stream.synchronize();
  compare(what + " swiglu again", gact, act, tolerance<T>());
  compare(what + " dgate", ggate, gate, tolerance<T>());
  compare(what + " dup", gup, up, tolerance<T>());
  Array<double> constant(Reals{0.25});
  on.gpu.add_constant(constant.data(), 2.5, on.stream);
  on.stream.synchronize();
  compare(what + " add_constant", constant, {2.75}, 0);
}

template <class T>
void test_embedding(Devices& on, std::int64_t rows, int vocabulary, std::int64_t dim) {
  using A = pleat::accumulator_t<T>;
  const std::string what = named(name<T>, "embedding", rows, vocabulary, dim);
  const Ids ids = draw_ids(rows, vocabulary);
  const Reals table = draw<T>(vocabulary * dim), dout = draw<T>(rows * dim), old = draw<float>(vocabulary * dim);
  Reals out(static_cast<std::size_t>(rows * dim)), dtable = old;
  on.host.embed(ids.data(), table.data(), out.data(), rows, dim, {});
  on.host.embed_backward(ids.data(), dout.data(), dtable.data(), rows, dim, vocabulary, {});
  const IdArray gids(ids);
  Array<T> gtable(table), gout(rows * dim), gdout(dout);
  Array<A> gdtable(old);
  on.twice(
      what,
      [&] {
        gdtable.set(old);
        on.gpu.embed(gids.data(), gtable.data(), gout.data(), rows, dim, on.stream);
        on.gpu.embed_backward(gids.data(), gdout.data(), gdtable.data(), rows, dim, vocabulary, on.stream);
      },
      gout, gdtable);
  compare(what + " out", gout, out, 0);
  compare(what + " dtable", gdtable, dtable, 3e-6);
}

/// The input's rows lie apart.
template <class T>
void test_linear(Devices& on, std::int64_t rows, std::int64_t in, std::int64_t out) {
  using A = pleat::accumulator_t<T>;
  const std::string what = named(name<T>, "linear", rows, in, out);
  const std::int64_t pitch = in + 16;
  Reals x = draw<T>(rows * pitch), w = draw<T>(out * in, 0.1), dy = draw<T>(rows * out), residual = draw<T>(rows * out);
  const Reals old_dx = draw<T>(rows * in), old_dw = draw<float>(out * in);
  const Rows<const double> rows_of_x{x.data(), pitch};
  Reals y(dy.size()), scores(dy.size()), dx = old_dx, dw = old_dw, dw_of_scores(w.size());
  on.host.linear(rows_of_x, w.data(), y.data(), rows, in, out, residual.data(), {});
  on.host.linear(rows_of_x, w.data(), scores.data(), rows, in, out, nullptr, {});
  on.host.linear_input_gradient(dy.data(), w.data(), dx.data(), true, rows, in, out, {});
  on.host.linear_weight_gradient(dy.data(), rows_of_x, dw.data(), true, rows, in, out, {});
  on.host.linear_weight_gradient(scores.data(), rows_of_x, dw_of_scores.data(), false, rows, in, out, {});
  Array<T> gx(x), gw(w), gy(rows * out), gresidual(residual), gdy(dy), gdx(rows * in);
  Array<A> gdw(old_dw), gscores(rows * out), gdw_of_scores(out * in);
  const Rows<const T> grows{gx.data(), pitch};
  on.twice(
      what,
      [&] {
        gdw.set(old_dw), gdx.set(old_dx), gdw_of_scores.poison();
        on.gpu.linear(grows, gw.data(), gy.data(), rows, in, out, gresidual.data(), on.stream);
        on.gpu.linear(grows, gw.data(), gscores.data(), rows, in, out, nullptr, on.stream);
        on.gpu.linear_input_gradient(gdy.data(), gw.data(), gdx.data(), true, rows, in, out, on.stream);
        on.gpu.linear_weight_gradient(gdy.data(), grows, gdw.data(), true, rows, in, out, on.stream);
        on.gpu.linear_weight_gradient(gscores.data(), grows, gdw_of_scores.data(), false, rows, in, out, on.stream);
      },
      gy, gscores, gdx, gdw, gdw_of_scores);
  compare(what + " y", gy, y, tolerance<T>());
  compare(what + " scores", gscores, scores, 5e-6);
  compare(what + " dx", gdx, dx, tolerance<T>());
  compare(what + " dweight", gdw, dw, 5e-6);
  compare(what + " dweight of scores", gdw_of_scores, dw_of_scores, tolerance<T>());
}

template <class T>
void test_loss(Devices& on, std::int64_t rows, std::int64_t classes) {
  const std::string what = named(name<T>, "loss", rows, classes);
  Reals logits = draw<T>(rows * classes, 3);
  Ids labels = draw_ids(rows, static_cast<int>(classes));
  for (std::size_t i = 0; i < labels.size(); i += 7) labels[i] = -1;
  Array<T> glogits(logits);
  Array<double> gloss(Reals{0.5});
  const IdArray glabels(labels);
  const Reals before = logits;
  double loss = 0.5;
  on.host.cross_entropy(logits.data(), labels.data(), &loss, rows, classes, {});
  on.twice(
      what,
      [&] {
        gloss.set({0.5}), glogits.set(before);
        on.gpu.cross_entropy(glogits.data(), glabels.data(), gloss.data(), rows, classes, on.stream);
      },
      gloss, glogits);
  compare(what + " loss", gloss, {loss}, 1e-6);
  compare(what + " gradient", glogits, logits, std::is_same_v<T, bfloat16> ? 3e-3 : 1e-5);
}

template <class T>
void test_latent(Devices& on, std::int64_t rows, const train_moe::LatentShape& shape) {
  using A = pleat::accumulator_t<T>;
  const std::string what = named(name<T>, "latent", rows, shape.heads, shape.nope, shape.rope, shape.value, shape.lora);
  const std::int64_t pitch = shape.width(), keys = shape.heads * shape.key(), values = shape.heads * shape.value;
  const Reals latent = draw<T>(rows * pitch), wk = draw<T>(shape.heads * shape.nope * shape.lora, 0.1);
  const Reals wv = draw<T>(values * shape.lora, 0.1), dk = draw<float>(rows * keys), dv = draw<float>(rows * values);
  const Reals old = draw<float>(rows * pitch), old_wk = draw<float>(static_cast<std::int64_t>(wk.size())),
              old_wv = draw<float>(static_cast<std::int64_t>(wv.size()));
  Reals k(dk.size()), v(dv.size());
  Array<T> glatent(latent), gwk(wk), gwv(wv), gk(rows * keys), gv(rows * values);
  Array<A> gdk(dk), gdv(dv), gdlatent(old), gdwk(old_wk), gdwv(old_wv);
  const Rows<const double> host_latent{latent.data(), pitch};
  const Rows<const T> gpu_latent{glatent.data(), pitch};
  on.host.expand_latent(shape, host_latent, wk.data(), wv.data(), k.data(), v.data(), rows, {});
  on.twice(
      what,
      [&] { on.gpu.expand_latent(shape, gpu_latent, gwk.data(), gwv.data(), gk.data(), gv.data(), rows, on.stream); },
      gk, gv);
  compare(what + " keys", gk, k, tolerance<T>());
  compare(what + " values", gv, v, tolerance<T>());
  for (const bool adds : {false, true}) {
    Reals dlatent = old, dwk = old_wk, dwv = old_wv;
    on.host.expand_latent_backward(shape, host_latent, wk.data(), wv.data(), dk.data(), dv.data(),
                                   Rows<double>{dlatent.data(), pitch}, adds, dwk.data(), dwv.data(), rows, {});
    on.twice(
        what,
        [&] {
          gdlatent.set(old), gdwk.set(old_wk), gdwv.set(old_wv);
          if (!adds) gdlatent.poison();
          on.gpu.expand_latent_backward(shape, gpu_latent, gwk.data(), gwv.data(), gdk.data(), gdv.data(),
                                        Rows<A>{gdlatent.data(), pitch}, adds, gdwk.data(), gdwv.data(), rows,
                                        on.stream);
        },
        gdlatent, gdwk, gdwv);
    const double most = std::is_same_v<T, bfloat16> ? 4e-3 : 5e-6;  // gradients of keys and values are rounded to T
    compare(what + " dlatent", gdlatent, dlatent, most);
    compare(what + " dkey_weight", gdwk, dwk, most);
    compare(what + " dvalue_weight", gdwv, dwv, most);
  }
}

template <class A>
void test_initial(Devices& on) {
  const train_moe::Initial initial{generator(), 0.5, 0.02};
  constexpr std::int64_t first = 12345, elems = 70001;
  Reals values(elems);
  on.host.initialize(values.data(), initial, first, elems, {});
  Array<A> gvalues(elems);
  on.gpu.initialize(gvalues.data(), initial, first, elems, on.stream);
  on.stream.synchronize();
  compare(named(name<A>, "initial"), gvalues, values, 1e-7);
}

template <class T>
void test_all(Devices& on) {
  struct NormCase {
    std::int64_t rows, dim, gap;
  };
  for (const auto& c : {NormCase{1, 8, 0},
                        {7, 13, 3},
                        {33, 16, 0},
                        {300, 32, 8},
                        {130, 128, 0},
                        {70, 2048, 16},
                        {5, 4104, 0},
                        {40000, 24, 0}}) {
    test_norm<T>(on, c.rows, c.dim, c.gap);
  }
  for (const auto& c : {NormCase{1, 2, 0}, {3, 10, 1}, {4, 16, 0}, {2, 64, 128}, {5, 128, 0}})
    test_rotate<T>(on, 37, c.rows, c.dim, c.gap);
  for (const int elems : {1, 7, 8, 1000, 70001}) test_pointwise<T>(on, elems);
  test_embedding<T>(on, 1, 3, 5);
  test_embedding<T>(on, 3000, 256, 64);
  test_embedding<T>(on, 500, 50000, 24);
  test_embedding<T>(on, 257, 2, 2056);
  for (const auto& [rows, in, out] :
       {std::array{16, 32, 16}, {60, 32, 64}, {257, 64, 128}, {130, 256, 48}, {1000, 96, 512}}) {
    test_linear<T>(on, rows, in, out);
  }
  test_linear<T>(on, 9000, 16, 1024);  // gradients that are converted in more than one piece
  test_loss<T>(on, 60, 256);
  test_loss<T>(on, 40, 5003);
  test_loss<T>(on, 24, 40000);
  test_latent<T>(on, 50, {3, 16, 8, 24, 32});
  test_latent<T>(on, 5000, {16, 128, 64, 128, 8});  // several pieces
}

}  // namespace

int main() {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  {
    Devices on({.tokens = 40000, .hidden = 4104, .vocabulary = 50000, .widest = 4104, .dtype = pleat::DType::bf16});
    test_all<float>(on);
    test_all<bfloat16>(on);
    test_initial<float>(on);
  }
  std::printf("%s\n", failures == 0 ? "all passed" : "some FAILED");
  return failures == 0 ? 0 : 1;
}
