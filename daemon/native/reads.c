/* What the expert store has its threads read: what a step needs, the weights, what the next layer is
 * expected to need, what is warmed. */
#include "store.h"

static int32_t next_queued(ember_store *store)
{
    if (store->queue_count == 0)
        return -1;
    int32_t index = store->queue[store->queue_start];
    store->queue_start = (int32_t)((store->queue_start + 1) % store->expert_count);
    store->queue_count--;
    return index;
}

void ember_store_enqueue(ember_store *store, int32_t index)
{
    int64_t end = (store->queue_start + store->queue_count) % store->expert_count;
    store->queue[end] = index;
    store->queue_count++;
}

/* Takes no slot of what the step needs, or is expected to. */
static int32_t next_expected(ember_store *store)
{
    while (store->expected_next < store->expected_count) {
        int32_t expert = store->expected[store->expected_next++];
        if (store->slot_of[expert] >= 0)
            continue;
        int32_t index = ember_store_place(store, expert, EMBER_READ_EXPECTED, EMBER_PINNED - 1,
                                          store->clock);
        if (index >= 0) {
            store->slots[index].placed = 0;
            store->slots[index].expected = true;
            store->slots[index].spared = store->clock;
            store->config.counters[expert / store->config.layout.experts].expected++;
            return index;
        }
        store->expected_next = store->expected_count;
    }
    return -1;
}

/* Warming takes no slot of what was warmed or used since it began, nor of a higher priority: where
 * there is none for an expert, those of its priority and below are dropped from the list. What it
 * could not read is tried again by a step that needs it. */
static int32_t next_warm(ember_store *store)
{
    while (store->warm_next < store->warm_count) {
        int32_t expert = store->warm[store->warm_next++];
        if (store->slot_of[expert] >= 0)
            continue;
        int32_t priority = store->config.priorities[expert];
        if (priority == EMBER_PINNED)
            priority--;
        if (priority <= store->warm_refused)
            continue;
        int32_t index =
            ember_store_place(store, expert, EMBER_READ_WARM, priority, store->warm_since);
        if (index >= 0) {
            store->slots[index].placed = 0;
            return index;
        }
        store->warm_refused = priority;
    }
    return -1;
}

/* While a program runs, one read at most is in the way of those that it will need. */
static bool may_go_ahead(const ember_store *store)
{
    int32_t most = store->running ? 1 : store->config.threads;
    return store->under_way[EMBER_READ_EXPECTED] + store->under_way[EMBER_READ_WARM] +
               store->under_way[EMBER_READ_PAGES] < most;
}

/* They are mostly right, and more than one at a time make better use of a disk. */
static bool may_expect(const ember_store *store)
{
    return store->under_way[EMBER_READ_EXPECTED] < (store->config.threads + 1) / 2;
}

/* What may be needed delays nothing that is. */
static bool may_guess(const ember_store *store)
{
    return !store->waiting && store->placed && store->under_way[EMBER_READ_NEEDED] == 0;
}

static bool find_read(ember_store *store, ember_read *read)
{
    ember_read_kind kind = EMBER_READ_NEEDED;
    int32_t index = next_queued(store);
    if (index < 0 && may_guess(store) && may_expect(store)) {
        kind = EMBER_READ_EXPECTED;
        index = next_expected(store);
    }
    if (index < 0 && may_go_ahead(store)) {
        if (ember_ahead_next(store->config.ahead, read))
            return true;
        kind = EMBER_READ_WARM;
        if (may_guess(store))
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

bool ember_store_next_read(void *self, ember_read *read)
{
    ember_store *store = self;
    bool found = find_read(store, read);
    if (found)
        store->under_way[read->kind]++;
    return found;
}

void ember_store_read_done(void *self, const ember_read *read, int code)
{
    ember_store *store = self;
    if (read->kind == EMBER_READ_PAGES) {
        store->under_way[read->kind]--;
        return;
    }
    ember_slot *slot = &store->slots[read->slot];
    store->under_way[slot->kind]--;
    ember_expert_counters *counters = store->config.counters;
    store->reading--;
    if (code == 0) {
        slot->ready = true;
        ember_store_set_resident(store, slot->expert, true);
        counters[slot->expert / store->config.layout.experts].bytes += read->bytes;
        return;
    }
    /* What an earlier step or warming had begun to read, and a step came to need, is tried again. */
    if (slot->needed == store->clock && slot->placed == store->clock) {
        store->failed = slot->expert;
        store->failed_code = code;
    }
    ember_store_empty_slot(store, read->slot);
}

void ember_store_set_running(ember_store *store, bool running)
{
    ember_reader_lock(store->reader);
    store->running = running;
    store->placed = true;
    if (running) {
        store->stall_before = store->stall;
        store->began = ember_nanoseconds();
    } else {
        store->starved = store->stall - store->stall_before >
                         (ember_nanoseconds() - store->began) / 2;
        ember_reader_start(store->reader);
    }
    ember_reader_unlock(store->reader);
}

/* Notes an expert that is missing, and keeps one that is there until the next layer has chosen. */
static void expect(ember_store *store, int32_t expert)
{
    int32_t index = store->slot_of[expert], position = store->config.positions[expert];
    if (index >= 0)
        store->slots[index].spared = store->clock;
    else if (position >= 0 && position < store->config.bank_experts)
        store->expected[store->expected_count++] = expert;
}

void ember_store_expect(ember_store *store, int32_t layer, const ember_tensor *ids)
{
    const int32_t *chosen = ids->dl.data;
    int32_t experts = store->config.layout.experts;
    int64_t top_k = ids->shape[1], count = ids->shape[0] * top_k;
    ember_reader_lock(store->reader);
    for (int64_t k = 0; k < top_k; k++)
        for (int64_t i = k; i < count; i += top_k) {
            if (chosen[i] < 0 || chosen[i] >= experts || store->foreseen[chosen[i]] == store->clock)
                continue;
            store->foreseen[chosen[i]] = store->clock;
            expect(store, layer * experts + chosen[i]);
        }
    if (store->expected_count > 0)
        ember_reader_start(store->reader);
    ember_reader_unlock(store->reader);
}

void ember_store_warm(ember_store *store, const int32_t *experts, int64_t count)
{
    ember_reader_lock(store->reader);
    if (!store->running)
        store->clock++; /* else what the present acquire needs has to stay */
    store->warm_since = store->clock;
    store->warm_next = store->warm_count = 0;
    store->warm_refused = INT64_MIN;
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
