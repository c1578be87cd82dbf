# An overlay port of this checkout: vcpkg install pleat --overlay-ports=<pleat>/cmake/vcpkg
set(VCPKG_BUILD_TYPE release) # headers alone
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DPLEAT_BUILD_TESTS=OFF -DPLEAT_BUILD_EXAMPLES=OFF -DPLEAT_BUILD_BENCH=OFF -DPLEAT_INSTALL=ON -DPLEAT_ENABLE_CUDA=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/pleat)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/lib")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
