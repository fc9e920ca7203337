/* Copies of rows out of memory that another process writes to. See copies.py.
 *
 * A slot's generation is raised before another chunk is written to its row. So what was copied is
 * right if the generation was the wanted one before the first byte was read, and after the last.
 */
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

/* For each item, results[i] is 1 if into[i] holds the whole row of slots[i] as it was while the slot
 * had the generation wanted[i], else 0. Slots are there: the caller has looked. */
EXPORTED void kvt_copy_rows(uint32_t count, const uint64_t *slots, const uint64_t *wanted,
                            const uint8_t *rows, const uint64_t *generations, uint64_t row_bytes,
                            uint8_t *const *into, uint8_t *results)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t *generation = &generations[slots[i]];
        results[i] = 0;
        if (__atomic_load_n(generation, __ATOMIC_ACQUIRE) != wanted[i])
            continue;
        memcpy(into[i], rows + slots[i] * row_bytes, row_bytes);
        /* No byte of the row is read behind this. */
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        results[i] = __atomic_load_n(generation, __ATOMIC_RELAXED) == wanted[i];
    }
}
