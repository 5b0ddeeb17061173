/* Programs: checked against the sections they live in and turned into calls.
 *
 * Nothing in the packed tables is trusted: every id, offset, size and end is checked here, so that
 * a damaged program cannot make the core touch memory that is not its own. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { BUFFER_FIELDS = 8, STEP_WORDS = 3 };
enum {
    FIELD_SECTION,
    FIELD_CODE,
    FIELD_BITS,
    FIELD_NDIM,
    FIELD_OFFSET,
    FIELD_TOKEN_ROWS,
    FIELD_SHAPE
};

/* Zero bytes are asked for as one, so that NULL always means no memory. */
static void *allocate(int64_t count, size_t size)
{
    return count < 0 ? NULL : calloc(count > 0 ? (size_t)count : 1, size);
}

static bool known_type(int64_t code, int64_t bits)
{
    switch (code) {
    case DL_INT:
        return bits == 8 || bits == 16 || bits == 32 || bits == 64;
    case DL_UINT:
        return bits == 8;
    case DL_FLOAT:
        return bits == 16 || bits == 32;
    default:
        return false;
    }
}

static int64_t section_size(const ember_model_config *config, int64_t section)
{
    switch (section) {
    case EMBER_WEIGHTS:
        return config->weights_bytes;
    case EMBER_EXPERTS:
        return config->experts_bytes;
    case EMBER_SCRATCH:
        return config->scratch_bytes;
    case EMBER_STATE:
        return config->state_bytes;
    case EMBER_KV:
        return config->kv_bytes_per_token;
    case EMBER_TOKENS:
        return config->tokens_bytes;
    case EMBER_POSITIONS:
        return config->positions_bytes;
    case EMBER_LOGITS:
        return config->logits_bytes;
    case EMBER_TABLES:
        return config->tables_bytes;
    case EMBER_BOUNDS:
        return config->bounds_bytes;
    default:
        return -1;
    }
}

/* Bytes of a buffer (in KV: for one token), or -1 when a dimension is not as it must be. */
static int64_t buffer_bytes(const int64_t *fields, const int64_t *shape)
{
    int64_t bytes = fields[FIELD_BITS] / 8;
    bool in_kv = fields[FIELD_SECTION] == EMBER_KV;
    if (in_kv && (fields[FIELD_NDIM] == 0 || shape[0] != -1))
        return -1;
    for (int64_t i = in_kv; i < fields[FIELD_NDIM]; i++)
        if (shape[i] < 1 || __builtin_mul_overflow(bytes, shape[i], &bytes))
            return -1;
    return bytes;
}

static bool has_token_rows(int64_t section)
{
    return section == EMBER_SCRATCH || section == EMBER_TOKENS || section == EMBER_POSITIONS ||
           section == EMBER_LOGITS || section == EMBER_BOUNDS;
}

static bool check_buffer(const ember_model_config *config, int64_t index, ember_error error)
{
    const int64_t *fields = config->buffers + index * BUFFER_FIELDS;
    int64_t section = fields[FIELD_SECTION], ndim = fields[FIELD_NDIM];
    int64_t shape = fields[FIELD_SHAPE], offset = fields[FIELD_OFFSET];
    long long id = index;
    if (section < 0 || section >= EMBER_SECTION_COUNT)
        return ember_fail(error, "program: buffer %lld is in section %lld, which does not exist",
                          id, (long long)section);
    if (!known_type(fields[FIELD_CODE], fields[FIELD_BITS]))
        return ember_fail(error, "program: buffer %lld has an unknown dtype", id);
    if (ndim < 0 || ndim > EMBER_MAX_DIMENSIONS || shape < 0 || shape > config->shape_count - ndim)
        return ember_fail(error, "program: buffer %lld has its shape outside the shape table", id);
    int64_t rows = fields[FIELD_TOKEN_ROWS], bytes, end;
    if (rows != 0 && (!has_token_rows(section) || ndim == 0 || rows < 0 ||
                      rows > config->shapes[shape] || config->shapes[shape] % rows != 0))
        return ember_fail(error, "program: buffer %lld cannot have %lld rows for each token", id,
                          (long long)rows);
    bytes = buffer_bytes(fields, config->shapes + shape);
    if (bytes < 0)
        return ember_fail(error, "program: buffer %lld has an impossible shape", id);
    if (offset < 0 || (section != EMBER_KV && offset % EMBER_ALIGNMENT != 0))
        return ember_fail(error, "program: buffer %lld starts at %lld, which is not a multiple of "
                                 "%d", id, (long long)offset, EMBER_ALIGNMENT);
    if (__builtin_add_overflow(offset, bytes, &end) || end > section_size(config, section))
        return ember_fail(error, "program: buffer %lld ends outside section %lld, which has %lld "
                                 "bytes", id, (long long)section,
                          (long long)section_size(config, section));
    return true;
}

