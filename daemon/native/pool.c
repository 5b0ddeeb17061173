/* The thread pool: a caller and its workers claim the tasks of a parallel region one by one.
 *
 * Claims go through one 64-bit word, (generation << 32 | next task). A worker advances it by
 * compare-and-swap from a value it has seen, so a worker that wakes late can never take a task of a
 * region whose description it has not read, and the caller never waits for workers without a task:
 * the region ends when its tasks do. That is what keeps the pool going when another process takes a
 * core away. Idle workers spin for SPIN_NANOSECONDS, yielding, and then sleep on a futex. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

enum {
    SPIN_NANOSECONDS = 80 * 1000,
    SPINS_BEFORE_YIELD = 256,
    SPINS_PER_CLOCK = 16,
    TASKS_PER_THREAD = 4,
    STACK_BYTES = 1 << 20,
};

static const uint32_t CLOSED = UINT32_MAX; /* as next task: none can be claimed */

struct ember_pool {
    _Alignas(64) _Atomic uint64_t claims;
    _Alignas(64) _Atomic int32_t remaining;
    _Alignas(64) _Atomic uint32_t generation; /* the futex word; follows claims */
    _Atomic int32_t sleepers;
    _Atomic bool stopping;
    /* The current region; read by workers, valid while a task of its generation is unclaimed. */
    _Atomic(tvm_parallel_lambda *) lambda;
    _Atomic(void *) closure;
    _Atomic int32_t num_task;
    _Atomic bool failed;
    char message[EMBER_ERROR_BYTES]; /* of the first task that failed */
    int threads;
    int started; /* workers that must be joined */
    pthread_t workers[EMBER_MAX_THREADS];
};

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t ember_nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, EMBER_MAX_THREADS, NULL, NULL, 0);
}

static void run_task(ember_pool *pool, tvm_parallel_lambda *lambda, void *closure, int task,
                     int num_task)
{
    tvm_parallel_group group = {NULL, num_task};
    if (lambda(task, &group, closure) != 0) {
        if (!atomic_exchange(&pool->failed, true))
            snprintf(pool->message, sizeof pool->message, "%s", ember_kernel_error());
        ember_set_kernel_error("");
    }
    atomic_fetch_sub(&pool->remaining, 1);
}

/* Writes the description of a region and opens it for claims. Claims are closed meanwhile, so that
 * nobody takes a task of the old region by the new description. */
static void publish(ember_pool *pool, tvm_parallel_lambda *lambda, void *closure, int num_task)
{
    uint32_t generation = atomic_load(&pool->generation);
    atomic_store(&pool->claims, (uint64_t)generation << 32 | CLOSED);
    atomic_store(&pool->lambda, lambda);
    atomic_store(&pool->closure, closure);
    atomic_store(&pool->num_task, num_task);
    atomic_store(&pool->failed, false);
    atomic_store(&pool->remaining, num_task);
    atomic_store(&pool->claims, (uint64_t)(generation + 1) << 32);
    atomic_store(&pool->generation, generation + 1);
}

/* Claims and runs tasks until the current region has none left; returns its generation. */
static uint32_t drain(ember_pool *pool)
{
    for (;;) {
        uint64_t claims = atomic_load(&pool->claims);
        tvm_parallel_lambda *lambda = atomic_load(&pool->lambda);
        void *closure = atomic_load(&pool->closure);
        int32_t num_task = atomic_load(&pool->num_task);
        uint32_t task = (uint32_t)claims;
        if (task >= (uint32_t)num_task) {
            if (atomic_load(&pool->claims) == claims)
                return (uint32_t)(claims >> 32);
        } else if (atomic_compare_exchange_weak(&pool->claims, &claims, claims + 1)) {
            run_task(pool, lambda, closure, (int)task, num_task);
        }
    }
}

static bool spin(const ember_pool *pool, uint32_t seen)
{
    int64_t start = 0;
    for (int i = 1;; i++) {
        if (atomic_load(&pool->generation) != seen)
            return true;
        if (i < SPINS_BEFORE_YIELD) {
            pause_cpu();
            continue;
        }
        sched_yield();
        if (i % SPINS_PER_CLOCK == 0) {
            int64_t now = ember_nanoseconds();
            if (start == 0)
                start = now;
            else if (now - start > SPIN_NANOSECONDS)
                return false;
        }
    }
}

