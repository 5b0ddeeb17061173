/* Draws a token from a row of logits without sorting the vocabulary.
 *
 * Where top-k, top-p or min-p leave out some, tokens are ranked by descending logit, equal ones by
 * ascending id. They fall into classes by how far their logit lies below the greatest one, 64
 * classes to a factor e of probability. Counts and masses of whole classes find the class in which
 * a limit falls, and only that one is sorted. */
#include <math.h>
#include <stdlib.h>

#include "internal.h"
#include "row.h"

enum {
    CLASSES = 32 * 64 + 1, /* the last one, below e^-32 of the greatest, is left out */
    PER_FACTOR = 64,
    FEW = 256, /* tokens that are sorted at once, as one class */
};

enum { NOT_FINITE = -1, NO_MEMORY = -2 }; /* in place of a token */

/* Leaves the greatest alone as any lower one does; its inverse is a float. */
static const double LOWEST_TEMPERATURE = 1e-30;

/* The arguments of ember_draw. */
typedef struct {
    double uniform, temperature;
    int64_t top_k;
    double top_p, min_p;
} sampling;

typedef struct {
    float value;
    int32_t id;
} entry;

typedef struct {
    ember_row row;
    float best;
    double temperature;
    int64_t classes; /* that are told apart */
    int64_t counts[CLASSES];
    double masses[CLASSES]; /* the greatest token's is 1 */
    entry *sorted;          /* the entries of one class, */
    int64_t sorted_class;   /* this one; -1 for none */
} ranking;

/* The first tokens of a ranking: all of the classes before `last`, and `count` of that one. */
typedef struct {
    int64_t last;
    int64_t count;
    double mass;
} prefix;

static double weight_of(const ranking *r, float value)
{
    return exp(((double)value - r->best) / r->temperature);
}

/* Classes below the best, for a distance of `below` >= 0; NaN is in the last one. */
static inline int32_t class_of(float below)
{
    float number = below * PER_FACTOR;
    return number < CLASSES - 1 ? (int32_t)number : CLASSES - 1;
}

static int by_rank(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->value != y->value)
        return x->value > y->value ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static int64_t block_size(ember_row row, int64_t start)
{
    return row.n - start < EMBER_BLOCK ? row.n - start : EMBER_BLOCK;
}

/* Counts and weighs all classes. */
static void classify(ranking *r)
{
    float scale = (float)(1 / r->temperature);
    r->classes = CLASSES - 1;
    for (int64_t start = 0; start < r->row.n; start += EMBER_BLOCK) {
        int64_t size = block_size(r->row, start);
        const float *row = r->row.logits + start;
        if (class_of((r->best - ember_block_bound(r->row, start)) * scale) >= r->classes)
            continue;
        float weights[EMBER_BLOCK];
        int32_t classes[EMBER_BLOCK];
        ember_weigh(row, size, r->best, scale, weights);
        for (int64_t i = 0; i < size; i++)
            classes[i] = class_of((r->best - row[i]) * scale);
        for (int64_t i = 0; i < size; i++) {
            r->counts[classes[i]]++;
            r->masses[classes[i]] += weights[i];
        }
    }
}

/* Makes the first `k` tokens, at most FEW, the only class. */
static bool take_first(ranking *r, int64_t k)
{
    int32_t ids[FEW];
    float values[FEW];
    r->counts[0] = ember_top_k(r->row, k, ids, values);
    r->classes = 1;
    r->sorted = malloc((size_t)k * sizeof *r->sorted);
    if (!r->sorted)
        return false;
    r->sorted_class = 0;
    for (int64_t i = 0; i < r->counts[0]; i++) {
        r->sorted[i] = (entry){values[i], ids[i]};
        r->masses[0] += weight_of(r, values[i]);
    }
    return true;
}

/* Makes `sorted` the entries of a class. */
static bool sort(ranking *r, int64_t class)
{
    if (r->sorted_class == class)
        return true;
    size_t bytes = (size_t)r->counts[class] * sizeof *r->sorted;
    entry *entries = realloc(r->sorted, bytes > 0 ? bytes : sizeof *entries);
    if (!entries)
        return false;
    r->sorted = entries;
    r->sorted_class = class;
    float scale = (float)(1 / r->temperature);
    int64_t found = 0;
    const float *row = r->row.logits;
    for (int64_t start = 0; start < r->row.n && found < r->counts[class]; start += EMBER_BLOCK) {
        int64_t end = r->row.n - start < EMBER_BLOCK ? r->row.n : start + EMBER_BLOCK;
        if (class_of((r->best - ember_block_bound(r->row, start)) * scale) > class)
            continue;
        for (int64_t i = start; i < end; i++)
            if (class_of((r->best - row[i]) * scale) == class)
                entries[found++] = (entry){row[i], (int32_t)i};
    }
    qsort(entries, (size_t)found, sizeof *entries, by_rank);
    return true;
}

/* The first `count` tokens, or all. */
static bool by_count(ranking *r, int64_t count, prefix *result)
{
    double before = 0;
    int64_t class = 0;
    for (; class < r->classes && r->counts[class] <= count; class++) {
        count -= r->counts[class];
        before += r->masses[class];
    }
    count = class < r->classes ? count : 0;
    if (count > 0 && !sort(r, class))
        return false;
    *result = (prefix){class, count, before};
    for (int64_t i = 0; i < count; i++)
        result->mass += weight_of(r, r->sorted[i].value);
    return true;
}

