/* The core: runs the programs of an artifact. It knows buffers, steps, threads and bytes; it knows
 * no model, no HTTP and no policy.
 *
 * Calls on one model and its sessions must not overlap, but where it is said; the caller holds a
 * lock per model.
 * A function that can fail takes a buffer for a message, one line without a newline. */
#ifndef EMBER_H
#define EMBER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EMBER_API __attribute__((visibility("default")))

typedef struct ember_model ember_model;
typedef struct ember_session ember_session;

typedef enum {
    EMBER_OK = 0,
    EMBER_REFUSED = 1, /* bad arguments: nothing was done */
    EMBER_FAILED = 2,  /* a step failed half-way: the session's state is undefined until reset */
} ember_status;

/* A batch is the body for tokens that each continue a session of their own. */
typedef enum {
    EMBER_BODY = 0,
    EMBER_LOGITS_LAST = 1,
    EMBER_LOGITS_ALL = 2,
    EMBER_BATCH = 3,
} ember_role;

/* Step words as in program.msgpack: kind, symbol, argument count, arguments; repeated. */
typedef struct {
    int32_t tokens;
    int32_t role;
    const int32_t *steps;
    int64_t words;
} ember_sequence;

/* A model to open. Everything is copied except `logits` and `bounds`, which must outlive the
 * model. */
typedef struct {
    const void *kernels; /* the bytes of the kernel library */
    int64_t kernels_bytes;
    const char *const *symbols;
    int64_t symbol_count;
    const int64_t *buffers; /* EMBER_BUFFER_FIELDS each */
    int64_t buffer_count;
    const int64_t *shapes;
    int64_t shape_count;
    const ember_sequence *sequences;
    int64_t sequence_count;
    const void *tables; /* initial content of the TABLES section */
    int64_t tables_bytes;
    int64_t scratch_bytes;
    int64_t state_bytes;
    int64_t kv_bytes_per_token;
    int64_t tokens_bytes;
    int64_t positions_bytes;
    int64_t logits_bytes;
    int64_t bounds_bytes; /* 0: the program writes none */
    float *logits;
    float *bounds;
    int64_t vocab_size;
    int64_t weights_bytes;
    int64_t experts_bytes;
    int32_t weights_file; /* descriptors, not needed after the call */
    int32_t experts_file;
    int32_t reader_threads; /* of the expert store */
    int32_t threads;
    int32_t cpu_count; /* 0: workers run on any CPU */
    const int32_t *cpus; /* else on these */
} ember_model_config;

/* Checks every value of the program, loads the kernels, maps the weights and starts the threads.
 * NULL on failure. */
EMBER_API ember_model *ember_model_open(const ember_model_config *config, char *error, size_t size);

/* Closes a model; its sessions must be closed before. NULL is allowed. */
EMBER_API void ember_model_close(ember_model *model);

/* What the steps of one kernel have cost so far. */
typedef struct {
    int64_t calls;
    int64_t nanoseconds;
} ember_cost;

/* From now on every step adds to the entry of its kernel in `costs`, which has one entry for each
 * symbol and a last one for the acquiring of experts; it must stay until it is replaced or the
 * model closed. NULL: steps are no longer timed. */
EMBER_API void ember_model_profile(ember_model *model, ember_cost *costs);

/* How the experts of a program lie and are chosen: the same in all layers. All 0 without experts. */
typedef struct {
    int32_t layers;       /* one more than the last layer with experts */
    int32_t experts;      /* of a layer */
    int32_t top_k;        /* experts that a token chooses in a layer */
    int64_t expert_bytes; /* of one of them in the bank */
} ember_expert_layout;

EMBER_API ember_expert_layout ember_model_experts(const ember_model *model);

/* What the experts of a layer have cost, in acquires of the expert store: different experts of a
 * step that were there, those that were not, and what was read and waited for. */
typedef struct {
    int64_t hits;
    int64_t misses;
    int64_t bytes;
    int64_t stall_nanoseconds;
    int64_t skipped; /* of those that were not there; see ember_model_break_stalls */
    int64_t substituted; /* of those that were there; see ember_model_prefer_resident */
    int64_t expected;      /* read because a step expected them; see ember_model_expect_experts */
    int64_t expected_used; /* of those that were there */
} ember_expert_counters;

