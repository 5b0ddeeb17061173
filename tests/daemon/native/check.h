/* Ends a driver that finds something not as it must be. */
#ifndef EMBER_CHECK_H
#define EMBER_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#include "internal.h"

extern char message[EMBER_ERROR_BYTES]; /* of the last error of the core */

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, message); \
            exit(1); \
        } \
    } while (0)

#endif
