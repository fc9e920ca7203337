/* io_uring by its system calls: a ring belongs to the thread that opened it.
 *
 * While something is under way the kernel may touch its memory, so ring_enter waits, whatever the
 * kernel answers: a thread that hangs is better than one that gives memory away too early.
 */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>

#if !defined(KVT_WITHOUT_URING) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif
#endif

/* What came with Linux 5.6: asking which operations there are. */
#if defined(IORING_FEAT_CUR_PERSONALITY) && defined(__NR_io_uring_setup)

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

/* What costs fewer interrupts first; kernels before 6.1 and 5.19 refuse the first and second. */
static const unsigned SETUPS[] = {
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
    IORING_SETUP_COOP_TASKRUN,
    0,
};

static int map_ring(struct ring *ring, const struct io_uring_params *params)
{
    size_t sq_bytes = params->sq_off.array + params->sq_entries * sizeof(unsigned);
    size_t cq_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    ring->map_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->sqes_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    ring->map = mmap(NULL, ring->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                     ring->fd, IORING_OFF_SQ_RING);
    if (ring->map == MAP_FAILED)
        return -errno;
    ring->sqes = mmap(NULL, ring->sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      ring->fd, IORING_OFF_SQES);
    if (ring->sqes == MAP_FAILED) {
        int error = errno;
        munmap(ring->map, ring->map_bytes);
        return -error;
    }
    char *map = ring->map;
    ring->sq_tail = (unsigned *)(map + params->sq_off.tail);
    ring->sq_mask = (unsigned *)(map + params->sq_off.ring_mask);
    ring->cq_head = (unsigned *)(map + params->cq_off.head);
    ring->cq_tail = (unsigned *)(map + params->cq_off.tail);
    ring->cq_mask = (unsigned *)(map + params->cq_off.ring_mask);
    ring->cqes = map + params->cq_off.cqes;
    unsigned *array = (unsigned *)(map + params->sq_off.array);
    for (unsigned i = 0; i < params->sq_entries; i++)
        array[i] = i;
    ring->to_submit = 0;
    return 0;
}

int ring_open(struct ring *ring)
{
    struct io_uring_params params;
    int fd = -1;
    for (size_t i = 0; fd < 0 && i < sizeof(SETUPS) / sizeof(SETUPS[0]); i++) {
        memset(&params, 0, sizeof(params));
        params.flags = SETUPS[i];
        fd = syscall(__NR_io_uring_setup, DEPTH, &params);
        if (fd < 0 && errno != EINVAL)
            return -errno;
    }
    if (fd < 0)
        return -EINVAL;
    /* Without NODROP a completion could get lost, and its memory would stay in doubt. */
    unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
    ring->fd = fd;
    int error = (params.features & needed) == needed ? map_ring(ring, &params) : -EOPNOTSUPP;
    if (error != 0)
        close(fd);
    return error;
}

void ring_close(struct ring *ring)
{
    munmap(ring->sqes, ring->sqes_bytes);
    munmap(ring->map, ring->map_bytes);
    close(ring->fd);
}

int ring_check(struct ring *ring)
{
    static const uint8_t NEEDED[] = {IORING_OP_READV, IORING_OP_WRITEV, IORING_OP_FSYNC};
    enum { OPS = 64 };
    struct io_uring_probe *probe = calloc(1, sizeof(*probe) + OPS * sizeof(probe->ops[0]));
    if (!probe)
        return -ENOMEM;
    int error = 0;
    if (syscall(__NR_io_uring_register, ring->fd, IORING_REGISTER_PROBE, probe, OPS) != 0)
        error = -errno;
    for (size_t i = 0; error == 0 && i < sizeof(NEEDED); i++)
        if (NEEDED[i] > probe->last_op || !(probe->ops[NEEDED[i]].flags & IO_URING_OP_SUPPORTED))
            error = -EOPNOTSUPP;
    free(probe);
    return error;
}

void ring_queue(struct ring *ring, const struct batch *batch, struct frame *frame, unsigned place)
{
    unsigned tail = *ring->sq_tail;
    struct io_uring_sqe *sqe = (struct io_uring_sqe *)ring->sqes + (tail & *ring->sq_mask);
    memset(sqe, 0, sizeof(*sqe));
    sqe->fd = frame->fd;
    sqe->user_data = place;
    if (frame->syncing) {
        sqe->opcode = IORING_OP_FSYNC;
        sqe->fsync_flags = IORING_FSYNC_DATASYNC;
    } else {
        sqe->opcode = batch_writes(batch) ? IORING_OP_WRITEV : IORING_OP_READV;
        sqe->len = frame_parts(frame);
        sqe->addr = (uintptr_t)frame->parts;
        sqe->off = frame->offset + frame->done;
    }
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    ring->to_submit++;
}

void ring_enter(struct ring *ring, bool wait)
{
    while (ring->to_submit > 0 || wait) {
        unsigned head = *ring->cq_head;
        bool has_completion = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) != head;
        if (has_completion && ring->to_submit == 0)
            return;
        long taken = syscall(__NR_io_uring_enter, ring->fd, ring->to_submit,
                             wait && !has_completion, IORING_ENTER_GETEVENTS, NULL, 0);
        if (taken >= 0) {
            ring->to_submit -= taken;
            wait = wait && __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) == head;
        } else if (errno != EINTR) {
            if (has_completion)
                return; /* the kernel may be out of room until they are taken */
            nanosleep(&(struct timespec){0, 100000}, NULL);
        }
    }
}

bool ring_reap(struct ring *ring, unsigned *place, int64_t *moved)
{
    unsigned head = *ring->cq_head;
    if (head == __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE))
        return false;
    struct io_uring_cqe *cqe = (struct io_uring_cqe *)ring->cqes + (head & *ring->cq_mask);
    *place = cqe->user_data;
    *moved = cqe->res;
    __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
    return true;
}

#else

int ring_open(struct ring *ring)
{
    (void)ring;
    return -ENOSYS;
}

void ring_close(struct ring *ring)
{
    (void)ring;
}

int ring_check(struct ring *ring)
{
    (void)ring;
    return -ENOSYS;
}

void ring_queue(struct ring *ring, const struct batch *batch, struct frame *frame, unsigned place)
{
    (void)ring, (void)batch, (void)frame, (void)place;
}

void ring_enter(struct ring *ring, bool wait)
{
    (void)ring, (void)wait;
}

bool ring_reap(struct ring *ring, unsigned *place, int64_t *moved)
{
    (void)ring, (void)place, (void)moved;
    return false;
}

#endif
