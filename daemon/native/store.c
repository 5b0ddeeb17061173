/* The expert store: a part of the experts in slots of memory, the others in their file.
 *
 * An expert is known by its index, layer * experts + expert. Whoever acquires experts waits until
 * they are in slots and finds the slots in the layer's table. One that is not there takes a free
 * slot or that of the expert of the lowest priority, among these of the longest unused. Experts
 * that an acquire needs stay until they were used; where a part of them at a time is enough, they
 * are handed out in waves, as they arrive.
 *
 * Everything below is guarded by the lock of the reader threads, but for the tables, which only the
 * thread that runs a program touches. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

typedef struct {
    int32_t expert;  /* index; -1: free */
    bool ready;      /* else it is being read */
    uint64_t placed; /* the acquire since which it is read or there */
    uint64_t used;   /* the acquire that asked for it last */
    uint64_t needed; /* the acquire that still needs it */
} slot;

typedef enum { WAITING, RUNNING, FINISHED } progress;

typedef struct {
    int32_t expert; /* index */
    progress progress;
} wanted;

struct ember_store {
    ember_store_config config;
    int64_t expert_count;
    ember_reader *reader;
    ember_mapping memory; /* room for all experts, usable up to `usable` slots */
    slot *slots;
    int32_t usable;
    int32_t limit;    /* of occupied slots */
    int32_t occupied;
    int32_t *slot_of; /* by index; -1: not in memory */
    int32_t *queue;   /* a ring of slots to be read */
    int32_t queue_start, queue_count;
    int32_t reading; /* slots that are not ready */
    int32_t under_way[EMBER_READ_PAGES + 1]; /* reads, by kind */
    bool running; /* a program */
    bool waiting; /* a step */
    int32_t *warm;   /* experts to read when nothing else is to be read */
    int32_t warm_next, warm_count;
    uint64_t warm_since;
    uint64_t clock; /* counts acquires */
    wanted *wanted; /* of the current acquire, in the order of the file */
    uint64_t *seen; /* by expert of a layer: the acquire that last wanted it */
    int32_t wanted_count;
    int32_t layer;
    int32_t *table;
    int32_t failed; /* an expert needed that could not be read, or -1 */
    int failed_code;
    int64_t stall;
};

/* ---- slots */
static int32_t priority_of(const ember_store *store, const slot *slot)
{
    return store->config.priorities[slot->expert];
}

static bool is_worth_less(const ember_store *store, const slot *a, const slot *b)
{
    int32_t first = priority_of(store, a), second = priority_of(store, b);
    return first != second ? first < second : a->used < b->used;
}

/* The slot of the expert that is worth least, of those unused since `since` whose priority is at
 * most `priority`; -1 when none may go. */
static int32_t find_victim(const ember_store *store, int32_t priority, uint64_t since)
{
    int32_t found = -1;
    for (int32_t i = 0; i < store->usable; i++) {
        const slot *slot = &store->slots[i];
        if (slot->expert < 0 || !slot->ready || slot->needed == store->clock ||
            slot->used >= since || priority_of(store, slot) > priority)
            continue;
        if (found < 0 || is_worth_less(store, slot, &store->slots[found]))
            found = i;
    }
    return found;
}

static void set_resident(const ember_store *store, int32_t expert, bool resident)
{
    if (store->config.resident)
        store->config.resident[expert] = resident;
}

static void empty_slot(ember_store *store, int32_t index)
{
    slot *slot = &store->slots[index];
    set_resident(store, slot->expert, false);
    store->slot_of[slot->expert] = -1;
    slot->expert = -1;
    store->occupied--;
}

static int32_t find_free(const ember_store *store)
{
    for (int32_t i = 0; i < store->usable; i++)
        if (store->slots[i].expert < 0)
            return i;
    return -1;
}

/* Gives an expert a slot to be read into; returns it, or -1 if there is none for it. */
static int32_t place(ember_store *store, int32_t expert, int32_t priority, uint64_t since)
{
    int32_t index = store->occupied < store->limit ? find_free(store)
                                                   : find_victim(store, priority, since);
    if (index < 0)
        return -1;
    if (store->slots[index].expert >= 0)
        empty_slot(store, index);
    store->slots[index] = (slot){
        .expert = expert, .placed = store->clock, .used = store->clock};
    store->slot_of[expert] = index;
    store->occupied++;
    store->reading++;
    return index;
}

/* ---- what the reader threads ask */
static int32_t next_queued(ember_store *store)
{
    if (store->queue_count == 0)
        return -1;
    int32_t index = store->queue[store->queue_start];
    store->queue_start = (int32_t)((store->queue_start + 1) % store->expert_count);
    store->queue_count--;
    return index;
}

