/* Parallel regions on the daemon's thread pool, timed one by one. */
#include <stdint.h>

#include "internal.h"

/* What a task does: so many steps of a sum that the compiler cannot leave out. */
static int work(int task, tvm_parallel_group *group, void *closure)
{
    (void)group;
    volatile uint64_t sum = (uint64_t)task;
    for (int64_t step = *(const int64_t *)closure; step > 0; step--)
        sum += (uint64_t)step;
    return 0;
}

/* `count` regions of `tasks` tasks of `steps` steps each; how long each took, i64[count]. Returns
 * 0, or -1 when one failed. */
int bench_regions(ember_pool *pool, int tasks, int64_t steps, int count, int64_t *nanoseconds)
{
    for (int region = 0; region < count; region++) {
        int64_t start = ember_nanoseconds();
        if (ember_pool_launch(pool, work, &steps, tasks) != 0)
            return -1;
        nanoseconds[region] = ember_nanoseconds() - start;
    }
    return 0;
}
