// What a checkpoint is of: the parameters of a model under names that no mesh changes, and what each rank holds of
// them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <pleat/checkpoint/error.hpp>
#include <pleat/fsdp/layout.hpp>
#include <pleat/mesh/runtime_mesh.hpp>

namespace pleat::inline v0::checkpoint {

/// A unit as the ranks of a stage hold it.
struct Unit {
  /// Canonical: with the number of its layer in the whole model, the same on every mesh.
  std::string name = {};
  /// Over which ranks of the stage it is sharded.
  Param kind = Param::dense;
  fsdp::UnitLayout layout = {};
  /// Of the masters and of the state of their optimizers.
  DType dtype = DType::f32;
  /// Every rank of the stage holds all of it, such as a selection bias; its layout is of one shard.
  bool replicated = false;
};

/// A tensor that an optimizer keeps for each parameter it updates, laid out by fsdp::update_pieces.
struct StateSpec {
  std::string name;
  fsdp::Optimizer optimizer;
};

/// A model on a mesh; the same value on every rank. Its tensors are called `unit.parameter`, with `.expert` behind it,
/// numbered over all ep ranks, for each expert; a state's begin with `state/`. A parameter that several stages hold
/// (`copies` of fsdp::ParamSpec, under one name) is saved by the first.
struct Model {
  /// The units of each pipeline stage, in the order of the memory that is given for them.
  std::vector<std::vector<Unit>> stages;
  /// Those of pleat::optim; empty to save or load parameters alone.
  std::vector<StateSpec> states = {{"adamw.first", fsdp::Optimizer::adamw},
                                   {"adamw.second", fsdp::Optimizer::adamw},
                                   {"muon.momentum", fsdp::Optimizer::muon}};
};

/// A parameter's name in a checkpoint, and that of one expert's tensor of it; `global_expert` counts over all ep ranks.
inline std::string parameter_name(const Unit& unit, int param) {
  return unit.name + '.' + unit.layout.place(param).spec.name;
}
inline std::string tensor_name(const Unit& unit, int param, std::int64_t global_expert) {
  std::string name = parameter_name(unit, param);
  if (unit.layout.experts_local != 0) name += '.' + std::to_string(global_expert);
  return name;
}
/// How many ep ranks have experts of their own in the unit.
inline int ep_ranks(const Unit& unit, const RuntimeMesh& mesh) {
  return unit.kind == Param::expert && !unit.replicated ? mesh.ep : 1;
}
inline std::string state_name(const StateSpec& state, const std::string& tensor) {
  return state.name + '/' + tensor;
}

/// The arrays of a unit on a rank: masters, then each state of the model.
inline constexpr int master_array = 0;

/// A contiguous part of a tensor, and where a rank holds it.
struct HeldPiece {
  std::string tensor;
  std::vector<std::int64_t> shape;  // of the whole tensor
  DType dtype = DType::f32;
  /// Elements [begin, begin + elems) of the tensor, row-major.
  std::int64_t begin = 0, elems = 0;
  /// Unit of the stage, parameter and array of the unit, and element of the array.
  int unit = 0, param = 0, array = 0;
  std::int64_t at = 0;
};

/// The stage that saves each parameter, by its name: the first that holds it.
/// Errors: checkpoint_error K08 when the model is not one of the mesh, or a name means two things.
inline std::map<std::string, int> saving_stages(const Model& model, const RuntimeMesh& mesh) {
  if (static_cast<int>(model.stages.size()) != mesh.pp) {
    fail<checkpoint_error>("pleat[K08]: a model of ", model.stages.size(), " stages on the mesh ", mesh,
                           "; give the units of each of its ", mesh.pp, " stages");
  }
  std::map<std::string, int> savers;
  std::map<std::string, const Unit*> units;
  for (int stage = 0; stage < mesh.pp; ++stage) {
    for (const Unit& unit : model.stages[static_cast<std::size_t>(stage)]) {
      const int shards = unit.replicated ? 1 : shard_group_shape(mesh, unit.kind).size();
      if (unit.layout.shard_count() != shards) {
        fail<checkpoint_error>("pleat[K08]: unit ", unit.name, " is laid out for ", unit.layout.shard_count(),
                               " ranks, and the mesh ", mesh, " shards it over ", shards);
      }
      if (ep_ranks(unit, mesh) > 1 && unit.layout.experts_local == 0) {
        fail<checkpoint_error>("pleat[K08]: unit ", unit.name, " differs among the ", mesh.ep,
                               " ep ranks and has no experts that tell its parts; set experts_local");
      }
      for (int p = 0; p < static_cast<int>(unit.layout.params.size()); ++p) {
        if (unit.layout.place(p).spec.tied_to >= 0) continue;
        const std::string name = parameter_name(unit, p);
        const auto [saver, is_new] = savers.emplace(name, stage);
        const auto same_shape = [&](const Unit& other) {
          for (const fsdp::ParamPlace& place : other.layout.params) {
            if (place.spec.name == unit.layout.place(p).spec.name) {
              return place.spec.shape == unit.layout.place(p).spec.shape && other.dtype == unit.dtype &&
                     other.layout.experts_local == unit.layout.experts_local;
            }
          }
          return false;
        };
        if (is_new) {
          units.emplace(name, &unit);
        } else if (saver->second == stage || !same_shape(*units[name])) {
          fail<checkpoint_error>("pleat[K08]: two parameters of the model are called ", name,
                                 "; names are unique, but for one that several stages hold alike");
        }
      }
    }
  }
  return savers;
}

/// Calls f(tensor name, unit, param) for every tensor of the model that a checkpoint holds, those of all ranks; a
/// tensor that several stages hold comes once for each. Parameters without elements have no tensor.
template <class F>
void for_each_tensor(const Model& model, const RuntimeMesh& mesh, F f) {
  for (const std::vector<Unit>& stage : model.stages) {
    for (const Unit& unit : stage) {
      for (int p = 0; p < static_cast<int>(unit.layout.params.size()); ++p) {
        const fsdp::ParamPlace& place = unit.layout.place(p);
        if (place.spec.tied_to >= 0 || place.elems == 0) continue;
        const std::int64_t tensors =
            unit.layout.experts_local == 0 ? 1 : unit.layout.experts_local * ep_ranks(unit, mesh);
        for (std::int64_t expert = 0; expert < tensors; ++expert) {
          const std::string name = tensor_name(unit, p, expert);
          f(name, unit, p);
          if (place.spec.frozen) continue;
          for (const StateSpec& state : model.states) {
            if (state.optimizer == place.spec.optimizer) f(state_name(state, name), unit, p);
          }
        }
      }
    }
  }
}

/// What `rank` holds, in the order of its units and arrays. Pure.
inline std::vector<HeldPiece> held_pieces(const Model& model, const RuntimeMesh& mesh, int rank) {
  const Coordinate at = coordinate(mesh, rank);
  const std::vector<Unit>& units = model.stages[static_cast<std::size_t>(at.pp)];
  std::vector<HeldPiece> held;
  for (int u = 0; u < static_cast<int>(units.size()); ++u) {
    const Unit& unit = units[static_cast<std::size_t>(u)];
    const int shard = unit.replicated ? 0 : shard_group_shape(mesh, unit.kind).index(rank);
    const std::vector<fsdp::Piece> pieces = unit.layout.pieces(shard);
    const std::int64_t first_expert = ep_ranks(unit, mesh) == 1 ? 0 : at.ep * unit.layout.experts_local;
    const auto add = [&](const fsdp::Piece& piece, int array, std::int64_t where) {
      const fsdp::ParamPlace& place = unit.layout.place(piece.param);
      const std::int64_t local_expert = piece.param_begin / place.elems;
      std::string name = tensor_name(unit, piece.param, first_expert + local_expert);
      if (array != master_array) name = state_name(model.states[static_cast<std::size_t>(array - 1)], name);
      held.push_back({std::move(name), place.spec.shape, unit.dtype, piece.param_begin - local_expert * place.elems,
                      piece.elems, u, piece.param, array, where});
    };
    for (const fsdp::Piece& piece : pieces) add(piece, master_array, piece.shard_begin);
    const std::vector<fsdp::UpdatePiece> updated = fsdp::update_pieces(unit.layout, pieces, 1);
    for (int s = 0; s < static_cast<int>(model.states.size()); ++s) {
      auto update = updated.begin();  // one for each trainable piece, in order
      for (const fsdp::Piece& piece : pieces) {
        if (unit.layout.place(piece.param).spec.frozen) continue;
        if (update->optimizer == model.states[static_cast<std::size_t>(s)].optimizer)
          add(piece, 1 + s, update->state_begin);
        ++update;
      }
    }
  }
  return held;
}

}  // namespace pleat::inline v0::checkpoint
