/* What the files of this library share. The contracts are those of chunkio.py.
 *
 * frames.c   one frame on its way: open, checksum, bounce, what to do next, finish
 * ring.c     io_uring by its system calls, one ring for each thread
 * native.c   what Python calls: a batch, by a ring or by blocking calls
 * device.c   what a device's driver calls, and loops over its calls
 * keytable.c, slots.c: what the core of the engine is made of; they share nothing with the others
 * rowstream.c rows through a socket
 * copies.c   rows out of memory that another process writes to; the same
 */
#ifndef KVT_NATIVE_H
#define KVT_NATIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* library.py refuses another number. */
#define KVT_ABI 4

#define HEADER_BYTES 4096
#define CHECKSUM_BYTES 16
#define CHECKSUM_AT (HEADER_BYTES - CHECKSUM_BYTES)
#define ALIGNMENT 4096

#define BAD_CHECKSUM (-100001)
#define UNNAMED (-100002)

/* Frames of one thread that are on their way at once. */
#define DEPTH 32

enum kind { READ_FILES, WRITE_FILES, READ_SLOTS, WRITE_SLOTS };

/* The arguments of one call; native.py has the same fields. Paths are one after the other, each
 * with its final zero. */
struct batch {
    int32_t kind;
    int32_t count;
    const char *paths;
    const char *finals;
    const uint8_t *reuse;
    const int64_t *descriptors;
    const int64_t *offsets;
    uint8_t *headers;
    uint8_t *const *payloads;
    uint64_t payload_bytes;
    int64_t *results;
    int32_t direct;
    int32_t sync;
};

/* The next item of a batch, as paths can only be walked. */
struct cursor {
    int32_t index;
    const char *path;
    const char *final;
};

/* One frame on its way, and the memory that stays with the place it has in a thread. */
struct frame {
    struct cursor at;
    int fd;
    bool direct;
    bool syncing;
    bool read_before;
    uint8_t *header;
    uint8_t *payload;
    uint8_t *body; /* what the kernel moves: the payload, or `bounce` */
    size_t body_bytes;
    off_t offset;
    size_t done;
    off_t file_bytes;
    dev_t device;
    ino_t inode;
    struct iovec parts[2];
    uint8_t *bounce;
    size_t bounce_bytes;
};

enum next { NEXT_IO, NEXT_DONE, NEXT_LATER };

/* NEXT_IO: carry out what frame_io or the ring makes of `frame`, and hand frame_advance its
 * result. NEXT_DONE: the result is in the batch. NEXT_LATER, only with `may_wait`: no descriptor is
 * free now, and nothing was done. */
enum next frame_begin(const struct batch *batch, struct frame *frame, void *hash, bool may_wait);
enum next frame_advance(const struct batch *batch, struct frame *frame, void *hash, int64_t moved);

/* Sets frame->parts to what is left to move; returns how many parts that are. */
int frame_parts(struct frame *frame);

/* The same by blocking calls: bytes moved, 0 for a sync, or -errno. */
int64_t frame_io(const struct batch *batch, struct frame *frame);

bool batch_writes(const struct batch *batch);
struct cursor batch_start(const struct batch *batch);
struct cursor batch_after(const struct batch *batch, struct cursor at);

/* XXH3-128 of a library that is there anyway. */
typedef struct {
    uint64_t low, high;
} hash_value;

struct hash_functions {
    void *(*create)(void);
    int (*free)(void *state);
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t bytes);
    hash_value (*digest)(const void *state);
};
extern struct hash_functions hash_functions;

struct ring {
    int fd;
    unsigned to_submit;
    unsigned *sq_tail;
    unsigned *sq_mask;
    unsigned *cq_head;
    unsigned *cq_tail;
    unsigned *cq_mask;
    void *sqes;
    void *cqes;
    void *map;
    size_t map_bytes;
    size_t sqes_bytes;
};

/* 0 or -errno; -ENOSYS where this library was built without io_uring. */
int ring_open(struct ring *ring);
void ring_close(struct ring *ring);
/* 0 if the kernel has all operations that are used, else -errno. */
int ring_check(struct ring *ring);
/* Queues the next operation of `frame`, which the ring then calls `place`. At most DEPTH of them. */
void ring_queue(struct ring *ring, const struct batch *batch, struct frame *frame, unsigned place);
/* Hands over what is queued; with `wait`, returns when something has completed. */
void ring_enter(struct ring *ring, bool wait);
/* Takes one completion, if there is one. */
bool ring_reap(struct ring *ring, unsigned *place, int64_t *moved);

#endif
