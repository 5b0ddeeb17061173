/* A kernel library as TVM would compile it, small enough to be read: for
 * driver.c and store_driver.c. */
#include "tvm_abi.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT tvm_parallel_launch *__TVMBackendParallelLaunch;
EXPORT tvm_alloc_workspace *__TVMBackendAllocWorkspace;
EXPORT tvm_free_workspace *__TVMBackendFreeWorkspace;
void computing(void); /* of the driver */
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count);

EXPORT tvm_kernel __tvm_ffi_append, __tvm_ffi_refuse, __tvm_ffi_route, __tvm_ffi_sum_experts;
EXPORT tvm_kernel __tvm_ffi_foresee;

typedef struct {
    const int32_t *tokens, *positions;
    float *state, *cache, *logits;
    int64_t count, rows, columns;
} append_closure;

static int append_task(int task, tvm_parallel_group *group, void *closure)
{
    append_closure *c = closure;
    int64_t share = (c->columns + group->num_task - 1) / group->num_task;
    for (int64_t i = task * share; i < c->columns && i < (task + 1) * share; i++)
        for (int64_t t = 0; t < c->count; t++) {
            c->cache[c->positions[t] * c->columns + i] = (float)c->tokens[t];
            c->state[i] += c->cache[c->positions[t] * c->columns + i];
            c->logits[i] = c->state[i];
        }
    return 0;
}

/* (tokens, positions, state, cache, logits): the cache gets the tokens, the state their sum. */
int __tvm_ffi_append(void *self, const tvm_any *arguments, int32_t count, tvm_any *result)
{
    (void)self, (void)result;
    const dl_tensor *tensors[5];
    if (count != 5)
        return -1;
    for (int i = 0; i < 5; i++)
        tensors[i] = arguments[i].pointer;
    append_closure closure = {
        tensors[0]->data,     tensors[1]->data,     tensors[2]->data,     tensors[3]->data,
        tensors[4]->data,     tensors[0]->shape[0], tensors[3]->shape[0], tensors[3]->shape[1],
    };
    void *workspace = __TVMBackendAllocWorkspace(1, 0, 1000, 2, 32);
    if (!workspace)
        return -1;
    int code = __TVMBackendParallelLaunch(append_task, &closure, 0);
    __TVMBackendFreeWorkspace(1, 0, workspace);
    return code;
}

static int refuse_task(int task, tvm_parallel_group *group, void *closure)
{
    (void)group, (void)closure;
    if (task != 2)
        return 0;
    const char *parts[] = {"task 2 ", "says\nno"};
    TVMFFIErrorSetRaisedFromCStrParts("ValueError", parts, 2);
    return -1;
}

int __tvm_ffi_refuse(void *self, const tvm_any *arguments, int32_t count, tvm_any *result)
{
    (void)self, (void)arguments, (void)count, (void)result;
    return __TVMBackendParallelLaunch(refuse_task, 0, 3);
}

/* (tokens, ids, weights and scores of layer 0, those of layer 1): each token chooses two of eight
 * experts in a layer, a heavy one, and a light one whose score the others' follow at small steps. */
int __tvm_ffi_route(void *self, const tvm_any *arguments, int32_t count, tvm_any *result)
{
    (void)self, (void)count, (void)result;
    const dl_tensor *tokens = arguments[0].pointer;
    const int32_t *token = tokens->data;
    for (int layer = 0; layer < 2; layer++) {
        int32_t *ids = ((const dl_tensor *)arguments[1 + 3 * layer].pointer)->data;
        float *weights = ((const dl_tensor *)arguments[2 + 3 * layer].pointer)->data;
        float *scores = ((const dl_tensor *)arguments[3 + 3 * layer].pointer)->data;
        for (int64_t t = 0; t < tokens->shape[0]; t++) {
            int heavy = token[t] % 2;
            for (int k = 0; k < 2; k++) {
                ids[2 * t + k] = (token[t] * 5 + layer * 3 + k * (1 + token[t] % 3)) % 8;
                weights[2 * t + k] = k == heavy ? 0.75F : 0.25F;
            }
            for (int32_t expert = 0; expert < 8; expert++) {
                int32_t after = (expert - ids[2 * t + 1 - heavy] + 8) % 8;
                scores[8 * t + expert] = 0.125F - (float)after / 128;
            }
            scores[8 * t + ids[2 * t + heavy]] = 0.375F;
        }
    }
    return 0;
}

/* (tokens, ids): what layer 1 is expected to choose, which is wrong for some tokens, and nonsense for
 * others. */
int __tvm_ffi_foresee(void *self, const tvm_any *arguments, int32_t count, tvm_any *result)
{
    (void)self, (void)count, (void)result;
    const dl_tensor *tokens = arguments[0].pointer;
    const int32_t *token = tokens->data;
    int32_t *ids = ((const dl_tensor *)arguments[1].pointer)->data;
    for (int64_t t = 0; t < tokens->shape[0]; t++)
        for (int k = 0; k < 2; k++) {
            int32_t right = (token[t] * 5 + 3 + k * (1 + token[t] % 3)) % 8;
            ids[2 * t + k] = token[t] % 5 == 0 ? 7 - right : token[t] % 7 == 0 ? 7 - token[t] : right;
        }
    return 0;
}

typedef struct {
    const int32_t *ids, *table;
    const char *bank;
    int64_t bytes;
    float *sums;
} sum_closure;

/* The words of an expert, so that none of them may change meanwhile. */
static int sum_task(int task, tvm_parallel_group *group, void *closure)
{
    (void)group;
    sum_closure *c = closure;
    int32_t slot = c->table[c->ids[task]];
    if (slot < 0)
        return 0;
    const int32_t *words = (const void *)(c->bank + slot * c->bytes);
    int64_t sum = 0;
    for (int64_t i = 0; i < c->bytes / 4; i++)
        sum += words[i];
    c->sums[task] = (float)sum;
    return 0;
}

/* (ids, table, bank, sums): the sum of the words of every chosen expert that has a slot. */
int __tvm_ffi_sum_experts(void *self, const tvm_any *arguments, int32_t count, tvm_any *result)
{
    (void)self, (void)count, (void)result;
    const dl_tensor *ids = arguments[0].pointer, *table = arguments[1].pointer;
    const dl_tensor *bank = arguments[2].pointer, *sums = arguments[3].pointer;
    computing();
    sum_closure closure = {ids->data, table->data, bank->data, bank->shape[1], sums->data};
    return __TVMBackendParallelLaunch(sum_task, &closure, (int)(ids->shape[0] * ids->shape[1]));
}
