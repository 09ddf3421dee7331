/* A stand-in for a fast NVMe drive: preloaded (LD_PRELOAD) into a process whose tiers lie on tmpfs.

   Of the transfers through descriptors opened with O_DIRECT, parts of 64 KiB and more (payload)
   take the time of a device with a bandwidth and 60 us of latency, but no processor, as with DMA:
   their bytes do not move. Smaller parts (header pages), and all of other descriptors (catalogs,
   markers), really move. It is on from the start where DMA_GBPS names a bandwidth in GB/s. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PAYLOAD_BYTES_MIN (64 << 10)
#define LATENCY_NS 60000
#define SECOND_NS 1000000000LL

static _Atomic double bandwidth; /* GB/s, that is bytes per ns; 0: off */
static _Atomic int64_t free_at_ns, moved_bytes;

double fast_device_gbps(void) { return bandwidth; }
void fast_device_set_gbps(double gbps) { bandwidth = gbps; }
int64_t fast_device_bytes(void) { return moved_bytes; }

__attribute__((constructor)) static void begin(void) {
    const char *gbps = getenv("DMA_GBPS");
    if (gbps) bandwidth = atof(gbps);
}

static void wait_for_device(int64_t size) {
    struct timespec time;
    int64_t now, start, busy_until = free_at_ns, duration = (int64_t)((double)size / bandwidth);
    clock_gettime(CLOCK_MONOTONIC, &time);
    now = time.tv_sec * SECOND_NS + time.tv_nsec;
    do start = busy_until > now ? busy_until : now;
    while (!atomic_compare_exchange_weak(&free_at_ns, &busy_until, start + duration));
    start += duration + LATENCY_NS;
    time = (struct timespec){start / SECOND_NS, start % SECOND_NS};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
    moved_bytes += size;
}

static int is_payload(int fd, const struct iovec *parts, int count) {
    if (bandwidth == 0) return 0;
    for (int i = 0; i < count; i++)
        if (parts[i].iov_len >= PAYLOAD_BYTES_MIN) {
            int flags = fcntl(fd, F_GETFL);
            return flags != -1 && (flags & O_DIRECT) != 0;
        }
    return 0;
}

static ssize_t transfer(int writes, int fd, const struct iovec *parts, int count, off64_t offset) {
    ssize_t size = 0;
    for (int i = 0; i < count; i++) {
        ssize_t length = (ssize_t)parts[i].iov_len, done = length;
        if (length < PAYLOAD_BYTES_MIN)
            done = syscall(writes ? SYS_pwrite64 : SYS_pread64, fd, parts[i].iov_base, length,
                           offset + size);
        if (done < 0) return size ? size : -1;
        size += done;
        if (done < length) break;
    }
    if (writes) { /* the file is as long as if all bytes had been written */
        struct stat found;
        if (fstat(fd, &found) || (found.st_size < offset + size && ftruncate(fd, offset + size)))
            return -1;
    }
    wait_for_device(size);
    return size;
}

static ssize_t transfer_here(int writes, int fd, const struct iovec *parts, int count) {
    off64_t offset = lseek64(fd, 0, SEEK_CUR);
    ssize_t size = offset < 0 ? -1 : transfer(writes, fd, parts, count, offset);
    if (size > 0) lseek64(fd, offset + size, SEEK_SET);
    return size;
}

#define PLAIN(name, number, writes, type)                                       \
    ssize_t name(int fd, type buffer, size_t size) {                            \
        struct iovec part = {(void *)buffer, size};                             \
        return is_payload(fd, &part, 1) ? transfer_here(writes, fd, &part, 1)   \
                                        : syscall(number, fd, buffer, size);    \
    }
#define PLACED(name, number, writes, type)                                      \
    ssize_t name(int fd, type buffer, size_t size, off64_t offset) {            \
        struct iovec part = {(void *)buffer, size};                             \
        return is_payload(fd, &part, 1) ? transfer(writes, fd, &part, 1, offset) \
                                        : syscall(number, fd, buffer, size, offset); \
    }
#define VECTORED(name, number, writes)                                          \
    ssize_t name(int fd, const struct iovec *parts, int count) {                \
        return is_payload(fd, parts, count) ? transfer_here(writes, fd, parts, count) \
                                            : syscall(number, fd, parts, count); \
    }
#define PLACED_VECTORED(name, number, writes)                                   \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset) { \
        return is_payload(fd, parts, count) ? transfer(writes, fd, parts, count, offset) \
                                            : syscall(number, fd, parts, count, offset, 0L); \
    }
#define FLAGGED(name, number, writes)                                           \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset, int flags) { \
        return is_payload(fd, parts, count) && offset >= 0                      \
                   ? transfer(writes, fd, parts, count, offset)                 \
                   : syscall(number, fd, parts, count, offset, 0L, flags);      \
    }

PLAIN(read, SYS_read, 0, void *)
PLAIN(write, SYS_write, 1, const void *)
PLACED(pread, SYS_pread64, 0, void *)
PLACED(pread64, SYS_pread64, 0, void *)
PLACED(pwrite, SYS_pwrite64, 1, const void *)
PLACED(pwrite64, SYS_pwrite64, 1, const void *)
VECTORED(readv, SYS_readv, 0)
VECTORED(writev, SYS_writev, 1)
PLACED_VECTORED(preadv, SYS_preadv, 0)
PLACED_VECTORED(preadv64, SYS_preadv, 0)
PLACED_VECTORED(pwritev, SYS_pwritev, 1)
PLACED_VECTORED(pwritev64, SYS_pwritev, 1)
FLAGGED(preadv2, SYS_preadv2, 0)
FLAGGED(preadv64v2, SYS_preadv2, 0)
FLAGGED(pwritev2, SYS_pwritev2, 1)
FLAGGED(pwritev64v2, SYS_pwritev2, 1)
