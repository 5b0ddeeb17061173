/* Guards: a page of a mapped file that cannot be read fails the step that touched it, not the
 * process.
 *
 * Touching such a page (the file was cut short, the disk failed) raises SIGBUS. The handler maps
 * zeros from there to the end of the map and notes it; when the step is over, it fails, and the file
 * is mapped again. Faults outside of all guards are left to whoever handled them before. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"

enum { MAX_GUARDS = 256 };

typedef struct {
    _Atomic uintptr_t base; /* 0: free */
    _Atomic size_t bytes;
    atomic_bool damaged;
    int file;
} guard;

static guard guards[MAX_GUARDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of taking and giving back */
static struct sigaction before;
static size_t page;

/* Only what may be done in a handler: the system call itself, without the library's function. */
static bool cover(uintptr_t address)
{
    for (int i = 0; i < MAX_GUARDS; i++) {
        uintptr_t base = atomic_load(&guards[i].base), end = base + atomic_load(&guards[i].bytes);
        if (base == 0 || address < base || address >= end)
            continue;
        uintptr_t first = address / page * page;
        atomic_store(&guards[i].damaged, true);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        return syscall(SYS_mmap, first, end - first, PROT_READ, flags, -1, 0) != -1;
    }
    return false;
}

static void on_fault(int number, siginfo_t *information, void *context)
{
    (void)context;
    if (!cover((uintptr_t)information->si_addr))
        sigaction(number, &before, NULL); /* the access is made again, and faults for them */
}

static void install(void)
{
    page = (size_t)sysconf(_SC_PAGESIZE);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
}

int ember_guard(const char *base, size_t bytes, int file)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install);
    int found = 0, own = fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_GUARDS && found == 0; i++)
        if (atomic_load(&guards[i].base) == 0) {
            guards[i].file = own;
            atomic_store(&guards[i].damaged, false);
            atomic_store(&guards[i].bytes, bytes);
            atomic_store(&guards[i].base, (uintptr_t)base);
            found = i + 1;
        }
    pthread_mutex_unlock(&lock);
    if (found == 0)
        close(own);
    return found;
}

void ember_unguard(int number)
{
    if (number == 0)
        return;
    pthread_mutex_lock(&lock);
    close(guards[number - 1].file);
    atomic_store(&guards[number - 1].base, 0);
    pthread_mutex_unlock(&lock);
}

bool ember_guard_renew(int number)
{
    if (number == 0 || !atomic_load(&guards[number - 1].damaged))
        return false;
    guard *guard = &guards[number - 1];
    void *base = (void *)atomic_load(&guard->base);
    atomic_store(&guard->damaged, mmap(base, atomic_load(&guard->bytes), PROT_READ,
                                       MAP_SHARED | MAP_FIXED, guard->file, 0) == MAP_FAILED);
    return true;
}
