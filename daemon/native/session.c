/* Sessions: the state and KV cache of a conversation, and the steps that advance it.
 *
 * The KV cache is reserved for the whole capacity and takes memory as rows are written. The region
 * of a tensor with offset o bytes per token starts at o * rows, where rows is the capacity rounded
 * up to CAPACITY_UNIT: so regions cannot overlap and start on a cache line. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { CAPACITY_UNIT = 64 };

struct ember_session {
    ember_model *model;
    ember_mapping state;
    ember_mapping kv;
    int64_t capacity;
    int64_t rows; /* of the KV cache */
};

ember_session *ember_session_open(ember_model *model, int64_t capacity, char *text, size_t size)
{
    ember_error error = {text, size};
    int64_t kv_bytes;
    if (capacity < 1 || capacity > INT32_MAX) {
        ember_fail(error, "a session of %lld tokens", (long long)capacity);
        return NULL;
    }
    int64_t rows = (capacity + CAPACITY_UNIT - 1) / CAPACITY_UNIT * CAPACITY_UNIT;
    if (__builtin_mul_overflow(rows, model->kv_bytes_per_token, &kv_bytes)) {
        ember_fail(error, "a KV cache of %lld tokens is too large", (long long)capacity);
        return NULL;
    }
    ember_session *session = calloc(1, sizeof *session);
    if (!session) {
        ember_fail(error, "no memory for a session");
        return NULL;
    }
    session->model = model;
    session->capacity = capacity;
    session->rows = rows;
    if (ember_map_zeroed(&session->state, model->state_bytes, EMBER_MAP_HUGE, "state", error) &&
        ember_map_zeroed(&session->kv, kv_bytes, EMBER_MAP_PLAIN, "KV cache", error))
        return session;
    ember_session_close(session);
    return NULL;
}

void ember_session_close(ember_session *session)
{
    if (!session)
        return;
    ember_unmap(&session->state);
    ember_unmap(&session->kv);
    free(session);
}

void ember_session_reset(ember_session *session)
{
    ember_mapping_clear(&session->state);
    ember_mapping_clear(&session->kv);
}

void ember_session_save(const ember_session *session, void *state)
{
    if (session->state.bytes > 0)
        memcpy(state, session->state.base, session->state.bytes);
}

void ember_session_load(ember_session *session, const void *state)
{
    if (session->state.bytes > 0)
        memcpy(session->state.base, state, session->state.bytes);
}

static ember_session_memory memory_of(const ember_session *session)
{
    return (ember_session_memory){session->state.base, session->kv.base, session->rows};
}

static bool check_step(const ember_session *session, const int32_t *tokens, int32_t count,
                       int64_t position, ember_error error)
{
    if (position < 0 || count < 1 || position > session->capacity - count)
        return ember_fail(error, "%d tokens at position %lld do not fit a session of %lld", count,
                          (long long)position, (long long)session->capacity);
    for (int32_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= session->model->vocab_size)
            return ember_fail(error, "token id %d is outside the vocabulary of %lld", tokens[i],
                              (long long)session->model->vocab_size);
    return true;
}

/* What a step computed from pages that could not be read is worth nothing. */
static bool check_maps(const ember_model *model, ember_error error)
{
    bool weights = ember_guard_renew(model->sections[EMBER_WEIGHTS].guard);
    bool experts = ember_guard_renew(model->sections[EMBER_EXPERTS].guard);
    if (weights || experts)
        return ember_fail(error, "%s cannot be read: the file was truncated or its disk failed",
                          weights ? "weights.bin" : "experts.bin");
    return true;
}

/* Tokens that are decoded are mostly right about the next layer's experts, those of a prompt together
 * nearly always: only there are a few useless reads worth it while a disk is busy all the time. */
static bool may_expect(const ember_model *model, bool decodes)
{
    const ember_residency *residency = &model->residency;
    return residency->store && residency->expects &&
           !(decodes && ember_store_is_starved(residency->store));
}

/* Runs the sequences of two roles, the second one unless it is EMBER_BODY; the tokens and
 * positions are in their sections. `sessions`: as in ember_run. */