/* The fewest tokens, at least one, that together have `mass`, or all. */
static bool by_mass(ranking *r, double mass, prefix *result)
{
    double before = 0;
    int64_t class = 0;
    while (class < r->classes && before + r->masses[class] < mass)
        before += r->masses[class++];
    *result = (prefix){class, 0, before};
    if (class == r->classes)
        return true;
    if (!sort(r, class))
        return false;
    do
        result->mass += weight_of(r, r->sorted[result->count++].value);
    while (result->count < r->counts[class] && result->mass < mass);
    return true;
}

/* The tokens that weigh at least `least`. */
static bool by_weight(ranking *r, double least, prefix *result)
{
    double lowest = r->best + r->temperature * log(least);
    int64_t count = 0;
    for (int64_t start = 0; start < r->row.n; start += EMBER_BLOCK) {
        if (!(ember_block_bound(r->row, start) >= lowest))
            continue;
        for (int64_t i = start; i < start + EMBER_BLOCK && i < r->row.n; i++)
            count += r->row.logits[i] >= lowest;
    }
    return by_count(r, count, result);
}

static prefix shorter(prefix a, prefix b)
{
    bool first = a.last < b.last || (a.last == b.last && a.count < b.count);
    return first ? a : b;
}

/* The tokens that top-k, then top-p, then min-p leave. */
static bool keep(ranking *r, const sampling *s, prefix *kept)
{
    prefix limit;
    if (!by_count(r, s->top_k > 0 ? s->top_k : r->row.n, kept))
        return false;
    if (s->top_p < 1) {
        if (!by_mass(r, s->top_p * kept->mass, &limit))
            return false;
        *kept = shorter(*kept, limit);
    }
    if (s->min_p > 0) {
        if (!by_weight(r, s->min_p, &limit))
            return false;
        *kept = shorter(*kept, limit);
    }
    return true;
}

/* The first token of a prefix up to which there is more than `mass`. */
static bool find(ranking *r, double mass, prefix within, int32_t *token)
{
    double before = 0, sum = 0;
    int64_t chosen = 0;
    for (int64_t class = 0; class < within.last + (within.count > 0); class++) {
        if (r->counts[class] == 0)
            continue;
        chosen = class;
        before = sum;
        sum += r->masses[class];
        if (sum > mass)
            break;
    }
    if (!sort(r, chosen))
        return false;
    int64_t count = chosen == within.last ? within.count : r->counts[chosen];
    int64_t i = 0;
    for (sum = before; i < count - 1; i++) {
        sum += weight_of(r, r->sorted[i].value);
        if (sum > mass)
            break;
    }
    *token = r->sorted[i].id;
    return true;
}

/* A token of all of them, in the order of their ids. */
static int32_t draw_unfiltered(ember_row row, float best, const sampling *s)
{
    float weights[EMBER_BLOCK], scale = (float)(1 / fmax(s->temperature, LOWEST_TEMPERATURE));
    double total = 0, before = 0, after = 0;
    float *sums = malloc((size_t)((row.n + EMBER_BLOCK - 1) / EMBER_BLOCK) * sizeof *sums);
    if (!sums)
        return NO_MEMORY;
    for (int64_t start = 0; start < row.n; start += EMBER_BLOCK)
        total += sums[start / EMBER_BLOCK] =
            ember_weigh(row.logits + start, block_size(row, start), best, scale, weights);
    int64_t chosen = 0;
    for (int64_t start = 0; start < row.n && !(after > s->uniform * total); start += EMBER_BLOCK) {
        if (sums[start / EMBER_BLOCK] == 0)
            continue;
        chosen = start;
        before = after;
        after += sums[start / EMBER_BLOCK];
    }
    free(sums);
    ember_weigh(row.logits + chosen, block_size(row, chosen), best, scale, weights);
    int64_t token = chosen;
    for (int64_t i = 0; i < EMBER_BLOCK && !(before > s->uniform * total); i++) {
        before += weights[i];
        if (weights[i] > 0)
            token = chosen + i;
    }
    return (int32_t)token;
}

static int32_t draw_filtered(ember_row row, float best, const sampling *s)
{
    ranking r = {.row = row, .best = best, .sorted_class = -1};
    prefix kept;
    int32_t token;
    r.temperature = fmax(s->temperature, LOWEST_TEMPERATURE);
    bool few = s->top_k > 0 && s->top_k <= FEW;
    bool ok = true;
    if (few)
        ok = take_first(&r, s->top_k);
    else
        classify(&r);
    ok = ok && keep(&r, s, &kept) && find(&r, s->uniform * kept.mass, kept, &token);
    free(r.sorted);
    return ok ? token : NO_MEMORY;
}

int32_t ember_draw(ember_row row, double uniform, double temperature, int64_t top_k, double top_p,
                   double min_p)
{
    sampling s = {uniform, temperature, top_k, top_p, min_p};
    float best;
    int32_t greatest;
    if (ember_top_k(row, 1, &greatest, &best) == 0 || !isfinite(best))
        return NOT_FINITE;
    if (temperature == 0)
        return greatest;
    bool filtered = top_k > 0 || top_p < 1 || min_p > 0;
    return filtered ? draw_filtered(row, best, &s) : draw_unfiltered(row, best, &s);
}
