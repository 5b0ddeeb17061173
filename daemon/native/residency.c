/* Residency: all experts mapped, or those that a budget allows in a store. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

static int64_t expert_count(const ember_program *program)
{
    return (int64_t)program->experts.layers * program->experts.experts;
}

static void find_positions(ember_residency *residency, const ember_program *program)
{
    int32_t experts = program->experts.experts;
    for (int32_t layer = 0; layer < program->experts.layers; layer++) {
        const ember_tensor *table = program->tables[layer];
        for (int32_t i = 0; i < experts; i++) {
            int32_t *position = &residency->positions[(int64_t)layer * experts + i];
            if (table)
                memcpy(position, (char *)residency->tables + table->offset + i * sizeof *position,
                       sizeof *position);
            else
                *position = -1;
        }
    }
}

bool ember_residency_open(ember_residency *residency, const ember_model_config *config,
                          const ember_program *program, ember_error error)
{
    size_t count = (size_t)expert_count(program);
    if (count == 0)
        return true;
    residency->bank_bytes = config->experts_bytes;
    residency->threads = config->reader_threads;
    residency->file = fcntl(config->experts_file, F_DUPFD_CLOEXEC, 0);
    if (residency->file < 0)
        return ember_fail(error, "experts.bin: %s", strerror(errno));
    residency->positions = calloc(count, sizeof *residency->positions);
    residency->priorities = calloc(count, sizeof *residency->priorities);
    residency->tables = calloc(1, (size_t)config->tables_bytes);
    if (!residency->positions || !residency->priorities || !residency->tables)
        return ember_fail(error, "no memory for %zu experts", count);
    memcpy(residency->tables, config->tables, (size_t)config->tables_bytes);
    find_positions(residency, program);
    return true;
}

void ember_residency_close(ember_residency *residency)
{
    ember_store_close(residency->store);
    if (residency->file >= 0)
        close(residency->file);
    free(residency->positions);
    free(residency->priorities);
    free(residency->tables);
    *residency = (ember_residency){.file = -1};
}

/* Points the tensors of experts at the bank or at the slots. */
static void bind_experts(ember_model *model, char *base)
{
    for (int64_t i = 0; i < model->program.tensor_count; i++)
        if (model->program.tensors[i].section == EMBER_EXPERTS)
            model->program.tensors[i].dl.data = base + model->program.tensors[i].offset;
}

static void set_all_resident(ember_model *model, bool resident)
{
    if (model->watch.resident)
        memset(model->watch.resident, resident, (size_t)expert_count(&model->program));
}

void ember_model_watch_experts(ember_model *model, ember_expert_watch watch)
{
    model->watch = watch;
    set_all_resident(model, true);
}

static bool map_all(ember_model *model, ember_error error)
{
    ember_residency *residency = &model->residency;
    if (!residency->store)
        return true;
    ember_mapping *experts = &model->sections[EMBER_EXPERTS];
    if (!ember_map_file(experts, residency->file, residency->bank_bytes, "experts.bin", error))
        return false;
    bind_experts(model, experts->base);
    ember_mapping *tables = &model->sections[EMBER_TABLES];
    memcpy(tables->base, residency->tables, tables->bytes);
    ember_store_close(residency->store);
    residency->store = NULL;
    set_all_resident(model, true);
    return true;
}

static bool open_store(ember_model *model, int32_t slots, ember_expert_counters *counters,
                       ember_error error)
{
    ember_residency *residency = &model->residency;
    ember_store_config config = {
        .layout = model->program.experts,
        .positions = residency->positions,
        .bank_experts = residency->bank_bytes / model->program.experts.expert_bytes,
        .priorities = residency->priorities,
        .counters = counters,
        .resident = model->watch.resident,
        .ahead = &model->ahead,
        .breaker = &residency->breaker,
        .routing_margin = &residency->routing_margin,
        .file = residency->file,
        .threads = residency->threads,
    };
    ember_ahead_close(&model->ahead); /* the threads of the store go on with it */
    ember_store *store = ember_store_open(&config, error);
    if (!store)
        return false;
    if (!ember_store_resize(store, slots, error)) {
        ember_store_close(store);
        return false;
    }
    residency->store = store;
    set_all_resident(model, false);
    bind_experts(model, ember_store_memory(store));
    ember_unmap(&model->sections[EMBER_EXPERTS]);
    ember_mapping_keep(&model->sections[EMBER_WEIGHTS]);
    return true;
}

int64_t ember_model_least_expert_budget(const ember_model *model)
{
    return model->program.least_slots * model->program.experts.expert_bytes;
}

ember_status ember_model_set_expert_budget(ember_model *model, int64_t bytes,
                                           ember_expert_counters *counters, char *text,
                                           size_t size)
{
    ember_error error = {text, size};
    int64_t count = expert_count(&model->program), least = ember_model_least_expert_budget(model);
    int64_t slots = count > 0 ? bytes / model->program.experts.expert_bytes : 0;
    if (bytes < least) {
        ember_fail(error, "an expert budget of %lld bytes: a step needs %d experts at once, %lld "
                          "bytes", (long long)bytes, model->program.least_slots,
                   (long long)least);
        return EMBER_REFUSED;
    }
    bool ok;
    if (slots >= count)
        ok = map_all(model, error);
    else if (model->residency.store)
        ok = ember_store_resize(model->residency.store, (int32_t)slots, error);
    else
        ok = open_store(model, (int32_t)slots, counters, error);
    return ok ? EMBER_OK : EMBER_FAILED;
}

void ember_model_expect_experts(ember_model *model, bool expects)
{
    model->residency.expects = expects;
}

void ember_model_prioritise_experts(ember_model *model, const int32_t *priorities)
{
    size_t bytes = (size_t)expert_count(&model->program) * sizeof *priorities;
    if (model->residency.store)
        ember_store_prioritise(model->residency.store, priorities);
    else if (bytes > 0)
        memcpy(model->residency.priorities, priorities, bytes);
}

ember_status ember_model_warm_experts(ember_model *model, const int32_t *experts, int64_t count,
                                      char *text, size_t size)
{
    const ember_residency *residency = &model->residency;
    int64_t bank = model->program.experts.expert_bytes > 0
                       ? residency->bank_bytes / model->program.experts.expert_bytes : 0;
    for (int64_t i = 0; i < count; i++)
        if (experts[i] < 0 || experts[i] >= expert_count(&model->program) ||
            residency->positions[experts[i]] < 0 || residency->positions[experts[i]] >= bank) {
            ember_fail((ember_error){text, size}, "expert %d to be warmed does not exist",
                       experts[i]);
            return EMBER_REFUSED;
        }
    if (residency->store)
        ember_store_warm(residency->store, experts, count);
    return EMBER_OK;
}
