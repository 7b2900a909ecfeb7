/* Lets the n-th call of the C library that touches files below a folder fail: for LD_PRELOAD, armed from the process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[4096];
static long turn, due = -1; /* calls so far, and the first one that fails; -1: none */
static int is_for_good;     /* all from then on */
static char watched[65536]; /* descriptors of files below the folder */
static char last[64];       /* the name of the call that failed */

void faults_arm(const char *below, long nth, int for_good) {
    strncpy(folder, below, sizeof folder - 1);
    turn = 0, due = nth, is_for_good = for_good, last[0] = 0;
}
const char *faults_last(void) { return last; }

static int is_below(const char *path) { return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0; }
static int is_watched(int fd) { return folder[0] && fd >= 0 && fd < (int)sizeof watched && watched[fd]; }

/* Say whether this call fails, and set errno. */
static int fails(const char *name, int number) {
    long now = turn++;
    if (due < 0 || now < due || (now > due && !is_for_good)) return 0;
    if (!last[0]) strncpy(last, name, sizeof last - 1);
    errno = number;
    return 1;
}

static int opened(int fd, const char *path) {
    if (fd >= 0 && fd < (int)sizeof watched) watched[fd] = is_below(path);
    return fd;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name, args, call)                                                              \
    int name args {                                                                         \
        mode_t mode = 0;                                                                    \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                \
            va_list more;                                                                   \
            va_start(more, flags);                                                          \
            mode = va_arg(more, mode_t);                                                    \
            va_end(more);                                                                   \
        }                                                                                   \
        int is_writing = (flags & O_ACCMODE) != O_RDONLY;                                   \
        if (is_below(path) && fails(is_writing ? "open to write" : "open", is_writing ? ENOSPC : EIO)) return -1; \
        return opened(REAL(name) call, path);                                               \
    }
OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))

#define ON_FD(type, name, args, call, number) \
    type name args { return is_watched(fd) && fails(#name, number) ? -1 : REAL(name) call; }
ON_FD(ssize_t, write, (int fd, const void *data, size_t num), (fd, data, num), ENOSPC)
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t num, off_t at), (fd, data, num, at), ENOSPC)
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t num, off64_t at), (fd, data, num, at), ENOSPC)
ON_FD(ssize_t, read, (int fd, void *data, size_t num), (fd, data, num), EIO)
ON_FD(int, fsync, (int fd), (fd), EIO)
ON_FD(int, fdatasync, (int fd), (fd), EIO)
ON_FD(int, ftruncate, (int fd, off_t num), (fd, num), ENOSPC)
ON_FD(int, ftruncate64, (int fd, off64_t num), (fd, num), ENOSPC)
ON_FD(int, flock, (int fd, int how), (fd, how), ENOLCK)
ON_FD(int, fchmod, (int fd, mode_t mode), (fd, mode), EPERM)

#define ON_PATH(name, args, call, number) \
    int name args { return is_below(path) && fails(#name, number) ? -1 : REAL(name) call; }
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode), EACCES)
ON_PATH(chmod, (const char *path, mode_t mode), (path, mode), EPERM)
ON_PATH(unlink, (const char *path), (path), EACCES)
ON_PATH(rmdir, (const char *path), (path), EACCES)
ON_PATH(rename, (const char *path, const char *to), (path, to), EACCES)

int close(int fd) {
    if (fd >= 0 && fd < (int)sizeof watched) watched[fd] = 0;
    return REAL(close)(fd);
}
