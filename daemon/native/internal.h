/* What the core's files share. */
#ifndef EMBER_INTERNAL_H
#define EMBER_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ember.h"
#include "tvm_abi.h"

/* Every section starts on a page, every buffer on a cache line. */
enum { EMBER_ALIGNMENT = 64, EMBER_ERROR_BYTES = 512 };
enum { EMBER_MAX_THREADS = 256, EMBER_MAX_READERS = 64 };
enum { EMBER_MAX_DIMENSIONS = 8, EMBER_MAX_ARGUMENTS = 64, EMBER_MAX_LAYERS = 1 << 12 };

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
    int guard; /* of a file's map; 0: none */
} ember_mapping;

typedef enum { EMBER_MAP_PLAIN, EMBER_MAP_HUGE } ember_map_kind;

bool ember_map_file(ember_mapping *mapping, int file, int64_t bytes, const char *name,
                    ember_error error);
bool ember_map_zeroed(ember_mapping *mapping, int64_t bytes, ember_map_kind kind,
                      const char *name, ember_error error);
/* Address space of which nothing can be used yet; `use` makes its first bytes usable, zero until
 * they are touched, and `drop` gives the memory of a part of them back. */
bool ember_map_reserved(ember_mapping *mapping, int64_t bytes, const char *name,
                        ember_error error);
bool ember_mapping_use(ember_mapping *mapping, int64_t bytes, ember_error error);
void ember_mapping_drop(ember_mapping *mapping, int64_t offset, int64_t bytes);
/* From now on pages that are read stay in memory, as far as the system allows. */
void ember_mapping_keep(ember_mapping *mapping);
void ember_mapping_clear(ember_mapping *mapping); /* anonymous memory: back to zero, given back */
void ember_unmap(ember_mapping *mapping);

/* ---- guard.c */
/* Guards a map of a file against faults; a number for the guard, or 0 when there is none left. */
int ember_guard(const char *base, size_t bytes, int file);
void ember_unguard(int number);
/* Whether a page could not be read since the last call; the file is then mapped again. */
bool ember_guard_renew(int number);

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
    EMBER_BOUNDS,
    EMBER_SECTION_COUNT,
};

typedef enum {
    EMBER_CALL,            /* call the kernel */
    EMBER_ACQUIRE_EXPERTS, /* make experts resident */
    EMBER_CALL_EACH,       /* call the kernel for one row after the other */
    EMBER_TAKE_LAST_ROW,   /* copy the last row */
    EMBER_CALL_IN_WAVES,   /* call the kernel for parts of the acquired experts, once for each */
    EMBER_CALL_AHEAD,      /* call the kernel if experts are expected */
    EMBER_EXPECT_EXPERTS,  /* have experts read that the next layer may need */
} ember_step_kind;

typedef struct {
    ember_step_kind kind;
    tvm_kernel *kernel; /* NULL unless one is called */
    const tvm_any *arguments;
    int32_t count;
    int32_t symbol; /* index of the kernel's name, or the layer */
    bool in_waves;  /* of acquired experts: a part of them at a time is enough */
    bool expects;   /* of acquired experts: a step follows that expects others, and then waits */
} ember_step;

typedef struct {
    int32_t tokens; /* at most */
    int32_t role;
    const ember_step *steps;
    int64_t step_count;
} ember_step_list;

/* A tensor of a program. That of a session (in STATE or KV) gets its address with the session;
 * that with rows for each token gets its first dimension with the step. */
typedef struct {
    dl_tensor dl; /* first: a kernel's argument points to it */
    int64_t shape[EMBER_MAX_DIMENSIONS];
    int64_t offset;    /* of a session's tensor in its section */
    int32_t section;
    int32_t token_rows; /* rows of the first dimension for each token; 0: fixed */
} ember_tensor;

/* Where the tensors of a session are. */
typedef struct {
    char *state;
    char *kv;
    int64_t rows; /* of the KV cache */
} ember_session_memory;

typedef struct {
    ember_tensor *tensors;
    int64_t tensor_count;
    int32_t bound_tokens;       /* the run that tensors were prepared for last: its tokens, */
    ember_session_memory bound; /* and its first session */
    char *bounce; /* one row of every argument of a step, each on a cache line */
    int64_t bounce_bytes;
    tvm_any *arguments;
    ember_step *steps;
    ember_step_list *sequences;
    int64_t sequence_count;
    char **symbols;
    int64_t symbol_count;
    ember_expert_layout experts;
    const ember_tensor **tables; /* of experts, by layer; NULL where there are none */
    int32_t least_slots;     /* that the steps need which take all of their experts at once */
    bool has_routers;        /* weights and scores in all steps that acquire experts */
} ember_program;

