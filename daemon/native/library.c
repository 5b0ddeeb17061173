/* The kernel library: loaded from bytes that were checked, given the callbacks that it expects.
 *
 * TVM's generated code knows its host by writable pointers (__TVMBackend...) and by one function
 * that it calls to raise an error. No TVM library is needed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

static _Thread_local ember_pool *current_pool;
static _Thread_local char kernel_error[EMBER_ERROR_BYTES];

/* Takes the error that a kernel raised in TVM, when it found TVM's function before ours: so it is
 * in a compiler that runs the core. */
static void take_error_of_tvm(void)
{
    void (*move)(tvm_error **) = (void (*)(tvm_error **))dlsym(RTLD_DEFAULT,
                                                               "TVMFFIErrorMoveFromRaised");
    int (*release)(tvm_error *) = (int (*)(tvm_error *))dlsym(RTLD_DEFAULT,
                                                              "TVMFFIObjectDecRef");
    tvm_error *raised = NULL;
    if (move && release)
        move(&raised);
    if (!raised)
        return;
    snprintf(kernel_error, sizeof kernel_error, "%.*s: %.*s", (int)raised->kind.size,
             raised->kind.data, (int)raised->message.size, raised->message.data);
    release(raised);
}

const char *ember_kernel_error(void)
{
    if (!*kernel_error)
        take_error_of_tvm();
    return *kernel_error ? kernel_error : "it gave no reason";
}

void ember_set_kernel_error(const char *message)
{
    snprintf(kernel_error, sizeof kernel_error, "%s", message);
}

/* Called by kernels. Where TVM is in the process, its own kernels may find this function first: so
 * TVM gets the error as well, by a function of which it has the only definition. */
EMBER_API void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts,
                                                 int32_t count);

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count)
{
    size_t start = (size_t)snprintf(kernel_error, sizeof kernel_error, "%s: ", kind);
    size_t used = start;
    for (int32_t i = 0; i < count && used < sizeof kernel_error; i++)
        if (parts[i])
            used += (size_t)snprintf(kernel_error + used, sizeof kernel_error - used, "%s",
                                     parts[i]);
    void (*raise)(const char *, const char *) = (void (*)(const char *, const char *))dlsym(
        RTLD_DEFAULT, "TVMFFIErrorSetRaisedFromCStr");
    if (raise && start < sizeof kernel_error)
        raise(kind, kernel_error + start);
}

void ember_library_use_pool(ember_pool *pool)
{
    current_pool = pool;
}

static int parallel_launch(tvm_parallel_lambda *lambda, void *closure, int num_task)
{
    ember_pool *pool = current_pool;
    current_pool = NULL; /* a region inside a task runs in that task's thread */
    int code = ember_pool_launch(pool, lambda, closure, num_task);
    current_pool = pool;
    return code;
}

static void *alloc_workspace(int device_type, int device_id, uint64_t bytes, int code, int bits)
{
    (void)device_type, (void)device_id, (void)code, (void)bits;
    if (bytes > SIZE_MAX - EMBER_ALIGNMENT)
        return NULL;
    uint64_t rounded = (bytes + EMBER_ALIGNMENT - 1) / EMBER_ALIGNMENT * EMBER_ALIGNMENT;
    return aligned_alloc(EMBER_ALIGNMENT, rounded > 0 ? rounded : EMBER_ALIGNMENT);
}

static int free_workspace(int device_type, int device_id, void *memory)
{
    (void)device_type, (void)device_id;
    free(memory);
    return 0;
}

static int parallel_barrier(int task, tvm_parallel_group *group)
{
    (void)task, (void)group;
    ember_set_kernel_error("the kernel uses a barrier inside a parallel region, which is not "
                           "supported: tasks run in any order");
    return -1;
}

static int write_all(int file, const char *bytes, size_t size)
{
    while (size > 0) {
        ssize_t written = write(file, bytes, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return written < 0 ? errno : EIO;
        bytes += written;
        size -= (size_t)written;
    }
    return 0;
}

/* A descriptor of an unnamed file, in memory or, where there is none, in the temporary folder. */
static int unnamed_file(void)
{
    int file = memfd_create("emberd-kernels", MFD_CLOEXEC);
    if (file >= 0)
        return file;
    const char *folder = getenv("TMPDIR");
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/emberd-kernels-XXXXXX", folder ? folder : "/tmp");
    if (length < 0 || (size_t)length >= sizeof path)
        return -1;
    file = mkostemp(path, O_CLOEXEC);
    if (file >= 0)
        unlink(path);
    return file;
}

static void set_backend(void *handle)
{
    const struct {
        const char *name;
        void (*function)(void);
    } backend[] = {
        {"__TVMBackendParallelLaunch", (void (*)(void))parallel_launch},
        {"__TVMBackendParallelBarrier", (void (*)(void))parallel_barrier},
        {"__TVMBackendAllocWorkspace", (void (*)(void))alloc_workspace},
        {"__TVMBackendFreeWorkspace", (void (*)(void))free_workspace},
    };
    for (size_t i = 0; i < sizeof backend / sizeof *backend; i++) {
        void (**slot)(void) = (void (**)(void))dlsym(handle, backend[i].name);
        if (slot)
            *slot = backend[i].function;
    }
}

bool ember_library_open(ember_library *library, const void *bytes, int64_t size, ember_error error)
{
    *library = (ember_library){NULL, unnamed_file()};
    if (library->file < 0)
        return ember_fail(error, "cannot create a file for the kernels: %s", strerror(errno));
    int code = write_all(library->file, bytes, (size_t)size);
    if (code != 0) {
        ember_library_close(library);
        return ember_fail(error, "cannot write the kernels to memory: %s", strerror(code));
    }
    /* The loader knows libraries by path: the descriptor stays open while this one is loaded, so
     * that no other library gets the same path. */
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", library->file);
    library->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library->handle) {
        ember_fail(error, "cannot load the kernels: %s", dlerror());
        ember_library_close(library);
        return false;
    }
    set_backend(library->handle);
    return true;
}

void ember_library_close(ember_library *library)
{
    if (library->handle)
        dlclose(library->handle);
    if (library->file >= 0)
        close(library->file);
    *library = (ember_library){NULL, -1};
}

tvm_kernel *ember_library_kernel(const ember_library *library, const char *symbol)
{
    char name[1024];
    int length = snprintf(name, sizeof name, "__tvm_ffi_%s", symbol);
    if (length < 0 || (size_t)length >= sizeof name)
        return NULL;
    return (tvm_kernel *)dlsym(library->handle, name);
}
