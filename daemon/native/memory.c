/* Memory: read-only maps of files, and anonymous memory that is zero until it is touched. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "internal.h"

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

bool ember_map_file(ember_mapping *mapping, int file, int64_t bytes, const char *name, bool ahead,
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
    void *base = mmap(NULL, (size_t)bytes, PROT_READ, MAP_SHARED, file, 0);
    if (base == MAP_FAILED)
        return ember_fail(error, "cannot map %s (%lld bytes): %s", name, (long long)bytes,
                          strerror(errno));
    /* Hints: a kernel without them works as well, only later. */
    if (ahead)
        madvise(base, (size_t)bytes, MADV_WILLNEED);
    *mapping = (ember_mapping){base, (size_t)bytes};
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
    void *base = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return ember_fail(error, "cannot reserve %lld bytes of %s memory: %s", (long long)bytes,
                          name, strerror(errno));
    if (kind == EMBER_MAP_HUGE)
        madvise(base, (size_t)bytes, MADV_HUGEPAGE);
    *mapping = (ember_mapping){base, (size_t)bytes};
    return true;
}

void ember_mapping_clear(ember_mapping *mapping)
{
    if (mapping->base && madvise(mapping->base, mapping->bytes, MADV_DONTNEED) != 0)
        memset(mapping->base, 0, mapping->bytes); /* locked pages cannot be given back */
}

void ember_unmap(ember_mapping *mapping)
{
    if (mapping->base)
        munmap(mapping->base, mapping->bytes);
    *mapping = (ember_mapping){0};
}
