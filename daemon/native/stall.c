/* The stall breaker: a token that is decoded and has waited too long goes on without experts that
 * weigh little.
 *
 * An expert that is skipped keeps its place among the ids with a weight of 0, and its entry of the
 * table leads to the layer's expert of the greatest weight, which is always there. */
#include "store.h"

int64_t ember_store_patience(const ember_store *store)
{
    const ember_stall_breaker *breaker = store->config.breaker;
    if (breaker->nanoseconds <= 0 || store->acquired.ids->shape[0] != 1)
        return INT64_MAX;
    return breaker->nanoseconds - (store->stall - store->stall_before);
}

/* Which of the token's experts has the greatest weight. */
static int32_t find_greatest(const ember_store *store)
{
    const float *weights = store->acquired.weights->dl.data;
    int32_t greatest = 0;
    for (int32_t i = 1; i < store->config.layout.top_k; i++)
        if (weights[i] > weights[greatest])
            greatest = i;
    return greatest;
}

static bool may_skip(const ember_store *store, int32_t expert, int32_t greatest)
{
    const int32_t *ids = store->acquired.ids->dl.data;
    const float *weights = store->acquired.weights->dl.data;
    for (int32_t i = 0; i < store->config.layout.top_k; i++)
        if (ids[i] == expert && (i == greatest || !(weights[i] < store->config.breaker->weight)))
            return false;
    return true;
}

void ember_store_skip(ember_store *store)
{
    int32_t greatest = find_greatest(store);
    store->patience = INT64_MAX;
    for (int32_t i = 0; i < store->wanted_count; i++) {
        ember_wanted *wanted = &store->wanted[i];
        int32_t slot = store->slot_of[wanted->expert];
        if (ember_store_is_ready(store, wanted) ||
            !may_skip(store, wanted->expert % store->config.layout.experts, greatest))
            continue;
        wanted->progress = EMBER_SKIPPED;
        store->skipped++;
        store->config.counters[store->layer].skipped++;
        if (slot >= 0)
            store->slots[slot].needed = 0; /* so that it may fail, or make place once it is read */
    }
}

void ember_store_replace_skipped(ember_store *store)
{
    int32_t *table = store->table, top_k = store->config.layout.top_k;
    const int32_t *ids = store->acquired.ids->dl.data;
    float *weights = store->acquired.weights->dl.data;
    float all = 0.0F, kept = 0.0F;
    int32_t greatest = table[ids[find_greatest(store)]];
    for (int32_t i = 0; i < top_k; i++) {
        all += weights[i];
        if (table[ids[i]] < 0)
            weights[i] = 0.0F;
        kept += weights[i];
    }
    for (int32_t i = 0; i < top_k; i++) {
        weights[i] *= all / kept;
        if (table[ids[i]] < 0)
            table[ids[i]] = greatest;
    }
}