static void enqueue(ember_store *store, int32_t index)
{
    int64_t end = (store->queue_start + store->queue_count) % store->expert_count;
    store->queue[end] = index;
    store->queue_count++;
}

/* Warming takes no slot of what was warmed or used since it began, so the rest of a list that is
 * too long is dropped. */
static int32_t next_warm(ember_store *store)
{
    while (store->warm_next < store->warm_count) {
        int32_t expert = store->warm[store->warm_next++];
        if (store->slot_of[expert] >= 0)
            continue;
        int32_t priority = store->config.priorities[expert];
        if (priority == EMBER_PINNED)
            priority--;
        int32_t index = place(store, expert, priority, store->warm_since);
        if (index >= 0)
            return index;
        store->warm_next = store->warm_count;
    }
    return -1;
}

/* While a program runs, one read at most is in the way of those that it will need. */
static bool may_go_ahead(const ember_store *store)
{
    int32_t most = store->running ? 1 : store->config.threads;
    return store->under_way[EMBER_READ_WARM] + store->under_way[EMBER_READ_PAGES] < most;
}

/* What may be needed delays nothing that is. */
static bool may_warm(const ember_store *store)
{
    return !store->waiting && store->under_way[EMBER_READ_NEEDED] == 0;
}

static bool find_read(ember_store *store, ember_read *read)
{
    ember_read_kind kind = EMBER_READ_NEEDED;
    int32_t index = next_queued(store);
    if (index < 0 && may_go_ahead(store)) {
        if (ember_ahead_next(store->config.ahead, read))
            return true;
        kind = EMBER_READ_WARM;
        if (may_warm(store))
            index = next_warm(store);
    }
    if (index < 0)
        return false;
    int64_t bytes = store->config.layout.expert_bytes;
    *read = (ember_read){
        .kind = kind,
        .offset = store->config.positions[store->slots[index].expert] * bytes,
        .bytes = bytes,
        .target = store->memory.base + index * bytes,
        .slot = index,
    };
    return true;
}

static bool next_read(void *self, ember_read *read)
{
    ember_store *store = self;
    bool found = find_read(store, read);
    if (found)
        store->under_way[read->kind]++;
    return found;
}

static void read_done(void *self, const ember_read *read, int code)
{
    ember_store *store = self;
    store->under_way[read->kind]--;
    if (read->kind == EMBER_READ_PAGES)
        return;
    slot *slot = &store->slots[read->slot];
    ember_expert_counters *counters = store->config.counters;
    store->reading--;
    if (code == 0) {
        slot->ready = true;
        set_resident(store, slot->expert, true);
        counters[slot->expert / store->config.layout.experts].bytes += read->bytes;
        return;
    }
    /* What an earlier step or warming had begun to read, and a step came to need, is tried again. */
    if (slot->needed == store->clock && slot->placed == store->clock) {
        store->failed = slot->expert;
        store->failed_code = code;
    }
    empty_slot(store, read->slot);
}

/* ---- opening, closing, changing */
ember_store *ember_store_open(const ember_store_config *config, ember_error error)
{
    ember_store *store = calloc(1, sizeof *store);
    if (!store) {
        ember_fail(error, "no memory for the expert store");
        return NULL;
    }
    store->config = *config;
    int64_t count = (int64_t)config->layout.layers * config->layout.experts;
    store->expert_count = count;
    store->clock = 1;
    store->slots = calloc((size_t)count, sizeof *store->slots);
    store->slot_of = calloc((size_t)count, sizeof *store->slot_of);
    store->queue = calloc((size_t)count, sizeof *store->queue);
    store->warm = calloc((size_t)count, sizeof *store->warm);
    store->wanted = calloc((size_t)config->layout.experts, sizeof *store->wanted);
    store->seen = calloc((size_t)config->layout.experts, sizeof *store->seen);
    bool ok = (store->slots && store->slot_of && store->queue && store->warm && store->wanted &&
               store->seen) ||
              ember_fail(error, "no memory for the expert store");
    for (int64_t i = 0; ok && i < count; i++)
        store->slots[i].expert = store->slot_of[i] = -1;
    ok = ok && ember_map_reserved(&store->memory, count * config->layout.expert_bytes,
                                  "expert", error);
    if (ok) {
        ember_read_owner owner = {store, next_read, read_done};
        store->reader = ember_reader_open(config->file, config->layout.expert_bytes,
                                          config->threads, owner, error);
    }
    if (store->reader)
        return store;
    ember_store_close(store);
    return NULL;
}

void ember_store_close(ember_store *store)
{
    if (!store)
        return;
    ember_reader_close(store->reader);
    ember_unmap(&store->memory);
    free(store->slots);
    free(store->slot_of);
    free(store->queue);
    free(store->warm);
    free(store->wanted);
    free(store->seen);
    free(store);
}

