// expect: pleat[T10]: a bind on this device needs a stream: pass the one that the calls compute on
// values: Device
#include <pleat/core/host/executor.hpp>
#include <pleat/core/streams.hpp>

#ifdef PLEAT_FIXED
using DeviceStream = pleat::HostStream;
#else
struct DeviceStream {
  int queue = 0;
};
#endif

void bind(DeviceStream s = pleat::only_stream<DeviceStream>());
void f() {
  bind();
}
