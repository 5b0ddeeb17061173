/* A model with experts that runs steps, each of which is checked. */
#ifndef EMBER_RUNNING_H
#define EMBER_RUNNING_H

#include "expert_program.h"

typedef struct {
    ember_model *model;
    ember_session *sessions[SESSIONS];
    int64_t lengths[SESSIONS];
    int64_t expert_bytes;
    float margin; /* of its routing */
    int failed;   /* steps */
} running;

/* Experts that were not those chosen. */
typedef struct {
    int64_t skipped, substituted;
} changes;

void open_model(running *run, const ember_model_config *config, int64_t expert_bytes);
void close_model(running *run);
void set_budget(running *run, int64_t slots);
/* Tokens decoded alone skip an expert of weight 0.25 after so many microseconds, if `weight` allows. */
void break_stalls(running *run, int64_t microseconds, float weight);
/* Tokens that are decoded may lose so much weight. */
void prefer_resident(running *run, float margin);

/* A step of random tokens, of one session's prompt or decoded. */
void random_step(running *run, bool may_fail);
/* A prompt of one session, from its start on, in one step. */
ember_status run_step(running *run, const int32_t *tokens, int32_t count);
/* Decodes a token there. */
ember_status decode(running *run, int32_t token);
/* Checks the experts of the last step, and returns what was changed of them. */
changes check_experts(const running *run, const int32_t *tokens, int32_t count);
changes counted(void); /* since the model was opened */
const int32_t *used_ids(const running *run, int layer);

#endif
