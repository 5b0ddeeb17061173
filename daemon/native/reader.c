/* Reader threads: each asks its owner what to read next, reads it and hands it back.
 *
 * Reads go past the page cache where the file system can (O_DIRECT) and the place is aligned;
 * elsewhere the pages are given back afterwards: what is read is kept in memory of its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since Linux 5.14 */
#endif

enum { DIRECT_ALIGNMENT = 4096, STACK_BYTES = 1 << 18 };

struct ember_reader {
    pthread_mutex_t lock;
    pthread_cond_t work; /* there may be something to read, or an end to it */
    pthread_cond_t done; /* something was read */
    ember_read_owner owner;
    int file;
    _Atomic bool direct;
    bool stopping;
    int started; /* threads that must be joined */
    pthread_t threads[EMBER_MAX_READERS];
};

/* Sets O_DIRECT; false where the file system has none. */
static bool set_direct(int file, bool direct)
{
    int flags = fcntl(file, F_GETFL);
    return flags >= 0 && fcntl(file, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

/* Some file systems take the flag and then refuse the reads. */
static void stop_direct(ember_reader *reader)
{
    set_direct(reader->file, false);
    atomic_store(&reader->direct, false);
}

/* 0, EMBER_READ_ENDED or what errno says. */
static int read_all(ember_reader *reader, const ember_read *read)
{
    int64_t have = 0;
    while (have < read->bytes) {
        bool direct = atomic_load(&reader->direct);
        ssize_t count = pread(reader->file, read->target + have, (size_t)(read->bytes - have),
                              read->offset + have);
        if (count > 0)
            have += count;
        else if (count == 0 || (direct && have % DIRECT_ALIGNMENT != 0))
            return EMBER_READ_ENDED; /* a direct read is only cut short where the file ends */
        else if (errno == EINVAL && direct)
            stop_direct(reader);
        else if (errno != EINTR)
            return errno;
    }
    if (!atomic_load(&reader->direct))
        posix_fadvise(reader->file, read->offset, read->bytes, POSIX_FADV_DONTNEED);
    return 0;
}

/* Whoever touches a page that could not be brought in is told. */
static void bring_in(const ember_read *read)
{
    if (madvise(read->target, (size_t)read->bytes, MADV_POPULATE_READ) != 0)
        madvise(read->target, (size_t)read->bytes, MADV_WILLNEED);
}

static int perform(ember_reader *reader, const ember_read *read)
{
    if (read->kind != EMBER_READ_PAGES)
        return read_all(reader, read);
    bring_in(read);
    return 0;
}

static void *work(void *argument)
{
    ember_reader *reader = argument;
    ember_read read;
    pthread_mutex_lock(&reader->lock);
    while (!reader->stopping) {
        if (!reader->owner.next(reader->owner.self, &read)) {
            pthread_cond_wait(&reader->work, &reader->lock);
            continue;
        }
        pthread_mutex_unlock(&reader->lock);
        int code = perform(reader, &read);
        pthread_mutex_lock(&reader->lock);
        reader->owner.done(reader->owner.self, &read, code);
        pthread_cond_broadcast(&reader->done);
    }
    pthread_mutex_unlock(&reader->lock);
    return NULL;
}

static int start_threads(ember_reader *reader, int threads)
{
    pthread_attr_t attributes;
    int code = pthread_attr_init(&attributes);
    if (code != 0)
        return code;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    /* Signals are for the threads of the program around us, but for those of a guard's fault. */
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < threads && code == 0; i++) {
        code = pthread_create(&reader->threads[i], &attributes, work, reader);
        reader->started += code == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return code;
}

ember_reader *ember_reader_open(int file, int64_t bytes, int threads, ember_read_owner owner,
                                ember_error error)
{
    if (threads < 1 || threads > EMBER_MAX_READERS) {
        ember_fail(error, "%d reader threads, expected 1 to %d", threads, EMBER_MAX_READERS);
        return NULL;
    }
    ember_reader *reader = calloc(1, sizeof *reader);
    if (!reader) {
        ember_fail(error, "no memory for reader threads");
        return NULL;
    }
    reader->owner = owner;
    reader->file = file;
    pthread_mutex_init(&reader->lock, NULL);
    pthread_cond_init(&reader->work, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC); /* as ember_nanoseconds */
    pthread_cond_init(&reader->done, &attributes);
    pthread_condattr_destroy(&attributes);
    atomic_store(&reader->direct, bytes % DIRECT_ALIGNMENT == 0 && set_direct(file, true));
    int code = start_threads(reader, threads);
    if (code != 0) {
        ember_fail(error, "cannot start %d reader threads: %s", threads, strerror(code));
        ember_reader_close(reader);
        return NULL;
    }
    return reader;
}

void ember_reader_close(ember_reader *reader)
{
    if (!reader)
        return;
    pthread_mutex_lock(&reader->lock);
    reader->stopping = true;
    pthread_cond_broadcast(&reader->work);
    pthread_mutex_unlock(&reader->lock);
    for (int i = 0; i < reader->started; i++)
        pthread_join(reader->threads[i], NULL);
    pthread_mutex_destroy(&reader->lock);
    pthread_cond_destroy(&reader->work);
    pthread_cond_destroy(&reader->done);
    free(reader);
}

void ember_reader_lock(ember_reader *reader)
{
    pthread_mutex_lock(&reader->lock);
}

void ember_reader_unlock(ember_reader *reader)
{
    pthread_mutex_unlock(&reader->lock);
}

void ember_reader_start(ember_reader *reader)
{
    pthread_cond_broadcast(&reader->work);
}

bool ember_reader_wait(ember_reader *reader, int64_t until)
{
    if (until == INT64_MAX)
        return pthread_cond_wait(&reader->done, &reader->lock) == 0;
    struct timespec time = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    return pthread_cond_timedwait(&reader->done, &reader->lock, &time) != ETIMEDOUT;
}
