/* What sampling needs of a row of logits without touching it in Python: top-k and log-sum-exp.
 *
 * The loops over the row work in blocks of fixed size without branches inside, so that any compiler
 * turns them into vector code for the machine at hand. */
#include <math.h>
#include <string.h>

#include "ember.h"

enum { BLOCK = 64 };

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

static float block_max(const float *row)
{
    float lanes[8];
    for (int j = 0; j < 8; j++)
        lanes[j] = -INFINITY;
    for (int i = 0; i < BLOCK; i += 8)
        for (int j = 0; j < 8; j++)
            lanes[j] = row[i + j] > lanes[j] ? row[i + j] : lanes[j]; /* false for NaN */
    float max = -INFINITY;
    for (int j = 0; j < 8; j++)
        max = lanes[j] > max ? lanes[j] : max;
    return max;
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
        if (n - i >= BLOCK && !(block_max(row + i) > values[0])) {
            i += BLOCK;
            continue;
        }
        int64_t end = n - i >= BLOCK ? i + BLOCK : n;
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

/* exp(x) for x <= 0 to a relative error of 2e-7: 2^n * 2^f with f in [-0.5, 0.5] (Cephes' expf
 * polynomial after Cody-Waite reduction). Below the range of normal floats it is 0. */
static inline float exp_negative(float x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float clamped = x > -87.0f ? x : -87.0f;
    float n = (clamped * 1.44269504f + round) - round;
    float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t exponent = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &exponent, sizeof scale);
    return x > -87.0f ? p * scale : 0.0f;
}

double ember_log_sum_exp(const float *row, int64_t n, float temperature)
{
    float scale = 1.0f / temperature;
    float max = -INFINITY;
    int64_t blocks = n / BLOCK * BLOCK;
    for (int64_t i = 0; i < blocks; i += BLOCK) {
        float m = block_max(row + i);
        max = m > max ? m : max;
    }
    for (int64_t i = blocks; i < n; i++)
        max = row[i] > max ? row[i] : max;
    if (isinf(max))
        return max;
    double sum = 0;
    for (int64_t i = 0; i < blocks; i += BLOCK) {
        float terms[BLOCK];
        for (int j = 0; j < BLOCK; j++)
            terms[j] = exp_negative((row[i + j] - max) * scale);
        float lanes[8] = {0};
        for (int j = 0; j < BLOCK; j += 8)
            for (int l = 0; l < 8; l++)
                lanes[l] += terms[j + l];
        for (int l = 0; l < 8; l++)
            sum += lanes[l];
    }
    for (int64_t i = blocks; i < n; i++)
        sum += exp_negative((row[i] - max) * scale);
    return max / (double)temperature + log(sum);
}
