// A plain CUDA trainer on one GPU: an MLP in bf16, raw pointers, a stream of its own. sharded.cu is the same on many.
#include "mlp.cuh"

int main() {
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Gemm gemm;

  float *master[layers], *gradient[layers], *m[layers], *v[layers];
  bf16* weights[layers];
  for (int l = 0; l < layers; ++l) {
    const long elems = weights_per_layer;
    master[l] = allocate<float>(elems), gradient[l] = allocate<float>(elems), weights[l] = allocate<bf16>(elems);
    draw<<<256, 256, 0, stream>>>(master[l], 100 + l, 0.06f, weights_per_layer, weights_per_layer);
    to_bf16<<<256, 256, 0, stream>>>(weights[l], master[l], weights_per_layer);
    m[l] = allocate<float>(elems), v[l] = allocate<float>(elems);
    check(cudaMemsetAsync(m[l], 0, elems * sizeof(float), stream));
    check(cudaMemsetAsync(v[l], 0, elems * sizeof(float), stream));
  }
  const int first = 0, count = rows;
  bf16 *x[layers + 1], *dx[2], *target = allocate<bf16>(rows * width);
  for (bf16*& activations : x) activations = allocate<bf16>(rows * width);
  for (bf16*& gradients : dx) gradients = allocate<bf16>(rows * width);
  draw<<<256, 256, 0, stream>>>(target, 50, 0.5f, rows * width, width);
  float* loss = allocate<float>(1);

  for (int step = 1; step <= steps; ++step) {
    draw<<<256, 256, 0, stream>>>(x[0], step, 1.0f, rows * width, rows * width);
    const bf16 *in = x[0] + first * width, *wanted = target + first * width;
    for (int l = 0; l < layers; ++l) {
      const bf16* y = l == 0 ? in : x[l];
      gemm.run(y, false, weights[l], true, x[l + 1], count, width, width, stream);
      if (l + 1 < layers) relu<<<256, 256, 0, stream>>>(x[l + 1], count * width);
    }
    squared_error<<<1, 1024, 0, stream>>>(loss, dx[layers % 2], x[layers], wanted, count * width, rows * width);
    for (int l = layers; l-- > 0;) {
      const bf16 *y = l == 0 ? in : x[l], *dy = dx[(l + 1) % 2];
      gemm.run(dy, true, y, false, gradient[l], width, width, count, stream);
      gemm.run(dy, false, weights[l], false, dx[l % 2], count, width, width, stream);
      if (l > 0) relu_backward<<<256, 256, 0, stream>>>(dx[l % 2], y, count * width);
    }
    for (int l = 0; l < layers; ++l) {
      adamw<<<256, 256, 0, stream>>>(master[l], weights[l], m[l], v[l], gradient[l], weights_per_layer, step);
    }
    float shown = 0;
    check(cudaMemcpyAsync(&shown, loss, sizeof shown, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    if (step % 8 == 0) std::printf("step %d loss %.6f\n", step, shown);
  }
}
