/* One frame on its way between memory and a file or slot, whoever moves its bytes.
 *
 * No function here blocks but for opening, naming, cutting and frame_io. Every way out of a file
 * closes its descriptor; every failed write but UNNAMED removes its temporary file.
 */
#define _GNU_SOURCE
#include "native.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct hash_functions hash_functions;

static bool is_of_files(const struct batch *batch)
{
    return batch->kind == READ_FILES || batch->kind == WRITE_FILES;
}

bool batch_writes(const struct batch *batch)
{
    return batch->kind == WRITE_FILES || batch->kind == WRITE_SLOTS;
}

struct cursor batch_start(const struct batch *batch)
{
    return (struct cursor){0, batch->paths, batch->finals};
}

struct cursor batch_after(const struct batch *batch, struct cursor at)
{
    at.index++;
    if (is_of_files(batch))
        at.path += strlen(at.path) + 1;
    if (batch->kind == WRITE_FILES)
        at.final += strlen(at.final) + 1;
    return at;
}

static size_t frame_bytes(const struct batch *batch)
{
    return HEADER_BYTES + batch->payload_bytes;
}

static void checksum(const struct batch *batch, const struct frame *frame, void *hash,
                     uint8_t into[CHECKSUM_BYTES])
{
    hash_functions.reset(hash);
    hash_functions.update(hash, frame->header, CHECKSUM_AT);
    hash_functions.update(hash, frame->payload, batch->payload_bytes);
    hash_value value = hash_functions.digest(hash);
    uint64_t canonical[2] = {htobe64(value.high), htobe64(value.low)};
    memcpy(into, canonical, CHECKSUM_BYTES);
}

/* Finish */

static bool names(const char *path, const struct frame *frame)
{
    struct stat found;
    return lstat(path, &found) == 0 && found.st_ino == frame->inode &&
           found.st_dev == frame->device;
}

static int64_t named(const struct frame *frame, int64_t result)
{
    if (rename(frame->at.path, frame->at.final) == 0)
        return result;
    int error = errno;
    /* ENOENT may also be said of a temporary file that somebody removed. */
    return error == ENOENT && names(frame->at.path, frame) ? UNNAMED : -error;
}

static enum next finish(const struct batch *batch, struct frame *frame, int64_t result)
{
    if (batch->kind == READ_FILES && (result >= 0 || result == BAD_CHECKSUM) &&
        !names(frame->at.path, frame))
        result = -ESTALE;
    /* Some file systems report a failed write only when the file is closed. */
    if (is_of_files(batch) && frame->fd >= 0 && close(frame->fd) != 0 && errno != EINTR &&
        batch->kind == WRITE_FILES && result >= 0)
        result = -errno;
    if (batch->kind == WRITE_FILES) {
        if (result >= 0)
            result = named(frame, result);
        if (result < 0 && result != UNNAMED)
            unlink(frame->at.path);
    }
    batch->results[frame->at.index] = result;
    return NEXT_DONE;
}

/* Begin */

static int open_once(const char *path, int flags)
{
    int fd;
    do
        fd = open(path, flags | O_NOFOLLOW | O_CLOEXEC, 0600);
    while (fd < 0 && errno == EINTR);
    return fd < 0 ? -errno : fd;
}

static int open_file(const struct batch *batch, struct frame *frame)
{
    /* O_NONBLOCK: a pipe that lies there instead must not hold up the thread. */
    int flags = O_RDONLY | O_NONBLOCK;
    if (batch->kind == WRITE_FILES)
        flags = batch->reuse[frame->at.index] ? O_WRONLY | O_NONBLOCK
                                              : O_WRONLY | O_CREAT | O_EXCL;
    frame->direct = batch->direct;
    if (!frame->direct)
        return open_once(frame->at.path, flags);
    int fd = open_once(frame->at.path, flags | O_DIRECT);
    if (fd != -EINVAL)
        return fd;
    frame->direct = false;
    if (flags & O_CREAT)
        unlink(frame->at.path); /* some file systems make the file before they refuse the flag */
    return open_once(frame->at.path, flags);
}

#define GO_ON INT64_MIN

/* GO_ON, or what to finish with. */
static int64_t look_at_file(const struct batch *batch, struct frame *frame)
{
    bool made = batch->kind == WRITE_FILES && !batch->reuse[frame->at.index];
    struct stat found;
    /* The umask may have taken the owner's own rights. */
    if ((made && fchmod(frame->fd, 0600) != 0) || fstat(frame->fd, &found) != 0)
        return -errno;
    frame->inode = found.st_ino;
    frame->device = found.st_dev;
    frame->file_bytes = found.st_size;
    if (!S_ISREG(found.st_mode))
        return -EINVAL;
    if (batch->kind == READ_FILES && found.st_size != (off_t)frame_bytes(batch))
        return found.st_size;
    /* io_uring gives EAGAIN for a file that has O_NONBLOCK, where it cannot tell at once. */
    if (!made && fcntl(frame->fd, F_SETFL, frame->direct ? O_DIRECT : 0) != 0)
        return -errno;
    return GO_ON;
}

