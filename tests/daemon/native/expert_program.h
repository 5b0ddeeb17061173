/* A program with experts, for drivers of the expert store. */
#ifndef EMBER_EXPERT_PROGRAM_H
#define EMBER_EXPERT_PROGRAM_H

#include "internal.h"

enum { LAYERS = 2, EXPERTS = 8, TOP_K = 2, ALL = LAYERS * EXPERTS, BANK = ALL + 1, CHUNK = 8 };
enum { VOCABULARY = 64, SESSIONS = 3, CAPACITY = 4096 };
enum { IDS, WEIGHTS, SCORES }; /* what a router says */

extern float logits[LAYERS * CHUNK * TOP_K * 16];
extern ember_expert_counters counters[LAYERS];

/* `bytes`: of an expert in the file `bank`. */
ember_model_config make_config(const void *kernels, int64_t size, int bank, int64_t bytes,
                               int threads, int readers);
/* Every 32-bit word of the expert at a position holds that position. */
int make_bank(const char *path, int64_t bytes);
int32_t position_of(int layer, int expert);
/* Where what a layer's router says is in SCRATCH. */
int64_t place_of(int layer, int kind);
/* What the kernel `route` chooses. */
int32_t chosen(int32_t token, int layer, int k);

#endif