static ember_tensor make_tensor(const ember_model_config *config, int64_t index,
                                const ember_mapping *sections)
{
    const int64_t *fields = config->buffers + index * BUFFER_FIELDS;
    ember_tensor tensor = {
        .dl = {.device_type = DL_CPU,
               .ndim = (int32_t)fields[FIELD_NDIM],
               .dtype = {(uint8_t)fields[FIELD_CODE], (uint8_t)fields[FIELD_BITS], 1}},
        .offset = fields[FIELD_OFFSET],
        .section = (int32_t)fields[FIELD_SECTION],
        .token_rows = (int32_t)fields[FIELD_TOKEN_ROWS],
    };
    for (int64_t i = 0; i < fields[FIELD_NDIM]; i++)
        tensor.shape[i] = config->shapes[fields[FIELD_SHAPE] + i];
    if (tensor.section != EMBER_STATE && tensor.section != EMBER_KV)
        tensor.dl.data = sections[tensor.section].base + tensor.offset;
    return tensor;
}

static bool build_tensors(ember_program *program, const ember_model_config *config,
                          const ember_mapping *sections, ember_error error)
{
    program->tensors = allocate(config->buffer_count, sizeof *program->tensors);
    if (!program->tensors)
        return ember_fail(error, "no memory for %lld buffers", (long long)config->buffer_count);
    program->tensor_count = config->buffer_count;
    for (int64_t i = 0; i < config->buffer_count; i++) {
        if (!check_buffer(config, i, error))
            return false;
        program->tensors[i] = make_tensor(config, i, sections);
        program->tensors[i].dl.shape = program->tensors[i].shape;
    }
    return true;
}

void ember_tensor_bind(ember_tensor *tensor, const ember_session_memory *memory)
{
    if (tensor->section == EMBER_STATE) {
        tensor->dl.data = memory->state + tensor->offset;
    } else if (tensor->section == EMBER_KV) {
        tensor->dl.data = memory->kv + tensor->offset * memory->rows;
        tensor->shape[0] = memory->rows;
    }
}

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

static bool check_acquire(ember_program *program, const ember_step *step, ember_error error)
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

/* One row of each argument must fit the bounce buffer. */
static void measure_rows(ember_program *program, const ember_step *step)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < step->count; i++) {
        const ember_tensor *tensor = step->arguments[i].pointer;
        if (tensor->token_rows > 0)
            bytes += ember_aligned(ember_row_bytes(tensor));
    }
    if (program->bounce_bytes < bytes)
        program->bounce_bytes = bytes;
}

static bool check_last_row(const ember_step *step, ember_error error)
{
    const ember_tensor *rows = step->count == 2 ? step->arguments[0].pointer : NULL;
    const ember_tensor *last = step->count == 2 ? step->arguments[1].pointer : NULL;
    if (!rows || rows->token_rows != 1 || last->token_rows != 0 || last->dl.ndim < 1 ||
        last->shape[0] != 1 || ember_row_bytes(rows) != ember_row_bytes(last) || !rows->dl.data ||
        !last->dl.data)
        return ember_fail(error, "program: the last row is taken from (rows, one row), equally "
                                 "long");
    return true;
}

/* What is being built, and how far. */
typedef struct {
    ember_program *program;
    tvm_kernel **kernels;
    int64_t buffer_count;
    int64_t step_count;
    int64_t argument_count;
    int32_t tokens;       /* of the sequence */
    bool decodes;         /* the sequence */
    ember_step *acquires; /* its last step that acquires experts, or NULL */
} builder;