/* Checks the program of `config` and builds its executable form; `sections` holds the mapped
 * sections of the model (those of a session are empty). */
bool ember_program_build(ember_program *program, const ember_model_config *config,
                         const ember_mapping *sections, const ember_library *library,
                         ember_error error);
void ember_program_free(ember_program *program);
/* The shortest sequence of the role that takes so many tokens; NULL if there is none. */
const ember_step_list *ember_program_find(const ember_program *program, int32_t tokens,
                                          int32_t role);
/* Zero bytes are asked for as one, so that NULL always means no memory. */
void *ember_allocate(int64_t count, size_t size);

/* ---- tensors.c */
bool ember_tensors_build(ember_program *program, const ember_model_config *config,
                         const ember_mapping *sections, ember_error error);
/* Points a tensor at the memory of a session, if it is one of a session. */
void ember_tensor_bind(ember_tensor *tensor, const ember_session_memory *memory);
int64_t ember_row_bytes(const ember_tensor *tensor); /* of one index of the first dimension */
int64_t ember_aligned(int64_t bytes);

/* ---- routing.c */

/* The arguments of a step that acquires experts: ids and weights of those that tokens chose, and the
 * router's probabilities of all. Weights and scores are NULL where a program does not say them. */
typedef struct {
    const ember_tensor *ids, *weights, *scores, *table, *bank;
} ember_acquired;

ember_acquired ember_step_acquired(const ember_step *step);

/* Checks a step that acquires experts, and notes how they lie and are chosen. */
bool ember_check_acquire(ember_program *program, const ember_step *step, ember_error error);
bool ember_check_expect(const ember_step *step, ember_error error);
/* Notes how many slots the steps of a sequence need that take all of their experts at once. */
void ember_count_slots(ember_program *program, const ember_step_list *list);

/* ---- reader.c */
typedef enum {
    EMBER_READ_NEEDED, /* a step waits for it, or will */
    EMBER_READ_EXPECTED, /* the next layer may need it */
    EMBER_READ_WARM,   /* it may be needed */
    EMBER_READ_PAGES,  /* the target is a map: its pages are brought in, failing or not */
} ember_read_kind;

typedef struct {
    ember_read_kind kind;
    int64_t offset, bytes; /* in the file */
    char *target;
    int32_t slot; /* the owner's */
} ember_read;

enum { EMBER_READ_ENDED = -1 }; /* the file ends before the range does */

/* Who is to be asked for reads: `next` fills in one or returns false, `done` takes it back with 0,
 * EMBER_READ_ENDED or an errno. Both are called with the lock held. */
typedef struct {
    void *self;
    bool (*next)(void *self, ember_read *read);
    void (*done)(void *self, const ember_read *read, int code);
} ember_read_owner;

typedef struct ember_reader ember_reader;

/* Threads that read from a descriptor (-1: only pages are read), which stays the caller's; every
 * offset and target is a multiple of `bytes` from the start of the file and from a page. */
ember_reader *ember_reader_open(int file, int64_t bytes, int threads, ember_read_owner owner,
                                ember_error error);
void ember_reader_close(ember_reader *reader); /* after the reads that have begun */
void ember_reader_lock(ember_reader *reader);
void ember_reader_unlock(ember_reader *reader);
void ember_reader_start(ember_reader *reader); /* there is something to read; with the lock */
/* Until a read is done, or false at this time (of ember_nanoseconds); with the lock. */
bool ember_reader_wait(ember_reader *reader, int64_t until);

/* ---- ahead.c */
/* How far a map has been read ahead; guarded by the lock of the reader that does. */
typedef struct {
    const ember_mapping *mapping;
    int64_t next;
    ember_reader *reader; /* of its own; NULL where another reader takes the pieces */
} ember_ahead;

/* Begins to read a map of a file from start to end, which must outlive it. */
bool ember_ahead_open(ember_ahead *ahead, const ember_mapping *mapping, ember_error error);
/* Ends the reader; what is left can be taken by `next`, a piece each time, until it is false. */
void ember_ahead_close(ember_ahead *ahead);
bool ember_ahead_next(ember_ahead *ahead, ember_read *read);

/* ---- store.c, slots.c, reads.c, acquire.c, stall.c and reroute.c: the expert store */
/* When a step stops waiting for which experts; as in ember_model_break_stalls. */
typedef struct {
    int64_t nanoseconds;
    float weight;
} ember_stall_breaker;

