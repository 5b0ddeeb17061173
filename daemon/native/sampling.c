/* What sampling needs of a row of logits without touching it in Python: biases, a mask, top-k and
 * log-sum-exp. */
#include <math.h>

#include "row.h"

typedef struct {
    float value;
    int32_t id;
} candidate;

/* Whether a comes after b in the result. */
static int after(candidate a, candidate b)
{
    return a.value < b.value || (a.value == b.value && a.id > b.id);
}

static candidate get(const int32_t *ids, const float *values, int64_t i)
{
    return (candidate){values[i], ids[i]};
}

static void put(int32_t *ids, float *values, int64_t i, candidate entry)
{
    values[i] = entry.value;
    ids[i] = entry.id;
}

/* Restores the heap (the last of the result on top) below a hole at `i` that `entry` goes into. */
static void sift_down(int32_t *ids, float *values, int64_t size, int64_t i, candidate entry)
{
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= size)
            break;
        if (child + 1 < size && after(get(ids, values, child + 1), get(ids, values, child)))
            child++;
        if (!after(get(ids, values, child), entry))
            break;
        put(ids, values, i, get(ids, values, child));
        i = child;
    }
    put(ids, values, i, entry);
}

ember_status ember_bias(ember_row row, const int32_t *tokens, const double *biases, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= row.n)
            return EMBER_REFUSED;
    for (int64_t i = 0; i < count; i++) {
        float *logit = &row.logits[tokens[i]];
        *logit = (float)(*logit + biases[i]);
        if (row.bounds && *logit > row.bounds[tokens[i] / EMBER_BLOCK])
            row.bounds[tokens[i] / EMBER_BLOCK] = *logit;
    }
    return EMBER_OK;
}

void ember_mask(ember_row row, const uint64_t *allowed)
{
    for (int64_t start = 0; start < row.n; start += EMBER_BLOCK) {
        uint64_t word = allowed[start / EMBER_BLOCK];
        if (word == UINT64_MAX)
            continue;
        if (word == 0 && row.bounds)
            row.bounds[start / EMBER_BLOCK] = -INFINITY;
        for (int64_t i = start; i < start + EMBER_BLOCK && i < row.n; i++, word >>= 1)
            row.logits[i] = word & 1 ? row.logits[i] : -INFINITY;
    }
}

int64_t ember_top_k(ember_row row, int64_t k, int32_t *ids, float *values)
{
    const float *logits = row.logits;
    if (k > row.n)
        k = row.n;
    if (k <= 0)
        return 0;
    for (int64_t i = 0; i < k; i++)
        put(ids, values, i, (candidate){isnan(logits[i]) ? -INFINITY : logits[i], (int32_t)i});
    for (int64_t i = k / 2 - 1; i >= 0; i--)
        sift_down(ids, values, k, i, get(ids, values, i));
    for (int64_t i = k; i < row.n;) {
        int64_t start = i / EMBER_BLOCK * EMBER_BLOCK, end = start + EMBER_BLOCK;
        /* An equal value with a higher id never enters: only greater ones matter. */
        if (ember_block_bound(row, start) > values[0])
            for (; i < end && i < row.n; i++)
                if (logits[i] > values[0])
                    sift_down(ids, values, k, 0, (candidate){logits[i], (int32_t)i});
        i = end;
    }
    for (int64_t size = k - 1; size > 0; size--) {
        candidate last = get(ids, values, size);
        put(ids, values, size, get(ids, values, 0));
        sift_down(ids, values, size, 0, last);
    }
    return k;
}

double ember_log_sum_exp(ember_row row)
{
    int32_t id;
    float max;
    if (ember_top_k(row, 1, &id, &max) == 0 || isinf(max))
        return row.n > 0 ? max : -INFINITY;
    double sum = 0;
    for (int64_t start = 0; start < row.n; start += EMBER_BLOCK) {
        int64_t size = row.n - start < EMBER_BLOCK ? row.n - start : EMBER_BLOCK;
        float weights[EMBER_BLOCK];
        sum += ember_weigh(row.logits + start, size, max, 1.0f, weights);
    }
    return max + log(sum);
}
