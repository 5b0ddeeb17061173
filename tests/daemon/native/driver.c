/* Drives the core without Python, for builds with sanitizers: `driver KERNELS.so`.
 * Exits with 0 when everything was as it must be, else says what was not. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "sampling_tests.h"
#include "system.h"

enum { COLUMNS = 40, CHUNK = 4, CAPACITY = 100 };

char message[EMBER_ERROR_BYTES];
static const ember_error error = {message, sizeof message};

/* ---- maps: the bytes of the file, from an address where huge pages may begin */
static void test_maps(void)
{
    enum { HUGE_PAGE = 2 << 20 };
    const size_t sizes[] = {1, 4096, 4097, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 5000000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t size = sizes[i];
        int file = memfd_create("map", 0);
        CHECK(file >= 0 && pwrite(file, "last", 1, (off_t)size - 1) == 1);
        ember_mapping mapped, zeroed;
        CHECK(ember_map_file(&mapped, file, (int64_t)size, "map", error));
        CHECK(ember_map_zeroed(&zeroed, (int64_t)size, EMBER_MAP_HUGE, "map", error));
        close(file);
        CHECK(mapped.bytes == size && mapped.base[size - 1] == 'l');
        CHECK(zeroed.bytes == size && zeroed.base[size - 1] == 0);
        CHECK(size < HUGE_PAGE || (uintptr_t)mapped.base % HUGE_PAGE == 0);
        CHECK(size < HUGE_PAGE || (uintptr_t)zeroed.base % HUGE_PAGE == 0);
        zeroed.base[size - 1] = 1;
        ember_mapping_clear(&zeroed);
        CHECK(zeroed.base[size - 1] == 0);
        char *base = mapped.base;
        ember_unmap(&mapped);
        ember_unmap(&zeroed);
        CHECK(msync(base, 1, MS_ASYNC) == -1 && errno == ENOMEM); /* nothing is mapped there */
    }
}

/* ---- vocabulary: merges in the order of their ranks, from the left */
static void test_vocabulary(void)
{
    enum { A = 1, B, AB, ABAB, TOKENS };
    int32_t byte_ids[256];
    for (int i = 0; i < 256; i++)
        byte_ids[i] = i == 'a' ? A : i == 'b' ? B : -1;
    int32_t first[TOKENS + 1] = {0, 0, 1, 1, 2, 2};
    ember_merge merges[] = {{B, 7, AB}, {AB, 9, ABAB}};
    ember_vocabulary vocabulary = {byte_ids, first, merges, TOKENS, 2};
    CHECK(ember_vocabulary_check(&vocabulary));
    const uint8_t text[] = "ababxab" "" "bab";
    const int64_t ends[] = {7, 7, 10};
    const int32_t expected[] = {ABAB, AB, B, AB};
    int32_t ids[10];
    CHECK(ember_vocabulary_encode(&vocabulary, text, ends, 3, ids) == 4);
    CHECK(memcmp(ids, expected, sizeof expected) == 0);
    CHECK(ember_vocabulary_encode(&vocabulary, text, ends, 0, ids) == 0);
    for (int n = 0; n < 2; n++) {
        atomic_store(&allowed, n);
        CHECK(ember_vocabulary_encode(&vocabulary, text, ends, 3, ids) == -1);
        atomic_store(&allowed, -1);
    }
    merges[1].id = TOKENS;
    CHECK(!ember_vocabulary_check(&vocabulary));
    merges[1].id = ABAB;
    first[2] = 3;
    CHECK(!ember_vocabulary_check(&vocabulary));
}

/* ---- pool: every task runs exactly once, whatever the pace */
typedef struct {
    _Atomic int runs[64];
    int pause;
} counters;

static int count_task(int task, tvm_parallel_group *group, void *closure)
{
    counters *c = closure;
    CHECK(task >= 0 && task < group->num_task && group->num_task <= 64);
    for (volatile int i = 0; i < c->pause * (task % 3); i++)
        continue;
    c->runs[task]++;
    return task == 63 ? -1 : 0;
}

static void test_pool(int threads)
{
    const int32_t nowhere[] = {-1, 100000}; /* no such CPUs: workers start all the same */
    ember_pool *pool = ember_pool_open(threads, nowhere, threads % 3, error);
    CHECK(pool);
    static counters c;
    for (int round = 0; round < 3000; round++) {
        memset(&c, 0, sizeof c);
        c.pause = round % 7 * 20;
        int tasks = round % 64 + 1;
        if (round % 500 == 0) { /* long enough for the workers to fall asleep */
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
            ember_pool_wake(pool);
        }
        int code = ember_pool_launch(pool, count_task, &c, tasks);
        CHECK(code == (tasks == 64 ? -1 : 0));
        for (int i = 0; i < 64; i++)
            CHECK(c.runs[i] == (i < tasks));
    }
    ember_pool_close(pool);
}

