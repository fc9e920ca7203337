/* Rows through a connected socket that blocks, each with its checksum. See rowstream.py.
 *
 * A row is a lead (8 bytes: 1, a row follows, or 0, it does not), its bytes, and a tail of 24: 1 or
 * 0, whether the slot still had its generation when the last byte had left, and XXH3-128, low half
 * first. Little-endian, as this library is for.
 */
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "native.h"

#define EXPORTED __attribute__((visibility("default")))

/* Moved at once, and then checksummed while it is still in the processor's cache. */
#define PIECE_BYTES (256 << 10)
/* So many are waited for, unless fewer are left: measured, `tiering-bench tiers --tier p2p`. */
#define WAKE_BYTES (128 << 10)

#define STALE 0
#define ROW 1
#define DAMAGED (-100003)
#define NONSENSE (-100004)
#define ENDED (-100005)

struct tail {
    uint64_t verdict;
    uint64_t low, high;
};

static int64_t why(ssize_t moved)
{
    if (moved == 0)
        return ENDED;
    /* What the socket's own deadline makes of a call that moved nothing. */
    return errno == EAGAIN || errno == EWOULDBLOCK ? -ETIMEDOUT : -errno;
}

/* What is received from, for one call. */
struct source {
    int fd;
    int deadline_ms; /* of silence; -1: none */
    int wakes_at;    /* bytes that are there before whoever waits is woken: SO_RCVLOWAT */
};

static void wake_at(struct source *from, int bytes)
{
    if (from->wakes_at == bytes)
        return;
    /* Where the system refuses it, waits end sooner. */
    setsockopt(from->fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
    from->wakes_at = bytes;
}

static struct source source_of(int fd)
{
    struct source from = {.fd = fd, .deadline_ms = -1, .wakes_at = 1};
    struct timeval deadline;
    socklen_t bytes = sizeof deadline;
    if (getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &deadline, &bytes) == 0 &&
        (deadline.tv_sec || deadline.tv_usec))
        from.deadline_ms = (int)(deadline.tv_sec * 1000 + (deadline.tv_usec + 999) / 1000);
    return from;
}

/* A wait ends when WAKE_BYTES are there or all that is left, not with each packet: to be put to
 * sleep and woken costs more than a packet's copy. */
static int64_t receive(struct source *from, void *into, size_t bytes)
{
    bool waited = false; /* and nothing was there in time */
    for (size_t done = 0; done < bytes;) {
        ssize_t moved = recv(from->fd, (uint8_t *)into + done, bytes - done, MSG_DONTWAIT);
        if (moved > 0) {
            done += (size_t)moved;
            waited = false;
            continue;
        }
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved == 0 || (errno != EAGAIN && errno != EWOULDBLOCK) || waited)
            return why(moved);
        wake_at(from, bytes - done < WAKE_BYTES ? (int)(bytes - done) : WAKE_BYTES);
        struct pollfd poll_for = {.fd = from->fd, .events = POLLIN};
        waited = poll(&poll_for, 1, from->deadline_ms) == 0;
    }
    return 0;
}

static int64_t send_all(int fd, const void *from, size_t bytes, int flags)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t moved = send(fd, (const uint8_t *)from + done, bytes - done, MSG_NOSIGNAL | flags);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved <= 0)
            return why(moved);
        done += (size_t)moved;
    }
    return 0;
}

static bool has(const uint64_t *generations, uint64_t rows, uint64_t slot, uint64_t wanted)
{
    return slot < rows && __atomic_load_n(&generations[slot], __ATOMIC_ACQUIRE) == wanted;
}

static int64_t send_row(int fd, const uint8_t *row, uint64_t row_bytes, void *hash,
                        hash_value *value)
{
    hash_functions.reset(hash);
    for (uint64_t at = 0; at < row_bytes; at += PIECE_BYTES) {
        size_t bytes = row_bytes - at < PIECE_BYTES ? row_bytes - at : PIECE_BYTES;
        int64_t failed = send_all(fd, row + at, bytes, MSG_MORE);
        if (failed)
            return failed;
        hash_functions.update(hash, row + at, bytes);
    }
    *value = hash_functions.digest(hash);
    return 0;
}

/* Sends the rows of `slots`, those that have the generation `wanted`. 0, or why it went no further. */
EXPORTED int64_t kvt_send_rows(int fd, uint32_t count, const uint64_t *slots,
                               const uint64_t *wanted, const uint8_t *rows,
                               const uint64_t *generations, uint64_t rows_count,
                               uint64_t row_bytes)
{
    void *hash = hash_functions.create();
    int64_t failed = hash ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < count && !failed; i++) {
        int more = i + 1 < count ? MSG_MORE : 0;
        uint64_t lead = has(generations, rows_count, slots[i], wanted[i]) ? ROW : STALE;
        failed = send_all(fd, &lead, sizeof lead, lead == ROW ? MSG_MORE : more);
        if (failed || lead == STALE)
            continue;
        hash_value value;
        failed = send_row(fd, rows + slots[i] * row_bytes, row_bytes, hash, &value);
        if (failed)
            continue;
        /* No byte of the row is read behind this. */
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        struct tail tail = {.low = value.low, .high = value.high};
        tail.verdict = has(generations, rows_count, slots[i], wanted[i]) ? ROW : STALE;
        failed = send_all(fd, &tail, sizeof tail, more);
    }
    if (hash)
        hash_functions.free(hash);
    return failed;
}

static int64_t receive_row(struct source *from, uint8_t *into, uint64_t row_bytes, void *hash,
                           uint8_t *result)
{
    uint64_t lead;
    int64_t failed = receive(from, &lead, sizeof lead);
    if (failed)
        return failed;
    if (lead == STALE) {
        *result = STALE;
        return 0;
    }
    if (lead != ROW)
        return NONSENSE;
    hash_functions.reset(hash);
    for (uint64_t at = 0; at < row_bytes && !failed; at += PIECE_BYTES) {
        size_t bytes = row_bytes - at < PIECE_BYTES ? row_bytes - at : PIECE_BYTES;
        failed = receive(from, into + at, bytes);
        if (!failed)
            hash_functions.update(hash, into + at, bytes);
    }
    struct tail tail;
    if (failed || (failed = receive(from, &tail, sizeof tail)))
        return failed;
    if (tail.verdict == STALE) {
        *result = STALE;
        return 0;
    }
    hash_value value = hash_functions.digest(hash);
    if (tail.verdict != ROW || tail.low != value.low || tail.high != value.high)
        return DAMAGED;
    *result = ROW;
    return 0;
}

/* Fills `into` in order; how many came, whose results are 1 or 0. Where that is not all, `failed`
 * says why. */
EXPORTED uint32_t kvt_receive_rows(int fd, uint32_t count, uint8_t *const *into, uint64_t row_bytes,
                                   uint8_t *results, int64_t *failed)
{
    void *hash = hash_functions.create();
    struct source from = source_of(fd);
    uint32_t done = 0;
    *failed = hash ? 0 : -ENOMEM;
    while (done < count && !*failed) {
        *failed = receive_row(&from, into[done], row_bytes, hash, &results[done]);
        if (!*failed)
            done++;
    }
    wake_at(&from, 1); /* others read from it, too */
    if (hash)
        hash_functions.free(hash);
    return done;
}
