/* Have a process's calls that touch one folder fail, each in turn: LD_PRELOAD, and `io_faults_arm` by ctypes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ONCE = 0, FROM_THEN_ON = 1, SHORT_WRITES = 2 };

static atomic_long seen, failed_at;
static atomic_int armed;
static long place;
static int failure, manner;
static const char *under;
static const char *_Atomic failed_name = "";

/* Fail the call with this number, counted from 1, of those that touch the folder; 0 only counts. */
void io_faults_arm(long number, int error, int how) {
    under = getenv("IO_FAULTS_UNDER");
    seen = 0;
    failed_at = 0;
    failed_name = "";
    place = number;
    failure = error;
    manner = how;
    armed = under != NULL;
}

/* Let calls succeed again; return how many there were. */
long io_faults_disarm(void) {
    armed = 0;
    return seen;
}

/* Return the name of the function that failed first; empty when none has. */
const char *io_faults_failed(void) { return failed_name; }

static int is_below(const char *path) { return strstr(path, under) != NULL; }

static int is_of(int fd) {
    char link[64], target[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlink, link, target, sizeof target - 1);
    if (length <= 0)
        return 0;
    target[length] = 0;
    return is_below(target);
}

static int is_hit(int touches, const char *name) {
    if (!touches)
        return 0;
    long number = ++seen;
    if (place == 0 || number < place || (manner == ONCE && number > place))
        return 0;
    long none = 0;
    if (atomic_compare_exchange_strong(&failed_at, &none, number))
        failed_name = name;
    errno = failure;
    return 1;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define PATH_HIT(path, name) (armed && is_hit(is_below(path), name))
#define AT_HIT(fd, path, name) \
    (armed && is_hit(is_below(path) || (fd != AT_FDCWD && path[0] != '/' && is_of(fd)), name))
#define FD_HIT(fd, name) (armed && is_hit(is_of(fd), name))

#define BY_PATH(type, name, failing, parameters, path, arguments) \
    type name parameters { \
        REAL(name); \
        return PATH_HIT(path, #name) ? failing : real arguments; \
    }
#define BY_AT(type, name, failing, parameters, fd, path, arguments) \
    type name parameters { \
        REAL(name); \
        return AT_HIT(fd, path, #name) ? failing : real arguments; \
    }
#define BY_FD(type, name, failing, parameters, fd, arguments) \
    type name parameters { \
        REAL(name); \
        return FD_HIT(fd, #name) ? failing : real arguments; \
    }

static int mode_of(int flags, va_list rest) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, int) : 0;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        int mode = mode_of(flags, rest); \
        va_end(rest); \
        return PATH_HIT(path, #name) ? -1 : real(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int fd, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        int mode = mode_of(flags, rest); \
        va_end(rest); \
        return AT_HIT(fd, path, #name) ? -1 : real(fd, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
BY_PATH(FILE *, fopen, NULL, (const char *path, const char *mode), path, (path, mode))
BY_PATH(FILE *, fopen64, NULL, (const char *path, const char *mode), path, (path, mode))

/* A disk that fills takes the first half of what is written, and then nothing. */
static size_t taken(size_t count) {
    if (manner == SHORT_WRITES && seen == failed_at && count > 1)
        return count / 2;
    return 0;
}

#define WRITES(name, parameters, arguments, half) \
    ssize_t name parameters { \
        REAL(name); \
        if (!FD_HIT(fd, #name)) \
            return real arguments; \
        int error = errno; \
        size_t part = taken(count); \
        if (part) \
            return real half; \
        errno = error; \
        return -1; \
    }
WRITES(write, (int fd, const void *data, size_t count), (fd, data, count), (fd, data, part))
WRITES(pwrite, (int fd, const void *data, size_t count, off_t at), (fd, data, count, at), (fd, data, part, at))
WRITES(pwrite64, (int fd, const void *data, size_t count, off64_t at), (fd, data, count, at), (fd, data, part, at))
BY_FD(ssize_t, writev, -1, (int fd, const struct iovec *parts, int count), fd, (fd, parts, count))
BY_FD(ssize_t, read, -1, (int fd, void *data, size_t count), fd, (fd, data, count))
BY_FD(ssize_t, pread, -1, (int fd, void *data, size_t count, off_t at), fd, (fd, data, count, at))
BY_FD(ssize_t, pread64, -1, (int fd, void *data, size_t count, off64_t at), fd, (fd, data, count, at))
BY_FD(ssize_t, readv, -1, (int fd, const struct iovec *parts, int count), fd, (fd, parts, count))

size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    REAL(fwrite);
    return FD_HIT(fileno(file), "fwrite") ? 0 : real(data, size, count, file);
}

int fclose(FILE *file) {
    REAL(fclose);
    int hit = FD_HIT(fileno(file), "fclose"), done = real(file);
    if (hit)
        errno = failure;
    return hit ? EOF : done;
}

/* The descriptor is gone all the same, as on Linux. */
int close(int fd) {
    REAL(close);
    int hit = FD_HIT(fd, "close"), done = real(fd);
    if (hit)
        errno = failure;
    return hit ? -1 : done;
}

BY_FD(int, fsync, -1, (int fd), fd, (fd))
BY_FD(int, fdatasync, -1, (int fd), fd, (fd))
BY_FD(int, flock, -1, (int fd, int how), fd, (fd, how))
BY_FD(int, ftruncate, -1, (int fd, off_t length), fd, (fd, length))
BY_FD(int, ftruncate64, -1, (int fd, off64_t length), fd, (fd, length))
BY_FD(off_t, lseek, -1, (int fd, off_t at, int whence), fd, (fd, at, whence))
BY_FD(off64_t, lseek64, -1, (int fd, off64_t at, int whence), fd, (fd, at, whence))
BY_FD(int, fallocate, -1, (int fd, int how, off_t at, off_t count), fd, (fd, how, at, count))
BY_FD(int, fchmod, -1, (int fd, mode_t mode), fd, (fd, mode))
BY_FD(DIR *, fdopendir, NULL, (int fd), fd, (fd))
BY_FD(ssize_t, copy_file_range, -1, (int in, off64_t *from, int fd, off64_t *to, size_t count, unsigned how), fd,
      (in, from, fd, to, count, how))
BY_FD(void *, mmap, MAP_FAILED, (void *near, size_t count, int what, int how, int fd, off_t at), fd,
      (near, count, what, how, fd, at))
BY_FD(void *, mmap64, MAP_FAILED, (void *near, size_t count, int what, int how, int fd, off64_t at), fd,
      (near, count, what, how, fd, at))
BY_FD(int, fstat, -1, (int fd, struct stat *found), fd, (fd, found))
BY_FD(int, fstat64, -1, (int fd, struct stat64 *found), fd, (fd, found))
BY_PATH(int, stat, -1, (const char *path, struct stat *found), path, (path, found))
BY_PATH(int, stat64, -1, (const char *path, struct stat64 *found), path, (path, found))
BY_PATH(int, lstat, -1, (const char *path, struct stat *found), path, (path, found))
BY_PATH(int, lstat64, -1, (const char *path, struct stat64 *found), path, (path, found))
BY_AT(int, fstatat, -1, (int fd, const char *path, struct stat *found, int how), fd, path, (fd, path, found, how))
BY_AT(int, fstatat64, -1, (int fd, const char *path, struct stat64 *found, int how), fd, path,
      (fd, path, found, how))
BY_AT(int, statx, -1, (int fd, const char *path, int how, unsigned what, struct statx *found), fd, path,
      (fd, path, how, what, found))
BY_PATH(int, statvfs, -1, (const char *path, struct statvfs *found), path, (path, found))
BY_PATH(int, statvfs64, -1, (const char *path, struct statvfs64 *found), path, (path, found))
BY_PATH(int, access, -1, (const char *path, int how), path, (path, how))
BY_AT(int, faccessat, -1, (int fd, const char *path, int what, int how), fd, path, (fd, path, what, how))
BY_PATH(DIR *, opendir, NULL, (const char *path), path, (path))
BY_PATH(int, mkdir, -1, (const char *path, mode_t mode), path, (path, mode))
BY_AT(int, mkdirat, -1, (int fd, const char *path, mode_t mode), fd, path, (fd, path, mode))
BY_PATH(int, rmdir, -1, (const char *path), path, (path))
BY_PATH(int, unlink, -1, (const char *path), path, (path))
BY_AT(int, unlinkat, -1, (int fd, const char *path, int how), fd, path, (fd, path, how))
BY_PATH(int, rename, -1, (const char *path, const char *to), path, (path, to))
BY_AT(int, renameat, -1, (int fd, const char *path, int there, const char *to), fd, path, (fd, path, there, to))
BY_AT(int, renameat2, -1, (int fd, const char *path, int there, const char *to, unsigned how), fd, path,
      (fd, path, there, to, how))
BY_PATH(int, link, -1, (const char *path, const char *to), to, (path, to))
BY_PATH(int, symlink, -1, (const char *path, const char *to), to, (path, to))
BY_PATH(int, chmod, -1, (const char *path, mode_t mode), path, (path, mode))
BY_PATH(ssize_t, readlink, -1, (const char *path, char *text, size_t count), path, (path, text, count))
BY_PATH(int, truncate, -1, (const char *path, off_t length), path, (path, length))

/* At the end of a folder and at an error alike it returns nothing: errno tells. */
struct dirent *readdir(DIR *folder) {
    REAL(readdir);
    return FD_HIT(dirfd(folder), "readdir") ? NULL : real(folder);
}
struct dirent64 *readdir64(DIR *folder) {
    REAL(readdir64);
    return FD_HIT(dirfd(folder), "readdir64") ? NULL : real(folder);
}
