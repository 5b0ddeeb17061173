/* The part of TVM's binary interface that compiled kernels use: DLPack tensors, the packed call of
 * tvm-ffi and the backend callbacks. Declared here so that a device needs no TVM headers.
 * Sources: dlpack.h, tvm/ffi/c_api.h and tvm/runtime/c_backend_api.h of TVM 0.27. */
#ifndef EMBER_TVM_ABI_H
#define EMBER_TVM_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { DL_CPU = 1 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2 };

typedef struct {
    uint8_t code; /* DL_INT, DL_UINT or DL_FLOAT */
    uint8_t bits;
    uint16_t lanes;
} dl_type;

typedef struct {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    dl_type dtype;
    int64_t *shape;
    int64_t *strides; /* NULL: contiguous, row-major */
    uint64_t byte_offset;
} dl_tensor;

enum { TVM_NONE = 0, TVM_DL_TENSOR = 7 };

typedef struct {
    int32_t type_index;
    uint32_t zero_padding;
    union {
        int64_t integer;
        void *pointer;
    };
} tvm_any;

/* A kernel, exported as __tvm_ffi_<symbol>; returns 0, or -1 after it raised an error. */
typedef int tvm_kernel(void *self, const tvm_any *arguments, int32_t count, tvm_any *result);

typedef struct {
    void *sync_handle;
    int32_t num_task;
} tvm_parallel_group;

/* One task of a parallel region: does part `task` of group->num_task. */
typedef int tvm_parallel_lambda(int task, tvm_parallel_group *group, void *closure);

/* Types of the writable pointers __TVMBackend... that a kernel library exports. */
typedef int tvm_parallel_launch(tvm_parallel_lambda *lambda, void *closure, int num_task);
typedef void *tvm_alloc_workspace(int device_type, int device_id, uint64_t bytes, int code,
                                  int bits);
typedef int tvm_free_workspace(int device_type, int device_id, void *memory);

/* What TVM's own error objects begin with; seen only where TVM is in the process. */
typedef struct {
    const char *data;
    size_t size;
} tvm_bytes;

typedef struct {
    uint64_t reference_count;
    int32_t type_index;
    uint32_t padding;
    void (*deleter)(void *self, int flags);
    tvm_bytes kind;
    tvm_bytes message;
} tvm_error;

#endif
