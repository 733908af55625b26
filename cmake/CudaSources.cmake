# The sources of the CUDA half.
#
#   spectrain_cuda_sources(<result>)
#
# sets a variable to those of csrc/kernels/cuda, and one for each unit of csrc/kernels/operations.h, which nvcc compiles in
# parallel.

function(spectrain_cuda_sources result)
  set(csrc ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../csrc)
  file(GLOB sources CONFIGURE_DEPENDS ${csrc}/kernels/cuda/*.cu ${csrc}/kernels/cuda/*.cpp)
  list(FILTER sources EXCLUDE REGEX stub.cpp)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${csrc}/kernels/operations.h)
  file(READ ${csrc}/kernels/operations.h operations)
  string(REGEX MATCH "SPECTRAIN_UNITS\\(X\\)([^#]*)" list "${operations}")
  string(REGEX MATCHALL "X\\([a-z_0-9]+\\)" units "${CMAKE_MATCH_1}")
  foreach(unit IN LISTS units)
    string(REGEX REPLACE "X\\((.*)\\)" "\\1" unit "${unit}")
    set(source ${CMAKE_CURRENT_BINARY_DIR}/cuda/${unit}.cu)
    file(CONFIGURE OUTPUT ${source} CONTENT "#define SPECTRAIN_UNIT ${unit}\n#include \"kernels/cuda/driver.cuh\"\n")
    list(APPEND sources ${source})
  endforeach()
  set(${result} ${sources} PARENT_SCOPE)
endfunction()
