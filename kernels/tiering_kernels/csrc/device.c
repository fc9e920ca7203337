/* What a device's driver calls, and what of its calls would be too many for Python.
 *
 * No header of any driver is needed: its functions come as addresses. devicecalls.py has the
 * contracts.
 */
#include "native.h"

#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

/* devicecalls.py has the same fields. */
struct cell {
    int64_t descriptor;
    int64_t ended_ns;
};

/* A host function: called by the driver, on a thread of its own, which must not wait. The
 * descriptor is an eventfd that never blocks; the time comes first, so who was woken finds it. */
EXPORTED void kvt_signal(void *where)
{
    struct cell *cell = where;
    int64_t descriptor = cell->descriptor;
    struct timespec now;
    uint64_t one = 1;

    clock_gettime(CLOCK_MONOTONIC, &now);
    /* From here on the cell may be used again. */
    __atomic_store_n(&cell->ended_ns, now.tv_sec * 1000000000LL + now.tv_nsec, __ATOMIC_RELEASE);
    /* A full counter rings already, and nobody could be told of another failure. */
    ssize_t written = write((int)descriptor, &one, sizeof one);
    (void)written;
}

typedef int copy_function(uint64_t target, uint64_t source, size_t bytes, void *stream);

/* `copy` for each of `count`, until one fails: its code, and its number in `failed`. */
EXPORTED int kvt_copy_loop(copy_function *copy, const uint64_t *targets, const uint64_t *sources,
                           const uint64_t *sizes, uint64_t count, void *stream, uint64_t *failed)
{
    for (uint64_t at = 0; at < count; at++) {
        int code = copy(targets[at], sources[at], sizes[at], stream);
        if (code != 0) {
            *failed = at;
            return code;
        }
    }
    return 0;
}
