/* Drives the expert store without Python, for builds with sanitizers: `store_driver KERNELS.so BANK`,
 * where BANK is a path for experts.bin. Reads are delayed and fail at random, budgets, priorities
 * and warming change between steps; each expert used must be whole all the same. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
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
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, message); \
            exit(1); \
        } \
    } while (0)

enum { LAYERS = 2, EXPERTS = 8, TOP_K = 2, ALL = LAYERS * EXPERTS, BANK = ALL + 1, CHUNK = 8 };
enum { VOCABULARY = 64, SESSIONS = 3, CAPACITY = 4096 };

static char message[EMBER_ERROR_BYTES];

/* ---- what the core asks of the system, linked with --wrap */
static atomic_int failures_in_100; /* reads that fail */
static atomic_bool delayed;
static atomic_int allowed = -1; /* calls until one is refused; negative: none is */
static atomic_uint seed = 1;

/* Reads wait for a closed gate, which opens when a step waits for them; they are noted. */
static pthread_t stepping;
static atomic_bool closed;
static pthread_mutex_t noting = PTHREAD_MUTEX_INITIALIZER;
static off_t noted[64];
static int count_noted;

static unsigned draw(void)
{
    unsigned next = atomic_fetch_add(&seed, 2654435761u);
    next ^= next >> 15;
    next *= 2246822519u;
    return next ^ next >> 13;
}

static void note(off_t offset)
{
    pthread_mutex_lock(&noting);
    if (count_noted < (int)(sizeof noted / sizeof *noted))
        noted[count_noted++] = offset;
    pthread_mutex_unlock(&noting);
}

static void forget_noted(void)
{
    pthread_mutex_lock(&noting);
    count_noted = 0;
    pthread_mutex_unlock(&noting);
}

/* How many reads began before the one at this offset; -1: it has not begun. */
static int noted_before(off_t offset)
{
    pthread_mutex_lock(&noting);
    int before = 0;
    while (before < count_noted && noted[before] != offset)
        before++;
    before = before < count_noted ? before : -1;
    pthread_mutex_unlock(&noting);
    return before;
}

static bool refused(void)
{
    return atomic_load(&allowed) >= 0 && atomic_fetch_sub(&allowed, 1) == 0;
}

ssize_t __real_pread(int file, void *target, size_t bytes, off_t offset);
void *__real_calloc(size_t count, size_t size);
void *__real_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset);
int __real_mprotect(void *at, size_t size, int protection);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*function)(void *), void *argument);
int __real_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);

ssize_t __wrap_pread(int file, void *target, size_t bytes, off_t offset)
{
    note(offset);
    while (atomic_load(&closed))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    if (atomic_load(&delayed))
        nanosleep(&(struct timespec){.tv_nsec = (long)(draw() % 400) * 1000}, NULL);
    if (draw() % 100 >= (unsigned)atomic_load(&failures_in_100))
        return __real_pread(file, target, bytes, offset);
    memset(target, 0xFF, bytes);
    const int codes[] = {EIO, EINTR, EINVAL, 0};
    errno = codes[draw() % 4];
    return errno ? -1 : 0;
}

void *__wrap_calloc(size_t count, size_t size)
{
    return refused() ? NULL : __real_calloc(count, size);
}

void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
    return refused() ? MAP_FAILED : __real_mmap(at, size, protection, flags, file, offset);
}

int __wrap_mprotect(void *at, size_t size, int protection)
{
    return refused() ? -1 : __real_mprotect(at, size, protection);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*function)(void *), void *argument)
{
    return refused() ? EAGAIN : __real_pthread_create(thread, attributes, function, argument);
}

int __wrap_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
{
    if (pthread_equal(pthread_self(), stepping))
        atomic_store(&closed, false);
    return __real_pthread_cond_wait(condition, mutex);
}

/* ---- a program: ids of both layers, then the sums of each layer's experts as logits */
enum { IDS, WEIGHTS, SCORES, OUT, PER_LAYER, PER_SIZE = 1 + LAYERS * PER_LAYER };
enum { LINE = CHUNK * TOP_K * 4, SCORE_BYTES = CHUNK * EXPERTS * 4 };
enum { TABLES, BANK_BUFFER = LAYERS, FIRST };

static int64_t shapes[16], buffers[FIRST + 2 * PER_SIZE][8];
static int32_t tables[LAYERS][16]; /* each on a cache line */
static float logits[LAYERS * CHUNK * TOP_K * 16];
static ember_expert_counters counters[LAYERS];