char *ember_store_memory(const ember_store *store)
{
    return store->memory.base;
}

int64_t ember_store_stall(const ember_store *store)
{
    return store->stall;
}

void ember_store_set_running(ember_store *store, bool running)
{
    ember_reader_lock(store->reader);
    store->running = running;
    if (!running)
        ember_reader_start(store->reader);
    ember_reader_unlock(store->reader);
}

bool ember_store_resize(ember_store *store, int32_t slots, ember_error error)
{
    int64_t bytes = store->config.layout.expert_bytes;
    if (slots > store->usable) {
        if (!ember_mapping_use(&store->memory, slots * bytes, error))
            return false;
    }
    ember_reader_lock(store->reader);
    if (slots > store->usable)
        store->usable = slots;
    store->clock++; /* nothing is needed between steps */
    store->warm_next = store->warm_count;
    while (store->reading > 0)
        ember_reader_wait(store->reader);
    while (store->occupied > slots) {
        int32_t index = find_victim(store, INT32_MAX, UINT64_MAX);
        empty_slot(store, index);
        ember_mapping_drop(&store->memory, index * bytes, bytes);
    }
    store->limit = slots;
    ember_reader_unlock(store->reader);
    return true;
}

void ember_store_prioritise(ember_store *store, const int32_t *priorities)
{
    ember_reader_lock(store->reader);
    memcpy(store->config.priorities, priorities,
           (size_t)store->expert_count * sizeof *priorities);
    ember_reader_unlock(store->reader);
}

void ember_store_warm(ember_store *store, const int32_t *experts, int64_t count)
{
    ember_reader_lock(store->reader);
    store->warm_since = ++store->clock;
    store->warm_next = store->warm_count = 0;
    for (int64_t i = 0; i < count && i < store->expert_count; i++) {
        int32_t index = store->slot_of[experts[i]];
        if (index >= 0)
            store->slots[index].used = store->clock; /* for what is warmed, others go first */
        else
            store->warm[store->warm_count++] = experts[i];
    }
    ember_reader_start(store->reader);
    ember_reader_unlock(store->reader);
}

/* ---- acquiring */
static bool check_expert(const ember_store *store, int32_t id, ember_error error)
{
    int32_t experts = store->config.layout.experts;
    if (id < 0 || id >= experts)
        return ember_fail(error, "layer %d chose expert %d of %d", store->layer, id, experts);
    int64_t position = store->config.positions[(int64_t)store->layer * experts + id];
    if (position < 0 || position >= store->config.bank_experts)
        return ember_fail(error, "layer %d: expert %d is in slot %lld of %lld", store->layer, id,
                          (long long)position, (long long)store->config.bank_experts);
    return true;
}

/* Lists the different experts of `ids`, in the order of the file. */
static bool list_wanted(ember_store *store, const ember_tensor *ids, ember_error error)
{
    const int32_t *chosen = ids->dl.data;
    int64_t count = ids->shape[0] * ids->shape[1];
    int32_t first = store->layer * store->config.layout.experts;
    store->wanted_count = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!check_expert(store, chosen[i], error))
            return false;
        if (store->seen[chosen[i]] == store->clock)
            continue;
        store->seen[chosen[i]] = store->clock;
        store->wanted[store->wanted_count++] = (wanted){first + chosen[i], WAITING};
    }
    return true;
}

/* Insertion, as the lists are short and mostly in order. */
static void sort_wanted(ember_store *store)
{
    const int32_t *positions = store->config.positions;
    for (int32_t i = 1; i < store->wanted_count; i++) {
        wanted moved = store->wanted[i];
        int32_t at = i;
        for (; at > 0 && positions[store->wanted[at - 1].expert] > positions[moved.expert]; at--)
            store->wanted[at] = store->wanted[at - 1];
        store->wanted[at] = moved;
    }
}

/* Keeps those that are there, and counts. */
static void count_wanted(ember_store *store)
{
    ember_expert_counters *counters = &store->config.counters[store->layer];
    for (int32_t i = 0; i < store->wanted_count; i++) {
        int32_t index = store->slot_of[store->wanted[i].expert];
        if (index < 0) {
            counters->misses++;
            continue;
        }
        slot *slot = &store->slots[index];
        slot->used = slot->needed = store->clock; /* before others are placed */
        *(slot->ready ? &counters->hits : &counters->misses) += 1;
    }
}

