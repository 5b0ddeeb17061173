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
    int64_t rows;
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
    if (session->model->bound == session)
        session->model->bound = NULL;
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

/* Points the program's session tensors at this session's memory. */
static void bind(ember_session *session)
{
    ember_model *model = session->model;
    if (model->bound == session)
        return;
    for (int64_t i = 0; i < model->program.session_tensor_count; i++) {
        const ember_session_tensor *entry = &model->program.session_tensors[i];
        if (entry->in_kv) {
            entry->tensor->data = session->kv.base + entry->offset * session->rows;
            entry->tensor->shape[0] = session->rows;
        } else {
            entry->tensor->data = session->state.base + entry->offset;
        }
    }
    model->bound = session;
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

ember_status ember_session_step(ember_session *session, const int32_t *tokens, int32_t count,
                                int64_t position, int32_t role, char *text, size_t size)
{
    ember_error error = {text, size};
    ember_model *model = session->model;
    if (!check_step(session, tokens, count, position, error))
        return EMBER_REFUSED;
    const ember_step_list *body = ember_program_find(&model->program, count, EMBER_BODY);
    const ember_step_list *tail = ember_program_find(&model->program, count, role);
    if (!body || !tail) {
        ember_fail(error, "the program has no sequence of role %d for %d tokens", role, count);
        return EMBER_REFUSED;
    }
    ember_pool_wake(model->pool);
    bind(session);
    int32_t *positions = (int32_t *)(void *)model->sections[EMBER_POSITIONS].base;
    memcpy(model->sections[EMBER_TOKENS].base, tokens, (size_t)count * sizeof *tokens);
    for (int32_t i = 0; i < count; i++)
        positions[i] = (int32_t)position + i;
    ember_library_use_pool(model->pool);
    bool ok = ember_program_run(&model->program, body, model->costs, error) &&
              (role == EMBER_BODY ||
               ember_program_run(&model->program, tail, model->costs, error));
    ember_library_use_pool(NULL);
    return ok ? EMBER_OK : EMBER_FAILED;
}
