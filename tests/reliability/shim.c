/* Over the C library's calls, when preloaded: what bad file systems do, as SHIM asks for it.

   no-direct   open() refuses O_DIRECT
   no-flock    flock() is not implemented
   short       every transfer of more than a page stops half-way
   no-space    pwritev() finds no space from the SHIM_AFTER-th large transfer on, twice */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

static int asked(const char *what) {
    const char *shim = getenv("SHIM");
    return shim != NULL && strstr(shim, what) != NULL;
}

static int open_any(const char *name, const char *path, int flags, mode_t mode) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    if ((flags & O_DIRECT) && asked("no-direct")) {
        errno = EINVAL;
        return -1;
    }
    return real(path, flags, mode);
}

#define OPEN(name)                                   \
    int name(const char *path, int flags, ...) {     \
        va_list more;                                \
        va_start(more, flags);                       \
        mode_t mode = va_arg(more, int);             \
        va_end(more);                                \
        return open_any(#name, path, flags, mode);   \
    }
OPEN(open)
OPEN(open64)

int flock(int fd, int operation) {
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    if (asked("no-flock")) {
        errno = ENOSYS;
        return -1;
    }
    return real(fd, operation);
}

typedef ssize_t transfer(int, const struct iovec *, int, off64_t, int);

/* The calls without flags ignore the fifth argument. */
static ssize_t move(const char *name, int fd, const struct iovec *part, int count, off64_t at,
                    int flags) {
    transfer *real = (transfer *)dlsym(RTLD_NEXT, name);
    static int large = 0;
    struct iovec half = part[0];
    if (count == 1 && half.iov_len > 4096) {
        if (strncmp(name, "pwritev", 7) == 0 && asked("no-space")) {
            int after = atoi(getenv("SHIM_AFTER"));
            int now = __sync_add_and_fetch(&large, 1);
            if (now > after && now <= after + 2) {
                errno = ENOSPC;
                return -1;
            }
        }
        if (asked("short")) {
            half.iov_len = half.iov_len / 2 / 4096 * 4096 + 4096;
            return real(fd, &half, 1, at, flags);
        }
    }
    return real(fd, part, count, at, flags);
}

#define MOVE(name)                                                                      \
    ssize_t name(int fd, const struct iovec *part, int count, off64_t at) {             \
        return move(#name, fd, part, count, at, 0);                                     \
    }
#define MOVE2(name)                                                                     \
    ssize_t name(int fd, const struct iovec *part, int count, off64_t at, int flags) {  \
        return move(#name, fd, part, count, at, flags);                                 \
    }
MOVE(pwritev)
MOVE(pwritev64)
MOVE(preadv)
MOVE(preadv64)
MOVE2(pwritev2)
MOVE2(pwritev64v2)
MOVE2(preadv2)
MOVE2(preadv64v2)
