/* Work that several threads have a part in, each taking what is left until nothing is. */
#include <stdint.h>

typedef struct {
    int64_t (*function)(const void *work); /* below 0 where memory is short */
    const void *work;
    int64_t parts, failed; /* parts: how many may still come */
} Parts;

void take_part(Parts *all) {
    int64_t left = __atomic_sub_fetch(&all->parts, 1, __ATOMIC_RELAXED);
    if (left >= 0 && all->function(all->work) < 0) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
}
