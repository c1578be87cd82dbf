// expect: pleat[A17]: an expander needs expand
// values: expand_backward
#include <pleat/attention.hpp>
#include <pleat/comm.hpp>

struct Expander {
  using Tensor = pleat::TensorRef;
  void expand(const Tensor&, const Tensor&, const Tensor&, pleat::HostStream) {}
#ifdef PLEAT_FIXED
  void expand_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, pleat::HostStream) {}
#endif
};

using Ring = pleat::ring::RingAttention<pleat::HostExecutor, pleat::ThreadComm, pleat::HostArena>;
void attend(Ring& ring, Expander& expander, const pleat::TensorRef& t, pleat::ring::Saved& saved) {
  ring.forward_latent({}, expander, t, t, t, saved);
}
