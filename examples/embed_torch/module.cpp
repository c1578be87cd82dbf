// The Python module.
#include <torch/extension.h>

#include "operations.hpp"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<embed::Ring>(m, "Ring")
      .def(py::init<std::int64_t, std::int64_t, std::int64_t, int, int, int, int, at::ScalarType, bool>(),
           py::arg("nccl_comm"), py::arg("batch"), py::arg("tokens"), py::arg("q_heads"), py::arg("kv_heads"),
           py::arg("qk_dim"), py::arg("v_dim"), py::arg("dtype"), py::arg("causal") = true)
      .def("positions", &embed::Ring::positions)
      .def("forward", &embed::Ring::forward)
      .def("backward", &embed::Ring::backward);
  py::class_<embed::Experts::Call>(m, "Call");
  py::class_<embed::Experts>(m, "Experts")
      .def(py::init<std::int64_t, std::int64_t, std::int64_t, int, int, at::ScalarType>(), py::arg("nccl_comm"),
           py::arg("max_tokens"), py::arg("hidden"), py::arg("experts"), py::arg("k"), py::arg("dtype"))
      .def("dispatch", &embed::Experts::dispatch)
      .def("combine", &embed::Experts::combine)
      .def("combine_backward", &embed::Experts::combine_backward)
      .def("dispatch_backward", &embed::Experts::dispatch_backward);
}
