/* What the processor of this machine can execute, by which `kernels/library.py` chooses a library of kernels.
 *
 * This file is a library of its own, compiled for every processor of its architecture. */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
/* The features of each instruction set are those of the compiler's flags in CMakeLists.txt. __builtin_cpu_supports also
 * checks that the operating system saves the registers of AVX and AVX-512. */
static int64_t has_sse4(void) {
    return __builtin_cpu_supports("sse3") && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1")
        && __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
}
static int64_t has_avx2(void) {
    return has_sse4() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
        && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
static int64_t has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512cd");
}
static int64_t has_avx512bf16(void) { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

/* Return 1 if this processor can execute the kernels for an instruction set, else 0. */
int64_t can_execute(const char *instruction_set) {
    __builtin_cpu_init();
    if (!strcmp(instruction_set, "avx512bf16")) return has_avx512bf16();
    if (!strcmp(instruction_set, "avx512")) return has_avx512();
    if (!strcmp(instruction_set, "avx2")) return has_avx2();
    if (!strcmp(instruction_set, "sse4")) return has_sse4();
    return 0;
}

/* Return 1 if dot products of bfloat16 vectors are faster on this processor than those of float32 vectors, else 0.
 *
 * On Intel's processors they are slower: the instruction processes twice as many numbers as the one for float32, but
 * takes four times as long. */
int64_t has_fast_bfloat16_dot(void) {
    __builtin_cpu_init();
    return has_avx512bf16() && !__builtin_cpu_is("intel");
}
#else
int64_t can_execute(const char *instruction_set) { return !strcmp(instruction_set, "baseline"); }
int64_t has_fast_bfloat16_dot(void) { return 0; }
#endif
