/* Linked into the native library by tests: the kernel's vectored calls, as a script lets them go. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define SCRIPT_MAX 64

static int64_t script[SCRIPT_MAX]; /* at most so many bytes; negative: an errno; -0: as it is */
static int script_length, position, calls;
static char leaves[4096], arrives[4096]; /* what the next call renames; empty: nothing */

void scripted_begin(const int64_t *outcomes, int count) {
    script_length = count < SCRIPT_MAX ? count : SCRIPT_MAX;
    for (int i = 0; i < script_length; i++) script[i] = outcomes[i];
    position = calls = 0;
}

void scripted_rename(const char *from, const char *to) {
    strncpy(leaves, from, sizeof leaves - 1);
    strncpy(arrives, to, sizeof arrives - 1);
}

int scripted_calls(void) {
    return calls;
}

static ssize_t move(long number, int fd, const struct iovec *vectors, int count, int64_t offset) {
    struct iovec chosen[1024];
    int64_t left = position < script_length ? script[position++] : INT64_MAX;
    int used = 0;
    calls++;
    if (leaves[0] != 0) {
        if (rename(leaves, arrives) != 0) return -1;
        leaves[0] = 0;
    }
    if (left < 0) {
        errno = (int)-left;
        return -1;
    }
    for (; used < count && used < 1024 && left > 0; used++) {
        chosen[used] = vectors[used];
        if ((int64_t)chosen[used].iov_len > left) chosen[used].iov_len = (size_t)left;
        left -= (int64_t)chosen[used].iov_len;
    }
    return used == 0 ? 0 : syscall(number, fd, chosen, used, (long)offset, 0L);
}

ssize_t preadv64(int fd, const struct iovec *vectors, int count, off64_t offset) {
    return move(SYS_preadv, fd, vectors, count, offset);
}

ssize_t pwritev64(int fd, const struct iovec *vectors, int count, off64_t offset) {
    return move(SYS_pwritev, fd, vectors, count, offset);
}
