/* Steps that acquire experts: what they take, and what that says of the program's experts. */
#include "internal.h"

static bool is_int32(const dl_tensor *tensor)
{
    return tensor->dtype.code == DL_INT && tensor->dtype.bits == 32;
}

ember_acquired ember_step_acquired(const ember_step *step)
{
    const tvm_any *arguments = step->arguments;
    int32_t last = step->count - 1;
    bool routed = last == 4;
    return (ember_acquired){
        .ids = arguments[0].pointer,
        .weights = routed ? arguments[1].pointer : NULL,
        .scores = routed ? arguments[2].pointer : NULL,
        .table = arguments[last - 1].pointer,
        .bank = arguments[last].pointer,
    };
}

static bool is_float32_matrix(const dl_tensor *tensor)
{
    return tensor->dtype.code == DL_FLOAT && tensor->dtype.bits == 32 && tensor->ndim == 2;
}

/* Ids and weights are in SCRATCH, as they may be changed. */
static bool are_of_a_router(const ember_acquired *acquired)
{
    const ember_tensor *ids = acquired->ids, *weights = acquired->weights;
    const ember_tensor *scores = acquired->scores;
    return is_float32_matrix(&weights->dl) && is_float32_matrix(&scores->dl) &&
           ids->section == EMBER_SCRATCH && weights->section == EMBER_SCRATCH &&
           weights->shape[0] == ids->shape[0] && weights->shape[1] == ids->shape[1] &&
           scores->shape[0] == ids->shape[0] && scores->shape[1] >= acquired->table->shape[0];
}

/* Notes how experts lie and are chosen: the first time; then it must be the same. */
static bool check_layout(ember_program *program, const ember_step *step,
                         const ember_acquired *acquired)
{
    ember_expert_layout *known = &program->experts, layout = {
        .layers = step->symbol < known->layers ? known->layers : step->symbol + 1,
        .experts = (int32_t)acquired->table->shape[0],
        .top_k = (int32_t)acquired->ids->shape[1],
        .expert_bytes = ember_row_bytes(acquired->bank),
    };
    const ember_tensor **table = &program->tables[step->symbol];
    bool first = known->layers == 0;
    bool same = layout.experts == known->experts && layout.top_k == known->top_k &&
                layout.expert_bytes == known->expert_bytes &&
                (!*table || (*table)->offset == acquired->table->offset);
    *table = acquired->table;
    program->has_routers = (first || program->has_routers) && acquired->weights;
    *known = layout;
    return first || same;
}

bool ember_check_acquire(ember_program *program, const ember_step *step, ember_error error)
{
    bool takes = step->count == 3 || step->count == 5;
    ember_acquired acquired = takes ? ember_step_acquired(step) : (ember_acquired){0};
    if (!takes || !is_int32(&acquired.ids->dl) || acquired.ids->dl.ndim != 2 ||
        acquired.ids->shape[1] > INT32_MAX || !is_int32(&acquired.table->dl) ||
        acquired.table->dl.ndim != 1 || acquired.table->shape[0] > INT32_MAX ||
        acquired.table->section != EMBER_TABLES || acquired.bank->dl.ndim < 1 ||
        acquired.bank->section != EMBER_EXPERTS || acquired.bank->offset != 0 ||
        (acquired.weights && !are_of_a_router(&acquired)))
        return ember_fail(error, "program: acquire_experts of layer %d takes (ids i32[T,K], weights"
                                 " f32[T,K], scores f32[T,E or more], table i32[E], bank) or these "
                                 "without weights and scores", step->symbol);
    if (step->symbol < 0 || step->symbol >= EMBER_MAX_LAYERS)
        return ember_fail(error, "program: acquire_experts of layer %d, expected 0 to %d",
                          step->symbol, EMBER_MAX_LAYERS - 1);
    if (!check_layout(program, step, &acquired))
        return ember_fail(error, "program: acquire_experts of layer %d is unlike the one before: "
                                 "all layers have the same experts and top-k", step->symbol);
    return true;
}

bool ember_check_expect(const ember_step *step, ember_error error)
{
    const ember_tensor *ids = step->count == 1 ? step->arguments[0].pointer : NULL;
    return (ids && is_int32(&ids->dl) && ids->dl.ndim == 2 && ids->dl.data) ||
           ember_fail(error, "program: expect_experts of layer %d takes (ids i32[T,K])",
                      step->symbol);
}

void ember_count_slots(ember_program *program, const ember_step_list *list)
{
    for (int64_t i = 0; i < list->step_count; i++) {
        const ember_step *step = &list->steps[i];
        if (step->kind != EMBER_ACQUIRE_EXPERTS || step->in_waves)
            continue;
        const ember_tensor *ids = ember_step_acquired(step).ids;
        int64_t chosen = ids->shape[1];
        if (__builtin_mul_overflow(chosen, ids->shape[0], &chosen) ||
            chosen > program->experts.experts)
            chosen = program->experts.experts;
        if (program->least_slots < chosen)
            program->least_slots = (int32_t)chosen;
    }
}
