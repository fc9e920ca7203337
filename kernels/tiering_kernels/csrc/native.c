/* What Python calls: a batch at a time, by io_uring or by blocking calls in the calling thread.
 *
 * A thread keeps its ring, its checksum state and its memory for unaligned payloads in a context,
 * from its first call to its end. A child that was forked has no ring of its parent's.
 */
#define _GNU_SOURCE
#include "native.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef KVT_SOURCES
#define KVT_SOURCES ""
#endif

/* What is queued before the kernel is told: a few, so that it can join neighbours, and the disk
 * does not wait for the checksums of a whole batch. */
#define QUEUED_MAX 4

/* Bounds the memory of a thread for unaligned payloads. */
#define BOUNCE_BYTES_MAX (4 << 20)

struct context {
    struct context *next; /* of all threads */
    bool has_ring;
    struct ring ring;
    void *hash;
    struct frame frames[DEPTH];
};

static pthread_key_t context_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool has_key;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards contexts */
static struct context *contexts;

static void drop_ring(struct context *context)
{
    if (context->has_ring)
        ring_close(&context->ring);
    context->has_ring = false;
}

static void free_context(struct context *context)
{
    if (context->hash)
        hash_functions.free(context->hash);
    for (unsigned i = 0; i < DEPTH; i++)
        free(context->frames[i].bounce);
    free(context);
}

static void end_context(void *pointer)
{
    struct context *context = pointer;
    pthread_mutex_lock(&lock);
    struct context **link = &contexts;
    while (*link != context)
        link = &(*link)->next;
    *link = context->next;
    pthread_mutex_unlock(&lock);
    drop_ring(context);
    free_context(context);
}

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

/* At once, while the numbers of the descriptors still mean the rings. */
static void after_fork_in_child(void)
{
    for (struct context *context = contexts; context; context = context->next)
        drop_ring(context);
    pthread_mutex_unlock(&lock);
}

static void make_key(void)
{
    has_key = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0 &&
              pthread_key_create(&context_key, end_context) == 0;
}

/* NULL where there is no memory for it. */
static struct context *own_context(void)
{
    pthread_once(&once, make_key);
    if (!has_key)
        return NULL;
    struct context *context = pthread_getspecific(context_key);
    if (context)
        return context;
    context = calloc(1, sizeof(*context));
    if (!context)
        return NULL;
    context->hash = hash_functions.create();
    if (!context->hash || pthread_setspecific(context_key, context) != 0) {
        free_context(context);
        return NULL;
    }
    pthread_mutex_lock(&lock);
    context->next = contexts;
    contexts = context;
    pthread_mutex_unlock(&lock);
    return context;
}

/* Whether this thread has a ring, or could make one now. */
static bool has_ring(struct context *context)
{
    if (!context->has_ring)
        context->has_ring = ring_open(&context->ring) == 0;
    return context->has_ring;
}

static void run_blocking(struct context *context, const struct batch *batch)
{
    struct frame *frame = &context->frames[0];
    for (frame->at = batch_start(batch); frame->at.index < batch->count;
         frame->at = batch_after(batch, frame->at)) {
        enum next next = frame_begin(batch, frame, context->hash, false);
        while (next == NEXT_IO)
            next = frame_advance(batch, frame, context->hash, frame_io(batch, frame));
    }
}

static unsigned depth_of(const struct batch *batch)
{
    uintptr_t bits = batch->payload_bytes;
    for (int32_t i = 0; i < batch->count; i++)
        bits |= (uintptr_t)batch->payloads[i];
    if ((bits & (ALIGNMENT - 1)) == 0)
        return DEPTH;
    uint64_t fit = BOUNCE_BYTES_MAX / (batch->payload_bytes + ALIGNMENT);
    return fit < 1 ? 1 : fit < DEPTH ? fit : DEPTH;
}

/* A batch on its way through a ring. */
struct flow {
    struct context *context;
    const struct batch *batch;
    struct cursor at;
    unsigned idle[DEPTH]; /* places in context->frames, a stack */
    unsigned idle_count;
    unsigned in_flight;
};

