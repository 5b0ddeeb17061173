/* Cache-aware routing: a token that is decoded takes an expert that is in memory in place of one that
 * is not, if it loses little of its routing weight by that.
 *
 * After Skliar et al. 2024, "Mixture of cache-conditional experts for efficient mobile device
 * inference", with a bound on what a choice may lose instead of a bonus for what is in memory. The
 * bound is a difference, not a ratio: what weighs next to nothing may go for any other. */
#include "store.h"

/* What the router made of a token. */
typedef struct {
    int32_t *ids;
    float *weights;
    const float *scores;
    int32_t top_k;
} routed;

static bool is_resident(const ember_store *store, int32_t expert)
{
    int32_t index = store->slot_of[store->layer * store->config.layout.experts + expert];
    return index >= 0 && store->slots[index].ready;
}

static float sum_scores(const routed *token)
{
    float sum = 0.0F;
    for (int32_t i = 0; i < token->top_k; i++)
        sum += token->scores[token->ids[i]];
    return sum;
}

static int32_t find_first(const routed *token)
{
    int32_t first = 0;
    for (int32_t i = 1; i < token->top_k; i++)
        if (token->scores[token->ids[i]] > token->scores[token->ids[first]])
            first = i;
    return first;
}

static bool is_chosen(const routed *token, int32_t expert)
{
    for (int32_t i = 0; i < token->top_k; i++)
        if (token->ids[i] == expert)
            return true;
    return false;
}

/* The resident expert of the greatest score that is not chosen; -1 if none has as much as `least`. */
static int32_t find_resident(const ember_store *store, const routed *token, float least)
{
    int32_t found = -1;
    for (int32_t i = 0; i < store->config.layout.experts; i++) {
        bool better = token->scores[i] >= least && (found < 0 || token->scores[i] > least);
        if (!better || !is_resident(store, i) || is_chosen(token, i))
            continue;
        found = i;
        least = token->scores[i];
    }
    return found;
}

/* By falling score, of equal ones the lower id first. Insertion, as they are few and nearly so. */
static void sort_ids(routed *token)
{
    for (int32_t i = 1; i < token->top_k; i++) {
        int32_t id = token->ids[i], at = i;
        float score = token->scores[id];
        for (; at > 0; at--) {
            int32_t before = token->ids[at - 1];
            float other = token->scores[before];
            if (other > score || (other == score && before < id))
                break;
            token->ids[at] = before;
        }
        token->ids[at] = id;
    }
}

/* As the router weighs what it chose: its bits, if that had been these experts. */
static void weigh(routed *token)
{
    float total = sum_scores(token);
    for (int32_t i = 0; i < token->top_k; i++)
        token->weights[i] = token->scores[token->ids[i]] / total;
}

static int32_t reroute_token(const ember_store *store, routed *token)
{
    float most = *store->config.routing_margin * sum_scores(token);
    int32_t substituted = 0, first = find_first(token);
    for (int32_t i = 0; i < token->top_k; i++) {
        int32_t id = token->ids[i];
        if (i == first || is_resident(store, id))
            continue;
        int32_t other = find_resident(store, token, token->scores[id] - most);
        if (other < 0)
            continue;
        token->ids[i] = other;
        substituted++;
    }
    if (substituted > 0) {
        sort_ids(token);
        weigh(token);
    }
    return substituted;
}

void ember_store_reroute(ember_store *store)
{
    const ember_acquired *acquired = &store->acquired;
    int64_t top_k = acquired->ids->shape[1], columns = acquired->scores->shape[1];
    for (int64_t i = 0; i < acquired->ids->shape[0]; i++) {
        routed token = {
            .ids = (int32_t *)acquired->ids->dl.data + i * top_k,
            .weights = (float *)acquired->weights->dl.data + i * top_k,
            .scores = (const float *)acquired->scores->dl.data + i * columns,
            .top_k = (int32_t)top_k,
        };
        store->config.counters[store->layer].substituted += reroute_token(store, &token);
    }
}
