/* What logits weigh: a block of exponentials, as wide as the vectors of the machine at hand.
 *
 * Operations are the same in every variant, fused multiply-adds excluded, so results are too. */
#include <string.h>

#include "row.h"

/* Choosing a variant when the library is loaded needs glibc; sanitizers are not ready by then. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

/* exp(x) for x <= 0: 2^n * 2^f with f in [-0.5, 0.5] (Cephes' expf polynomial after Cody-Waite
 * reduction). */
static inline float exponential(float x)
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
    float power;
    memcpy(&power, &exponent, sizeof power);
    return x > -87.0f ? p * power : 0.0f;
}

FOR_EACH_MACHINE float ember_weigh(const float *logits, int64_t size, float best, float scale,
                                   float weights[EMBER_BLOCK])
{
    float block[EMBER_BLOCK], lanes[EMBER_LANES] = {0}, sum = 0;
    for (int64_t i = size; i < EMBER_BLOCK; i++)
        block[i] = -INFINITY;
    memcpy(block, logits, (size_t)size * sizeof *block);
    for (int i = 0; i < EMBER_BLOCK; i++)
        weights[i] = exponential((block[i] - best) * scale);
    for (int i = 0; i < EMBER_BLOCK; i += EMBER_LANES)
        for (int j = 0; j < EMBER_LANES; j++)
            lanes[j] += weights[i + j];
    for (int j = 0; j < EMBER_LANES; j++)
        sum += lanes[j];
    return sum;
}
