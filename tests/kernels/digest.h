/* What drivers share: one number for all bytes that were computed, to compare processors by, and
   how many of its shapes a driver leaves out where the processor is slow. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t digest = 14695981039346656037u; /* FNV-1a */

static void digest_bytes(const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        digest = (digest ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
}

/* True for every n-th call, where n is the program's argument; without one always. */
static inline int is_chosen(char **arguments) {
    static int num_calls;
    return num_calls++ % (arguments[1] == NULL ? 1 : atoi(arguments[1])) == 0;
}

static void print_digest(void) { printf("%016llx\n", (unsigned long long)digest); }
