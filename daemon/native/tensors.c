/* The tensors of a program: checked against the sections that they live in.
 *
 * Every offset and size is checked here, so that a damaged program cannot make the core touch memory
 * that is not its own. */
#include <stdlib.h>

#include "internal.h"

enum { BUFFER_FIELDS = 8 };
enum {
    FIELD_SECTION,
    FIELD_CODE,
    FIELD_BITS,
    FIELD_NDIM,
    FIELD_OFFSET,
    FIELD_TOKEN_ROWS,
    FIELD_SHAPE
};

int64_t ember_aligned(int64_t bytes)
{
    return (bytes + EMBER_ALIGNMENT - 1) / EMBER_ALIGNMENT * EMBER_ALIGNMENT;
}

int64_t ember_row_bytes(const ember_tensor *tensor)
{
    int64_t bytes = tensor->dl.dtype.bits / 8;
    for (int32_t i = 1; i < tensor->dl.ndim; i++)
        bytes *= tensor->shape[i];
    return bytes;
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

bool ember_tensors_build(ember_program *program, const ember_model_config *config,
                         const ember_mapping *sections, ember_error error)
{
    program->tensors = ember_allocate(config->buffer_count, sizeof *program->tensors);
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
