/* A trainer in plain C, sharded: y = W2 tanh(W1 x), fitted to the sine of sums of x by the ranks together. It computes
 * on the host, and takes weights and gives gradients wherever the backend has them.
 * Run: embed_c <ranks>. Every rank takes its part of the batch; the losses do not depend on how many there are. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "pleat_c.h"

enum { inputs = 8, hidden = 48, batch = 48, steps = 60 };

typedef struct {
  double first, last;
} result;

/* The same numbers on every machine. */
static float draw(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / (float)(1u << 24) - 0.5f;
}

static int failed(const char* what, const pleat_error* error) {
  fprintf(stderr, "%s: %s\n", what, error->text);
  return 1;
}

/* Forward of one sample; `h` [hidden] is kept for the backward pass. */
static float predict(const float* w1, const float* w2, const float* x, float* h) {
  float y = 0;
  for (int j = 0; j < hidden; ++j) {
    float sum = 0;
    for (int i = 0; i < inputs; ++i) sum += w1[j * inputs + i] * x[i];
    h[j] = tanhf(sum);
    y += w2[j] * h[j];
  }
  return y;
}

/* What this rank has computed goes where the backend wants it, or is added to what is there. */
static int give(pleat_world* world, float* gradient, int adds, float* mine, int count, pleat_error* error) {
  float before[hidden * inputs];
  if (adds) {
    if (pleat_copy(world, before, gradient, count * sizeof *mine, error)) return 1;
    for (int i = 0; i < count; ++i) mine[i] += before[i];
  }
  return pleat_copy(world, gradient, mine, count * sizeof *mine, error);
}

static int train(pleat_world* world, void* user) {
  static const pleat_param first[] = {{"w1", 2, {hidden, inputs}}}, second[] = {{"w2", 1, {hidden}}};
  static const pleat_unit units[] = {{"first", 1, first}, {"second", 1, second}};
  static const pleat_options options = {pleat_f32, 1, 0.9, 0.95, 1e-8, 0};
  const int rank = pleat_rank(world), count = batch / pleat_size(world);
  pleat_error error;
  pleat_model* model = NULL;
  if (pleat_model_new(world, units, 2, &options, &model, &error)) return failed("model", &error);

  float w1[hidden * inputs], w2[hidden], x[batch][inputs], h[batch][hidden], dy[batch];
  unsigned state = 1;
  for (int i = 0; i < hidden * inputs; ++i) w1[i] = draw(&state);
  for (int i = 0; i < hidden; ++i) w2[i] = draw(&state);
  if (pleat_load(model, 0, 0, w1, &error) || pleat_load(model, 1, 0, w2, &error)) return failed("load", &error);

  for (int step = 0; step < steps; ++step) {
    double loss = 0;
    pleat_step done;
    state = 7; /* one batch, over and over */
    for (int b = 0; b < batch; ++b) {
      for (int i = 0; i < inputs; ++i) x[b][i] = 2 * draw(&state);
    }
    if (pleat_begin(model, &error) || pleat_acquire(model, 0, &error) || pleat_acquire(model, 1, &error) ||
        pleat_copy(world, w1, pleat_weights(model, 0, 0), sizeof w1, &error) ||
        pleat_copy(world, w2, pleat_weights(model, 1, 0), sizeof w2, &error)) {
      return failed("forward", &error);
    }
    for (int b = rank * count; b < (rank + 1) * count; ++b) {
      float target = 0;
      for (int i = 0; i < inputs; ++i) target += x[b][i];
      dy[b] = predict(w1, w2, x[b], h[b]) - sinf(target);
      loss += 0.5 * dy[b] * dy[b];
    }
    if (pleat_release(model, 0, &error) || pleat_release(model, 1, &error)) return failed("forward", &error);

    float g1[hidden * inputs] = {0}, g2[hidden] = {0}, *to1, *to2;
    int adds1, adds2;
    for (int j = 0; j < hidden; ++j) {
      for (int b = rank * count; b < (rank + 1) * count; ++b) {
        const float dh = dy[b] * w2[j] * (1 - h[b][j] * h[b][j]);
        g2[j] += dy[b] * h[b][j];
        for (int i = 0; i < inputs; ++i) g1[j * inputs + i] += dh * x[b][i];
      }
    }
    if (pleat_acquire(model, 1, &error) || pleat_acquire(model, 0, &error) ||
        pleat_gradient(model, 1, 0, &to2, &adds2, &error) || pleat_gradient(model, 0, 0, &to1, &adds1, &error) ||
        give(world, to2, adds2, g2, hidden, &error) || give(world, to1, adds1, g1, hidden * inputs, &error)) {
      return failed("backward", &error);
    }
    for (int u = 2; u-- > 0;) {
      if (pleat_reduce(model, u, &error) || pleat_release(model, u, &error)) return failed("reduce", &error);
    }
    if (pleat_finish(model, loss, count, 0.01, 1.0, &done, &error)) return failed("finish", &error);
    if (rank == 0) {
      result* out = user;
      if (step == 0) out->first = done.loss;
      out->last = done.loss;
    }
  }
  pleat_model_free(model);
  return 0;
}

int main(int argc, char** argv) {
  const int ranks = argc == 2 ? atoi(argv[1]) : 4;
  pleat_error error;
  result one = {0, 0}, many = {0, 0};
  if (ranks < 1 || batch % ranks != 0) {
    fprintf(stderr, "%s ranks: a number that divides %d is needed\n", argc == 2 ? argv[1] : "no", batch);
    return 2;
  }
  if (pleat_run(1, train, &one, &error)) return failed("one rank", &error);
  if (pleat_run(ranks, train, &many, &error)) return failed("ranks", &error);
  if (many.first == 0) return 0; /* a process of another rank than 0 */
  printf("loss %.6f to %.6f on one rank, %.6f on %d\n", one.first, one.last, many.last, ranks);
  return many.last < 0.1 * many.first && fabs(many.last - one.last) < 1e-3 * one.last ? 0 : 1;
}
