/* Products of bytes, added to sums, from registers alone: the most that the processor can do of
 * them (VNNI). */
#include <immintrin.h>

enum { SUMS = 16 }; /* more than an instruction takes cycles, so that none waits for another */

/* `rounds` times SUMS instructions of 64 products. The result keeps the compiler from leaving
 * them out. */
int ember_multiply(long rounds)
{
    __m512i sums[SUMS];
    __m512i bytes = _mm512_set1_epi8((char)rounds);
    for (int i = 0; i < SUMS; i++)
        sums[i] = _mm512_set1_epi32(i);
    for (long round = 0; round < rounds; round++)
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++)
            sums[i] = _mm512_dpbusd_epi32(sums[i], bytes, bytes);
    for (int i = 1; i < SUMS; i++)
        sums[0] = _mm512_add_epi32(sums[0], sums[i]);
    return _mm512_reduce_add_epi32(sums[0]);
}
