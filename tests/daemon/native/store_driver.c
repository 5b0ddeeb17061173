/* Drives the expert store without Python, for builds with sanitizers: `store_driver KERNELS.so BANK`,
 * where BANK is a path for experts.bin. Reads are delayed and fail at random, budgets and what tokens
 * may do without change between steps, priorities and warming also during them; each expert used must
 * be whole. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "running.h"
#include "store.h"
#include "system.h"

char message[EMBER_ERROR_BYTES];

static void prefer(ember_model *model)
{
    int32_t experts[ALL];
    char text[EMBER_ERROR_BYTES];
    for (int i = 0; i < ALL; i++)
        experts[i] = (int32_t)(draw() % ALL);
    if (draw() % 2) {
        CHECK(ember_model_warm_experts(model, experts, draw() % (ALL + 1), text, sizeof text) ==
              EMBER_OK);
        return;
    }
    for (int i = 0; i < ALL; i++)
        experts[i] = draw() % 4 ? experts[i] % 3 : EMBER_PINNED;
    ember_model_prioritise_experts(model, experts);
}

/* Experts are warmed and pinned while steps run, but not while the budget changes. */
static pthread_mutex_t preferring = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool over;

static void *prefer_on(void *model)
{
    while (!atomic_load(&over)) {
        pthread_mutex_lock(&preferring);
        prefer(model);
        pthread_mutex_unlock(&preferring);
        nanosleep(&(struct timespec){.tv_nsec = (long)(draw() % 400) * 1000}, NULL);
    }
    return NULL;
}

static void change(running *run)
{
    switch (draw() % 6) {
    case 0:
        pthread_mutex_lock(&preferring);
        set_budget(run, TOP_K + draw() % (ALL - TOP_K + 1));
        pthread_mutex_unlock(&preferring);
        break;
    case 1:
        prefer(run->model);
        break;
    case 2:
        break_stalls(run, draw() % 3 * 100, 0.5F);
        break;
    case 3:
        prefer_resident(run, (float)(draw() % 3) / 32);
        break;
    case 4:
        ember_model_expect_experts(run->model, draw() % 2);
        break;
    default:
        break;
    }
}

static void random_steps(running *run, int rounds, bool failing)
{
    for (int i = 0; i < rounds; i++) {
        if (i >= 50 && i % 5 == 0)
            change(run);
        atomic_store(&delayed, i % 3 > 0);
        random_step(run, failing);
    }
}

static void test_random_steps(const ember_model_config *config, int64_t expert_bytes, int rounds)
{
    running run;
    open_model(&run, config, expert_bytes);
    for (int failing = 0; failing <= 1; failing++) {
        set_budget(&run, TOP_K);
        atomic_store(&failures_in_100, failing ? 20 : 0);
        random_steps(&run, rounds, failing);
        CHECK((run.failed > 0) == failing);
        pthread_t thread;
        atomic_store(&over, false);
        CHECK(pthread_create(&thread, NULL, prefer_on, run.model) == 0);
        random_steps(&run, rounds, failing);
        atomic_store(&over, true);
        pthread_join(thread, NULL);
    }
    atomic_store(&failures_in_100, 0);
    close_model(&run); /* and with it the threads that count what is expected */
    CHECK(counters[0].hits > 0 && counters[1].misses > 0 && counters[0].stall_nanoseconds > 0);
    CHECK(counters[1].expected >= counters[1].expected_used);
}

