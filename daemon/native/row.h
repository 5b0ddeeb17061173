/* What loops over rows of logits share. They work in blocks of fixed size without branches inside, so
 * that any compiler turns them into vector code for the machine at hand. */
#ifndef EMBER_ROW_H
#define EMBER_ROW_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "ember.h"

enum { EMBER_LANES = 16 };

/* The greatest of n values, NaN counting as -infinity. */
static inline float ember_max(const float *row, int64_t n)
{
    float lanes[EMBER_LANES], max = -INFINITY;
    for (int j = 0; j < EMBER_LANES; j++)
        lanes[j] = -INFINITY;
    int64_t whole = n / EMBER_LANES * EMBER_LANES;
    for (int64_t i = 0; i < whole; i += EMBER_LANES)
        for (int j = 0; j < EMBER_LANES; j++)
            lanes[j] = row[i + j] > lanes[j] ? row[i + j] : lanes[j]; /* false for NaN */
    for (int64_t i = whole; i < n; i++)
        max = row[i] > max ? row[i] : max;
    for (int j = 0; j < EMBER_LANES; j++)
        max = lanes[j] > max ? lanes[j] : max;
    return max;
}

/* What no value of the block that starts at `start` exceeds. */
static inline float ember_block_bound(ember_row row, int64_t start)
{
    int64_t left = row.n - start;
    return row.bounds ? row.bounds[start / EMBER_BLOCK]
                      : ember_max(row.logits + start, left < EMBER_BLOCK ? left : EMBER_BLOCK);
}

static inline float ember_sum(const float block[EMBER_BLOCK])
{
    float lanes[EMBER_LANES] = {0}, sum = 0;
    for (int i = 0; i < EMBER_BLOCK; i += EMBER_LANES)
        for (int j = 0; j < EMBER_LANES; j++)
            lanes[j] += block[i + j];
    for (int j = 0; j < EMBER_LANES; j++)
        sum += lanes[j];
    return sum;
}

/* exp(x) for x <= 0 to a relative error of 2e-7: 2^n * 2^f with f in [-0.5, 0.5] (Cephes' expf
 * polynomial after Cody-Waite reduction). Below the range of normal floats it is 0. */
static inline float ember_exp(float x)
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

#endif
