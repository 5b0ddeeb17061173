/* What the files of the expert store share.
 *
 * Everything in it is guarded by the lock of its reader threads, but for the tables, which only the
 * thread that runs a program touches. */
#ifndef EMBER_STORE_H
#define EMBER_STORE_H

#include "internal.h"

typedef struct {
    int32_t expert;  /* index; -1: free */
    bool ready;      /* else it is being read */
    uint64_t placed; /* the acquire that had it read; 0: none, it was expected or warmed */
    uint64_t used;   /* the acquire that asked for it last */
    uint64_t needed; /* the acquire that still needs it */
    ember_read_kind kind; /* of its read: NEEDED once a step has come to need it */
    bool expected;   /* it was read as such, and not used since */
    uint64_t spared; /* the acquire after which it was last expected */
} ember_slot;

typedef enum { EMBER_WAITING, EMBER_RUNNING, EMBER_FINISHED, EMBER_SKIPPED } ember_progress;

typedef struct {
    int32_t expert; /* index */
    ember_progress progress;
} ember_wanted;

struct ember_store {
    ember_store_config config;
    int64_t expert_count;
    ember_reader *reader;
    ember_mapping memory; /* room for all experts, usable up to `usable` slots */
    ember_slot *slots;
    int32_t usable;
    int32_t limit;    /* of occupied slots */
    int32_t occupied;
    int32_t *slot_of; /* by index; -1: not in memory */
    int32_t *queue;   /* a ring of slots to be read */
    int32_t queue_start, queue_count;
    int32_t reading; /* slots that are not ready */
    int32_t under_way[EMBER_READ_PAGES + 1]; /* reads, by kind */
    bool running; /* a program */
    bool waiting; /* a step */
    uint64_t *foreseen; /* by expert of a layer: the acquire after which it was last expected */
    int32_t *expected; /* experts to read when none is needed */
    int32_t expected_next, expected_count;
    int32_t *warm;   /* experts to read when nothing else is to be read */
    int32_t warm_next, warm_count;
    int64_t warm_refused; /* there was no slot for this priority */
    uint64_t warm_since;
    uint64_t clock; /* counts acquires */
    ember_wanted *wanted; /* of the current acquire, in the order of the file */
    uint64_t *seen; /* by expert of a layer: the acquire that last wanted it */
    int32_t wanted_count;
    int32_t skipped; /* of them */
    bool in_waves;   /* a part of them at a time is enough */
    bool placed;     /* all that are not skipped have slots, or had them */
    int32_t layer;
    int32_t *table;
    ember_acquired acquired;
    int32_t failed; /* an expert needed that could not be read, or -1 */
    int failed_code;
    int64_t stall;
    int64_t stall_before; /* the present step */
    int64_t began;  /* the present step, as of ember_nanoseconds */
    bool starved;   /* the last step waited for most of its time */
    int64_t patience;     /* how long this acquire waits until it skips; INT64_MAX: for ever */
};

/* ---- slots.c */
/* The slot of the expert that is worth least, of those unused since `since` whose priority is at
 * most `priority`; -1 when none may go. For what is only expected, none goes that is expected too. */
int32_t ember_store_find_victim(const ember_store *store, ember_read_kind kind, int32_t priority,
                                uint64_t since);
void ember_store_empty_slot(ember_store *store, int32_t index);
/* Gives an expert a slot to be read into; returns it, or -1 if there is none for it. */
int32_t ember_store_place(ember_store *store, int32_t expert, ember_read_kind kind,
                          int32_t priority, uint64_t since);
/* Notes for whoever watches whether an expert is in memory. */
void ember_store_set_resident(const ember_store *store, int32_t expert, bool resident);

/* ---- reads.c */
void ember_store_enqueue(ember_store *store, int32_t index); /* a slot that a step needs read */
bool ember_store_next_read(void *self, ember_read *read);    /* as in ember_read_owner */
void ember_store_read_done(void *self, const ember_read *read, int code);

/* ---- acquire.c */
/* Whether an expert that is wanted has been read. */
bool ember_store_is_ready(const ember_store *store, const ember_wanted *wanted);

/* ---- reroute.c */
/* Changes ids and weights of tokens that decode. */
void ember_store_reroute(ember_store *store);

/* ---- stall.c */
/* How long a token that is decoded may still wait until experts are skipped, in nanoseconds;
 * INT64_MAX: for ever. */
int64_t ember_store_patience(const ember_store *store);
/* Skips the wanted experts that are missing and weigh little; those left are waited for. */
void ember_store_skip(ember_store *store);
/* Points the skipped experts at one that is there, and gives their weights to the others. */
void ember_store_replace_skipped(ember_store *store);

#endif
