/* What the core asks of the system, linked with --wrap. */
#define _GNU_SOURCE
#include "system.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

atomic_int failures_in_100;
atomic_bool delayed;
atomic_int allowed = -1;
bool without_memfd;
pthread_t stepping;
atomic_bool closed;
static atomic_bool overlapping, computes;
static atomic_llong first_read; /* meanwhile: its offset, or -1 */
static atomic_int finished;     /* reads meanwhile */
static atomic_uint seed = 1;
static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;
static off_t noted[64];
static int count_noted;

unsigned draw(void)
{
    unsigned next = atomic_fetch_add(&seed, 2654435761u);
    next ^= next >> 15;
    next *= 2246822519u;
    return next ^ next >> 13;
}

static void note(off_t offset)
{
    pthread_mutex_lock(&noting);
    if (count_noted < (int)(sizeof noted / sizeof *noted))
        noted[count_noted++] = offset;
    pthread_mutex_unlock(&noting);
}

void forget_noted(void)
{
    pthread_mutex_lock(&noting);
    count_noted = 0;
    pthread_mutex_unlock(&noting);
}

int noted_before(off_t offset)
{
    pthread_mutex_lock(&noting);
    int before = 0;
    while (before < count_noted && noted[before] != offset)
        before++;
    before = before < count_noted ? before : -1;
    pthread_mutex_unlock(&noting);
    return before;
}

static void pause_shortly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

void demand_overlap(void)
{
    atomic_store(&computes, false);
    atomic_store(&first_read, -1);
    atomic_store(&finished, 0);
    atomic_store(&overlapping, true);
}

bool has_overlapped(void)
{
    return !atomic_load(&overlapping);
}

void computing(void)
{
    if (!atomic_load(&overlapping))
        return;
    atomic_store(&computes, true);
    while (atomic_load(&finished) < 2)
        pause_shortly();
    atomic_store(&overlapping, false);
}

/* All reads but the first, which may be tried again. */
static void hold_back(off_t offset)
{
    long long none = -1;
    atomic_compare_exchange_strong(&first_read, &none, offset);
    while (atomic_load(&overlapping) && !atomic_load(&computes) &&
           atomic_load(&first_read) != offset)
        pause_shortly();
}

static bool refused(void)
{
    return atomic_load(&allowed) >= 0 && atomic_fetch_sub(&allowed, 1) == 0;
}

ssize_t __real_pread(int file, void *target, size_t bytes, off_t offset);
void *__real_calloc(size_t count, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
char *__real_strdup(const char *text);
int __real_memfd_create(const char *name, unsigned flags);
void *__real_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset);
int __real_mprotect(void *at, size_t size, int protection);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*function)(void *), void *argument);
int __real_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);

ssize_t __wrap_pread(int file, void *target, size_t bytes, off_t offset)
{
    note(offset);
    while (atomic_load(&closed))
        pause_shortly();
    hold_back(offset);
    if (atomic_load(&delayed))
        nanosleep(&(struct timespec){.tv_nsec = (long)(draw() % 400) * 1000}, NULL);
    if (draw() % 100 >= (unsigned)atomic_load(&failures_in_100)) {
        ssize_t count = __real_pread(file, target, bytes, offset);
        atomic_fetch_add(&finished, count > 0);
        return count;
    }
    memset(target, 0xFF, bytes);
    const int codes[] = {EIO, EINTR, EINVAL, 0};
    errno = codes[draw() % 4];
    return errno ? -1 : 0;
}

void *__wrap_calloc(size_t count, size_t size)
{
    return refused() ? NULL : __real_calloc(count, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return refused() ? NULL : __real_aligned_alloc(alignment, size);
}

char *__wrap_strdup(const char *text)
{
    return refused() ? NULL : __real_strdup(text);
}

int __wrap_memfd_create(const char *name, unsigned flags)
{
    return without_memfd ? -1 : __real_memfd_create(name, flags);
}

void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
    return refused() ? MAP_FAILED : __real_mmap(at, size, protection, flags, file, offset);
}

int __wrap_mprotect(void *at, size_t size, int protection)
{
    return refused() ? -1 : __real_mprotect(at, size, protection);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*function)(void *), void *argument)
{
    return refused() ? EAGAIN : __real_pthread_create(thread, attributes, function, argument);
}

int __wrap_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
{
    if (pthread_equal(pthread_self(), stepping))
        atomic_store(&closed, false);
    return __real_pthread_cond_wait(condition, mutex);
}
