/* What the core asks of the system, so that a driver can refuse it, delay it and see it. */
#ifndef EMBER_SYSTEM_H
#define EMBER_SYSTEM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

extern atomic_int failures_in_100; /* reads that fail */
extern atomic_bool delayed;        /* reads, at random */
extern atomic_int allowed; /* allocations, maps and threads until one is refused; negative: none is */
extern bool without_memfd;

/* Reads wait for a closed gate, which opens when a step of this thread waits for them. */
extern pthread_t stepping;
extern atomic_bool closed;

/* From then on, reads after the first wait until a kernel runs, and that waits until one was read. */
void demand_overlap(void);
bool has_overlapped(void);
void computing(void); /* called by a kernel that takes experts */

unsigned draw(void); /* a random number */

/* Reads are noted. */
void forget_noted(void);
/* How many reads began before the one at this offset; -1: it has not begun. */
int noted_before(off_t offset);

#endif
