/* Running a sequence of a program, for one session or for a batch of them. */
#include <string.h>

#include "internal.h"

static int64_t element_count(const dl_tensor *tensor)
{
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

/* Copies the rows of `from` [tokens][top_k] to those of a layer in [tokens][layers][top_k]. */
static void note(void *to, const ember_tensor *from, const ember_expert_layout *layout,
                 int32_t layer)
{
    int64_t bytes = ember_row_bytes(from);
    for (int64_t token = 0; token < from->shape[0]; token++)
        memcpy((char *)to + (token * layout->layers + layer) * bytes,
               (const char *)from->dl.data + token * bytes, (size_t)bytes);
}

static void note_routing(const ember_trace *trace, const ember_step *step,
                         const ember_acquired *acquired, const ember_expert_layout *layout)
{
    int64_t start = trace->tokens * layout->layers * layout->top_k;
    note(trace->ids + start, acquired->ids, layout, step->symbol);
    note(trace->weights + start, acquired->weights, layout, step->symbol);
}

static bool check_ids(const ember_step *step, const ember_acquired *acquired, ember_error error)
{
    const int32_t *ids = acquired->ids->dl.data;
    int64_t experts = acquired->table->shape[0], count = element_count(&acquired->ids->dl);
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= experts)
            return ember_fail(error, "layer %d chose expert %d of %lld", step->symbol, ids[i],
                              (long long)experts);
    return true;
}

/* With the whole bank mapped, every expert is resident: the table only has to be a real one. */
static bool check_mapped(const ember_step *step, const ember_acquired *acquired,
                         ember_error error)
{
    const int32_t *ids = acquired->ids->dl.data, *table = acquired->table->dl.data;
    int64_t slots = acquired->bank->shape[0], count = element_count(&acquired->ids->dl);
    for (int64_t i = 0; i < count; i++)
        if (table[ids[i]] < 0 || table[ids[i]] >= slots)
            return ember_fail(error, "layer %d: expert %d is in slot %d of %lld", step->symbol,
                              ids[i], table[ids[i]], (long long)slots);
    return true;
}

static void count_chosen(uint64_t *chosen, const ember_acquired *acquired)
{
    const int32_t *ids = acquired->ids->dl.data;
    int64_t count = element_count(&acquired->ids->dl);
    for (int64_t i = 0; i < count; i++)
        chosen[ids[i]]++;
}

static bool acquire_experts(const ember_program *program, const ember_step *step,
                            const ember_run *run, ember_error error)
{
    ember_acquired acquired = ember_step_acquired(step);
    if (run->trace)
        note_routing(run->trace, step, &acquired, &program->experts);
    if (!check_ids(step, &acquired, error))
        return false;
    if (run->chosen)
        count_chosen(run->chosen + (int64_t)step->symbol * program->experts.experts, &acquired);
    if (!run->store)
        return check_mapped(step, &acquired, error);
    return ember_store_acquire(run->store, step, &acquired, run->decodes, error) &&
           ((step->expects && run->expects) || ember_store_await(run->store, error));
}

static bool expect_experts(const ember_step *step, const ember_run *run, ember_error error)
{
    ember_store_expect(run->store, step->symbol, step->arguments[0].pointer);
    return ember_store_await(run->store, error);
}

static bool call_kernel(const ember_program *program, const ember_step *step,
                        const tvm_any *arguments, ember_error error)
{
    tvm_any result = {.type_index = TVM_NONE};
    if (step->kernel(NULL, arguments, step->count, &result) == 0)
        return true;
    ember_fail(error, "kernel %s failed: %s", program->symbols[step->symbol],
               ember_kernel_error());
    ember_set_kernel_error("");
    return false;
}

/* A row of a tensor as a tensor of its own. Kernels count on cache lines: a row that does not
 * start on one is copied to `bounce`, and back by `put_row`. */
static void take_row(ember_tensor *row, const ember_tensor *whole, int64_t index, char **bounce)
{
    int64_t bytes = ember_row_bytes(whole) * whole->token_rows;
    *row = *whole;
    row->dl.shape = row->shape;
    row->shape[0] = whole->token_rows;
    row->dl.data = (char *)whole->dl.data + index * bytes;
    if (bytes % EMBER_ALIGNMENT == 0)
        return;
    row->dl.data = memcpy(*bounce, row->dl.data, (size_t)bytes);
    *bounce += ember_aligned(bytes);
}

static void put_row(const ember_tensor *row, const ember_tensor *whole, int64_t index)
{
    int64_t bytes = ember_row_bytes(whole) * whole->token_rows;
    if (bytes % EMBER_ALIGNMENT != 0)
        memcpy((char *)whole->dl.data + index * bytes, row->dl.data, (size_t)bytes);
}

