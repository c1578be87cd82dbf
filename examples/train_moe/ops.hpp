// The trainer's own kernels: norms, rotary positions, embedding, products, loss. What pleat's templates do is not here.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <pleat/core/block.hpp>
#include <pleat/core/config.hpp>
#include <pleat/core/dtype.hpp>

namespace train_moe {

/// Rows of equal width, contiguous each, that begin `stride` elements apart.
template <class T>
struct Rows {
  T* data = nullptr;
  std::int64_t stride = 0;

  PLEAT_HD constexpr T* row(std::int64_t r) const { return data + r * stride; }
  template <class Constant>
  requires(!std::is_const_v<T> && std::is_same_v<Constant, const T>) operator Rows<Constant>() const {
    return {data, stride};
  }
};

/// The most that the operations of a rank are given.
struct OpsShape {
  std::int64_t tokens = 0;  // of a micro-batch
  std::int64_t hidden = 0;
  std::int64_t vocabulary = 0;
  std::int64_t widest = 0;  // of what linear reads or writes per row, besides the vocabulary
  pleat::DType dtype = pleat::DType::f32;
};

/// Heads whose keys and values are made of a latent row [lora | rope]: a key is [nope | rope] wide. source:
/// DeepSeek-V2, arXiv 2405.04434.
struct LatentShape {
  std::int64_t heads = 0;
  std::int64_t nope = 0;
  std::int64_t rope = 0;
  std::int64_t value = 0;
  std::int64_t lora = 0;

  PLEAT_HD constexpr std::int64_t key() const { return nope + rope; }
  PLEAT_HD constexpr std::int64_t width() const { return lora + rope; }
};

/// The initial values of a parameter, or of one expert's part of it: normal, or a constant where `deviation` is 0. They
/// depend on `key` and the element's number alone, so that every mesh starts from the same model.
struct Initial {
  std::uint64_t key = 0;
  double mean = 0;
  double deviation = 0;
  /// How far values lie from these, relatively: up or down, by the element's number.
  double perturbation = 0;

  PLEAT_HD double operator()(std::int64_t element) const {
    if (perturbation == 0) return value(element);
    const double sign = uniform(~static_cast<std::uint64_t>(element)) < 0.5 ? -1 : 1;
    return value(element) * (1 + sign * perturbation);
  }

 private:
  PLEAT_HD double value(std::int64_t element) const {
    if (deviation == 0) return mean;
    const auto first = 2 * static_cast<std::uint64_t>(element) + 1;
    const double radius = std::sqrt(-2 * std::log(uniform(first)));
    const double angle = 2 * 3.14159265358979323846 * uniform(first + 1);
    // Box-Muller, one of the pair; rounded to float, so that a run in f32 and its reference in f64 start alike.
    return static_cast<float>(mean + deviation * radius * std::cos(angle));
  }
  PLEAT_HD double uniform(std::uint64_t draw) const {  // splitmix64, in (0, 1)
    std::uint64_t z = key + draw * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (static_cast<double>((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
  }
};

/// The kernels of a transformer besides attention and experts, per device; one object per lane of a rank (see the
/// backend), made with `workspace_bytes(shape)` bytes of device memory:
///
///     static std::size_t workspace_bytes(const OpsShape&);
///     ops(const OpsShape&, pleat::Block workspace, Stream);      // handles are made and kernels loaded here
///
/// Activations and weights are `T`; gradients of parameters, statistics and logits of routers its accumulator `A`. All
/// arrays lie in the device's memory; work is ordered on the stream; nothing waits, nothing is allocated, and the same
/// arguments give the same bits. There may be 0 rows. host/ops.hpp says what each call means.
template <class Device>
class ops;

}  // namespace train_moe