static int32_t position_of(int layer, int expert)
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
static int64_t place_of(int layer, int kind)
{
    return layer * (2 * LINE + SCORE_BYTES) + kind * LINE;
}

/* Buffers of a sequence: tokens, then for each layer ids, weights, scores and sums. */
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
}

static int64_t write_steps(int32_t *words, int first, ember_step_kind kind)
{
    int32_t *at = words;
    int of_0 = first + 1, of_1 = of_0 + PER_LAYER;
    const int32_t route[] = {
        EMBER_CALL,     0,          1 + 3 * LAYERS, first,          of_0 + IDS,
        of_0 + WEIGHTS, of_0 + SCORES, of_1 + IDS,  of_1 + WEIGHTS, of_1 + SCORES,
    };
    at = (int32_t *)memcpy(at, route, sizeof route) + sizeof route / sizeof *route;
    for (int layer = 0; layer < LAYERS; layer++) {
        int ids = first + 1 + PER_LAYER * layer;
        const int32_t acquire[] = {
            EMBER_ACQUIRE_EXPERTS, layer, 5, ids, ids + WEIGHTS, ids + SCORES, TABLES + layer,
            BANK_BUFFER,
        };
        const int32_t sum[] = {kind, 1, 4, ids, TABLES + layer, BANK_BUFFER, ids + OUT};
        at = (int32_t *)memcpy(at, acquire, sizeof acquire) + sizeof acquire / sizeof *acquire;
        at = (int32_t *)memcpy(at, sum, sizeof sum) + sizeof sum / sizeof *sum;
    }
    return at - words;
}

