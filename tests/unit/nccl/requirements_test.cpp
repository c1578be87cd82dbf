// What pleat asks of NCCL: the library of its header (C22), and no NVLS (C23).
#include <string>

#include <pleat/nccl/requirements.hpp>

#include <doctest/doctest.h>

namespace {

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const pleat::nccl_error& e) {
    return e.what();
  }
  return "no error";
}

TEST_CASE("[C22]: header and library differ") {
  CHECK(error_of([] { pleat::check_nccl_versions({22809}, {22809}); }) == "no error");
  const std::string text = error_of([] { pleat::check_nccl_versions({22809}, {22803}); });
  CHECK(text.starts_with("pleat[C22]: "));
  CHECK(text.find("header of NCCL 2.28.9") != std::string::npos);
  CHECK(text.find("library of NCCL 2.28.3") != std::string::npos);
}
TEST_CASE("[C23]: NVLS is not off") {
  CHECK(error_of([] { pleat::check_nvls_is_off("0"); }) == "no error");
  CHECK(error_of([] { pleat::check_nvls_is_off("1"); }).starts_with("pleat[C23]: NCCL_NVLS_ENABLE is 1"));
  CHECK(error_of([] { pleat::check_nvls_is_off(nullptr); }).starts_with("pleat[C23]: NCCL_NVLS_ENABLE is not set"));
}

}  // namespace
