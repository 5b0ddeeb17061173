/* What loops over rows of logits share. They work in blocks of fixed size without branches inside, so
 * that any compiler turns them into vector code for the machine at hand. */
#ifndef EMBER_ROW_H
#define EMBER_ROW_H

#include <math.h>
#include <stdint.h>

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

/* weights[i] = exp((logits[i] - best) * scale), where that is at most 1, to a relative error of 2e-7;
 * 0 below the range of normal floats, for NaN and beyond `size`. Returns their sum. */
float ember_weigh(const float *logits, int64_t size, float best, float scale,
                  float weights[EMBER_BLOCK]);

#endif
