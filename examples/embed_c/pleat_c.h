/* The few calls that a trainer in plain C needs from pleat: a world of ranks, sharded parameters, AdamW on the shards.
 *
 * Every call that returns int gives 0, or 1 with the reason in `error`, which begins with pleat's id. A rank whose call
 * failed returns 1 from its function; the others then end with an error that names it. Pointers to weights and
 * gradients are memory of the backend: host memory in pleat_c.cpp, memory of the rank's GPU in pleat_c.cu. */
#ifndef PLEAT_C_H
#define PLEAT_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  char text[1024];
} pleat_error;
typedef struct pleat_world pleat_world;
typedef struct pleat_model pleat_model;

/* Runs `rank(world, user)` as `ranks` ranks: threads on the host; with NCCL this process is one rank of the launcher's
 * job, and `ranks` must be its size, or 1: then the process runs alone, on its current GPU. */
int pleat_run(int ranks, int (*rank)(pleat_world*, void* user), void* user, pleat_error* error);
int pleat_rank(const pleat_world* world);
int pleat_size(const pleat_world* world);
/* The stream of the backend on which the rank's work goes (a cudaStream_t), or a null pointer on the host. */
void* pleat_stream(const pleat_world* world);
/* Copies between host memory and that of the backend, either way, after the rank's work so far; waits for it. */
int pleat_copy(pleat_world* world, void* out, const void* in, size_t bytes, pleat_error* error);

enum { pleat_max_axes = 4, pleat_f32 = 0, pleat_bf16 = 1 };
typedef struct {
  const char* name;
  int axes;
  int64_t shape[pleat_max_axes];
} pleat_param;
typedef struct {
  const char* name;
  int param_count;
  const pleat_param* params;
} pleat_unit;
typedef struct {
  int compute; /* pleat_f32 or pleat_bf16: what weights are gathered in; masters and gradients are f32 */
  int replicas;
  double beta1, beta2, eps, weight_decay;
} pleat_options;

/* Collective: parameters, gradients and moments of `units`, sharded over the world. The caller frees the model before
 * its rank's function ends. */
int pleat_model_new(pleat_world* world, const pleat_unit* units, int unit_count, const pleat_options* options,
                    pleat_model** model, pleat_error* error);
void pleat_model_free(pleat_model* model);
/* The full parameter, f32, the same on every rank. */
int pleat_load(pleat_model* model, int unit, int param, const float* values, pleat_error* error);

/* A step: begin; acquire and release the units 0, 1, ... for the forward pass; acquire, gradients, reduce and release
 * them in reverse order for the backward pass; finish. */
int pleat_begin(pleat_model* model, pleat_error* error);
int pleat_acquire(pleat_model* model, int unit, pleat_error* error);
const void* pleat_weights(const pleat_model* model, int unit, int param);
/* Where the kernel writes the gradient (`*accumulates` 0) or adds to it (1). */
int pleat_gradient(pleat_model* model, int unit, int param, float** gradient, int* accumulates, pleat_error* error);
int pleat_reduce(pleat_model* model, int unit, pleat_error* error);
int pleat_release(pleat_model* model, int unit, pleat_error* error);

typedef struct {
  double loss, norm, tokens; /* means over the global batch, and its size */
  int applied;               /* 0 when the step was left out: the norm was not finite */
} pleat_step;
/* Sums losses, tokens and gradients of all ranks, clips to `max_norm` (0: not) and updates the shards; waits for it. */
int pleat_finish(pleat_model* model, double loss_sum, double tokens, double learning_rate, double max_norm,
                 pleat_step* step, pleat_error* error);

#ifdef __cplusplus
}
#endif

#endif