static ember_model_config make_config(const void *kernels, int64_t size, int bank, int64_t bytes,
                                      int threads, int readers)
{
    static int32_t one[64], many[64];
    static ember_sequence sequences[4];
    static const char *const symbols[] = {"route", "sum_experts"};
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
    sequences[0] = (ember_sequence){1, EMBER_BODY, one, write_steps(one, FIRST, EMBER_CALL)};
    int64_t words = write_steps(many, FIRST + PER_SIZE, EMBER_CALL_IN_WAVES);
    sequences[1] = (ember_sequence){CHUNK, EMBER_BODY, many, words};
    sequences[2] = (ember_sequence){CHUNK, EMBER_BATCH, many, words};
    sequences[3] = (ember_sequence){CHUNK, EMBER_LOGITS_ALL, many, 0};
    return (ember_model_config){
        .kernels = kernels,
        .kernels_bytes = size,
        .symbols = symbols,
        .symbol_count = 2,
        .buffers = buffers[0],
        .buffer_count = FIRST + 2 * PER_SIZE,
        .shapes = shapes,
        .shape_count = 16,
        .sequences = sequences,
        .sequence_count = 4,
        .tables = tables,
        .tables_bytes = sizeof tables,
        .scratch_bytes = LAYERS * (2 * LINE + SCORE_BYTES),
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
static int make_bank(const char *path, int64_t bytes)
{
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(file >= 0);
    for (int32_t position = 0; position < BANK; position++)
        for (int64_t i = 0; i < bytes / 4; i++)
            CHECK(write(file, &position, 4) == 4);
    return file;
}

/* What the kernel `route` chooses. */
static int32_t chosen(int32_t token, int layer, int k)
{
    return (token * 5 + layer * 3 + k * (1 + token % 3)) % EXPERTS;
}

/* ---- random steps */
typedef struct {
    ember_model *model;
    ember_session *sessions[SESSIONS];
    int64_t lengths[SESSIONS];
    int64_t expert_bytes;
    int failed;
} running;

static int64_t skipped(void)
{
    int64_t count = 0;
    for (int layer = 0; layer < LAYERS; layer++)
        count += counters[layer].skipped;
    return count;
}

/* What the kernel `route` gives the k-th expert of a token. */
static float weight_of(int32_t token, int k)
{
    return k == token % 2 ? 0.75F : 0.25F;
}

/* Whether experts of a layer were those chosen, but for a light one that may have been skipped: it
 * left its weight to the other one, and its entry of the table as well. Returns how many were. */
static int64_t check_token(const running *run, int layer, int32_t index, int32_t token)
{
    const float *weights = (const float *)(void *)(run->model->sections[EMBER_SCRATCH].base +
                                                   place_of(layer, WEIGHTS)) + index * TOP_K;
    const float *sums = logits + layer * CHUNK * TOP_K + index * TOP_K;
    int heavy = token % 2, light = 1 - heavy;
    bool left_out = weights[light] == 0;
    for (int k = 0; k < TOP_K; k++) {
        int used = left_out ? heavy : k;
        CHECK(weights[k] == (left_out ? (float)(k == heavy) : weight_of(token, k)));
        int32_t position = position_of(layer, chosen(token, layer, used));
        CHECK(sums[k] == (float)(position * (run->expert_bytes / 4)));
    }
    return left_out;
}

static int64_t check_sums(const running *run, const int32_t *tokens, int32_t count)
{
    int64_t left_out = 0;
    for (int layer = 0; layer < LAYERS; layer++)
        for (int32_t i = 0; i < count; i++)
            left_out += check_token(run, layer, i, tokens[i]);
    return left_out;
}

static void open_model(running *run, const ember_model_config *config, int64_t expert_bytes)
{
    memset(run, 0, sizeof *run);
    run->expert_bytes = expert_bytes;
    run->model = ember_model_open(config, message, sizeof message);
    CHECK(run->model);
    for (int i = 0; i < SESSIONS; i++) {
        run->sessions[i] = ember_session_open(run->model, CAPACITY, message, sizeof message);
        CHECK(run->sessions[i]);
    }
}

static void close_model(running *run)
{
    for (int i = 0; i < SESSIONS; i++)
        ember_session_close(run->sessions[i]);
    ember_model_close(run->model);
}

static void set_budget(running *run, int64_t slots)
{
    CHECK(ember_model_set_expert_budget(run->model, slots * run->expert_bytes, counters, message,
                                        sizeof message) == EMBER_OK);
}

static void step(running *run, bool may_fail)
{
    int32_t tokens[CHUNK], count = draw() % 2 ? 1 : (int32_t)(1 + draw() % CHUNK);
    int first = (int)(draw() % SESSIONS);
    bool batch = draw() % 4 == 0;
    if (batch)
        count = SESSIONS;
    for (int32_t i = 0; i < count; i++)
        tokens[i] = (int32_t)(draw() % VOCABULARY);
    int64_t before = skipped();
    ember_status status =
        batch ? ember_model_step(run->model, run->sessions, tokens, run->lengths, count, message,
                                 sizeof message)
              : ember_session_step(run->sessions[first], tokens, count, run->lengths[first],
                                   EMBER_BODY, message, sizeof message);
    if (status != EMBER_OK) {
        CHECK(may_fail && status == EMBER_FAILED && strstr(message, " cannot be read: "));
        run->failed++;
        return;
    }
    CHECK(check_sums(run, tokens, count) == skipped() - before);
    CHECK(count == 1 || skipped() == before);
    for (int i = 0; i < SESSIONS; i++)
        run->lengths[i] += batch ? 1 : i == first ? count : 0;
}

/* Steps of one token skip an expert of weight 0.25 after so many microseconds, if `weight` allows. */
static void break_stalls(running *run, int64_t microseconds, float weight)
{
    CHECK(ember_model_break_stalls(run->model, microseconds * 1000, weight, message,
                                   sizeof message) == EMBER_OK);
}

static void change(running *run)
{
    int32_t experts[ALL];
    for (int i = 0; i < ALL; i++)
        experts[i] = (int32_t)(draw() % ALL);
    switch (draw() % 5) {
    case 0:
        set_budget(run, TOP_K + draw() % (ALL - TOP_K + 1));
        break;
    case 1:
        CHECK(ember_model_warm_experts(run->model, experts, draw() % (ALL + 1), message,
                                       sizeof message) == EMBER_OK);
        break;
    case 2:
        for (int i = 0; i < ALL; i++)
            experts[i] = draw() % 4 ? experts[i] % 3 : EMBER_PINNED;
        ember_model_prioritise_experts(run->model, experts);
        break;
    case 3:
        break_stalls(run, draw() % 3 * 100, 0.5F);
        break;
    default:
        break;
    }
}

static void test_random_steps(const ember_model_config *config, int64_t expert_bytes, int rounds)
{
    running run;
    open_model(&run, config, expert_bytes);
    for (int failing = 0; failing <= 1; failing++) {
        set_budget(&run, TOP_K);
        atomic_store(&failures_in_100, failing ? 20 : 0);
        for (int i = 0; i < rounds; i++) {
            if (i >= 50 && i % 5 == 0)
                change(&run);
            atomic_store(&delayed, i % 3 > 0);
            step(&run, failing);
        }
        CHECK((run.failed > 0) == failing);
    }
    atomic_store(&failures_in_100, 0);
    CHECK(counters[0].hits > 0 && counters[1].misses > 0 && counters[0].stall_nanoseconds > 0);
    close_model(&run);
}

/* Reads fail in the middle of a model: the next steps are whole, and so are other sessions'. */
static void test_failures(running *run)
{
    const int32_t tokens[] = {3};
    for (int round = 0; round < 3; round++) {
        set_budget(run, ALL);
        set_budget(run, ALL - 1); /* an empty store */
        atomic_store(&failures_in_100, 100);
        CHECK(ember_session_step(run->sessions[0], tokens, 1, 0, EMBER_BODY, message,
                                 sizeof message) == EMBER_FAILED);
        CHECK(strncmp(message, "experts.bin: expert ", 20) == 0);
        atomic_store(&failures_in_100, 0);
        CHECK(ember_session_step(run->sessions[1], tokens, 1, 0, EMBER_BODY, message,
                                 sizeof message) == EMBER_OK);
        CHECK(check_sums(run, tokens, 1) == 0);
    }
}

/* What a step waits for is read before what is only warmed, but for reads that have begun. */
static void test_warming(running *run, int readers)
{
    const int32_t token = 0;
    int32_t needed[TOP_K], warm[ALL];
    int64_t count = 0;
    for (int k = 0; k < TOP_K; k++)
        needed[k] = chosen(token, 0, k);
    for (int32_t i = 0; i < ALL; i++)
        if (i != needed[0] && i != needed[1])
            warm[count++] = i;
    set_budget(run, ALL);
    set_budget(run, ALL - 1);
    atomic_store(&closed, true);
    forget_noted();
    CHECK(ember_model_warm_experts(run->model, warm, count, message, sizeof message) == EMBER_OK);
    CHECK(ember_session_step(run->sessions[0], &token, 1, 0, EMBER_BODY, message,
                             sizeof message) == EMBER_OK);
    CHECK(check_sums(run, &token, 1) == 0);
    for (int k = 0; k < TOP_K; k++) {
        int before = noted_before(position_of(0, needed[k]) * run->expert_bytes);
        CHECK(before >= 0 && before < readers + TOP_K);
    }
    set_budget(run, ALL);
}

/* A step that has waited for its time skips the light experts: that of layer 0, whose read has begun,
 * and that of layer 1, which is not read at all. */
static void test_stalls(running *run)
{
    const int32_t token = 0, many[CHUNK] = {0, 1, 2, 3, 4, 5, 6, 7};
    const float weights[] = {0.26F, 0.25F}; /* only what is below it may be skipped */
    for (int i = 0; i < 2; i++) {
        int64_t before = skipped();
        set_budget(run, ALL);
        set_budget(run, ALL - 1);
        break_stalls(run, 1000, weights[i]);
        forget_noted();
        atomic_store(&closed, true);
        CHECK(ember_session_step(run->sessions[0], &token, 1, 0, EMBER_BODY, message,
                                 sizeof message) == EMBER_OK);
        CHECK(check_sums(run, &token, 1) == (i == 0 ? LAYERS : 0));
        CHECK(skipped() - before == (i == 0 ? LAYERS : 0));
        off_t light = position_of(1, chosen(token, 1, 1)) * run->expert_bytes;
        CHECK(i == 1 || noted_before(light) < 0);
    }
    int64_t before = skipped();
    set_budget(run, ALL);
    set_budget(run, TOP_K);
    break_stalls(run, 1, 1.0F);
    CHECK(ember_session_step(run->sessions[0], many, CHUNK, 0, EMBER_BODY, message,
                             sizeof message) == EMBER_OK);
    CHECK(check_sums(run, many, CHUNK) == 0 && skipped() == before);
    break_stalls(run, 0, 0);
}

static void test_truncated(running *run, const char *path)
{
    const int32_t tokens[CHUNK] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int mapped = 0; mapped <= 1; mapped++) {
        set_budget(run, ALL);
        set_budget(run, mapped ? ALL : TOP_K);
        CHECK(truncate(path, run->expert_bytes / 3) == 0);
        CHECK(ember_session_step(run->sessions[0], tokens, CHUNK, 0, EMBER_BODY, message,
                                 sizeof message) == EMBER_FAILED);
        CHECK(strstr(message, "cannot be read: the file was truncated"));
        close(make_bank(path, run->expert_bytes));
        CHECK(ember_session_step(run->sessions[0], tokens, CHUNK, 0, EMBER_BODY, message,
                                 sizeof message) == EMBER_OK);
        CHECK(check_sums(run, tokens, CHUNK) == 0);
    }
}

/* A smaller budget gives memory back at once. */
static void test_memory(running *run)
{
    int64_t page = sysconf(_SC_PAGESIZE);
    unsigned char resident[ALL * 2];
    set_budget(run, ALL - 1);
    for (int i = 0; i < 50; i++)
        step(run, false);
    for (int slots = ALL - 1; slots >= TOP_K; slots -= 3) {
        set_budget(run, slots);
        int pages = 0;
        CHECK(mincore(ember_store_memory(run->model->residency.store),
                      (size_t)(ALL * run->expert_bytes), resident) == 0);
        for (int64_t i = 0; i < ALL * run->expert_bytes / page; i++)
            pages += resident[i] & 1;
        CHECK(pages > 0 && pages <= slots * run->expert_bytes / page);
    }
}

static int count_files(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static void test_refusals(running *run)
{
    const int32_t wrong[] = {0, ALL}, negative[] = {-1};
    const int64_t budgets[] = {INT64_MIN, -1, 0, 1, TOP_K * run->expert_bytes - 1};
    for (int i = 0; i < 5; i++)
        CHECK(ember_model_set_expert_budget(run->model, budgets[i], counters, message,
                                            sizeof message) == EMBER_REFUSED);
    CHECK(ember_model_least_expert_budget(run->model) == TOP_K * run->expert_bytes);
    CHECK(ember_model_warm_experts(run->model, wrong, 2, message, 0) == EMBER_REFUSED);
    CHECK(ember_model_warm_experts(run->model, negative, 1, message, 0) == EMBER_REFUSED);
    set_budget(run, ALL);
    int files = count_files(), refusals = 0;
    for (int n = 0;; n++) {
        set_budget(run, n % 2 ? ALL : TOP_K); /* from the map or from a store that must grow */
        atomic_store(&allowed, n / 2);
        int64_t slots = n % 2 ? TOP_K : ALL - 1;
        ember_status status = ember_model_set_expert_budget(
            run->model, slots * run->expert_bytes, counters, message, sizeof message);
        bool everything = atomic_exchange(&allowed, -1) >= 0;
        CHECK(status == EMBER_OK || status == EMBER_FAILED);
        refusals += status == EMBER_FAILED;
        step(run, false);
        if (everything && n % 2)
            break;
    }
    CHECK(refusals > 8);
    for (int i = 0; i < 1000; i++)
        set_budget(run, i % 3 ? TOP_K + i % 7 : ALL);
    set_budget(run, ALL);
    CHECK(count_files() == files);
}

int main(int count, char **arguments)
{
    CHECK(count == 3);
    stepping = pthread_self();
    int file = open(arguments[1], O_RDONLY);
    CHECK(file >= 0);
    off_t size = lseek(file, 0, SEEK_END);
    void *kernels = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, file, 0);
    CHECK(size > 0 && kernels != MAP_FAILED);
    const int64_t expert_bytes[] = {8192, 400}; /* with and without direct reads */
    for (int i = 0; i < 2; i++) {
        int bank = make_bank(arguments[2], expert_bytes[i]);
        for (int readers = 1; readers <= 4; readers++) {
            ember_model_config config =
                make_config(kernels, size, bank, expert_bytes[i], 1 + readers % 3, readers);
            test_random_steps(&config, expert_bytes[i], 150);
        }
        running run;
        ember_model_config config = make_config(kernels, size, bank, expert_bytes[i], 2, 2);
        open_model(&run, &config, expert_bytes[i]);
        test_failures(&run);
        if (expert_bytes[i] % sysconf(_SC_PAGESIZE) == 0)
            test_memory(&run);
        test_warming(&run, 2);
        test_stalls(&run);
        test_truncated(&run, arguments[2]);
        test_refusals(&run);
        close_model(&run);
        close(bank);
    }
    munmap(kernels, (size_t)size);
    close(file);
    return 0;
}
