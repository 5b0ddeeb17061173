/* What the core's files share. */
#ifndef EMBER_INTERNAL_H
#define EMBER_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ember.h"
#include "tvm_abi.h"

/* Every section starts on a page, every buffer on a cache line. */
enum { EMBER_ALIGNMENT = 64, EMBER_MAX_THREADS = 256, EMBER_ERROR_BYTES = 512 };

typedef struct {
    char *text;
    size_t size;
} ember_error;

/* Writes a message; always false, so that `return ember_fail(...)` reads well. */
bool ember_fail(ember_error error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- memory.c */
typedef struct {
    char *base; /* NULL when bytes is 0 */
    size_t bytes;
} ember_mapping;

typedef enum { EMBER_MAP_PLAIN, EMBER_MAP_HUGE } ember_map_kind;

bool ember_map_file(ember_mapping *mapping, int file, int64_t bytes, const char *name, bool ahead,
                    ember_error error);
bool ember_map_zeroed(ember_mapping *mapping, int64_t bytes, ember_map_kind kind,
                      const char *name, ember_error error);
void ember_mapping_clear(ember_mapping *mapping); /* anonymous memory: back to zero, given back */
void ember_unmap(ember_mapping *mapping);

/* ---- pool.c */
int64_t ember_nanoseconds(void); /* of the monotonic clock */

typedef struct ember_pool ember_pool;

ember_pool *ember_pool_open(int threads, const int32_t *cpus, int cpu_count, ember_error error);
void ember_pool_close(ember_pool *pool);
void ember_pool_wake(ember_pool *pool);
/* Runs every task of a parallel region on the pool; -1 when a task failed. */
int ember_pool_launch(ember_pool *pool, tvm_parallel_lambda *lambda, void *closure, int num_task);

/* ---- library.c */
typedef struct {
    void *handle;
    int file;
} ember_library;

bool ember_library_open(ember_library *library, const void *bytes, int64_t size, ember_error error);
void ember_library_close(ember_library *library);
tvm_kernel *ember_library_kernel(const ember_library *library, const char *symbol);
/* Makes `pool` the one on which kernels called by this thread run their parallel regions. */
void ember_library_use_pool(ember_pool *pool);
/* The message of the last error a kernel raised in this thread. */
const char *ember_kernel_error(void);
void ember_set_kernel_error(const char *message);

/* ---- program.c */
enum {
    EMBER_WEIGHTS,
    EMBER_EXPERTS,
    EMBER_SCRATCH,
    EMBER_STATE,
    EMBER_KV,
    EMBER_TOKENS,
    EMBER_POSITIONS,
    EMBER_LOGITS,
    EMBER_TABLES,
    EMBER_SECTION_COUNT,
};

enum { EMBER_CALL, EMBER_ACQUIRE_EXPERTS };

typedef struct {
    tvm_kernel *kernel; /* NULL: acquire experts */
    const tvm_any *arguments;
    int32_t count;
    int32_t symbol; /* index of the kernel's name, or the layer */
} ember_step;

typedef struct {
    int32_t tokens;
    int32_t role;
    const ember_step *steps;
    int64_t step_count;
} ember_step_list;

/* A tensor of STATE or KV: its address changes with the session. */
typedef struct {
    dl_tensor *tensor;
    int64_t offset;
    bool in_kv;
} ember_session_tensor;

typedef struct {
    dl_tensor *tensors;
    int64_t *shapes;
    tvm_any *arguments;
    ember_step *steps;
    ember_step_list *sequences;
    int64_t sequence_count;
    ember_session_tensor *session_tensors;
    int64_t session_tensor_count;
    char **symbols;
    int64_t symbol_count;
} ember_program;

/* Checks the program of `config` and builds its executable form; `sections` holds the mapped
 * sections of the model (those of a session are empty). */
bool ember_program_build(ember_program *program, const ember_model_config *config,
                         const ember_mapping *sections, const ember_library *library,
                         ember_error error);
void ember_program_free(ember_program *program);
const ember_step_list *ember_program_find(const ember_program *program, int32_t tokens,
                                          int32_t role);
/* `costs`: as in ember_model_profile, or NULL. */
bool ember_program_run(const ember_program *program, const ember_step_list *list,
                       ember_cost *costs, ember_error error);

/* ---- model.c */
struct ember_model {
    ember_mapping sections[EMBER_SECTION_COUNT]; /* STATE and KV stay empty */
    ember_library library;
    ember_program program;
    ember_pool *pool;
    const ember_session *bound; /* whose addresses are in the program's tensors */
    ember_cost *costs; /* the caller's; NULL while steps are not timed */
    int64_t state_bytes;
    int64_t kv_bytes_per_token;
    int64_t vocab_size;
};

#endif
