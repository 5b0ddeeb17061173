/* A disk that a test stops, slows and breaks: preloaded into a daemon, it stands between it and
 * experts.bin.
 *
 * In the folder that EMBERD_TEST_DISK names, the file `stopped` holds reads back for as long as it is
 * there, `broken` has them fail, and `slow` delays each of them. A read that is held back makes the
 * file `reached`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *path_of(char *path, size_t size, const char *name)
{
    snprintf(path, size, "%s/%s", getenv("EMBERD_TEST_DISK"), name);
    return path;
}

static bool is_there(const char *name)
{
    char path[4096];
    return access(path_of(path, sizeof path, name), F_OK) == 0;
}

static bool is_bank(int file)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size > 0 ? size : 0] = 0;
    return strstr(path, "/experts.bin") != NULL;
}

ssize_t pread(int file, void *target, size_t bytes, off_t offset)
{
    ssize_t (*real)(int, void *, size_t, off_t);
    *(void **)&real = dlsym(RTLD_NEXT, "pread");
    if (!is_bank(file))
        return real(file, target, bytes, offset);
    while (is_there("stopped")) {
        char path[4096];
        close(open(path_of(path, sizeof path, "reached"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (is_there("broken")) {
        errno = EIO;
        return -1;
    }
    if (is_there("slow"))
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    return real(file, target, bytes, offset);
}