static void *work(void *argument)
{
    ember_pool *pool = argument;
    uint32_t seen = 0;
    while (!atomic_load(&pool->stopping)) {
        if (spin(pool, seen)) {
            seen = drain(pool);
            continue;
        }
        atomic_fetch_add(&pool->sleepers, 1);
        futex_wait(&pool->generation, seen);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
    return NULL;
}

/* Keeps a worker on the given CPUs, one per core, so that no two share a core's units; which of
 * them is the scheduler's choice: bound to a single one, a worker waits there when another process
 * comes (median of a matrix product with a busy neighbour: 160-270 us bound, 140-150 us free). */
static void set_cpus(pthread_attr_t *attributes, const int32_t *cpus, int cpu_count)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < cpu_count; i++)
        if (cpus[i] >= 0 && cpus[i] < CPU_SETSIZE)
            CPU_SET(cpus[i], &set);
    pthread_attr_setaffinity_np(attributes, sizeof set, &set);
}

/* Starts a worker; on any CPU when those are not ours to use. */
static int start_worker(ember_pool *pool, const int32_t *cpus, int cpu_count)
{
    int code = EINVAL;
    for (int bound = cpu_count > 0; bound >= 0 && code != 0; bound--) {
        pthread_attr_t attributes;
        code = pthread_attr_init(&attributes);
        if (code != 0)
            return code;
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        if (bound)
            set_cpus(&attributes, cpus, cpu_count);
        code = pthread_create(&pool->workers[pool->started], &attributes, work, pool);
        pthread_attr_destroy(&attributes);
    }
    if (code == 0)
        pool->started++;
    return code;
}

ember_pool *ember_pool_open(int threads, const int32_t *cpus, int cpu_count, ember_error error)
{
    if (threads < 1 || threads > EMBER_MAX_THREADS) {
        ember_fail(error, "%d threads, expected 1 to %d", threads, EMBER_MAX_THREADS);
        return NULL;
    }
    ember_pool *pool = aligned_alloc(_Alignof(ember_pool), sizeof *pool);
    if (!pool) {
        ember_fail(error, "no memory for the thread pool");
        return NULL;
    }
    memset(pool, 0, sizeof *pool);
    pool->threads = threads;
    /* Signals are for the threads of the program around us, but for those of a guard's fault. */
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = 0;
    for (int i = 1; i < threads && code == 0; i++)
        code = start_worker(pool, cpus, cpu_count);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0) {
        ember_fail(error, "cannot start %d threads: %s", threads, strerror(code));
        ember_pool_close(pool);
        return NULL;
    }
    return pool;
}

void ember_pool_close(ember_pool *pool)
{
    if (!pool)
        return;
    atomic_store(&pool->stopping, true);
    atomic_fetch_add(&pool->generation, 1);
    futex_wake_all(&pool->generation);
    for (int i = 0; i < pool->started; i++)
        pthread_join(pool->workers[i], NULL);
    free(pool);
}

/* Lets sleeping workers wake up while the caller still does serial work. */
void ember_pool_wake(ember_pool *pool)
{
    if (atomic_load(&pool->sleepers) > 0)
        futex_wake_all(&pool->generation);
}

static int run_alone(tvm_parallel_lambda *lambda, void *closure, int num_task)
{
    tvm_parallel_group group = {NULL, num_task};
    for (int task = 0; task < num_task; task++)
        if (lambda(task, &group, closure) != 0)
            return -1;
    return 0;
}

int ember_pool_launch(ember_pool *pool, tvm_parallel_lambda *lambda, void *closure, int num_task)
{
    if (!pool || pool->threads == 1 || num_task == 1)
        return run_alone(lambda, closure, num_task > 0 ? num_task : 1);
    if (num_task <= 0)
        num_task = pool->threads * TASKS_PER_THREAD;
    publish(pool, lambda, closure, num_task);
    if (atomic_load(&pool->sleepers) > 0)
        futex_wake_all(&pool->generation);
    drain(pool);
    for (int i = 0; atomic_load(&pool->remaining) > 0; i++) {
        if (i < SPINS_BEFORE_YIELD)
            pause_cpu();
        else
            sched_yield();
    }
    if (!atomic_load(&pool->failed))
        return 0;
    ember_set_kernel_error(pool->message);
    return -1;
}
