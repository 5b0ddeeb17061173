/* Acquiring experts from the store: all of a layer's at once, or in waves as they arrive. */
#include <string.h>

#include "store.h"

static bool check_position(const ember_store *store, int32_t id, ember_error error)
{
    int32_t experts = store->config.layout.experts;
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
        if (!check_position(store, chosen[i], error))
            return false;
        if (store->seen[chosen[i]] == store->clock)
            continue;
        store->seen[chosen[i]] = store->clock;
        store->wanted[store->wanted_count++] = (ember_wanted){first + chosen[i], EMBER_WAITING};
    }
    return true;
}

/* Insertion, as the lists are short and mostly in order. */
static void sort_wanted(ember_store *store)
{
    const int32_t *positions = store->config.positions;
    for (int32_t i = 1; i < store->wanted_count; i++) {
        ember_wanted moved = store->wanted[i];
        int32_t at = i;
        for (; at > 0 && positions[store->wanted[at - 1].expert] > positions[moved.expert]; at--)
            store->wanted[at] = store->wanted[at - 1];
        store->wanted[at] = moved;
    }
}

/* Its read, if it is on its way, is no longer one that may turn out useless. */
static void need(ember_store *store, ember_slot *slot)
{
    slot->needed = store->clock;
    if (slot->ready || slot->kind == EMBER_READ_NEEDED)
        return;
    store->under_way[slot->kind]--;
    store->under_way[EMBER_READ_NEEDED]++;
    slot->kind = EMBER_READ_NEEDED;
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
        ember_slot *slot = &store->slots[index];
        slot->used = store->clock; /* before others are placed */
        need(store, slot);
        counters->expected_used += slot->expected;
        slot->expected = false;
        *(slot->ready ? &counters->hits : &counters->misses) += 1;
    }
}

/* What was expected in vain is the first to make place; what was not yet begun to be read, never is. */
static void forget_expected(ember_store *store)
{
    for (int32_t i = 0; i < store->expected_next; i++) {
        int32_t index = store->slot_of[store->expected[i]];
        if (index >= 0 && store->slots[index].expected)
            store->slots[index].used = 0;
    }
    store->expected_next = store->expected_count = 0;
}

/* Has the experts read that are missing, as many as there are slots for. */
static void read_missing(ember_store *store)
{
    bool all = true, some = false;
    for (int32_t i = 0; i < store->wanted_count; i++) {
        int32_t expert = store->wanted[i].expert, index = store->slot_of[expert];
        if (store->wanted[i].progress >= EMBER_FINISHED)
            continue;
        if (index < 0) {
            index = ember_store_place(store, expert, EMBER_READ_NEEDED, INT32_MAX, UINT64_MAX);
            all = index >= 0;
            if (!all)
                break;
            ember_store_enqueue(store, index);
            some = true;
        }
        need(store, &store->slots[index]);
    }
    store->placed = all;
    if (some)
        ember_reader_start(store->reader);
}

bool ember_store_is_ready(const ember_store *store, const ember_wanted *wanted)
{
    int32_t index = store->slot_of[wanted->expert];
    return index >= 0 && store->slots[index].ready;
}

static int32_t count_ready(const ember_store *store)
{
    int32_t count = 0;
    for (int32_t i = 0; i < store->wanted_count; i++)
        count += store->wanted[i].progress == EMBER_WAITING &&
                 ember_store_is_ready(store, &store->wanted[i]);
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

/* Waits until `count` of the experts are ready or skipped, and has missing ones read as slots become
 * free. */
static bool wait_for(ember_store *store, int32_t count, ember_error error)
{
    int64_t start = 0;
    for (;;) {
        read_missing(store);
        if (!check_failure(store, error) || count_ready(store) + store->skipped >= count)
            break;
        if (start == 0)
            start = ember_nanoseconds();
        store->waiting = true;
        bool forever = store->patience == INT64_MAX;
        if (!ember_reader_wait(store->reader, forever ? INT64_MAX : start + store->patience))
            ember_store_skip(store);
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
        ember_wanted *wanted = &store->wanted[i];
        int32_t expert = wanted->expert % store->config.layout.experts;
        bool taken = count > 0 && wanted->progress == EMBER_WAITING &&
                     ember_store_is_ready(store, wanted);
        store->table[expert] = taken ? store->slot_of[wanted->expert] : -1;
        if (taken) {
            store->slots[store->slot_of[wanted->expert]].needed = store->clock;
            wanted->progress = EMBER_RUNNING;
            count--;
        }
    }
}

bool ember_store_acquire(ember_store *store, const ember_step *step,
                         const ember_acquired *acquired, bool decodes, ember_error error)
{
    ember_reader_lock(store->reader);
    store->clock++;
    store->layer = step->symbol;
    store->table = acquired->table->dl.data;
    store->acquired = *acquired;
    store->in_waves = step->in_waves;
    store->failed = -1;
    store->skipped = 0;
    store->patience = decodes && !step->in_waves ? ember_store_patience(store) : INT64_MAX;
    if (decodes && *store->config.routing_margin > 0)
        ember_store_reroute(store);
    bool ok = list_wanted(store, acquired->ids, error);
    if (ok) {
        sort_wanted(store);
        count_wanted(store);
        forget_expected(store);
        if (store->patience <= 0)
            ember_store_skip(store); /* without a read, which needed ones would have to wait for */
        read_missing(store);
    }
    ember_reader_unlock(store->reader);
    return ok;
}

bool ember_store_await(ember_store *store, ember_error error)
{
    if (store->in_waves)
        return true;
    ember_reader_lock(store->reader);
    bool ok = wait_for(store, store->wanted_count, error);
    if (ok) {
        hand_out(store, store->wanted_count);
        if (store->skipped > 0)
            ember_store_replace_skipped(store);
    }
    ember_reader_unlock(store->reader);
    return ok;
}

/* Those of the last wave are no longer needed; returns how many are still to come. */
static int32_t finish_wave(ember_store *store)
{
    int32_t left = 0;
    for (int32_t i = 0; i < store->wanted_count; i++) {
        ember_wanted *wanted = &store->wanted[i];
        if (wanted->progress == EMBER_RUNNING) {
            wanted->progress = EMBER_FINISHED;
            store->slots[store->slot_of[wanted->expert]].needed = 0;
        }
        left += wanted->progress == EMBER_WAITING;
    }
    return left;
}

ember_wave ember_store_next_wave(ember_store *store, ember_error error)
{
    ember_reader_lock(store->reader);
    ember_wave wave = EMBER_WAVE_NONE;
    if (finish_wave(store) > 0) {
        wave = wait_for(store, 1, error) ? EMBER_WAVE_READY : EMBER_WAVE_FAILED;
        /* While half of the slots are computed with, others are read into the other half. */
        int32_t half = store->limit > 1 ? store->limit / 2 : 1;
        if (wave == EMBER_WAVE_READY)
            hand_out(store, store->placed ? store->wanted_count : half);
    }
    ember_reader_unlock(store->reader);
    return wave;
}