static bool build_arguments(builder *build, const int32_t *words, int32_t count, ember_error error)
{
    tvm_any *arguments = build->program->arguments + build->argument_count;
    long long number = build->step_count;
    for (int32_t i = 0; i < count; i++) {
        int32_t buffer = words[i];
        if (buffer < 0 || buffer >= build->buffer_count)
            return ember_fail(error, "program: step %lld uses buffer %d of %lld", number, buffer,
                              (long long)build->buffer_count);
        ember_tensor *tensor = &build->program->tensors[buffer];
        if (tensor->token_rows > 0 && tensor->shape[0] / tensor->token_rows < build->tokens)
            return ember_fail(error, "program: step %lld needs buffer %d for %d tokens", number,
                              buffer, build->tokens);
        arguments[i] = (tvm_any){.type_index = TVM_DL_TENSOR, .pointer = tensor};
    }
    return true;
}

static bool finish_step(builder *build, ember_step *step, ember_error error)
{
    ember_program *program = build->program;
    long long number = build->step_count;
    switch (step->kind) {
    case EMBER_CALL_IN_WAVES:
        if (!build->acquires || build->acquires->in_waves)
            return ember_fail(error, "program: step %lld takes experts in waves, but no step before"
                                     " it acquires them", number);
        build->acquires->in_waves = true;
        /* fall through */
    case EMBER_CALL:
    case EMBER_CALL_EACH:
        if (step->symbol < 0 || step->symbol >= program->symbol_count)
            return ember_fail(error, "program: step %lld calls kernel %d of %lld", number,
                              step->symbol, (long long)program->symbol_count);
        step->kernel = build->kernels[step->symbol];
        if (step->kind == EMBER_CALL_EACH)
            measure_rows(program, step);
        return true;
    case EMBER_ACQUIRE_EXPERTS:
        build->acquires = step;
        return check_acquire(program, step, error);
    case EMBER_TAKE_LAST_ROW:
        return check_last_row(step, error);
    }
    return ember_fail(error, "program: step %lld is of unknown kind %d", number, (int)step->kind);
}

/* Reads the step at `words`; returns how many words it has, 0 on failure. */
static int64_t build_step(builder *build, const int32_t *words, int64_t left, ember_error error)
{
    ember_program *program = build->program;
    long long number = build->step_count;
    if (left < STEP_WORDS || words[2] < 0 || words[2] > EMBER_MAX_ARGUMENTS ||
        words[2] > left - STEP_WORDS)
        return ember_fail(error, "program: step %lld is cut short", number);
    int32_t count = words[2];
    if (!build_arguments(build, words + STEP_WORDS, count, error))
        return 0;
    ember_step *step = &program->steps[build->step_count];
    *step = (ember_step){.kind = (ember_step_kind)words[0],
                         .arguments = program->arguments + build->argument_count,
                         .count = count,
                         .symbol = words[1],
                         .decodes = build->decodes};
    if (!finish_step(build, step, error))
        return 0;
    build->step_count++;
    build->argument_count += count;
    return STEP_WORDS + count;
}

static bool check_sequence(const ember_model_config *config, const ember_sequence *sequence,
                           ember_error error)
{
    int64_t tokens = sequence->tokens, logits;
    int64_t rows = sequence->role == EMBER_LOGITS_ALL ? tokens : 1;
    if (tokens < 1 || sequence->role < EMBER_BODY || sequence->role > EMBER_BATCH)
        return ember_fail(error, "program: a sequence of role %d for %lld tokens", sequence->role,
                          (long long)tokens);
    if (config->tokens_bytes / (int64_t)sizeof(int32_t) < tokens ||
        config->positions_bytes / (int64_t)sizeof(int32_t) < tokens)
        return ember_fail(error, "program: the token and position sections are too small for %lld "
                                 "tokens", (long long)tokens);
    if (__builtin_mul_overflow(rows * (int64_t)sizeof(float), config->vocab_size, &logits) ||
        logits > config->logits_bytes)
        return ember_fail(error, "program: the logits section has %lld bytes, too small for %lld "
                                 "rows of %lld", (long long)config->logits_bytes, (long long)rows,
                          (long long)config->vocab_size);
    int64_t blocks = (config->vocab_size + EMBER_BLOCK - 1) / EMBER_BLOCK;
    if (config->bounds_bytes > 0 && rows * blocks * (int64_t)sizeof(float) > config->bounds_bytes)
        return ember_fail(error, "program: the section of bounds has %lld bytes, too small for "
                                 "%lld rows of %lld", (long long)config->bounds_bytes,
                          (long long)rows, (long long)blocks);
    return true;
}

