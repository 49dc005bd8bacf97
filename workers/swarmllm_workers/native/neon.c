/* Whether the processor has dot products of bytes, which a program may know only while it runs. */
#include "neon.h"

#if defined(__aarch64__) && defined(__GNUC__)
#ifdef __linux__
#include <sys/auxv.h>

enum { HAS_DOT = 1 << 20 }; /* HWCAP_ASIMDDP */

bool swarmllm_has_dot(void) { return (getauxval(AT_HWCAP) & HAS_DOT) != 0; }
#elif defined(__ARM_FEATURE_DOTPROD)
bool swarmllm_has_dot(void) { return true; }
#else
bool swarmllm_has_dot(void) { return false; }
#endif
#else
typedef int swarmllm_no_neon;
#endif
