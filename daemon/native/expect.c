/* What is expected of experts: from the scores that a predictor gives them, priorities, and which
 * ones to read ahead. */
#include "internal.h"

enum { UNITS = 1 << 20 }; /* of priority, of an expert that a token is sure to choose */

/* The `count` with the highest scores, best first, equal ones by ascending number. */
static void take_best(const float *scores, int32_t experts, int32_t count, int32_t *best)
{
    for (int32_t expert = 0; expert < experts; expert++) {
        int32_t at = expert < count ? expert : count;
        while (at > 0 && scores[expert] > scores[best[at - 1]]) {
            if (at < count)
                best[at] = best[at - 1];
            at--;
        }
        if (at < count)
            best[at] = expert;
    }
}

void ember_expect(const float *scores, int32_t rows, ember_expert_layout layout,
                  int32_t *priorities, int32_t *likeliest)
{
    int64_t count = (int64_t)layout.layers * layout.experts;
    for (int64_t i = 0; i < count; i++) {
        float sum = 0;
        for (int32_t row = 0; row < rows; row++)
            sum += scores[row * count + i];
        int32_t room = EMBER_PINNED - 1 - priorities[i];
        if (priorities[i] < EMBER_PINNED)
            priorities[i] += sum * UNITS < (float)room ? (int32_t)(sum * UNITS) : room;
    }
    for (int32_t layer = 0; layer < layout.layers; layer++) {
        int32_t *best = likeliest + (int64_t)layer * layout.top_k, first = layer * layout.experts;
        take_best(scores + first, layout.experts, layout.top_k, best);
        for (int32_t i = 0; i < layout.top_k; i++)
            best[i] += first;
    }
}
