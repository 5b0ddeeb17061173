/* Sampling against the obvious way. */
#ifndef EMBER_SAMPLING_TESTS_H
#define EMBER_SAMPLING_TESTS_H

void test_sampling(void);

#endif
