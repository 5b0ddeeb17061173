/* Models: sections mapped, kernels loaded, program checked, threads started; or nothing at all. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static bool map_sections(ember_model *model, const ember_model_config *config, ember_error error)
{
    ember_mapping *sections = model->sections;
    if (!ember_map_file(&sections[EMBER_WEIGHTS], config->weights_file, config->weights_bytes,
                        "weights.bin", error) ||
        !ember_map_file(&sections[EMBER_EXPERTS], config->experts_file, config->experts_bytes,
                        "experts.bin", error) ||
        !ember_map_zeroed(&sections[EMBER_SCRATCH], config->scratch_bytes, EMBER_MAP_HUGE,
                          "scratch", error) ||
        !ember_map_zeroed(&sections[EMBER_TOKENS], config->tokens_bytes, EMBER_MAP_PLAIN,
                          "token", error) ||
        !ember_map_zeroed(&sections[EMBER_POSITIONS], config->positions_bytes, EMBER_MAP_PLAIN,
                          "position", error) ||
        !ember_map_zeroed(&sections[EMBER_TABLES], config->tables_bytes, EMBER_MAP_PLAIN,
                          "table", error))
        return false;
    if (config->tables_bytes > 0)
        memcpy(sections[EMBER_TABLES].base, config->tables, (size_t)config->tables_bytes);
    sections[EMBER_LOGITS] = (ember_mapping){.base = (char *)config->logits,
                                             .bytes = (size_t)config->logits_bytes};
    sections[EMBER_BOUNDS] = (ember_mapping){.base = (char *)config->bounds,
                                             .bytes = (size_t)config->bounds_bytes};
    return true;
}

ember_model *ember_model_open(const ember_model_config *config, char *text, size_t size)
{
    ember_error error = {text, size};
    ember_model *model = calloc(1, sizeof *model);
    if (!model) {
        ember_fail(error, "no memory for a model");
        return NULL;
    }
    model->library.file = -1;
    model->state_bytes = config->state_bytes;
    model->kv_bytes_per_token = config->kv_bytes_per_token;
    model->vocab_size = config->vocab_size;
    model->residency.file = -1;
    bool ok = map_sections(model, config, error) &&
              ember_library_open(&model->library, config->kernels, config->kernels_bytes, error) &&
              ember_program_build(&model->program, config, model->sections, &model->library,
                                  error) &&
              ember_residency_open(&model->residency, config, &model->program, error);
    if (ok)
        model->pool = ember_pool_open(config->threads, config->cpus, config->cpu_count, error);
    if (model->pool &&
        ember_ahead_open(&model->ahead, &model->sections[EMBER_WEIGHTS], error))
        return model;
    ember_model_close(model);
    return NULL;
}

void ember_model_profile(ember_model *model, ember_cost *costs)
{
    model->costs = costs;
}

ember_expert_layout ember_model_experts(const ember_model *model)
{
    return model->program.experts;
}

/* Whether the program says what its routers made of tokens, as `what` needs it to. */
static bool has_routers(const ember_model *model, const char *what, ember_error error)
{
    return model->program.has_routers ||
           ember_fail(error, "%s needs an artifact built with moa_fusion: build this one again "
                             "without --disable moa_fusion", what);
}

ember_status ember_model_trace(ember_model *model, ember_trace *trace, char *text, size_t size)
{
    if (trace && !has_routers(model, "a routing trace", (ember_error){text, size}))
        return EMBER_REFUSED;
    model->trace = trace;
    return EMBER_OK;
}

ember_status ember_model_break_stalls(ember_model *model, int64_t nanoseconds, float weight,
                                      char *text, size_t size)
{
    if (nanoseconds > 0 && !has_routers(model, "stall_deadline", (ember_error){text, size}))
        return EMBER_REFUSED;
    model->residency.breaker = (ember_stall_breaker){nanoseconds, weight};
    return EMBER_OK;
}

ember_status ember_model_prefer_resident(ember_model *model, float margin, char *text, size_t size)
{
    if (margin > 0 && !has_routers(model, "routing_margin", (ember_error){text, size}))
        return EMBER_REFUSED;
    model->residency.routing_margin = margin;
    return EMBER_OK;
}

void ember_model_close(ember_model *model)
{
    if (!model)
        return;
    ember_pool_close(model->pool);
    ember_ahead_close(&model->ahead);
    ember_residency_close(&model->residency);
    ember_program_free(&model->program);
    ember_library_close(&model->library);
    model->sections[EMBER_LOGITS] = (ember_mapping){0}; /* the caller's, */
    model->sections[EMBER_BOUNDS] = (ember_mapping){0}; /* and so are these */
    for (int i = 0; i < EMBER_SECTION_COUNT; i++)
        ember_unmap(&model->sections[i]);
    free(model);
}
