// The shim behind pleat_c.h, once for every backend. A backend defines, in the namespace `backend`: Comm, Arena and
// run().
#pragma once

#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "pleat_c.h"

struct pleat_world {
  backend::Comm* comm;
  backend::Streams streams = backend::Streams();
};

struct pleat_model {
  using Model = pleat::fsdp::ShardedModel<backend::Comm, backend::Arena>;
  using Executor = Model::executor_type;
  using Buffer = pleat::buffer_for<backend::Comm::device_type>;
  using View = pleat::fsdp::UnitView;

  pleat_model(pleat_world* of, const std::vector<pleat::fsdp::UnitSpec>& units, const pleat_options& options)
      : world(of),
        model(*of->comm, units, of->streams.shard(),
              {.compute = options.compute == pleat_bf16 ? pleat::DType::bf16 : pleat::DType::f32,
               .replicas = options.replicas}),
        norm_plan(pleat::optim::plan_step_norm(of->comm->size())),
        adamw_plan(pleat::optim::plan_adamw(model.plan().layouts, model.plan().master,
                                            {.beta1 = options.beta1,
                                             .beta2 = options.beta2,
                                             .eps = options.eps,
                                             .weight_decay = options.weight_decay})),
        norm_memory(norm_plan.footprint().persistent),
        adamw_memory(adamw_plan.footprint().persistent),
        norm(bind(norm_plan, Executor(), pleat::GroupComm<backend::Comm>(*of->comm), memory(norm_memory), stream())),
        adamw(bind(adamw_plan, Executor(), memory(adamw_memory), stream())),
        views(units.size()) {}

  static pleat::Memory<backend::Arena> memory(Buffer& buffer) { return {.persistent = buffer.block()}; }
  backend::Comm::stream_type stream() const { return world->streams.shard().compute; }
  auto& op() { return model.sharder(); }

  pleat_world* world;
  Model model;
  pleat::optim::StepNormPlan norm_plan;
  pleat::optim::AdamwPlan adamw_plan;
  Buffer norm_memory, adamw_memory;
  pleat::optim::StepNorm<Executor, backend::Comm> norm;
  pleat::optim::Adamw<Executor> adamw;
  std::vector<std::unique_ptr<View>> views;  // [unit], of those that are acquired
};

namespace {

template <class F>
int guarded(pleat_error* error, F&& f) {
  std::string text = "an exception that is no std::exception";
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    text = e.what();
  } catch (...) {
  }
  if (error != nullptr) {
    std::strncpy(error->text, text.c_str(), sizeof error->text - 1);
    error->text[sizeof error->text - 1] = 0;
  }
  return 1;
}

}  // namespace

extern "C" {

int pleat_run(int ranks, int (*rank)(pleat_world*, void*), void* user, pleat_error* error) {
  return guarded(error, [&] {
    backend::run(ranks, [&](backend::Comm& comm) {
      pleat_world world = {.comm = &comm};
      if (rank(&world, user) != 0) throw std::runtime_error("the rank's function returned an error");
    });
  });
}
int pleat_rank(const pleat_world* world) {
  return world->comm->rank();
}
int pleat_size(const pleat_world* world) {
  return world->comm->size();
}
void* pleat_stream(const pleat_world* world) {
  return world->streams.raw();
}
int pleat_copy(pleat_world* world, void* out, const void* in, size_t bytes, pleat_error* error) {
  return guarded(error, [&] {
    const auto s = world->streams.shard().compute;
    pleat_model::Executor().copy(out, in, bytes, s);
    world->comm->wait(s);
  });
}

int pleat_model_new(pleat_world* world, const pleat_unit* units, int unit_count, const pleat_options* options,
                    pleat_model** model, pleat_error* error) {
  return guarded(error, [&] {
    std::vector<pleat::fsdp::UnitSpec> specs;
    for (int u = 0; u < unit_count; ++u) {
      pleat::fsdp::UnitSpec spec = {.name = units[u].name};
      for (int p = 0; p < units[u].param_count; ++p) {
        const pleat_param& param = units[u].params[p];
        if (param.axes < 0 || param.axes > pleat_max_axes) {
          throw std::invalid_argument(std::string(param.name) + " has " + std::to_string(param.axes) +
                                      " axes; 0 to 4 are valid");
        }
        spec.params.push_back({.name = param.name, .shape = {param.shape, param.shape + param.axes}});
      }
      specs.push_back(std::move(spec));
    }
    *model = new pleat_model(world, specs, *options);
  });
}
void pleat_model_free(pleat_model* model) {
  delete model;
}

int pleat_load(pleat_model* model, int unit, int param, const float* values, pleat_error* error) {
  return guarded(error, [&] { model->model.load(unit, param, values); });
}
int pleat_begin(pleat_model* model, pleat_error* error) {
  return guarded(error, [&] { model->model.begin_step(); });
}
int pleat_acquire(pleat_model* model, int unit, pleat_error* error) {
  return guarded(error, [&] {
    auto view = std::make_unique<pleat_model::View>(model->op().acquire(unit, model->world->streams.shard()));
    model->views[static_cast<std::size_t>(unit)] = std::move(view);
  });
}
const void* pleat_weights(const pleat_model* model, int unit, int param) {
  return (*model->views[static_cast<std::size_t>(unit)])[param].data();
}
int pleat_gradient(pleat_model* model, int unit, int param, float** gradient, int* accumulates, pleat_error* error) {
  return guarded(error, [&] {
    const auto target = model->op().gradient(unit, model->world->streams.shard()).write(param);
    *gradient = static_cast<float*>(target.tensor.data());
    *accumulates = target.accumulate;
  });
}
int pleat_reduce(pleat_model* model, int unit, pleat_error* error) {
  return guarded(error, [&] { model->op().reduce(unit, model->world->streams.shard()); });
}
int pleat_release(pleat_model* model, int unit, pleat_error* error) {
  return guarded(error, [&] {
    model->op().release(unit, model->world->streams.shard());
    model->views[static_cast<std::size_t>(unit)].reset();
  });
}
int pleat_finish(pleat_model* model, double loss_sum, double tokens, double learning_rate, double max_norm,
                 pleat_step* step, pleat_error* error) {
  return guarded(error, [&] {
    const pleat_model::Executor executor;
    const auto s = model->stream();
    const auto streams = model->world->streams.shard();
    const pleat::optim::StepSums sums = {.loss = loss_sum, .tokens = tokens};
    pleat::optim::StepResult result;
    model->op().finish_gradients(streams);
    executor.copy(model->norm.sums(), &sums, sizeof sums, s);
    auto* const in_device = model->norm.run(model->op().shards(), max_norm, s);
    model->adamw.step(model->op().shards(), in_device, learning_rate, s);
    model->op().weights_changed(streams);
    executor.copy(&result, in_device, sizeof result, s);
    model->world->comm->wait(s);
    pleat::optim::check(result);
    *step = {result.loss, result.norm, result.tokens, static_cast<int>(result.applied)};
  });
}

}  // extern "C"
