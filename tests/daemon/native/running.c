/* A model with experts that runs steps, each of which is checked. */
#include "running.h"

#include <string.h>

#include "check.h"
#include "system.h"

changes counted(void)
{
    changes sum = {0};
    for (int layer = 0; layer < LAYERS; layer++) {
        sum.skipped += counters[layer].skipped;
        sum.substituted += counters[layer].substituted;
    }
    return sum;
}

static const void *routed(const running *run, int layer, int kind)
{
    return run->model->sections[EMBER_SCRATCH].base + place_of(layer, kind);
}

const int32_t *used_ids(const running *run, int layer)
{
    return routed(run, layer, IDS);
}

/* An expert may take the place of the token's light one, with the weights of a router that chose it,
 * if they lose no more than the margin. */
static void check_substitute(const running *run, int layer, int32_t token, const int32_t *ids,
                             const float *weights)
{
    int32_t heavy = chosen(token, layer, token % 2), light = chosen(token, layer, 1 - token % 2);
    CHECK(ids[0] == heavy && ids[1] >= 0 && ids[1] < EXPERTS && ids[1] != heavy && ids[1] != light);
    float lost = (float)((ids[1] - light + EXPERTS) % EXPERTS) / 128; /* as `route` scores */
    float score = 0.125F - lost, total = 0.375F + score;
    CHECK(weights[0] == 0.375F / total && weights[1] == score / total);
    CHECK(lost <= run->margin * 0.5F);
}

/* The light expert may have been skipped: it left its weight to the other one, and its entry of the
 * table as well. Returns whether it was. */
static bool check_chosen(int32_t token, const float *weights)
{
    int heavy = token % 2;
    bool left_out = weights[1 - heavy] == 0;
    CHECK(weights[heavy] == (left_out ? 1.0F : 0.75F));
    CHECK(weights[1 - heavy] == (left_out ? 0.0F : 0.25F));
    return left_out;
}

static changes check_token(const running *run, int layer, int32_t index, int32_t token)
{
    const int32_t *ids = used_ids(run, layer) + index * TOP_K;
    const float *weights = (const float *)routed(run, layer, WEIGHTS) + index * TOP_K;
    const float *sums = logits + layer * CHUNK * TOP_K + index * TOP_K;
    changes found = {0};
    if (ids[0] == chosen(token, layer, 0) && ids[1] == chosen(token, layer, 1)) {
        found.skipped = check_chosen(token, weights);
    } else {
        check_substitute(run, layer, token, ids, weights);
        found.substituted = 1;
    }
    for (int k = 0; k < TOP_K; k++) {
        int32_t position = position_of(layer, ids[found.skipped ? token % 2 : k]);
        CHECK(sums[k] == (float)(position * (run->expert_bytes / 4)));
    }
    return found;
}

changes check_experts(const running *run, const int32_t *tokens, int32_t count)
{
    changes sum = {0};
    for (int layer = 0; layer < LAYERS; layer++)
        for (int32_t i = 0; i < count; i++) {
            changes found = check_token(run, layer, i, tokens[i]);
            sum.skipped += found.skipped;
            sum.substituted += found.substituted;
        }
    return sum;
}

void open_model(running *run, const ember_model_config *config, int64_t expert_bytes)
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

void close_model(running *run)
{
    for (int i = 0; i < SESSIONS; i++)
        ember_session_close(run->sessions[i]);
    ember_model_close(run->model);
}

void set_budget(running *run, int64_t slots)
{
    CHECK(ember_model_set_expert_budget(run->model, slots * run->expert_bytes, counters, message,
                                        sizeof message) == EMBER_OK);
}

void break_stalls(running *run, int64_t microseconds, float weight)
{
    CHECK(ember_model_break_stalls(run->model, microseconds * 1000, weight, message,
                                   sizeof message) == EMBER_OK);
}

void prefer_resident(running *run, float margin)
{
    run->margin = margin;
    CHECK(ember_model_prefer_resident(run->model, margin, message, sizeof message) == EMBER_OK);
}

ember_status run_step(running *run, const int32_t *tokens, int32_t count)
{
    return ember_session_step(run->sessions[0], tokens, count, 0, EMBER_BODY, message,
                              sizeof message);
}

ember_status decode(running *run, int32_t token)
{
    int64_t start = 0;
    return ember_model_step(run->model, run->sessions, &token, &start, 1, message, sizeof message);
}

void random_step(running *run, bool may_fail)
{
    int32_t tokens[CHUNK], count = draw() % 2 ? 1 : (int32_t)(1 + draw() % CHUNK);
    int first = (int)(draw() % SESSIONS);
    bool decodes = draw() % 2;
    if (decodes)
        count = draw() % 2 ? 1 : SESSIONS;
    if (decodes && count > 1)
        first = 0;
    for (int32_t i = 0; i < count; i++)
        tokens[i] = (int32_t)(draw() % VOCABULARY);
    changes before = counted();
    ember_status status =
        decodes ? ember_model_step(run->model, &run->sessions[first], tokens, &run->lengths[first],
                                   count, message, sizeof message)
                : ember_session_step(run->sessions[first], tokens, count, run->lengths[first],
                                     EMBER_BODY, message, sizeof message);
    if (status != EMBER_OK) {
        CHECK(may_fail && status == EMBER_FAILED && strstr(message, " cannot be read: "));
        run->failed++;
        return;
    }
    changes found = check_experts(run, tokens, count), after = counted();
    CHECK(found.skipped == after.skipped - before.skipped);
    CHECK(found.substituted == after.substituted - before.substituted);
    CHECK((decodes && count == 1) || found.skipped == 0);
    CHECK(decodes || found.substituted == 0);
    for (int32_t i = 0; i < count; i++)
        run->lengths[decodes ? first + i : first]++;
}