/* ---- models and sessions, on the kernels of kernels.c */
static int64_t buffers[][8] = {
    {EMBER_TOKENS, DL_INT, 32, 1, 0, 1, 0, 0},    {EMBER_POSITIONS, DL_INT, 32, 1, 0, 1, 0, 0},
    {EMBER_STATE, DL_FLOAT, 32, 1, 64, 0, 1, 0},  {EMBER_KV, DL_FLOAT, 32, 2, 12, 0, 2, 0},
    {EMBER_LOGITS, DL_FLOAT, 32, 1, 0, 0, 1, 0},
};
static const int64_t shapes[] = {CHUNK, COLUMNS, -1, COLUMNS};
static const int32_t body[] = {EMBER_CALL, 0, 5, 0, 1, 2, 3, 4};
static const int32_t refusing[] = {EMBER_CALL, 1, 0};
static const ember_sequence sequences[] = {{CHUNK, EMBER_BODY, body, 8},
                                           {CHUNK, EMBER_LOGITS_LAST, body, 0},
                                           {CHUNK, EMBER_LOGITS_ALL, refusing, 3}};
static const int32_t each[] = {EMBER_CALL_EACH, 0, 5, 0, 1, 2, 3, 4};
static const ember_sequence batch[] = {{CHUNK, EMBER_BODY, body, 8},
                                       {CHUNK, EMBER_LOGITS_ALL, body, 0},
                                       {CHUNK, EMBER_BATCH, each, 8}};
static const char *const symbols[] = {"append", "refuse"};
static float logits[CHUNK * COLUMNS];

static ember_model_config tiny_config(const void *kernels, int64_t size, int weights)
{
    return (ember_model_config){
        .kernels = kernels,
        .kernels_bytes = size,
        .symbols = symbols,
        .symbol_count = 2,
        .buffers = buffers[0],
        .buffer_count = 5,
        .shapes = shapes,
        .shape_count = 4,
        .sequences = sequences,
        .sequence_count = 3,
        .state_bytes = 64 + COLUMNS * 4,
        .kv_bytes_per_token = 12 + COLUMNS * 4,
        .tokens_bytes = CHUNK * 4,
        .positions_bytes = CHUNK * 4,
        .logits_bytes = sizeof logits,
        .logits = logits,
        .vocab_size = COLUMNS,
        .weights_bytes = 100,
        .experts_bytes = 0,
        .weights_file = weights,
        .experts_file = weights,
        .threads = 3,
    };
}

static ember_status step(ember_session *session, int64_t position, int32_t role)
{
    const int32_t tokens[CHUNK] = {1, 2, 3, 4};
    return ember_session_step(session, tokens, CHUNK, position, role, message, sizeof message);
}

static void test_session(ember_model *model)
{
    ember_session *session = ember_session_open(model, CAPACITY, message, sizeof message);
    ember_session *other = ember_session_open(model, 5, message, sizeof message);
    CHECK(session && other);
    float state[16 + COLUMNS];
    for (int64_t position = 0; position < CAPACITY; position += CHUNK) {
        CHECK(step(session, position, EMBER_LOGITS_LAST) == EMBER_OK);
        CHECK(logits[0] == 10.0f * (float)(position / CHUNK + 1));
        CHECK(logits[COLUMNS - 1] == logits[0]);
        if (position == 8)
            ember_session_save(session, state);
        CHECK(step(other, 1, EMBER_BODY) == EMBER_OK);
    }
    CHECK(step(session, CAPACITY - 3, EMBER_BODY) == EMBER_REFUSED);
    CHECK(step(session, -1, EMBER_BODY) == EMBER_REFUSED);
    CHECK(step(session, 0, 7) == EMBER_REFUSED);
    const int32_t outside[CHUNK] = {0, 0, 0, COLUMNS};
    CHECK(ember_session_step(session, outside, CHUNK, 0, 0, NULL, 0) == EMBER_REFUSED);
    ember_session_load(session, state);
    CHECK(step(session, 12, EMBER_BODY) == EMBER_OK && logits[0] == 40);
    CHECK(step(session, 16, EMBER_LOGITS_ALL) == EMBER_FAILED);
    CHECK(strcmp(message, "kernel refuse failed: ValueError: task 2 says no") == 0);
    ember_session_reset(session);
    CHECK(step(session, 0, EMBER_BODY) == EMBER_OK && logits[0] == 10);
    ember_session_close(session);
    ember_session_close(other);
    CHECK(!ember_session_open(model, 0, message, sizeof message));
    CHECK(!ember_session_open(model, INT64_MAX, message, sizeof message));
}

/* Two steps timed, a third one no longer. */
static void test_costs(ember_model *model)
{
    ember_session *session = ember_session_open(model, CAPACITY, message, sizeof message);
    CHECK(session);
    ember_cost costs[3] = {0};
    ember_model_profile(model, costs);
    CHECK(step(session, 0, EMBER_BODY) == EMBER_OK);
    CHECK(step(session, CHUNK, EMBER_LOGITS_ALL) == EMBER_FAILED);
    ember_model_profile(model, NULL);
    CHECK(step(session, CHUNK, EMBER_BODY) == EMBER_OK);
    CHECK(costs[0].calls == 2 && costs[1].calls == 1 && costs[2].calls == 0);
    CHECK(costs[0].nanoseconds > 0 && costs[2].nanoseconds == 0);
    ember_session_close(session);
}