/* Notes how many slots the steps of a sequence need that take all of their experts at once. */
static void count_slots(ember_program *program, const ember_step_list *list)
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

static bool build_steps(builder *build, const ember_model_config *config, ember_error error)
{
    ember_program *program = build->program;
    int64_t words = 0;
    for (int64_t i = 0; i < config->sequence_count; i++)
        words += config->sequences[i].words;
    program->steps = allocate(words / STEP_WORDS, sizeof *program->steps);
    program->arguments = allocate(words, sizeof *program->arguments);
    program->sequences = allocate(config->sequence_count, sizeof *program->sequences);
    program->tables = allocate(EMBER_MAX_LAYERS, sizeof *program->tables);
    if (!program->steps || !program->arguments || !program->sequences || !program->tables)
        return ember_fail(error, "no memory for the program");
    for (int64_t i = 0; i < config->sequence_count; i++) {
        const ember_sequence *sequence = &config->sequences[i];
        if (!check_sequence(config, sequence, error))
            return false;
        int64_t first = build->step_count;
        build->tokens = sequence->tokens;
        build->decodes = sequence->tokens == 1 || sequence->role == EMBER_BATCH;
        build->acquires = NULL;
        for (int64_t at = 0; at < sequence->words;) {
            int64_t used = build_step(build, sequence->steps + at, sequence->words - at, error);
            if (used == 0)
                return false;
            at += used;
        }
        program->sequences[program->sequence_count++] =
            (ember_step_list){sequence->tokens, sequence->role, program->steps + first,
                              build->step_count - first};
        count_slots(program, &program->sequences[program->sequence_count - 1]);
    }
    return true;
}

static bool copy_symbols(ember_program *program, const ember_model_config *config,
                         ember_error error)
{
    program->symbols = allocate(config->symbol_count, sizeof *program->symbols);
    if (!program->symbols)
        return ember_fail(error, "no memory for kernel names");
    for (int64_t i = 0; i < config->symbol_count; i++) {
        program->symbols[i] = strdup(config->symbols[i]);
        if (!program->symbols[i])
            return ember_fail(error, "no memory for kernel names");
        program->symbol_count++;
    }
    return true;
}

static bool allocate_bounce(ember_program *program, ember_error error)
{
    if (program->bounce_bytes == 0)
        return true;
    program->bounce = aligned_alloc(EMBER_ALIGNMENT, (size_t)program->bounce_bytes);
    return program->bounce || ember_fail(error, "no memory for the rows of a batch");
}

bool ember_program_build(ember_program *program, const ember_model_config *config,
                         const ember_mapping *sections, const ember_library *library,
                         ember_error error)
{
    *program = (ember_program){0};
    builder build = {.program = program, .buffer_count = config->buffer_count};
    bool ok = copy_symbols(program, config, error) &&
              build_tensors(program, config, sections, error);
    if (ok) {
        build.kernels = allocate(config->symbol_count, sizeof *build.kernels);
        ok = build.kernels || ember_fail(error, "no memory for kernels");
    }
    for (int64_t i = 0; ok && i < program->symbol_count; i++) {
        build.kernels[i] = ember_library_kernel(library, program->symbols[i]);
        if (!build.kernels[i])
            ok = ember_fail(error, "the kernel library has no %s", program->symbols[i]);
    }
    ok = ok && build_steps(&build, config, error) && allocate_bounce(program, error);
    free(build.kernels);
    if (!ok)
        ember_program_free(program);
    return ok;
}

void ember_program_free(ember_program *program)
{
    for (int64_t i = 0; i < program->symbol_count; i++)
        free(program->symbols[i]);
    free(program->symbols);
    free(program->tensors);
    free(program->bounce);
    free(program->arguments);
    free(program->steps);
    free(program->sequences);
    free(program->tables);
    *program = (ember_program){0};
}

const ember_step_list *ember_program_find(const ember_program *program, int32_t tokens,
                                          int32_t role)
{
    const ember_step_list *found = NULL;
    for (int64_t i = 0; i < program->sequence_count; i++) {
        const ember_step_list *list = &program->sequences[i];
        if (list->role == role && list->tokens >= tokens &&
            (!found || list->tokens < found->tokens))
            found = list;
    }
    return found;
}
