/* The expert store: a part of the experts in slots of memory, the others in their file.
 *
 * An expert is known by its index, layer * experts + expert. Whoever acquires experts waits until
 * they are in slots and finds the slots in the layer's table. One that is not there takes a free
 * slot or that of the expert of the lowest priority, among these of the longest unused. Experts
 * that an acquire needs stay until they were used; where a part of them at a time is enough, they
 * are handed out in waves, as they arrive. */
#include <stdlib.h>
#include <string.h>

#include "store.h"

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
    store->placed = true;
    store->slots = calloc((size_t)count, sizeof *store->slots);
    store->slot_of = calloc((size_t)count, sizeof *store->slot_of);
    store->queue = calloc((size_t)count, sizeof *store->queue);
    store->foreseen = calloc((size_t)config->layout.experts, sizeof *store->foreseen);
    store->expected = calloc((size_t)config->layout.experts, sizeof *store->expected);
    store->warm = calloc((size_t)count, sizeof *store->warm);
    store->wanted = calloc((size_t)config->layout.experts, sizeof *store->wanted);
    store->seen = calloc((size_t)config->layout.experts, sizeof *store->seen);
    bool ok = (store->slots && store->slot_of && store->queue && store->foreseen &&
               store->expected && store->warm && store->wanted && store->seen) ||
              ember_fail(error, "no memory for the expert store");
    for (int64_t i = 0; ok && i < count; i++)
        store->slots[i].expert = store->slot_of[i] = -1;
    ok = ok && ember_map_reserved(&store->memory, count * config->layout.expert_bytes,
                                  "expert", error);
    if (ok) {
        ember_read_owner owner = {store, ember_store_next_read, ember_store_read_done};
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
    free(store->foreseen);
    free(store->expected);
    free(store->warm);
    free(store->wanted);
    free(store->seen);
    free(store);
}

char *ember_store_memory(const ember_store *store)
{
    return store->memory.base;
}

bool ember_store_is_starved(const ember_store *store)
{
    return store->starved;
}

int64_t ember_store_stall(const ember_store *store)
{
    return store->stall;
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
    store->expected_next = store->expected_count;
    store->warm_next = store->warm_count;
    while (store->reading > 0)
        ember_reader_wait(store->reader, INT64_MAX);
    while (store->occupied > slots) {
        int32_t index = ember_store_find_victim(store, EMBER_READ_NEEDED, INT32_MAX,
                                                UINT64_MAX);
        ember_store_empty_slot(store, index);
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