typedef struct {
    ember_expert_layout layout;
    const int32_t *positions; /* [layers * experts] in the bank; -1: no such expert */
    int64_t bank_experts;
    int32_t *priorities; /* [layers * experts], the higher the longer kept */
    ember_expert_counters *counters; /* [layers] */
    uint8_t *resident; /* [layers * experts], kept up to date; or NULL */
    ember_ahead *ahead; /* what is read before anything is warmed */
    const ember_stall_breaker *breaker;
    const float *routing_margin; /* as in ember_model_prefer_resident */
    int file;
    int threads; /* that read */
} ember_store_config;

typedef struct ember_store ember_store;

/* What `config` points to must outlive the store, which has no slots until it is resized. */
ember_store *ember_store_open(const ember_store_config *config, ember_error error);
void ember_store_close(ember_store *store);
char *ember_store_memory(const ember_store *store); /* of slot 0, the same for ever */
int64_t ember_store_stall(const ember_store *store); /* nanoseconds waited for reads */
/* Whether the last step waited for reads most of its time: the disk has none to spare. */
bool ember_store_is_starved(const ember_store *store);
/* While a program runs, not all threads read what may be needed. */
void ember_store_set_running(ember_store *store, bool running);
bool ember_store_resize(ember_store *store, int32_t slots, ember_error error);
void ember_store_prioritise(ember_store *store, const int32_t *priorities);
void ember_store_warm(ember_store *store, const int32_t *experts, int64_t count);
/* Finds the experts that a step with these arguments wants, all of them of its layer, and begins to
 * read missing ones. Tokens that it `decodes` may get others than the router chose. */
bool ember_store_acquire(ember_store *store, const ember_step *step,
                         const ember_acquired *acquired, bool decodes, ember_error error);

/* Returns when all of them are in the table, or skipped; at once if they are taken in waves. */
bool ember_store_await(ember_store *store, ember_error error);
/* Has experts read that the layer is expected to want, the first of them of all tokens [T][K] first.
 * What is left of them is forgotten with the next acquire. */
void ember_store_expect(ember_store *store, int32_t layer, const ember_tensor *ids);

typedef enum { EMBER_WAVE_NONE, EMBER_WAVE_READY, EMBER_WAVE_FAILED } ember_wave;

/* The next wave of the experts acquired, alone in the table; NONE after the last. */
ember_wave ember_store_next_wave(ember_store *store, ember_error error);

/* ---- run.c */
/* What a run of a sequence is about: `sessions` holds one place for each token of a batch, or one
 * for all of them. `costs` and `trace`: the caller's, or NULL; the trace has room. */
typedef struct {
    int32_t tokens;
    const ember_session_memory *sessions;
    ember_cost *costs;
    const ember_trace *trace;
    ember_store *store; /* NULL while the whole bank is mapped */
    uint64_t *chosen;   /* as in ember_expert_watch; or NULL */
    bool decodes;       /* rather than reads a prompt */
    bool expects;       /* experts, of the next layer */
} ember_run;

bool ember_program_run(ember_program *program, const ember_step_list *list, const ember_run *run,
                       ember_error error);

/* ---- residency.c */
/* Where the experts are: all of them mapped, or as many as the budget allows in a store. */
typedef struct {
    ember_store *store; /* NULL: mapped */
    int32_t *positions; /* as in ember_store_config */
    int32_t *priorities;
    ember_stall_breaker breaker;
    float routing_margin;
    bool expects; /* as in ember_model_expect_experts */
    void *tables; /* the initial content of TABLES */
    int64_t bank_bytes;
    int file;
    int threads; /* that read */
} ember_residency;

bool ember_residency_open(ember_residency *residency, const ember_model_config *config,
                          const ember_program *program, ember_error error);
void ember_residency_close(ember_residency *residency);

/* ---- model.c */
struct ember_model {
    ember_mapping sections[EMBER_SECTION_COUNT]; /* STATE and KV stay empty */
    ember_library library;
    ember_program program;
    ember_pool *pool;
    ember_ahead ahead; /* of the weights */
    ember_cost *costs; /* the caller's; NULL while steps are not timed */
    ember_trace *trace; /* the caller's; NULL while routing is not traced */
    ember_expert_watch watch; /* the caller's; empty while nothing is watched */
    ember_residency residency;
    int64_t state_bytes;
    int64_t kv_bytes_per_token;
    int64_t vocab_size;
};

#endif
