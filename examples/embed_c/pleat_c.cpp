// pleat_c.h on the host: ranks are threads.
#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/optim.hpp>

namespace backend {
using Comm = pleat::ThreadComm;
using Arena = pleat::HostArena;
struct Streams {
  pleat::fsdp::ShardStreams<pleat::HostStream> shard() const { return {}; }
  void* raw() const { return nullptr; }
};
template <class F>
void run(int ranks, F&& f) {
  pleat::run_ranks(ranks, f);
}
}  // namespace backend

#include "shim.hpp"