/* Calls a kernel for every token of a batch, each with its own row and its own session. */
static bool call_each(const ember_program *program, const ember_step *step, const ember_run *run,
                      ember_error error)
{
    ember_tensor rows[EMBER_MAX_ARGUMENTS];
    tvm_any arguments[EMBER_MAX_ARGUMENTS];
    for (int32_t token = 0; token < run->tokens; token++) {
        char *bounce = program->bounce;
        for (int32_t i = 0; i < step->count; i++) {
            const ember_tensor *whole = step->arguments[i].pointer;
            if (whole->token_rows > 0) {
                take_row(&rows[i], whole, token, &bounce);
            } else {
                rows[i] = *whole;
                rows[i].dl.shape = rows[i].shape;
                ember_tensor_bind(&rows[i], &run->sessions[token]);
            }
            arguments[i] = (tvm_any){.type_index = TVM_DL_TENSOR, .pointer = &rows[i]};
        }
        if (!call_kernel(program, step, arguments, error))
            return false;
        for (int32_t i = 0; i < step->count; i++) {
            const ember_tensor *whole = step->arguments[i].pointer;
            if (whole->token_rows > 0)
                put_row(&rows[i], whole, token);
        }
    }
    return true;
}

static bool call_in_waves(const ember_program *program, const ember_step *step,
                          const ember_run *run, ember_error error)
{
    if (!run->store)
        return call_kernel(program, step, step->arguments, error);
    for (;;) {
        ember_wave wave = ember_store_next_wave(run->store, error);
        if (wave != EMBER_WAVE_READY)
            return wave == EMBER_WAVE_NONE;
        if (!call_kernel(program, step, step->arguments, error))
            return false;
    }
}

static void take_last_row(const ember_step *step, int32_t tokens)
{
    const ember_tensor *rows = step->arguments[0].pointer, *last = step->arguments[1].pointer;
    int64_t bytes = ember_row_bytes(rows);
    memcpy(last->dl.data, (const char *)rows->dl.data + (tokens - 1) * bytes, (size_t)bytes);
}

static bool run_step(const ember_program *program, const ember_step *step, const ember_run *run,
                     ember_error error)
{
    switch (step->kind) {
    case EMBER_CALL:
    case EMBER_CALL_AHEAD:
        return call_kernel(program, step, step->arguments, error);
    case EMBER_CALL_IN_WAVES:
        return call_in_waves(program, step, run, error);
    case EMBER_CALL_EACH:
        return call_each(program, step, run, error);
    case EMBER_ACQUIRE_EXPERTS:
        return acquire_experts(program, step, run, error);
    case EMBER_EXPECT_EXPERTS:
        return expect_experts(step, run, error);
    case EMBER_TAKE_LAST_ROW:
        take_last_row(step, run->tokens);
        return true;
    }
    return ember_fail(error, "a step of unknown kind %d", (int)step->kind);
}

/* Whether a step is for the expectation of experts only. */
static bool is_ahead(const ember_step *step)
{
    return step->kind == EMBER_CALL_AHEAD || step->kind == EMBER_EXPECT_EXPERTS;
}

/* What a kernel waits for its experts is part of acquiring them. */
static bool run_timed(const ember_program *program, const ember_step *step, const ember_run *run,
                      ember_error error)
{
    ember_cost *acquiring = &run->costs[program->symbol_count];
    ember_cost *cost = step->kernel ? &run->costs[step->symbol] : acquiring;
    int64_t start = ember_nanoseconds(), stalled = run->store ? ember_store_stall(run->store) : 0;
    bool ok = run_step(program, step, run, error);
    int64_t stall = run->store ? ember_store_stall(run->store) - stalled : 0;
    cost->nanoseconds += ember_nanoseconds() - start - stall;
    acquiring->nanoseconds += stall;
    cost->calls++;
    return ok;
}

/* Gives every tensor the first dimension, and that of a session the address, of this run. */
static void prepare(ember_program *program, const ember_run *run)
{
    ember_session_memory *bound = &program->bound;
    if (program->bound_tokens == run->tokens && !memcmp(bound, run->sessions, sizeof *bound))
        return;
    program->bound_tokens = run->tokens;
    *bound = *run->sessions;
    for (int64_t i = 0; i < program->tensor_count; i++) {
        ember_tensor *tensor = &program->tensors[i];
        if (tensor->token_rows > 0)
            tensor->shape[0] = (int64_t)tensor->token_rows * run->tokens;
        else
            ember_tensor_bind(tensor, run->sessions);
    }
}

bool ember_program_run(ember_program *program, const ember_step_list *list, const ember_run *run,
                       ember_error error)
{
    prepare(program, run);
    for (int64_t i = 0; i < list->step_count; i++) {
        const ember_step *step = &list->steps[i];
        if (is_ahead(step) && !run->expects)
            continue;
        bool timed = run->costs && step->kind != EMBER_TAKE_LAST_ROW;
        bool ok = timed ? run_timed(program, step, run, error)
                        : run_step(program, step, run, error);
        if (!ok)
            return false;
    }
    return true;
}
