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

#include "internal.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

enum { COLUMNS = 40, CHUNK = 4, CAPACITY = 100 };

static char message[EMBER_ERROR_BYTES];
static const ember_error error = {message, sizeof message};

/* ---- what the core asks of the system, linked with --wrap so that it can be refused here */
static int allowed = -1; /* calls until one is refused; negative: none is */

static bool refused(void)
{
    return allowed >= 0 && allowed-- == 0;
}

void *__real_calloc(size_t count, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
char *__real_strdup(const char *text);
void *__real_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset);
int __real_memfd_create(const char *name, unsigned flags);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*function)(void *), void *argument);

void *__wrap_calloc(size_t count, size_t size)
{
    return refused() ? NULL : __real_calloc(count, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return refused() ? NULL : __real_aligned_alloc(alignment, size);
}

char *__wrap_strdup(const char *text)
{
    return refused() ? NULL : __real_strdup(text);
}

void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
    return refused() ? MAP_FAILED : __real_mmap(at, size, protection, flags, file, offset);
}

static bool without_memfd;

int __wrap_memfd_create(const char *name, unsigned flags)
{
    return without_memfd ? -1 : __real_memfd_create(name, flags);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*function)(void *), void *argument)
{
    return refused() ? EAGAIN : __real_pthread_create(thread, attributes, function, argument);
}

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
        allowed = n;
        CHECK(ember_vocabulary_encode(&vocabulary, text, ends, 3, ids) == -1);
        allowed = -1;
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

/* ---- sampling: against the obvious way */
static int by_value(const void *a, const void *b)
{
    const float *x = a, *y = b; /* value, id */
    if (x[0] != y[0])
        return x[0] < y[0] ? 1 : -1;
    return x[1] < y[1] ? -1 : x[1] > y[1];
}

/* Bounds as a head and a few biases leave them: some are above all of their logits. */
static ember_row bounded(float *logits, float *bounds, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float *bound = &bounds[i / EMBER_BLOCK];
        if (i % EMBER_BLOCK == 0)
            *bound = i % 3 == 0 ? -1 : -INFINITY;
        *bound = logits[i] > *bound ? logits[i] : *bound;
    }
    return (ember_row){logits, bounds, n};
}

static void test_row(int64_t n, int64_t k, unsigned seed)
{
    float *row = malloc((size_t)n * sizeof *row);
    float(*sorted)[2] = malloc((size_t)n * sizeof *sorted);
    int32_t *ids = malloc((size_t)(k + 1) * sizeof *ids);
    float *values = malloc((size_t)(k + 1) * sizeof *values);
    CHECK(row && sorted && ids && values);
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        unsigned draw = (unsigned)rand_r(&seed) % 100;
        row[i] = draw == 0 ? NAN : draw == 1 ? -INFINITY : (float)draw / 8 - 20;
        sorted[i][0] = isnan(row[i]) ? -INFINITY : row[i];
        sorted[i][1] = (float)i;
        sum += exp(sorted[i][0]);
    }
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    float bounds[100];
    const ember_row rows[] = {{row, NULL, n}, bounded(row, bounds, n)};
    for (int kind = 0; kind < 2; kind++) {
        int64_t found = ember_top_k(rows[kind], k, ids, values);
        CHECK(found == (k < n ? k : n));
        for (int64_t i = 0; i < found; i++)
            CHECK(ids[i] == (int32_t)sorted[i][1] && values[i] == sorted[i][0]);
        double expected = log(sum), actual = ember_log_sum_exp(rows[kind]);
        CHECK(expected == actual || fabs(expected - actual) < 1e-5);
    }
    free(row);
    free(sorted);
    free(ids);
    free(values);
}

/* The greater the number, the less likely the token. */
static void test_draw(int64_t n, ember_sampling sampling)
{
    enum { DRAWS = 400 };
    float row[2000], bounds[32];
    int32_t token = -1, same = -1, last = 0;
    for (int64_t i = 0; i < n; i++)
        row[i] = i % 50 == 3 ? NAN : -(float)i / (float)n;
    ember_row plain = {row, NULL, n}, quick = bounded(row, bounds, n);
    for (int i = 0; i < DRAWS; i++) {
        sampling.uniform = (double)i / DRAWS;
        CHECK(ember_draw(plain, &sampling, &token) == EMBER_OK);
        CHECK(token >= last && token < n && !isnan(row[token]));
        CHECK(ember_draw(quick, &sampling, &same) == EMBER_OK && same == token);
        last = token;
    }
}

static void test_sampling(void)
{
    for (int64_t n = 1; n <= 2000; n += 333) {
        test_draw(n, (ember_sampling){.temperature = 1, .top_p = 1});
        test_draw(n, (ember_sampling){.temperature = 0.1, .top_k = 7, .top_p = 0.5});
        test_draw(n, (ember_sampling){.temperature = 0.1, .top_k = 700, .top_p = 0.9});
        test_draw(n, (ember_sampling){.temperature = 2, .top_p = 1, .min_p = 0.9});
    }
    for (int64_t n = 1; n < 300; n += 7)
        for (int64_t k = 0; k <= n + 1; k += n / 3 + 1)
            test_row(n, k, (unsigned)(n * 1000 + k));
    test_row(5000, 64, 1);
    test_row(5000, 5000, 2);
    float two[][2] = {{1e30f, -1e30f}, {1, INFINITY}, {-INFINITY, NAN}};
    ember_row empty = {0}, huge = {two[0], NULL, 2}, infinite = {two[1], NULL, 2};
    ember_row none = {two[2], NULL, 2};
    CHECK(ember_top_k(empty, 3, NULL, NULL) == 0);
    CHECK(ember_log_sum_exp(empty) == -INFINITY);
    CHECK(ember_log_sum_exp(huge) == (double)1e30f);
    CHECK(ember_log_sum_exp(infinite) == INFINITY);
    CHECK(ember_log_sum_exp(none) == -INFINITY);
    int32_t token = -1;
    ember_sampling all = {.temperature = 1, .top_p = 1, .uniform = 0.999};
    CHECK(ember_draw(huge, &all, &token) == EMBER_OK && token == 0);
    CHECK(ember_draw(infinite, &all, &token) == EMBER_REFUSED);
    CHECK(ember_draw(none, &all, &token) == EMBER_REFUSED);
    CHECK(ember_draw(empty, &all, &token) == EMBER_REFUSED);
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
        allowed = n;
        message[0] = 0;
        ember_model *model = ember_model_open(config, message, sizeof message);
        ember_session *session =
            model ? ember_session_open(model, CAPACITY, message, sizeof message) : NULL;
        bool everything = allowed >= 0;
        allowed = -1;
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
