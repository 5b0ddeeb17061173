/* Byte-pair encoding (Sennrich et al. 2016): the bytes of a word become tokens by merging, again
 * and again, the two neighbours whose merge comes first; among equal ones the leftmost.
 *
 * The merges are a table to search in, not one to build: a vocabulary is ready when it is read. */
#include <stdlib.h>

#include "internal.h"

/* A token of the word at work, in a list; `next` is -1 at the end. */
typedef struct {
    int32_t id; /* negative: merged into the one before */
    int32_t previous;
    int32_t next;
} symbol;

/* A merge of the symbol `at` with its next one, as it was when the candidate was found. */
typedef struct {
    int32_t rank;
    int32_t at;
    int32_t id;
} candidate;

typedef struct {
    symbol *symbols;
    int32_t symbol_count;
    candidate *heap; /* the least is at 0 */
    int32_t heap_count;
} workspace;

bool ember_vocabulary_check(const ember_vocabulary *vocabulary)
{
    int32_t tokens = vocabulary->tokens;
    for (int i = 0; i < 256; i++)
        if (vocabulary->byte_ids[i] >= tokens)
            return false;
    if (vocabulary->first[0] != 0 || vocabulary->first[tokens] != vocabulary->merge_count)
        return false;
    for (int32_t i = 0; i < tokens; i++)
        if (vocabulary->first[i] > vocabulary->first[i + 1])
            return false;
    for (int32_t i = 0; i < vocabulary->merge_count; i++)
        if (vocabulary->merges[i].id < 0 || vocabulary->merges[i].id >= tokens)
            return false;
    return true;
}

static const ember_merge *find_merge(const ember_vocabulary *vocabulary, int32_t left,
                                     int32_t right)
{
    int32_t low = vocabulary->first[left], end = vocabulary->first[left + 1], high = end;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (vocabulary->merges[middle].right < right)
            low = middle + 1;
        else
            high = middle;
    }
    return low < end && vocabulary->merges[low].right == right ? &vocabulary->merges[low] : NULL;
}

static bool before(candidate a, candidate b)
{
    return a.rank < b.rank || (a.rank == b.rank && a.at < b.at);
}

static void push(workspace *work, candidate item)
{
    int32_t place = work->heap_count++;
    while (place > 0 && before(item, work->heap[(place - 1) / 2])) {
        work->heap[place] = work->heap[(place - 1) / 2];
        place = (place - 1) / 2;
    }
    work->heap[place] = item;
}

static candidate pop(workspace *work)
{
    candidate least = work->heap[0], last = work->heap[--work->heap_count];
    int32_t place = 0;
    for (;;) {
        int32_t child = 2 * place + 1;
        if (child + 1 < work->heap_count && before(work->heap[child + 1], work->heap[child]))
            child++;
        if (child >= work->heap_count || !before(work->heap[child], last))
            break;
        work->heap[place] = work->heap[child];
        place = child;
    }
    work->heap[place] = last;
    return least;
}

/* Notes the merge of the symbol `at` with its next one, if there is such a merge. */
static void consider(const ember_vocabulary *vocabulary, workspace *work, int32_t at)
{
    if (at < 0 || work->symbols[at].next < 0)
        return;
    const ember_merge *merge =
        find_merge(vocabulary, work->symbols[at].id, work->symbols[work->symbols[at].next].id);
    if (merge)
        push(work, (candidate){merge->rank, at, merge->id});
}

static void merge_word(const ember_vocabulary *vocabulary, workspace *work)
{
    symbol *symbols = work->symbols;
    work->heap_count = 0;
    for (int32_t i = 0; i < work->symbol_count; i++)
        consider(vocabulary, work, i);
    while (work->heap_count > 0) {
        candidate best = pop(work);
        symbol *left = &symbols[best.at];
        if (left->id < 0 || left->next < 0)
            continue;
        symbol *right = &symbols[left->next];
        const ember_merge *merge = find_merge(vocabulary, left->id, right->id);
        if (!merge || merge->id != best.id)
            continue; /* one of the two has changed since */
        left->id = merge->id;
        left->next = right->next;
        right->id = -1;
        if (left->next >= 0)
            symbols[left->next].previous = best.at;
        consider(vocabulary, work, left->previous);
        consider(vocabulary, work, best.at);
    }
}

/* Appends the symbol of a byte; bytes without a token are left out. */
static void append(const ember_vocabulary *vocabulary, workspace *work, uint8_t byte)
{
    if (vocabulary->byte_ids[byte] < 0)
        return;
    int32_t place = work->symbol_count++;
    work->symbols[place] = (symbol){vocabulary->byte_ids[byte], place - 1, -1};
    if (place > 0)
        work->symbols[place - 1].next = place;
}

int64_t ember_vocabulary_encode(const ember_vocabulary *vocabulary, const uint8_t *bytes,
                                const int64_t *ends, int64_t words, int32_t *ids)
{
    int64_t longest = 1, count = 0;
    for (int64_t i = 0, start = 0; i < words; start = ends[i++])
        longest = ends[i] - start > longest ? ends[i] - start : longest;
    if (longest > INT32_MAX / 4)
        return -1;
    /* Every merge takes one candidate out and puts at most two in. */
    workspace work = {.symbols = calloc((size_t)longest, sizeof *work.symbols),
                      .heap = calloc((size_t)longest * 2, sizeof *work.heap)};
    if (work.symbols && work.heap)
        for (int64_t i = 0, at = 0; i < words; i++) {
            work.symbol_count = 0;
            while (at < ends[i])
                append(vocabulary, &work, bytes[at++]);
            merge_word(vocabulary, &work);
            for (int32_t j = 0; j < work.symbol_count; j++)
                if (work.symbols[j].id >= 0)
                    ids[count++] = work.symbols[j].id;
        }
    else
        count = -1;
    free(work.symbols);
    free(work.heap);
    return count;
}
