# The install tree: headers, and a CMake package that depends on neither the architecture nor what this machine has.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
set(package_dir ${CMAKE_INSTALL_DATADIR}/cmake/pleat)

install(TARGETS pleat EXPORT pleatTargets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT pleatTargets NAMESPACE pleat:: DESTINATION ${package_dir})
install(DIRECTORY include/pleat DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES cmake/pleatConfig.cmake cmake/PleatComponents.cmake cmake/FindNCCL.cmake cmake/FindCUDNN.cmake DESTINATION ${package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# Before 1.0 a minor version may break what the one before it promised.
write_basic_package_version_file(pleatConfigVersion.cmake COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/pleatConfigVersion.cmake DESTINATION ${package_dir})
