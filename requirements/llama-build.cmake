# How the set-up builds libllama. CMake includes this file at the end of the bindings' own `project()` call
# (-DCMAKE_PROJECT_llama_cpp_INCLUDE=<this file>): their sources stay untouched.
#
# The bindings force some of these into the cache. Plain variables win over them, because a project that
# asks for CMake 3.21 or newer has policy CMP0126: `set(... CACHE ... FORCE)` leaves a plain variable alone.

# headrace calls libllama's and ggml's C functions only. Everything below is used by llama.cpp's command-line
# programs or by multimodal input, and takes most of a default build's time.
set(LLAMA_BUILD_COMMON OFF)
set(LLAVA_BUILD OFF)
foreach(part TESTS TOOLS EXAMPLES SERVER APP UI)
  set(LLAMA_BUILD_${part} OFF)
endforeach()

# Used by the parts left out; off, they cannot pull in OpenSSL headers that a machine may lack.
set(LLAMA_OPENSSL OFF)
set(LLAMA_SUBPROCESS OFF)

# Use every instruction set of this machine's CPU (AVX2, AVX-512, NEON): without it, inference is many times
# slower. The result runs on this kind of CPU only, so the set-up never takes it from a shared cache. To build
# for other machines, pass -DHEADRACE_PORTABLE=ON and the wanted GGML_* switches in CMAKE_ARGS.
if(NOT HEADRACE_PORTABLE)
  set(GGML_NATIVE ON)
endif()

# libllama is some 180 small C++ files (one per architecture) that include the same large headers. Twelve
# at a time they compile several times faster. Deferred, since the target does not exist yet.
cmake_language(DEFER CALL set_target_properties llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
