/* Programs: checked, and turned into calls. Nothing in the packed tables is trusted. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { STEP_WORDS = 3 };

void *ember_allocate(int64_t count, size_t size)
{
    return count < 0 ? NULL : calloc(count > 0 ? (size_t)count : 1, size);
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
    ember_step *acquires; /* its last step that acquires experts, or NULL */
    ember_step *expects;  /* its last step that expects experts, which none has acquired; or NULL */
    ember_step_kind last; /* of the step before */
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

/* An acquire with experts to expect goes on after them: between the two are calls for that alone. And
 * those expected are the ones acquired next. */
static bool check_order(const builder *build, const ember_step *step, ember_error error)
{
    long long number = build->step_count;
    bool before = build->last == EMBER_ACQUIRE_EXPERTS || build->last == EMBER_CALL_AHEAD;
    bool ahead = step->kind == EMBER_CALL_AHEAD || step->kind == EMBER_EXPECT_EXPERTS;
    if (ahead ? !before : build->last == EMBER_CALL_AHEAD)
        return ember_fail(error, "program: step %lld: what is called ahead stands between acquired "
                                 "and expected experts", number);
    if (step->kind == EMBER_ACQUIRE_EXPERTS && build->expects &&
        build->expects->symbol != step->symbol)
        return ember_fail(error, "program: step %lld acquires experts of layer %d, but those of layer "
                                 "%d are expected", number, step->symbol, build->expects->symbol);
    return true;
}

static bool check_end(const builder *build, ember_error error)
{
    if (build->last == EMBER_CALL_AHEAD || build->expects)
        return ember_fail(error, "program: a sequence ends, but experts are still expected");
    return true;
}

static bool finish_step(builder *build, ember_step *step, ember_error error)
{
    ember_program *program = build->program;
    long long number = build->step_count;
    if (!check_order(build, step, error))
        return false;
    switch (step->kind) {
    case EMBER_CALL_IN_WAVES:
        if (!build->acquires || build->acquires->in_waves)
            return ember_fail(error, "program: step %lld takes experts in waves, but no step before"
                                     " it acquires them", number);
        build->acquires->in_waves = true;
        /* fall through */
    case EMBER_CALL:
    case EMBER_CALL_AHEAD:
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
        build->expects = NULL;
        return ember_check_acquire(program, step, error);
    case EMBER_EXPECT_EXPERTS:
        build->acquires->expects = true;
        build->expects = step;
        return ember_check_expect(step, error);
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
                         .symbol = words[1]};
    if (!finish_step(build, step, error))
        return 0;
    build->last = step->kind;
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

static bool build_steps(builder *build, const ember_model_config *config, ember_error error)
{
    ember_program *program = build->program;
    int64_t words = 0;
    for (int64_t i = 0; i < config->sequence_count; i++)
        words += config->sequences[i].words;
    program->steps = ember_allocate(words / STEP_WORDS, sizeof *program->steps);
    program->arguments = ember_allocate(words, sizeof *program->arguments);
    program->sequences = ember_allocate(config->sequence_count, sizeof *program->sequences);
    program->tables = ember_allocate(EMBER_MAX_LAYERS, sizeof *program->tables);
    if (!program->steps || !program->arguments || !program->sequences || !program->tables)
        return ember_fail(error, "no memory for the program");
    for (int64_t i = 0; i < config->sequence_count; i++) {
        const ember_sequence *sequence = &config->sequences[i];
        if (!check_sequence(config, sequence, error))
            return false;
        int64_t first = build->step_count;
        build->tokens = sequence->tokens;
        build->acquires = build->expects = NULL;
        build->last = EMBER_CALL;
        for (int64_t at = 0; at < sequence->words;) {
            int64_t used = build_step(build, sequence->steps + at, sequence->words - at, error);
            if (used == 0)
                return false;
            at += used;
        }
        if (!check_end(build, error))
            return false;
        program->sequences[program->sequence_count++] =
            (ember_step_list){sequence->tokens, sequence->role, program->steps + first,
                              build->step_count - first};
        ember_count_slots(program, &program->sequences[program->sequence_count - 1]);
    }
    return true;
}

static bool copy_symbols(ember_program *program, const ember_model_config *config,
                         ember_error error)
{
    program->symbols = ember_allocate(config->symbol_count, sizeof *program->symbols);
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
              ember_tensors_build(program, config, sections, error);
    if (ok) {
        build.kernels = ember_allocate(config->symbol_count, sizeof *build.kernels);
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
