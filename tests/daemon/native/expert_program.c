/* A program with experts: ids, weights and scores of both layers, then the sums of each layer's
 * experts as logits, by the kernels `route` and `sum_experts`. Layer 1's are expected before those of
 * layer 0 are waited for, by the kernel `foresee`. */
#define _GNU_SOURCE
#include "expert_program.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

enum { OUT = SCORES + 1, PER_LAYER, EXPECTED = 1 + LAYERS * PER_LAYER, PER_SIZE }; /* buffers of a
                                                                                    * sequence */
enum { LINE = CHUNK * TOP_K * 4, SCORE_BYTES = CHUNK * EXPERTS * 4 };
enum { TABLES, BANK_BUFFER = LAYERS, FIRST };

static int64_t shapes[16], buffers[FIRST + 2 * PER_SIZE][8];
static int32_t tables[LAYERS][16]; /* each on a cache line */
float logits[LAYERS * CHUNK * TOP_K * 16];
ember_expert_counters counters[LAYERS];

int32_t position_of(int layer, int expert)
{
    return (layer * EXPERTS + expert) * 5 % BANK;
}

static void set_buffer(int index, int section, int code, int ndim, int64_t offset, int64_t rows,
                       int64_t shape)
{
    const int64_t fields[] = {section, code, code == DL_UINT ? 8 : 32, ndim, offset, rows, shape, 0};
    memcpy(buffers[index], fields, sizeof fields);
}

/* Where the ids, weights and scores of a layer are in SCRATCH. */
int64_t place_of(int layer, int kind)
{
    return layer * (2 * LINE + SCORE_BYTES) + kind * LINE;
}

/* Buffers of a sequence: tokens, for each layer ids, weights, scores and sums, and the ids expected. */
static void set_sequence(int first, int64_t tokens, int64_t shape)
{
    int64_t rows = tokens > 1;
    shapes[shape] = shapes[shape + 2] = tokens;
    shapes[shape + 1] = TOP_K;
    shapes[shape + 3] = EXPERTS;
    set_buffer(first, EMBER_TOKENS, DL_INT, 1, 0, rows, shape);
    for (int layer = 0; layer < LAYERS; layer++) {
        int at = first + 1 + PER_LAYER * layer;
        set_buffer(at + IDS, EMBER_SCRATCH, DL_INT, 2, place_of(layer, IDS), rows, shape);
        set_buffer(at + WEIGHTS, EMBER_SCRATCH, DL_FLOAT, 2, place_of(layer, WEIGHTS), rows, shape);
        set_buffer(at + SCORES, EMBER_SCRATCH, DL_FLOAT, 2, place_of(layer, SCORES), rows,
                   shape + 2);
        set_buffer(at + OUT, EMBER_LOGITS, DL_FLOAT, 2, layer * LINE, rows, shape);
    }
    set_buffer(first + EXPECTED, EMBER_SCRATCH, DL_INT, 2, place_of(LAYERS, IDS), rows, shape);
}

static int32_t *write_words(int32_t *at, const int32_t *words, size_t bytes)
{
    return (int32_t *)memcpy(at, words, bytes) + bytes / sizeof *words;
}

static int64_t write_steps(int32_t *words, int first, ember_step_kind kind)
{
    int32_t *at = words;
    int of_0 = first + 1, of_1 = of_0 + PER_LAYER;
    const int32_t route[] = {
        EMBER_CALL,     0,          1 + 3 * LAYERS, first,          of_0 + IDS,
        of_0 + WEIGHTS, of_0 + SCORES, of_1 + IDS,  of_1 + WEIGHTS, of_1 + SCORES,
    };
    at = write_words(at, route, sizeof route);
    for (int layer = 0; layer < LAYERS; layer++) {
        int ids = first + 1 + PER_LAYER * layer;
        const int32_t acquire[] = {
            EMBER_ACQUIRE_EXPERTS, layer, 5, ids, ids + WEIGHTS, ids + SCORES, TABLES + layer,
            BANK_BUFFER,
        };
        const int32_t sum[] = {kind, 1, 4, ids, TABLES + layer, BANK_BUFFER, ids + OUT};
        const int32_t ahead[] = {
            EMBER_CALL_AHEAD,     2,         2, first, first + EXPECTED,
            EMBER_EXPECT_EXPERTS, layer + 1, 1, first + EXPECTED,
        };
        at = write_words(at, acquire, sizeof acquire);
        if (layer + 1 < LAYERS)
            at = write_words(at, ahead, sizeof ahead);
        at = write_words(at, sum, sizeof sum);
    }
    return at - words;
}

ember_model_config make_config(const void *kernels, int64_t size, int bank, int64_t bytes,
                                      int threads, int readers)
{
    static int32_t one[64], many[64];
    static ember_sequence sequences[5];
    static const char *const symbols[] = {"route", "sum_experts", "foresee"};
    shapes[0] = EXPERTS;
    shapes[1] = BANK;
    shapes[2] = bytes;
    for (int layer = 0; layer < LAYERS; layer++) {
        set_buffer(TABLES + layer, EMBER_TABLES, DL_INT, 1, layer * 64, 0, 0);
        for (int expert = 0; expert < EXPERTS; expert++)
            tables[layer][expert] = position_of(layer, expert);
    }
    set_buffer(BANK_BUFFER, EMBER_EXPERTS, DL_UINT, 2, 0, 0, 1);
    set_sequence(FIRST, 1, 4);
    set_sequence(FIRST + PER_SIZE, CHUNK, 8);
    int64_t words = write_steps(one, FIRST, EMBER_CALL);
    sequences[0] = (ember_sequence){1, EMBER_BODY, one, words};
    sequences[1] = (ember_sequence){1, EMBER_BATCH, one, words};
    words = write_steps(many, FIRST + PER_SIZE, EMBER_CALL_IN_WAVES);
    sequences[2] = (ember_sequence){CHUNK, EMBER_BODY, many, words};
    sequences[3] = (ember_sequence){CHUNK, EMBER_BATCH, many, words};
    sequences[4] = (ember_sequence){CHUNK, EMBER_LOGITS_ALL, many, 0};
    return (ember_model_config){
        .kernels = kernels,
        .kernels_bytes = size,
        .symbols = symbols,
        .symbol_count = 3,
        .buffers = buffers[0],
        .buffer_count = FIRST + 2 * PER_SIZE,
        .shapes = shapes,
        .shape_count = 16,
        .sequences = sequences,
        .sequence_count = 5,
        .tables = tables,
        .tables_bytes = sizeof tables,
        .scratch_bytes = place_of(LAYERS, IDS) + LINE,
        .state_bytes = 4,
        .tokens_bytes = CHUNK * 4,
        .positions_bytes = CHUNK * 4,
        .logits_bytes = sizeof logits,
        .logits = logits,
        .vocab_size = VOCABULARY,
        .experts_bytes = BANK * bytes,
        .weights_file = bank,
        .experts_file = bank,
        .reader_threads = readers,
        .threads = threads,
    };
}

/* Every 32-bit word of the expert at a position holds that position. */
int make_bank(const char *path, int64_t bytes)
{
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(file >= 0);
    for (int32_t position = 0; position < BANK; position++)
        for (int64_t i = 0; i < bytes / 4; i++)
            CHECK(write(file, &position, 4) == 4);
    return file;
}

/* What the kernel `route` chooses. */
int32_t chosen(int32_t token, int layer, int k)
{
    return (token * 5 + layer * 3 + k * (1 + token % 3)) % EXPERTS;
}
