/* Reading a map ahead: its pages are brought in in order, in large pieces, before a step touches
 * them one by one. A hint to the system would not do: it heeds the first few megabytes of one. */
#include "internal.h"

enum { PIECE_BYTES = 2 << 20 };

bool ember_ahead_next(ember_ahead *ahead, ember_read *read)
{
    int64_t left = (int64_t)ahead->mapping->bytes - ahead->next;
    if (left <= 0)
        return false;
    *read = (ember_read){
        .kind = EMBER_READ_PAGES,
        .bytes = left < PIECE_BYTES ? left : PIECE_BYTES,
        .target = ahead->mapping->base + ahead->next,
    };
    ahead->next += read->bytes;
    return true;
}

static bool next(void *self, ember_read *read)
{
    return ember_ahead_next(self, read);
}

static void done(void *self, const ember_read *read, int code)
{
    (void)self, (void)read, (void)code;
}

bool ember_ahead_open(ember_ahead *ahead, const ember_mapping *mapping, ember_error error)
{
    *ahead = (ember_ahead){.mapping = mapping};
    ahead->reader = ember_reader_open(-1, 1, 1, (ember_read_owner){ahead, next, done}, error);
    return ahead->reader;
}

void ember_ahead_close(ember_ahead *ahead)
{
    ember_reader_close(ahead->reader);
    ahead->reader = NULL;
}