/* Reads fail in the middle of a model: the next steps are whole, and so are other sessions'. */
static void test_failures(running *run)
{
    const int32_t tokens[] = {3};
    for (int round = 0; round < 3; round++) {
        set_budget(run, ALL);
        set_budget(run, ALL - 1); /* an empty store */
        atomic_store(&failures_in_100, 100);
        CHECK(run_step(run, tokens, 1) == EMBER_FAILED);
        CHECK(strncmp(message, "experts.bin: expert ", 20) == 0);
        atomic_store(&failures_in_100, 0);
        CHECK(ember_session_step(run->sessions[1], tokens, 1, 0, EMBER_BODY, message,
                                 sizeof message) == EMBER_OK);
        check_experts(run, tokens, 1);
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
    CHECK(run_step(run, &token, 1) == EMBER_OK);
    check_experts(run, &token, 1);
    for (int k = 0; k < TOP_K; k++) {
        int before = noted_before(position_of(0, needed[k]) * run->expert_bytes);
        CHECK(before >= 0 && before < readers + TOP_K);
    }
    set_budget(run, ALL);
}

static bool is_reading(ember_store *store)
{
    ember_reader_lock(store->reader);
    bool reading = store->reading > 0 || store->expected_next < store->expected_count;
    ember_reader_unlock(store->reader);
    return reading;
}

/* Expects experts of a layer, as a step does, and waits until they were read. */
static void expect(running *run, int32_t layer, int32_t *ids, int64_t count)
{
    ember_tensor tensor = {.dl.data = ids, .shape = {count, 1}};
    ember_store_expect(run->model->residency.store, layer, &tensor);
    while (is_reading(run->model->residency.store))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

/* What is expected is there when it is used, and takes no slot of what is used or expected itself.
 * While steps wait most of their time, tokens that are decoded expect nothing. */
static void test_expecting(running *run)
{
    const int32_t token = 1;
    for (int slots = 2 * TOP_K; slots <= 3 * TOP_K; slots++) {
        set_budget(run, ALL);
        set_budget(run, slots);
        CHECK(decode(run, token) == EMBER_OK);
        ember_expert_counters before[LAYERS];
        memcpy(before, counters, sizeof before);
        int32_t ids[EXPERTS], used[] = {chosen(token, 1, 0), chosen(token, 1, 1)};
        for (int i = 0; i < EXPERTS; i++)
            ids[i] = (chosen(token, 0, 0) + i) % EXPERTS;
        expect(run, 1, used, TOP_K);
        CHECK(counters[1].expected == before[1].expected);
        expect(run, 0, ids, EXPERTS);
        int64_t read = counters[0].expected - before[0].expected;
        CHECK(read == slots - 2 * TOP_K);
        CHECK(decode(run, token) == EMBER_OK);
        CHECK(counters[0].misses == before[0].misses && counters[1].misses == before[1].misses);
    }
    set_budget(run, ALL);
    set_budget(run, ALL - 1);
    ember_expert_counters before = counters[1];
    int32_t used[] = {chosen(token, 1, 0), chosen(token, 1, 1)};
    expect(run, 1, used, TOP_K);
    CHECK(counters[1].expected == before.expected + TOP_K);
    for (int i = 0; i < 2; i++) {
        CHECK(decode(run, token) == EMBER_OK);
        CHECK(counters[1].expected_used == before.expected_used + TOP_K);
        CHECK(counters[1].hits == before.hits + (i + 1) * TOP_K);
    }
    ember_model_expect_experts(run->model, true);
    int64_t expected = counters[1].expected;
    for (int32_t other = 0; other < 24; other++) {
        run->model->residency.store->starved = true;
        CHECK(decode(run, other) == EMBER_OK);
        CHECK(counters[1].expected == expected);
    }
    ember_model_expect_experts(run->model, false);
}

/* A prompt computes with the experts that are there while others are read. */
static void test_waves(running *run)
{
    const int32_t tokens[CHUNK] = {0, 1, 2, 3, 4, 5, 6, 7};
    set_budget(run, ALL);
    set_budget(run, 2 * TOP_K); /* an empty store */
    demand_overlap();
    CHECK(run_step(run, tokens, CHUNK) == EMBER_OK);
    CHECK(has_overlapped());
    check_experts(run, tokens, CHUNK);
}

/* A step that has waited for its time skips the light experts: that of layer 0, whose read has begun,
 * and that of layer 1, which is not read at all. */
static void test_stalls(running *run)
{
    const int32_t token = 0, many[CHUNK] = {0, 1, 2, 3, 4, 5, 6, 7};
    const float weights[] = {0.26F, 0.25F}; /* only what is below it may be skipped */
    for (int i = 0; i < 2; i++) {
        int64_t before = counted().skipped;
        set_budget(run, ALL);
        set_budget(run, ALL - 1);
        break_stalls(run, 1000, weights[i]);
        forget_noted();
        atomic_store(&closed, true);
        CHECK(decode(run, token) == EMBER_OK);
        CHECK(check_experts(run, &token, 1).skipped == (i == 0 ? LAYERS : 0));
        CHECK(counted().skipped - before == (i == 0 ? LAYERS : 0));
        off_t light = position_of(1, chosen(token, 1, 1)) * run->expert_bytes;
        CHECK(i == 1 || noted_before(light) < 0);
    }
    int64_t before = counted().skipped;
    set_budget(run, ALL);
    set_budget(run, TOP_K);
    break_stalls(run, 1, 1.0F);
    for (int32_t length = 1; length <= CHUNK; length++) { /* of a prompt */
        CHECK(run_step(run, many, length) == EMBER_OK);
        CHECK(check_experts(run, many, length).skipped == 0 && counted().skipped == before);
    }
    break_stalls(run, 0, 0);
}

/* A token after another, in an otherwise empty store: its light expert is replaced by the resident one
 * whose score follows most closely, if that is within the margin. */
static void check_rerouting(running *run, int32_t first, int32_t token, int steps)
{
    bool resident[LAYERS][EXPERTS] = {0};
    int32_t expected[LAYERS];
    set_budget(run, ALL);
    set_budget(run, ALL - 1);
    prefer_resident(run, 0);
    CHECK(decode(run, first) == EMBER_OK);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int k = 0; k < TOP_K; k++)
            resident[layer][chosen(first, layer, k)] = true;
    prefer_resident(run, (float)steps / 64); /* each step costs 1/128 of a score of 0.5 in all */
    for (int layer = 0; layer < LAYERS; layer++) {
        int32_t heavy = chosen(token, layer, token % 2), light = chosen(token, layer, 1 - token % 2);
        expected[layer] = light;
        int last = steps < EXPERTS ? steps : EXPERTS - 1;
        for (int after = last; after > 0 && !resident[layer][light]; after--) {
            int32_t other = (light + after) % EXPERTS;
            if (other != heavy && resident[layer][other])
                expected[layer] = other;
        }
    }
    CHECK(decode(run, token) == EMBER_OK);
    int64_t substituted = 0;
    for (int layer = 0; layer < LAYERS; layer++) {
        const int32_t *ids = used_ids(run, layer);
        substituted += expected[layer] != chosen(token, layer, 1 - token % 2);
        CHECK(ids[0] == expected[layer] || ids[1] == expected[layer]);
    }
    CHECK(check_experts(run, &token, 1).substituted == substituted);
}

static void test_rerouting(running *run)
{
    const int steps[] = {0, 1, 3, 64}; /* with the last, any expert is within the margin */
    int64_t before = counted().substituted;
    for (int i = 0; i < 4; i++)
        for (int32_t first = 0; first < 3; first++)
            for (int32_t token = 0; token < 24; token++) /* which is all kinds that there are */
                check_rerouting(run, first, token, steps[i]);
    CHECK(counted().substituted > before);
    before = counted().substituted;
    set_budget(run, ALL);
    set_budget(run, TOP_K);
    for (int32_t token = 0; token < 24; token++) { /* of a prompt */
        CHECK(run_step(run, &token, 1) == EMBER_OK);
        CHECK(check_experts(run, &token, 1).substituted == 0);
    }
    CHECK(counted().substituted == before);
    prefer_resident(run, 0);
}

static void test_truncated(running *run, const char *path)
{
    const int32_t tokens[CHUNK] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int mapped = 0; mapped <= 1; mapped++) {
        set_budget(run, ALL);
        set_budget(run, mapped ? ALL : TOP_K);
        CHECK(truncate(path, run->expert_bytes / 3) == 0);
        CHECK(run_step(run, tokens, CHUNK) == EMBER_FAILED);
        CHECK(strstr(message, "cannot be read: the file was truncated"));
        close(make_bank(path, run->expert_bytes));
        CHECK(run_step(run, tokens, CHUNK) == EMBER_OK);
        check_experts(run, tokens, CHUNK);
    }
}

/* A smaller budget gives memory back at once. */
static void test_memory(running *run)
{
    int64_t page = sysconf(_SC_PAGESIZE);
    unsigned char resident[ALL * 2];
    set_budget(run, ALL - 1);
    for (int i = 0; i < 50; i++)
        random_step(run, false);
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
        random_step(run, false);
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
        test_expecting(&run);
        test_waves(&run);
        test_stalls(&run);
        test_rerouting(&run);
        test_truncated(&run, arguments[2]);
        test_refusals(&run);
        close_model(&run);
        close(bank);
    }
    munmap(kernels, (size_t)size);
    close(file);
    return 0;
}
