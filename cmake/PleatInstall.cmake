# The install tree: headers, a CMake package and a pkg-config file; nothing depends on the architecture or on what this
# machine has, and the tree can be moved.
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

set(pkgconfig_dir ${CMAKE_INSTALL_DATADIR}/pkgconfig)
# Found from where the file lies, but for what was given as an absolute path.
set(pc_prefix ${CMAKE_INSTALL_PREFIX})
if(NOT IS_ABSOLUTE "${pkgconfig_dir}")
  string(REGEX REPLACE "[^/]+" ".." up_to_prefix "${pkgconfig_dir}")
  set(pc_prefix "\${pcfiledir}/${up_to_prefix}")
endif()
set(pc_includedir "\${prefix}")
cmake_path(APPEND pc_includedir "${CMAKE_INSTALL_INCLUDEDIR}")
configure_file(cmake/pleat.pc.in pleat.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/pleat.pc DESTINATION ${pkgconfig_dir})

# All of the host part in one header, for projects that want to copy a file: `cmake --build <dir> --target pleat_single_header`.
find_package(Python3 QUIET COMPONENTS Interpreter)
if(Python3_FOUND)
  add_custom_target(pleat_single_header
    COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/cmake/amalgamate.py ${PROJECT_SOURCE_DIR}/include pleat/pleat.hpp
            ${PROJECT_BINARY_DIR}/single_header/pleat.hpp
    COMMENT "single_header/pleat.hpp")
endif()

# Build trees can be used in place: find_package(pleat) with pleat_DIR or CMAKE_PREFIX_PATH at this folder.
export(EXPORT pleatTargets NAMESPACE pleat:: FILE pleatTargets.cmake)
configure_file(cmake/pleatConfig.cmake pleatConfig.cmake COPYONLY)
configure_file(cmake/PleatComponents.cmake PleatComponents.cmake COPYONLY)
configure_file(cmake/FindNCCL.cmake FindNCCL.cmake COPYONLY)
configure_file(cmake/FindCUDNN.cmake FindCUDNN.cmake COPYONLY)
