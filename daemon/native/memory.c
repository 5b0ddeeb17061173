/* Memory: read-only maps of files, and anonymous memory that is zero until it is touched.
 *
 * Large maps begin where huge pages do: then a map of a file whose cached pages are huge costs one
 * fault each 2 MiB instead of one each 64 KiB, which is most of the time of a first token. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

enum { HUGE_PAGE = 2 << 20 };

bool ember_fail(ember_error error, const char *format, ...)
{
    if (error.size > 0) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(error.text, error.size, format, arguments);
        va_end(arguments);
        for (char *c = error.text; *c; c++)
            if (*c == '\n')
                *c = ' '; /* messages of kernels have several lines, users get one */
    }
    return false;
}

/* An address with `bytes` of reserved memory behind it that is a multiple of HUGE_PAGE, as far as
 * bytes are; or MAP_FAILED. To be mapped over, and unmapped with the same `bytes`. */
static char *reserve(size_t bytes)
{
    size_t spare = bytes >= HUGE_PAGE ? HUGE_PAGE : 0;
    if (bytes > SIZE_MAX - spare) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    char *base = mmap(NULL, bytes + spare, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                      -1, 0);
    if (base == MAP_FAILED || spare == 0)
        return base;
    size_t before = (size_t)(-(uintptr_t)base % HUGE_PAGE);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t used = (bytes + page - 1) / page * page;
    if (before > 0)
        munmap(base, before);
    if (before + used < bytes + spare)
        munmap(base + before + used, bytes + spare - before - used);
    return base + before;
}

/* Maps over reserved memory, which is given back if that fails. */
static char *map_huge(size_t bytes, int protection, int flags, int file)
{
    char *base = reserve(bytes);
    if (base == MAP_FAILED)
        return base;
    if (mmap(base, bytes, protection, flags | MAP_FIXED, file, 0) == MAP_FAILED) {
        int code = errno;
        munmap(base, bytes);
        errno = code;
        return MAP_FAILED;
    }
    /* A hint: a kernel without it works as well, only later. */
    madvise(base, bytes, MADV_HUGEPAGE);
    return base;
}

bool ember_map_file(ember_mapping *mapping, int file, int64_t bytes, const char *name,
                    ember_error error)
{
    *mapping = (ember_mapping){0};
    struct stat status;
    if (fstat(file, &status) != 0)
        return ember_fail(error, "%s: %s", name, strerror(errno));
    if (bytes < 0 || status.st_size < bytes)
        return ember_fail(error, "%s has %lld bytes, expected %lld", name,
                          (long long)status.st_size, (long long)bytes);
    if (bytes == 0)
        return true;
    void *base = map_huge((size_t)bytes, PROT_READ, MAP_SHARED, file);
    if (base == MAP_FAILED)
        return ember_fail(error, "cannot map %s (%lld bytes): %s", name, (long long)bytes,
                          strerror(errno));
    *mapping = (ember_mapping){base, (size_t)bytes, ember_guard(base, (size_t)bytes, file)};
    return true;
}

bool ember_map_zeroed(ember_mapping *mapping, int64_t bytes, ember_map_kind kind,
                      const char *name, ember_error error)
{
    *mapping = (ember_mapping){0};
    if (bytes < 0)
        return ember_fail(error, "%s memory: %lld bytes", name, (long long)bytes);
    if (bytes == 0)
        return true;
    int protection = PROT_READ | PROT_WRITE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *base = kind == EMBER_MAP_HUGE ? map_huge((size_t)bytes, protection, flags, -1)
                                        : mmap(NULL, (size_t)bytes, protection, flags, -1, 0);
    if (base == MAP_FAILED)
        return ember_fail(error, "cannot reserve %lld bytes of %s memory: %s", (long long)bytes,
                          name, strerror(errno));
    *mapping = (ember_mapping){.base = base, .bytes = (size_t)bytes};
    return true;
}

bool ember_map_reserved(ember_mapping *mapping, int64_t bytes, const char *name,
                        ember_error error)
{
    *mapping = (ember_mapping){0};
    char *base = bytes < 1 ? MAP_FAILED : reserve((size_t)bytes);
    if (base == MAP_FAILED)
        return ember_fail(error, "cannot reserve %lld bytes of %s memory: %s", (long long)bytes,
                          name, strerror(bytes < 1 ? EINVAL : errno));
    *mapping = (ember_mapping){.base = base, .bytes = (size_t)bytes};
    return true;
}

bool ember_mapping_use(ember_mapping *mapping, int64_t bytes, ember_error error)
{
    if (mprotect(mapping->base, (size_t)bytes, PROT_READ | PROT_WRITE) != 0)
        return ember_fail(error, "cannot use %lld bytes of memory: %s", (long long)bytes,
                          strerror(errno));
    madvise(mapping->base, (size_t)bytes, MADV_HUGEPAGE); /* a hint */
    return true;
}

void ember_mapping_drop(ember_mapping *mapping, int64_t offset, int64_t bytes)
{
    int64_t page = sysconf(_SC_PAGESIZE);
    int64_t first = (offset + page - 1) / page * page, end = (offset + bytes) / page * page;
    if (first < end)
        madvise(mapping->base + first, (size_t)(end - first), MADV_DONTNEED);
}

void ember_mapping_keep(ember_mapping *mapping)
{
    if (mapping->base)
        mlock2(mapping->base, mapping->bytes, MLOCK_ONFAULT); /* where that is allowed */
}

void ember_mapping_clear(ember_mapping *mapping)
{
    if (mapping->base && madvise(mapping->base, mapping->bytes, MADV_DONTNEED) != 0)
        memset(mapping->base, 0, mapping->bytes); /* locked pages cannot be given back */
}

void ember_unmap(ember_mapping *mapping)
{
    ember_unguard(mapping->guard);
    if (mapping->base)
        munmap(mapping->base, mapping->bytes);
    *mapping = (ember_mapping){0};
}
