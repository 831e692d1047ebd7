# How the peer llama-server is built: the same kernels as the installed bindings (requirements/llama-build.cmake),
# without what a benchmark does not ask for. Included by cmake at the end of llama.cpp's own `project()` call.
foreach(part TESTS EXAMPLES APP UI)
  set(LLAMA_BUILD_${part} OFF)
endforeach()
set(LLAMA_BUILD_COMMON ON)
set(LLAMA_BUILD_TOOLS ON)
set(LLAMA_BUILD_SERVER ON)
set(LLAMA_USE_PREBUILT_UI OFF)
set(LLAMA_OPENSSL OFF)
set(LLAMA_BUILD_IS_DEV OFF)
set(BUILD_SHARED_LIBS OFF)
set(GGML_NATIVE ON)

# Many small files that include the same large headers: together they compile several times faster.
cmake_language(DEFER CALL set_target_properties llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
