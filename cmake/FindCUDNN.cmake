# Finds cuDNN 9 and NVIDIA's header-only front end of it, and makes one target of both: CUDNN::cudnn.
# Versions are read from the text of headers, so nothing is compiled or run. Hints: CUDNN_ROOT, cudnn_frontend_ROOT and
# the CUDA toolkit; the packages of Python (nvidia-cudnn-cu13, nvidia-cudnn-frontend) will do.
find_package(CUDAToolkit QUIET)
find_path(CUDNN_INCLUDE_DIR cudnn_version.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 NAMES_PER_DIR HINTS ${CUDAToolkit_LIBRARY_DIR}) # Python's package has the second alone
find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ENV cudnn_frontend_ROOT "${cudnn_frontend_ROOT}" PATH_SUFFIXES include)
mark_as_advanced(CUDNN_INCLUDE_DIR CUDNN_LIBRARY CUDNN_FRONTEND_INCLUDE_DIR)

if(CUDNN_INCLUDE_DIR)
  file(STRINGS "${CUDNN_INCLUDE_DIR}/cudnn_version.h" CUDNN_VERSION REGEX "^#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) +[0-9]+")
  list(TRANSFORM CUDNN_VERSION REPLACE "^#define CUDNN_[A-Z]+ +([0-9]+).*$" "\\1")
  list(JOIN CUDNN_VERSION "." CUDNN_VERSION)
endif()
if(CUDNN_FRONTEND_INCLUDE_DIR)
  file(STRINGS "${CUDNN_FRONTEND_INCLUDE_DIR}/cudnn_frontend_version.h" CUDNN_FRONTEND_VERSION
       REGEX "^#define CUDNN_FRONTEND_(MAJOR|MINOR|PATCH)_VERSION +[0-9]+")
  list(TRANSFORM CUDNN_FRONTEND_VERSION REPLACE "^#define CUDNN_[A-Z_]+ +([0-9]+).*$" "\\1")
  list(JOIN CUDNN_FRONTEND_VERSION "." CUDNN_FRONTEND_VERSION)
  if(CUDNN_FRONTEND_VERSION VERSION_LESS 1.32) # the oldest that was tried
    set(CUDNN_FRONTEND_INCLUDE_DIR CUDNN_FRONTEND_INCLUDE_DIR-NOTFOUND)
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUDNN REQUIRED_VARS CUDNN_LIBRARY CUDNN_INCLUDE_DIR CUDNN_FRONTEND_INCLUDE_DIR
                                  VERSION_VAR CUDNN_VERSION)

if(CUDNN_FOUND AND NOT TARGET CUDNN::cudnn)
  add_library(CUDNN::cudnn UNKNOWN IMPORTED)
  set_target_properties(CUDNN::cudnn PROPERTIES IMPORTED_LOCATION "${CUDNN_LIBRARY}"
                                                INTERFACE_INCLUDE_DIRECTORIES "${CUDNN_INCLUDE_DIR};${CUDNN_FRONTEND_INCLUDE_DIR}"
                                                INTERFACE_LINK_LIBRARIES "CUDA::nvrtc") # the front end compiles with it
endif()