/* What can be seen of experts while steps run, for each [layers * experts]. */
typedef struct {
    uint8_t *resident; /* 1: in memory; all are while they are mapped */
    uint64_t *chosen;  /* tokens that chose it, prompts included */
} ember_expert_watch;

/* Keeps `watch` up to date from now on; its memory, zero at first, must outlive the model. To be
 * called before a budget is set. */
EMBER_API void ember_model_watch_experts(ember_model *model, ember_expert_watch watch);

/* Keeps at most so many bytes of experts in memory, the others in experts.bin; as a model opens,
 * all of them are mapped, and so they are again with a budget that holds them all. Adds to
 * `counters`, one for each layer, which must outlive the model. Results do not depend on it.
 * Refused when a step needs more experts at once; FAILED when memory or threads run out: then the
 * budget is as before. */
EMBER_API ember_status ember_model_set_expert_budget(ember_model *model, int64_t bytes,
                                                     ember_expert_counters *counters, char *error,
                                                     size_t size);

/* The least budget that is not refused. */
EMBER_API int64_t ember_model_least_expert_budget(const ember_model *model);

/* When a token that is decoded alone has waited so long for experts in all, missing ones whose
 * routing weight is below `weight` are no longer waited for: the others' weights grow by one factor
 * that makes up for theirs, so the step computes what it would have if the router had chosen only the
 * others. A layer's expert of the greatest weight is never skipped, prompts and batches of several
 * tokens skip none, and a trace notes what the router chose. 0 nanoseconds: nothing is skipped, as
 * when a model opens. Refused when the program does not say what its routers made of tokens. */
EMBER_API ember_status ember_model_break_stalls(ember_model *model, int64_t nanoseconds,
                                                float weight, char *error, size_t size);

/* A token that is decoded, alone or in a batch, takes in place of an expert that is not in memory the
 * likeliest one that is, if its probability is at most `margin` less, as a share of those of all that
 * the router chose: so much routing weight is lost. Weights are those that the router would have
 * given to the new choice. A token's first expert is never replaced, prompts replace none, and a
 * trace and ember_expert_watch note what the router chose. 0: none is replaced, as when a model
 * opens. Refused when the program does not say what its routers made of tokens. */
EMBER_API ember_status ember_model_prefer_resident(ember_model *model, float margin, char *error,
                                                   size_t size);

/* Whether steps ask the router of the next layer about the present one's tokens, where the program
 * says how, and have the experts read that it expects: one at a time, after what a step needs, and
 * in place of none that the step needs or expects. False when a model opens. */
EMBER_API void ember_model_expect_experts(ember_model *model, bool expects);

/* An expert of the lowest priority makes place for another first, of equal ones the one unused for
 * longest. One that is pinned goes only when a step finds no other to replace. */
#define EMBER_PINNED INT32_MAX

/* Sets the priorities, [layers][experts]; they are 0 at first. May be called during a step. */
EMBER_API void ember_model_prioritise_experts(ember_model *model, const int32_t *priorities);

/* Reads experts, given by layer * experts + expert, into memory in the background and in order, as
 * far as there is room besides those that are pinned, of a higher priority or used since; instead
 * of what is left of an earlier call. Reads that a step waits for go first. Without effect while
 * all experts are mapped. Refused for an expert that does not exist. May be called during a step. */
EMBER_API ember_status ember_model_warm_experts(ember_model *model, const int32_t *experts,
                                                int64_t count, char *error, size_t size);

/* The experts that tokens chose: `ids` and `weights` are [capacity][layers][top_k]. */
typedef struct {
    int32_t *ids;
    float *weights;
    int64_t capacity; /* tokens that fit; a step of more than are left is refused */
    int64_t tokens;   /* noted so far; a step that fails notes none */
} ember_trace;

/* From now on every step notes the routing of its tokens, in their order, in `trace`, which must
 * stay until it is replaced or the model closed; between steps the caller may change it. NULL: no
 * longer. Refused when the program does not say what its routers made of tokens. */
EMBER_API ember_status ember_model_trace(ember_model *model, ember_trace *trace, char *error,
                                         size_t size);

/* A session of up to `capacity` tokens, with zeroed state. NULL on failure. */
EMBER_API ember_session *ember_session_open(ember_model *model, int64_t capacity, char *error,
                                            size_t size);
EMBER_API void ember_session_close(ember_session *session);