/* Has the experts read that are missing, as many as there are slots for; true if that is all. */
static bool read_missing(ember_store *store)
{
    bool all = true, some = false;
    for (int32_t i = 0; i < store->wanted_count; i++) {
        int32_t expert = store->wanted[i].expert, index = store->slot_of[expert];
        if (store->wanted[i].progress == FINISHED)
            continue;
        if (index < 0) {
            index = place(store, expert, INT32_MAX, UINT64_MAX);
            all = index >= 0;
            if (!all)
                break;
            enqueue(store, index);
            some = true;
        }
        store->slots[index].needed = store->clock;
    }
    if (some)
        ember_reader_start(store->reader);
    return all;
}

static bool is_ready(const ember_store *store, const wanted *wanted)
{
    int32_t index = store->slot_of[wanted->expert];
    return index >= 0 && store->slots[index].ready;
}

static int32_t count_ready(const ember_store *store)
{
    int32_t count = 0;
    for (int32_t i = 0; i < store->wanted_count; i++)
        count += store->wanted[i].progress == WAITING && is_ready(store, &store->wanted[i]);
    return count;
}

static bool check_failure(const ember_store *store, ember_error error)
{
    if (store->failed < 0)
        return true;
    int32_t experts = store->config.layout.experts;
    const char *reason = store->failed_code == EMBER_READ_ENDED ? "the file was truncated"
                                                                : strerror(store->failed_code);
    return ember_fail(error, "experts.bin: expert %d of layer %d cannot be read: %s",
                      store->failed % experts, store->failed / experts, reason);
}

/* Waits until `count` of the experts are ready, and has missing ones read as slots become free;
 * `all_read`: whether none is left to be. */
static bool wait_for(ember_store *store, int32_t count, bool *all_read, ember_error error)
{
    int64_t start = 0;
    for (;;) {
        *all_read = read_missing(store);
        if (!check_failure(store, error) || count_ready(store) >= count)
            break;
        if (start == 0)
            start = ember_nanoseconds();
        store->waiting = true;
        ember_reader_wait(store->reader);
    }
    if (start != 0) {
        store->waiting = false;
        ember_reader_start(store->reader);
        int64_t stall = ember_nanoseconds() - start;
        store->stall += stall;
        store->config.counters[store->layer].stall_nanoseconds += stall;
    }
    return store->failed < 0;
}

/* Puts up to `count` experts that are ready into the table, and takes the others out. */
static void hand_out(ember_store *store, int32_t count)
{
    for (int32_t i = 0; i < store->wanted_count; i++) {
        wanted *wanted = &store->wanted[i];
        int32_t expert = wanted->expert % store->config.layout.experts;
        bool taken = count > 0 && wanted->progress == WAITING && is_ready(store, wanted);
        store->table[expert] = taken ? store->slot_of[wanted->expert] : -1;
        if (taken) {
            store->slots[store->slot_of[wanted->expert]].needed = store->clock;
            wanted->progress = RUNNING;
            count--;
        }
    }
}

bool ember_store_acquire(ember_store *store, int32_t layer, const ember_acquired *acquired,
                         bool in_waves, ember_error error)
{
    ember_reader_lock(store->reader);
    store->clock++;
    store->layer = layer;
    store->table = acquired->table->dl.data;
    store->failed = -1;
    bool ok = list_wanted(store, acquired->ids, error), all_read;
    if (ok) {
        sort_wanted(store);
        count_wanted(store);
        ok = wait_for(store, in_waves ? 0 : store->wanted_count, &all_read, error);
    }
    if (ok && !in_waves)
        hand_out(store, store->wanted_count);
    ember_reader_unlock(store->reader);
    return ok;
}

/* Those of the last wave are no longer needed; returns how many are still to come. */
static int32_t finish_wave(ember_store *store)
{
    int32_t left = 0;
    for (int32_t i = 0; i < store->wanted_count; i++) {
        wanted *wanted = &store->wanted[i];
        if (wanted->progress == RUNNING) {
            wanted->progress = FINISHED;
            store->slots[store->slot_of[wanted->expert]].needed = 0;
        }
        left += wanted->progress == WAITING;
    }
    return left;
}

ember_wave ember_store_next_wave(ember_store *store, ember_error error)
{
    ember_reader_lock(store->reader);
    ember_wave wave = EMBER_WAVE_NONE;
    if (finish_wave(store) > 0) {
        bool all_read;
        wave = wait_for(store, 1, &all_read, error) ? EMBER_WAVE_READY : EMBER_WAVE_FAILED;
        /* While half of the slots are computed with, others are read into the other half. */
        int32_t half = store->limit > 1 ? store->limit / 2 : 1;
        if (wave == EMBER_WAVE_READY)
            hand_out(store, all_read ? store->wanted_count : half);
    }
    ember_reader_unlock(store->reader);
    return wave;
}