static ember_status run(ember_model *model, int32_t tokens, const ember_session_memory *sessions,
                        int32_t first, int32_t second, ember_error error)
{
    const ember_step_list *body = ember_program_find(&model->program, tokens, first);
    const ember_step_list *tail = ember_program_find(&model->program, tokens, second);
    if (!body || !tail) {
        ember_fail(error, "the program has no sequence of role %d for %d tokens",
                   body ? second : first, tokens);
        return EMBER_REFUSED;
    }
    ember_run run = {
        .tokens = tokens,
        .sessions = sessions,
        .costs = model->costs,
        .trace = model->trace,
        .store = model->residency.store,
        .chosen = model->watch.chosen,
        .decodes = first == EMBER_BATCH,
        .expects = may_expect(model, first == EMBER_BATCH),
    };
    if (run.store)
        ember_store_set_running(run.store, true);
    ember_pool_wake(model->pool);
    ember_library_use_pool(model->pool);
    bool ok = ember_program_run(&model->program, body, &run, error) &&
              (second == EMBER_BODY || ember_program_run(&model->program, tail, &run, error));
    ember_library_use_pool(NULL);
    if (run.store)
        ember_store_set_running(run.store, false);
    ok = check_maps(model, error) && ok;
    if (ok && model->trace)
        model->trace->tokens += tokens;
    return ok ? EMBER_OK : EMBER_FAILED;
}

static bool fits_model(const ember_model *model, int32_t count, ember_error error)
{
    size_t bytes = (size_t)count * sizeof(int32_t);
    if (bytes > model->sections[EMBER_TOKENS].bytes ||
        bytes > model->sections[EMBER_POSITIONS].bytes)
        return ember_fail(error, "%d tokens in a step are more than the program takes", count);
    const ember_trace *trace = model->trace;
    if (trace && (trace->tokens < 0 || trace->tokens > trace->capacity - count))
        return ember_fail(error, "the routing trace has room for %lld tokens and holds %lld: %d "
                                 "more do not fit", (long long)trace->capacity,
                          (long long)trace->tokens, count);
    return true;
}

ember_status ember_session_step(ember_session *session, const int32_t *tokens, int32_t count,
                                int64_t position, int32_t role, char *text, size_t size)
{
    ember_error error = {text, size};
    ember_model *model = session->model;
    if (!check_step(session, tokens, count, position, error) ||
        !fits_model(model, count, error))
        return EMBER_REFUSED;
    int32_t *positions = (int32_t *)(void *)model->sections[EMBER_POSITIONS].base;
    memcpy(model->sections[EMBER_TOKENS].base, tokens, (size_t)count * sizeof *tokens);
    for (int32_t i = 0; i < count; i++)
        positions[i] = (int32_t)position + i;
    ember_session_memory memory = memory_of(session);
    return run(model, count, &memory, EMBER_BODY, role, error);
}

ember_status ember_model_step(ember_model *model, ember_session *const *sessions,
                              const int32_t *tokens, const int64_t *at, int32_t count, char *text,
                              size_t size)
{
    ember_error error = {text, size};
    if (count < 1 || !fits_model(model, count, error))
        return EMBER_REFUSED;
    for (int32_t i = 0; i < count; i++)
        if (!check_step(sessions[i], &tokens[i], 1, at[i], error))
            return EMBER_REFUSED;
    ember_session_memory *memories = calloc((size_t)count, sizeof *memories);
    if (!memories) {
        ember_fail(error, "no memory for a batch of %d", count);
        return EMBER_REFUSED;
    }
    int32_t *positions = (int32_t *)(void *)model->sections[EMBER_POSITIONS].base;
    memcpy(model->sections[EMBER_TOKENS].base, tokens, (size_t)count * sizeof *tokens);
    for (int32_t i = 0; i < count; i++) {
        positions[i] = (int32_t)at[i];
        memories[i] = memory_of(sessions[i]);
    }
    ember_status status = run(model, count, memories, EMBER_BATCH, EMBER_LOGITS_ALL, error);
    free(memories);
    return status;
}