/* Begins items as long as there is a place and a descriptor for them. */
static void fill(struct flow *flow)
{
    struct context *context = flow->context;
    while (flow->at.index < flow->batch->count && flow->idle_count > 0) {
        unsigned place = flow->idle[flow->idle_count - 1];
        struct frame *frame = &context->frames[place];
        frame->at = flow->at;
        enum next next = frame_begin(flow->batch, frame, context->hash, flow->in_flight > 0);
        if (next == NEXT_LATER)
            return;
        flow->at = batch_after(flow->batch, flow->at);
        if (next == NEXT_DONE)
            continue;
        flow->idle_count--;
        flow->in_flight++;
        ring_queue(&context->ring, flow->batch, frame, place);
        if (context->ring.to_submit >= QUEUED_MAX)
            ring_enter(&context->ring, false);
    }
}

static void complete(struct flow *flow, unsigned place, int64_t moved)
{
    struct context *context = flow->context;
    struct frame *frame = &context->frames[place];
    /* What the ring cannot do now, or at all, a blocking call may. */
    if (moved == -EAGAIN || moved == -ECANCELED || moved == -EOPNOTSUPP)
        moved = frame_io(flow->batch, frame);
    if (frame_advance(flow->batch, frame, context->hash, moved) == NEXT_IO) {
        ring_queue(&context->ring, flow->batch, frame, place);
        return;
    }
    flow->idle[flow->idle_count++] = place;
    flow->in_flight--;
}

static void run_with_ring(struct context *context, const struct batch *batch)
{
    struct flow flow = {.context = context, .batch = batch, .at = batch_start(batch)};
    flow.idle_count = depth_of(batch);
    for (unsigned i = 0; i < flow.idle_count; i++)
        flow.idle[i] = i;
    fill(&flow);
    while (flow.in_flight > 0) {
        unsigned place;
        int64_t moved;
        ring_enter(&context->ring, true);
        while (ring_reap(&context->ring, &place, &moved)) {
            complete(&flow, place, moved);
            fill(&flow);
        }
    }
}

#define EXPORTED __attribute__((visibility("default")))

EXPORTED int kvt_abi(void)
{
    return KVT_ABI;
}

/* A digest of the sources that this was built from. */
EXPORTED const char *kvt_sources(void)
{
    return KVT_SOURCES;
}

EXPORTED void kvt_use_hash(const struct hash_functions *functions)
{
    hash_functions = *functions;
}

/* 0 where this thread could have a ring with all that is needed, else -errno. */
EXPORTED int kvt_check_ring(void)
{
    struct ring ring;
    int error = ring_open(&ring);
    if (error == 0) {
        error = ring_check(&ring);
        ring_close(&ring);
    }
    return error;
}

EXPORTED void kvt_run(const struct batch *batch, int with_ring)
{
    struct context *context = own_context();
    if (!context) {
        for (int32_t i = 0; i < batch->count; i++)
            batch->results[i] = -ENOMEM;
    } else if (with_ring && has_ring(context)) {
        run_with_ring(context, batch);
    } else {
        run_blocking(context, batch);
    }
}

EXPORTED void kvt_sizes(int32_t count, const char *paths, int64_t *results)
{
    for (int32_t i = 0; i < count; i++, paths += strlen(paths) + 1) {
        struct stat found;
        if (lstat(paths, &found) != 0)
            results[i] = -errno;
        else
            results[i] = S_ISREG(found.st_mode) ? (int64_t)found.st_size : -EINVAL;
    }
}

/* The checksum of `bytes` at `data`: how the functions given are tried out. */
EXPORTED void kvt_checksum(const void *data, uint64_t bytes, uint64_t *high_low)
{
    void *state = hash_functions.create();
    hash_functions.reset(state);
    hash_functions.update(state, data, bytes);
    hash_value value = hash_functions.digest(state);
    hash_functions.free(state);
    high_low[0] = value.high;
    high_low[1] = value.low;
}
