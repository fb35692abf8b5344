/* A wall clock that jumps, for all processes of a run: LD_PRELOAD; CLOCK_JUMPS names a file with nanoseconds to add.

   Waits until a moment of this clock end when it has come, also by a jump, as the kernel's do. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { SECOND = 1000000000, SLICE = 20000000 };
/* Conditions wait by one clock or the other, and do not say by which: uptimes are shorter than times since 1970. */
static const int64_t LONGEST_UPTIME = 500000000;

static const volatile int64_t *added;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_JUMPS");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *found = mmap(NULL, sizeof *added, PROT_READ, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED)
        added = found;
    close(fd);
}

static int64_t wall(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    return now.tv_sec * (int64_t)SECOND + now.tv_nsec + (added ? *added : 0);
}

static struct timespec parts_of(int64_t moment) {
    return (struct timespec){.tv_sec = moment / SECOND, .tv_nsec = moment % SECOND};
}

int clock_gettime(clockid_t id, struct timespec *now) {
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) {
        *now = parts_of(wall());
        return 0;
    }
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    return real(id, now);
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    int64_t moment = wall();
    *now = (struct timeval){.tv_sec = moment / SECOND, .tv_usec = moment % SECOND / 1000};
    return 0;
}

time_t time(time_t *place) {
    time_t now = wall() / SECOND;
    if (place)
        *place = now;
    return now;
}

int timespec_get(struct timespec *now, int base) {
    *now = parts_of(wall());
    return base;
}

static int is_wall(const struct timespec *end) { return added && end->tv_sec > LONGEST_UPTIME; }

/* Return the kernel's moment at which to look again. */
static struct timespec next_look(const struct timespec *end) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    int64_t left = end->tv_sec * (int64_t)SECOND + end->tv_nsec - wall();
    return parts_of(now.tv_sec * (int64_t)SECOND + now.tv_nsec + (left < SLICE ? (left > 0 ? left : 0) : SLICE));
}

static int is_over(const struct timespec *end) { return wall() >= end->tv_sec * (int64_t)SECOND + end->tv_nsec; }

/* A condition that is awaited in slices wakes now and then without a reason, as conditions may. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!is_wall(end))
        return real(condition, mutex, end);
    struct timespec look = next_look(end);
    int done = real(condition, mutex, &look);
    return done == ETIMEDOUT && !is_over(end) ? 0 : done;
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t id,
                           const struct timespec *end) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    if (id != CLOCK_REALTIME || !is_wall(end))
        return real(condition, mutex, id, end);
    struct timespec look = next_look(end);
    int done = real(condition, mutex, id, &look);
    return done == ETIMEDOUT && !is_over(end) ? 0 : done;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *end) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "sem_timedwait");
    for (;;) {
        struct timespec look = is_wall(end) ? next_look(end) : *end;
        int done = real(semaphore, &look);
        if (done == 0 || errno != ETIMEDOUT || !is_wall(end) || is_over(end))
            return done;
    }
}

int sem_clockwait(sem_t *semaphore, clockid_t id, const struct timespec *end) {
    static int (*real)(sem_t *, clockid_t, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "sem_clockwait");
    for (;;) {
        int by_wall = id == CLOCK_REALTIME && is_wall(end);
        struct timespec look = by_wall ? next_look(end) : *end;
        int done = real(semaphore, id, &look);
        if (done == 0 || errno != ETIMEDOUT || !by_wall || is_over(end))
            return done;
    }
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *end) {
    static int (*real)(pthread_mutex_t *, const struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    for (;;) {
        struct timespec look = is_wall(end) ? next_look(end) : *end;
        int done = real(mutex, &look);
        if (done != ETIMEDOUT || !is_wall(end) || is_over(end))
            return done;
    }
}
