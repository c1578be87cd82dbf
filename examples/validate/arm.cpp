// Running arms.
#include "arm.hpp"

#include "host/train.hpp"
#include "unfolded_mesh.hpp"

namespace validate {

Outcome run_arm(const Arm& arm, const std::string& folder, int first_step) {
  train_moe::Options o = arm.options;
  o.quiet = true;
  o.json = folder + "/" + arm.name + ".json";
  train_moe::Run run(o);
  const auto train = o.dtype == pleat::DType::f64 ? train_moe::train_f64 : train_moe::train_f32;
  if (arm.unfolded) {
    const UnfoldedMesh mesh = UnfoldedMesh::like(o.mesh);
    pleat::run_ranks(mesh.world_size(),
                     [&](pleat::ThreadComm& world) {
                       UnfoldedComms<pleat::ThreadComm> comms(mesh, world);
                       train(comms.groups(), run);
                     },
                     {.deadline = std::chrono::minutes(30)});
  } else {
    train_moe::run_all_ranks<train_moe::HostBackend>(run, train);
  }
  run.json.close();
  return {read_log(o.json, first_step, o.steps), run.differences.loss, run.differences.gradients, run.differences.norm};
}

}  // namespace validate