/* Zeroes the state and gives the memory of state and KV cache back. */
EMBER_API void ember_session_reset(ember_session *session);

/* Copy the state out and in; `state` has the state_bytes of the config. */
EMBER_API void ember_session_save(const ember_session *session, void *state);
EMBER_API void ember_session_load(ember_session *session, const void *state);

/* Reads `count` tokens of a prompt (at most the largest chunk of the program) that follow the first
 * `position` tokens of the session, then runs the sequence of `role` if that is not EMBER_BODY. */
EMBER_API ember_status ember_session_step(ember_session *session, const int32_t *tokens,
                                          int32_t count, int64_t position, int32_t role,
                                          char *error, size_t size);

/* Decodes one token of each of `count` different sessions, which follows the session's first
 * positions[i] tokens, and computes the logits of all. On failure all of the sessions failed. */
EMBER_API ember_status ember_model_step(ember_model *model, ember_session *const *sessions,
                                        const int32_t *tokens, const int64_t *positions,
                                        int32_t count, char *error, size_t size);

#define EMBER_BLOCK 64 /* logits that share a bound */

/* The logits of a position, NaN counting as -infinity. With bounds, most blocks need not be read;
 * results are the same. */
typedef struct {
    float *logits;
    float *bounds; /* what no logit of a block exceeds, for each block; or NULL */
    int64_t n;
} ember_row;

/* Adds biases[i] to the logit of tokens[i]. Refused, with nothing done, for a token outside. */
EMBER_API ember_status ember_bias(ember_row row, const int32_t *tokens, const double *biases,
                                  int64_t count);

/* Makes -infinity the logit of every token whose bit (of word token / 64, the lowest first) is 0. */
EMBER_API void ember_mask(ember_row row, const uint64_t *allowed);

/* The k greatest, in descending order, equal values by ascending id. Returns how many were written:
 * min(k, n). */
EMBER_API int64_t ember_top_k(ember_row row, int64_t k, int32_t *ids, float *values);

/* log(sum(exp(logits))); -infinity for an empty sum. */
EMBER_API double ember_log_sum_exp(ember_row row);

/* Draws a token: of the first top_k (0: all), of these the fewest that have a share of top_p of their
 * mass, and of these the ones that are at least min_p times as likely as the greatest. `uniform`, in
 * [0, 1), says which, in descending order of probability, or in the order of ids where top_k, top_p
 * and min_p leave out none. With a temperature of 0 it is the greatest, whatever else is asked for.
 * Returns the token, or -1 when the greatest logit is not finite, -2 for want of memory. */
EMBER_API int32_t ember_draw(ember_row row, double uniform, double temperature, int64_t top_k,
                             double top_p, double min_p);

/* Takes scores [rows][layers][experts] of 0 to 1 for what a predictor expects of the next tokens, the
 * nearest first. Adds the sum of an expert's to its priority [layers][experts], in units of 2^-20 and
 * below EMBER_PINNED, but to none that is pinned; and writes which experts (layer * experts + expert)
 * of each layer the nearest token is likeliest to choose, best first: [layers][top_k]. */
EMBER_API void ember_expect(const float *scores, int32_t rows, ember_expert_layout layout,
                            int32_t *priorities, int32_t *likeliest);

/* A merge of byte-pair encoding, of a left token that is known where it is found. */
typedef struct {
    int32_t right; /* token */
    int32_t rank;  /* less comes first */
    int32_t id;    /* token that the two make */
} ember_merge;

typedef struct {
    const int32_t *byte_ids;   /* 256: the token of each byte, negative where there is none */
    const int32_t *first;      /* tokens + 1: where the merges of each left token begin */
    const ember_merge *merges; /* of a left token by ascending right token */
    int32_t tokens;
    int32_t merge_count;
} ember_vocabulary;

/* Whether every value lies where it may: only then can the vocabulary be used. */
EMBER_API bool ember_vocabulary_check(const ember_vocabulary *vocabulary);

/* Encodes `words` words, each on its own, of which word i ends at bytes[ends[i]]. `ids` has a place
 * for each byte. Returns how many tokens there are, or -1 for want of memory. */
EMBER_API int64_t ember_vocabulary_encode(const ember_vocabulary *vocabulary, const uint8_t *bytes,
                                          const int64_t *ends, int64_t words, int32_t *ids);

#endif
