// The trainer of plain.cu on many GPUs: each rank holds a shard of the weights and takes a part of the rows.
#include <pleat/nccl.cuh>

#include "mlp.cuh"

int main() {
  pleat::NcclComm world = pleat::NcclComm::from_environment();
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const pleat::CudaStream gather, reduce(pleat::first_priority()), own;
  const Gemm gemm;

  float *initial = allocate<float>(weights_per_layer), *m[layers], *v[layers];
  const std::vector<pleat::fsdp::UnitSpec> units(layers,
                                                 {.name = "layer", .params = {{.name = "w", .shape = {width, width}}}});
  pleat::fsdp::ShardedModel<pleat::NcclComm, pleat::NcclArena> model(world, units, {stream, gather, reduce, own});
  for (int l = 0; l < layers; ++l) {
    const long elems = model.sharder().shards()[l].elems;
    draw<<<256, 256, 0, stream>>>(initial, 100 + l, 0.06f, weights_per_layer, weights_per_layer);
    model.load(l, 0, initial);
    m[l] = allocate<float>(elems), v[l] = allocate<float>(elems);
    check(cudaMemsetAsync(m[l], 0, elems * sizeof(float), stream));
    check(cudaMemsetAsync(v[l], 0, elems * sizeof(float), stream));
  }
  const int count = rows / world.size(), first = world.rank() * count;
  bf16 *x[layers + 1], *dx[2], *target = allocate<bf16>(rows * width);
  for (bf16*& activations : x) activations = allocate<bf16>(rows * width);
  for (bf16*& gradients : dx) gradients = allocate<bf16>(rows * width);
  draw<<<256, 256, 0, stream>>>(target, 50, 0.5f, rows * width, width);
  float* loss = allocate<float>(1);

  for (int step = 1; step <= steps; ++step) {
    draw<<<256, 256, 0, stream>>>(x[0], step, 1.0f, rows * width, rows * width);
    const bf16 *in = x[0] + first * width, *wanted = target + first * width;
    model.begin_step();
    for (int l = 0; l < layers; ++l) {
      const bf16* y = l == 0 ? in : x[l];
      model.forward(l, [&](auto weights) {
        gemm.run(y, false, static_cast<bf16*>(weights[0].data()), true, x[l + 1], count, width, width, stream);
      });
      if (l + 1 < layers) relu<<<256, 256, 0, stream>>>(x[l + 1], count * width);
    }
    squared_error<<<1, 1024, 0, stream>>>(loss, dx[layers % 2], x[layers], wanted, count * width, rows * width);
    for (int l = layers; l-- > 0;) {
      const bf16 *y = l == 0 ? in : x[l], *dy = dx[(l + 1) % 2];
      model.backward(l, [&](auto weights, auto gradient) {
        const auto [dw, accumulate] = gradient.write(0);
        gemm.run(dy, true, y, false, static_cast<float*>(dw.data()), width, width, count, stream, accumulate);
        gemm.run(dy, false, static_cast<bf16*>(weights[0].data()), false, dx[l % 2], count, width, width, stream);
      });
      if (l > 0) relu_backward<<<256, 256, 0, stream>>>(dx[l % 2], y, count * width);
    }
    model.finish_step([&](auto shard, int l) {
      adamw<<<256, 256, 0, stream>>>(static_cast<float*>(shard.master), static_cast<bf16*>(shard.compute), m[l], v[l],
                                     static_cast<float*>(shard.gradient), shard.elems, step);
    });
    float shown = 0;
    world.all_reduce(loss, 1, pleat::DType::f32, stream);
    check(cudaMemcpyAsync(&shown, loss, sizeof shown, cudaMemcpyDeviceToHost, stream));
    world.wait(stream);
    if (step % 8 == 0 && world.rank() == 0) std::printf("step %d loss %.6f\n", step, shown);
  }
  model.wait();
}