/* Sessions at different places take a token each; then fewer tokens than a chunk. */
static void test_batch(ember_model_config config)
{
    config.sequences = batch;
    ember_model *model = ember_model_open(&config, message, sizeof message);
    CHECK(model);
    ember_session *sessions[CHUNK + 1];
    int64_t at[CHUNK + 1];
    const int32_t tokens[CHUNK + 1] = {5, 6, 7, 8, 9};
    float state[16 + COLUMNS];
    for (int i = 0; i <= CHUNK; i++) {
        sessions[i] = ember_session_open(model, CAPACITY, message, sizeof message);
        CHECK(sessions[i] && ember_session_step(sessions[i], tokens, i % CHUNK + 1, 0, EMBER_BODY,
                                                message, sizeof message) == EMBER_OK);
        at[i] = i % CHUNK + 1;
    }
    CHECK(ember_model_step(model, sessions, tokens, at, CHUNK, message, sizeof message) ==
          EMBER_OK);
    const float sums[CHUNK] = {5 + 5, 5 + 6 + 6, 5 + 6 + 7 + 7, 5 + 6 + 7 + 8 + 8};
    for (int i = 0; i < CHUNK; i++) {
        ember_session_save(sessions[i], state);
        CHECK(state[16] == sums[i] && state[16 + COLUMNS - 1] == sums[i]);
    }
    CHECK(ember_model_step(model, sessions, tokens, at, CHUNK + 1, message, sizeof message) ==
          EMBER_REFUSED);
    CHECK(ember_model_step(model, sessions, tokens, at, 0, message, sizeof message) ==
          EMBER_REFUSED);
    at[1] = CAPACITY;
    CHECK(ember_model_step(model, sessions, tokens, at, 2, message, sizeof message) ==
          EMBER_REFUSED);
    for (int i = 0; i <= CHUNK; i++)
        ember_session_close(sessions[i]);
    ember_model_close(model);
}

/* Changes one word of the buffer table at a time: the model opens or says why not. */
static void test_damaged_buffers(ember_model_config config)
{
    const int64_t values[] = {-1, 0, 1, 3, 4, 9, 63, 64, 1 << 20, INT64_MAX, INT64_MIN};
    int64_t *words = buffers[0];
    int opened = 0, refused = 0;
    config.threads = 1;
    for (size_t i = 0; i < sizeof buffers / sizeof *words; i++)
        for (size_t j = 0; j < sizeof values / sizeof *values; j++) {
            int64_t before = words[i];
            words[i] = values[j];
            message[0] = 0;
            ember_model *model = ember_model_open(&config, message, sizeof message);
            CHECK(model || strncmp(message, "program: ", 9) == 0);
            opened += model != NULL;
            refused += model == NULL;
            ember_model_close(model);
            words[i] = before;
        }
    CHECK(opened > 50 && refused > 100);
}

/* Refuses one request to the system after the other: each is noticed and nothing is left behind,
 * which the sanitizer checks. */
static void test_refusals(const ember_model_config *config)
{
    int failures = 0;
    for (int n = 0;; n++) {
        atomic_store(&allowed, n);
        message[0] = 0;
        ember_model *model = ember_model_open(config, message, sizeof message);
        ember_session *session =
            model ? ember_session_open(model, CAPACITY, message, sizeof message) : NULL;
        bool everything = atomic_load(&allowed) >= 0;
        atomic_store(&allowed, -1);
        CHECK(session || message[0]);
        failures += session == NULL;
        ember_session_close(session);
        ember_model_close(model);
        if (everything)
            break;
    }
    CHECK(failures > 15);
}

static void test_model(const char *path)
{
    int file = open(path, O_RDONLY);
    CHECK(file >= 0);
    off_t size = lseek(file, 0, SEEK_END);
    void *kernels = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, file, 0);
    CHECK(size > 0 && kernels != MAP_FAILED);
    ember_model_config config = tiny_config(kernels, size, file);
    for (int round = 0; round < 3; round++) {
        without_memfd = round == 1;
        ember_model *model = ember_model_open(&config, message, sizeof message);
        ember_model *twin = ember_model_open(&config, message, sizeof message);
        CHECK(model && twin);
        test_session(model);
        test_costs(model);
        ember_model_close(model);
        test_session(twin);
        ember_model_close(twin);
    }
    test_batch(config);
    test_damaged_buffers(config);
    test_refusals(&config);
    config.kernels_bytes = 100;
    CHECK(!ember_model_open(&config, message, sizeof message));
    config = tiny_config(kernels, size, file);
    config.weights_bytes = size + 1;
    CHECK(!ember_model_open(&config, message, sizeof message));
    CHECK(strncmp(message, "weights.bin has ", 16) == 0);
    munmap(kernels, (size_t)size);
    close(file);
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    test_maps();
    test_vocabulary();
    for (int threads = 1; threads <= 4; threads++)
        test_pool(threads);
    test_sampling();
    test_model(arguments[1]);
    return 0;
}
