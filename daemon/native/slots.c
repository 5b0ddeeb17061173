/* Slots of the expert store: which expert is where, and which makes place for another. */
#include "store.h"

static int32_t priority_of(const ember_store *store, const ember_slot *slot)
{
    return store->config.priorities[slot->expert];
}

static bool is_worth_less(const ember_store *store, const ember_slot *a, const ember_slot *b)
{
    int32_t first = priority_of(store, a), second = priority_of(store, b);
    return first != second ? first < second : a->used < b->used;
}

int32_t ember_store_find_victim(const ember_store *store, ember_read_kind kind, int32_t priority,
                                uint64_t since)
{
    int32_t found = -1;
    for (int32_t i = 0; i < store->usable; i++) {
        const ember_slot *slot = &store->slots[i];
        if (slot->expert < 0 || !slot->ready || slot->needed == store->clock ||
            slot->used >= since || priority_of(store, slot) > priority ||
            (kind == EMBER_READ_EXPECTED && slot->spared == store->clock))
            continue;
        if (found < 0 || is_worth_less(store, slot, &store->slots[found]))
            found = i;
    }
    return found;
}

void ember_store_set_resident(const ember_store *store, int32_t expert, bool resident)
{
    if (store->config.resident)
        store->config.resident[expert] = resident;
}

void ember_store_empty_slot(ember_store *store, int32_t index)
{
    ember_slot *slot = &store->slots[index];
    ember_store_set_resident(store, slot->expert, false);
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

int32_t ember_store_place(ember_store *store, int32_t expert, ember_read_kind kind,
                          int32_t priority, uint64_t since)
{
    bool full = store->occupied >= store->limit;
    int32_t index = full ? ember_store_find_victim(store, kind, priority, since) : find_free(store);
    if (index < 0)
        return -1;
    if (store->slots[index].expert >= 0)
        ember_store_empty_slot(store, index);
    store->slots[index] = (ember_slot){
        .expert = expert, .placed = store->clock, .used = store->clock, .kind = kind};
    store->slot_of[expert] = index;
    store->occupied++;
    store->reading++;
    return index;
}
