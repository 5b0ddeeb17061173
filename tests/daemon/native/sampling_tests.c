/* Sampling against the obvious way. */
#define _GNU_SOURCE
#include "sampling_tests.h"

#include <math.h>

#include "check.h"

static int by_value(const void *a, const void *b)
{
    const float *x = a, *y = b; /* value, id */
    if (x[0] != y[0])
        return x[0] < y[0] ? 1 : -1;
    return x[1] < y[1] ? -1 : x[1] > y[1];
}

/* Bounds as a head and a few biases leave them: some are above all of their logits. */
static ember_row bounded(float *logits, float *bounds, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float *bound = &bounds[i / EMBER_BLOCK];
        if (i % EMBER_BLOCK == 0)
            *bound = i % 3 == 0 ? -1 : -INFINITY;
        *bound = logits[i] > *bound ? logits[i] : *bound;
    }
    return (ember_row){logits, bounds, n};
}

static void test_row(int64_t n, int64_t k, unsigned seed)
{
    float *row = malloc((size_t)n * sizeof *row);
    float(*sorted)[2] = malloc((size_t)n * sizeof *sorted);
    int32_t *ids = malloc((size_t)(k + 1) * sizeof *ids);
    float *values = malloc((size_t)(k + 1) * sizeof *values);
    CHECK(row && sorted && ids && values);
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        unsigned draw = (unsigned)rand_r(&seed) % 100;
        row[i] = draw == 0 ? NAN : draw == 1 ? -INFINITY : (float)draw / 8 - 20;
        sorted[i][0] = isnan(row[i]) ? -INFINITY : row[i];
        sorted[i][1] = (float)i;
        sum += exp(sorted[i][0]);
    }
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    float bounds[100];
    const ember_row rows[] = {{row, NULL, n}, bounded(row, bounds, n)};
    for (int kind = 0; kind < 2; kind++) {
        int64_t found = ember_top_k(rows[kind], k, ids, values);
        CHECK(found == (k < n ? k : n));
        for (int64_t i = 0; i < found; i++)
            CHECK(ids[i] == (int32_t)sorted[i][1] && values[i] == sorted[i][0]);
        double expected = log(sum), actual = ember_log_sum_exp(rows[kind]);
        CHECK(expected == actual || fabs(expected - actual) < 1e-5);
    }
    free(row);
    free(sorted);
    free(ids);
    free(values);
}

/* The greater the number, the less likely the token. */
static void test_draw(int64_t n, double temperature, int64_t top_k, double top_p, double min_p)
{
    enum { DRAWS = 400 };
    float row[2000], bounds[32];
    int32_t last = 0;
    for (int64_t i = 0; i < n; i++)
        row[i] = i % 50 == 3 ? NAN : -(float)i / (float)n;
    ember_row plain = {row, NULL, n}, quick = bounded(row, bounds, n);
    for (int i = 0; i < DRAWS; i++) {
        double uniform = (double)i / DRAWS;
        int32_t token = ember_draw(plain, uniform, temperature, top_k, top_p, min_p);
        CHECK(token >= last && token < n && !isnan(row[token]));
        CHECK(ember_draw(quick, uniform, temperature, top_k, top_p, min_p) == token);
        last = token;
    }
}

void test_sampling(void)
{
    for (int64_t n = 1; n <= 2000; n += 333) {
        test_draw(n, 1, 0, 1, 0);
        test_draw(n, 0.1, 7, 0.5, 0);
        test_draw(n, 0.1, 700, 0.9, 0);
        test_draw(n, 2, 0, 1, 0.9);
    }
    for (int64_t n = 1; n < 300; n += 7)
        for (int64_t k = 0; k <= n + 1; k += n / 3 + 1)
            test_row(n, k, (unsigned)(n * 1000 + k));
    test_row(5000, 64, 1);
    test_row(5000, 5000, 2);
    float two[][2] = {{1e30f, -1e30f}, {1, INFINITY}, {-INFINITY, NAN}};
    ember_row empty = {0}, huge = {two[0], NULL, 2}, infinite = {two[1], NULL, 2};
    ember_row none = {two[2], NULL, 2};
    CHECK(ember_top_k(empty, 3, NULL, NULL) == 0);
    CHECK(ember_log_sum_exp(empty) == -INFINITY);
    CHECK(ember_log_sum_exp(huge) == (double)1e30f);
    CHECK(ember_log_sum_exp(infinite) == INFINITY);
    CHECK(ember_log_sum_exp(none) == -INFINITY);
    CHECK(ember_draw(huge, 0.999, 1, 0, 1, 0) == 0);
    CHECK(ember_draw(infinite, 0.999, 1, 0, 1, 0) == -1);
    CHECK(ember_draw(none, 0.999, 1, 0, 1, 0) == -1);
    CHECK(ember_draw(empty, 0.999, 1, 0, 1, 0) == -1);
}