/* Has the kernel move memory of ours in place of a payload that direct I/O cannot use. */
static int choose_body(const struct batch *batch, struct frame *frame)
{
    frame->body = frame->payload;
    frame->body_bytes = batch->payload_bytes;
    if ((((uintptr_t)frame->payload | batch->payload_bytes) & (ALIGNMENT - 1)) == 0)
        return 0;
    if (!is_of_files(batch)) {
        int flags = fcntl(frame->fd, F_GETFL);
        if (flags < 0)
            return -errno;
        frame->direct = flags & O_DIRECT;
    }
    if (!frame->direct)
        return 0;
    size_t bytes = (batch->payload_bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    if (frame->bounce_bytes < bytes) {
        free(frame->bounce);
        frame->bounce = aligned_alloc(ALIGNMENT, bytes);
        frame->bounce_bytes = frame->bounce ? bytes : 0;
        if (!frame->bounce)
            return -ENOMEM;
    }
    frame->body = frame->bounce;
    frame->body_bytes = bytes;
    return 0;
}

static void fill_body(const struct batch *batch, struct frame *frame)
{
    if (frame->body == frame->payload)
        return;
    memcpy(frame->body, frame->payload, batch->payload_bytes);
    memset(frame->body + batch->payload_bytes, 0, frame->body_bytes - batch->payload_bytes);
}

enum next frame_begin(const struct batch *batch, struct frame *frame, void *hash, bool may_wait)
{
    int32_t index = frame->at.index;
    frame->syncing = frame->read_before = frame->direct = false;
    frame->done = 0;
    frame->header = batch->headers + (size_t)index * HEADER_BYTES;
    frame->payload = batch->payloads[index];
    if (is_of_files(batch)) {
        frame->offset = 0;
        frame->fd = open_file(batch, frame);
        if (may_wait && (frame->fd == -EMFILE || frame->fd == -ENFILE))
            return NEXT_LATER;
        if (frame->fd < 0) {
            /* What is there belongs to another, unless it was handed over for use. */
            if (batch->kind == WRITE_FILES && batch->reuse[index])
                unlink(frame->at.path);
            batch->results[index] = frame->fd;
            return NEXT_DONE;
        }
        int64_t instead = look_at_file(batch, frame);
        if (instead != GO_ON)
            return finish(batch, frame, instead);
    } else {
        frame->fd = batch->descriptors[index];
        frame->offset = batch->offsets[index];
    }
    int error = choose_body(batch, frame);
    if (error != 0)
        return finish(batch, frame, error);
    if (batch_writes(batch)) {
        checksum(batch, frame, hash, frame->header + CHECKSUM_AT);
        fill_body(batch, frame);
    }
    return NEXT_IO;
}

/* Advance */

int frame_parts(struct frame *frame)
{
    struct iovec *part = frame->parts;
    if (frame->done < HEADER_BYTES) {
        *part++ = (struct iovec){frame->header + frame->done, HEADER_BYTES - frame->done};
        *part++ = (struct iovec){frame->body, frame->body_bytes};
    } else {
        size_t of_body = frame->done - HEADER_BYTES;
        *part++ = (struct iovec){frame->body + of_body, frame->body_bytes - of_body};
    }
    return part - frame->parts;
}

int64_t frame_io(const struct batch *batch, struct frame *frame)
{
    if (frame->syncing)
        return fdatasync(frame->fd) == 0 ? 0 : -errno;
    int count = frame_parts(frame);
    off_t offset = frame->offset + frame->done;
    ssize_t moved = batch_writes(batch) ? pwritev(frame->fd, frame->parts, count, offset)
                                        : preadv(frame->fd, frame->parts, count, offset);
    return moved < 0 ? -errno : moved;
}

/* Descriptors of slots are their owner's: what they do is not changed. */
static bool gave_up_direct(const struct batch *batch, struct frame *frame)
{
    if (!is_of_files(batch) || !frame->direct || fcntl(frame->fd, F_SETFL, 0) != 0)
        return false;
    frame->direct = false;
    return true;
}

static enum next written(const struct batch *batch, struct frame *frame)
{
    size_t total = frame_bytes(batch);
    if (frame->done < HEADER_BYTES + frame->body_bytes)
        return finish(batch, frame, -EIO); /* a file system that takes no bytes does not say why */
    if (batch->kind == WRITE_FILES) {
        bool longer = frame->file_bytes > (off_t)total || frame->done > total;
        if (longer && ftruncate(frame->fd, total) != 0)
            return finish(batch, frame, -errno);
        if (batch->sync) {
            frame->syncing = true;
            return NEXT_IO;
        }
    }
    return finish(batch, frame, total);
}

static enum next had(const struct batch *batch, struct frame *frame, void *hash)
{
    size_t total = frame_bytes(batch);
    if (frame->done < total)
        return finish(batch, frame, frame->done);
    if (frame->body != frame->payload)
        memcpy(frame->payload, frame->body, batch->payload_bytes);
    uint8_t wanted[CHECKSUM_BYTES];
    checksum(batch, frame, hash, wanted);
    if (memcmp(wanted, frame->header + CHECKSUM_AT, CHECKSUM_BYTES) == 0)
        return finish(batch, frame, total);
    if (frame->read_before)
        return finish(batch, frame, BAD_CHECKSUM);
    frame->read_before = true;
    frame->done = 0;
    return NEXT_IO;
}

enum next frame_advance(const struct batch *batch, struct frame *frame, void *hash, int64_t moved)
{
    if (moved == -EINTR)
        return NEXT_IO;
    if (frame->syncing)
        return finish(batch, frame, moved < 0 ? moved : (int64_t)frame_bytes(batch));
    if (moved == -EINVAL && gave_up_direct(batch, frame))
        return NEXT_IO;
    if (moved < 0)
        return finish(batch, frame, moved);
    frame->done += moved;
    bool writes = batch_writes(batch);
    /* What a reading rounds up to may lie behind the end of the file. */
    size_t wanted = writes ? HEADER_BYTES + frame->body_bytes : frame_bytes(batch);
    if (moved > 0 && frame->done < wanted)
        return NEXT_IO;
    return writes ? written(batch, frame) : had(batch, frame, hash);
}
