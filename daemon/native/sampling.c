/* What sampling needs of a row of logits without touching it in Python: top-k and log-sum-exp. */
#include <math.h>

#include "ember.h"
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

int64_t ember_top_k(const float *row, int64_t n, int64_t k, int32_t *ids, float *values)
{
    if (k > n)
        k = n;
    if (k <= 0)
        return 0;
    for (int64_t i = 0; i < k; i++)
        put(ids, values, i, (candidate){isnan(row[i]) ? -INFINITY : row[i], (int32_t)i});
    for (int64_t i = k / 2 - 1; i >= 0; i--)
        sift_down(ids, values, k, i, get(ids, values, i));
    for (int64_t i = k; i < n;) {
        /* An equal value with a higher id never enters: only greater ones matter. */
        if (n - i >= EMBER_BLOCK && !(ember_max(row + i, EMBER_BLOCK) > values[0])) {
            i += EMBER_BLOCK;
            continue;
        }
        int64_t end = n - i >= EMBER_BLOCK ? i + EMBER_BLOCK : n;
        for (; i < end; i++)
            if (row[i] > values[0])
                sift_down(ids, values, k, 0, (candidate){row[i], (int32_t)i});
    }
    for (int64_t size = k - 1; size > 0; size--) {
        candidate last = get(ids, values, size);
        put(ids, values, size, get(ids, values, 0));
        sift_down(ids, values, size, 0, last);
    }
    return k;
}

double ember_log_sum_exp(const float *row, int64_t n)
{
    float max = ember_max(row, n);
    if (isinf(max))
        return max;
    double sum = 0;
    for (int64_t start = 0; start < n; start += EMBER_BLOCK) {
        int64_t size = n - start < EMBER_BLOCK ? n - start : EMBER_BLOCK;
        float terms[EMBER_BLOCK] = {0};
        for (int64_t i = 0; i < size; i++)
            terms[i] = ember_exp(row[start + i] - max);
        sum += ember_sum(terms);
    }
    return max + log(sum);
}
