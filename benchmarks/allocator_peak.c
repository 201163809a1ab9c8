/* Counts the allocated bytes of torch's CPU allocator, which calls posix_memalign.

   All threads are counted, including those that a profiler does not record. `harness.build_counter`
   compiles this file as a shared library for LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1u << 18) /* far more than the live blocks */
static struct { uintptr_t address; long size; } known[SLOTS]; /* hash table with linear probing */
static long live_bytes, peak_bytes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned home(uintptr_t address) { return (uint32_t)(address >> 6) * 2654435761u >> 14; }

static unsigned find(uintptr_t address) {
    unsigned i = home(address);
    while (known[i].address && known[i].address != address) i = (i + 1) % SLOTS;
    return i;
}

static void add(uintptr_t address, long size) {
    pthread_mutex_lock(&lock);
    unsigned i = find(address);
    known[i].address = address;
    known[i].size = size;
    live_bytes += size;
    if (live_bytes > peak_bytes) peak_bytes = live_bytes;
    pthread_mutex_unlock(&lock);
}

/* free() also receives blocks of malloc, which are not in the table and not counted. */
static void drop(uintptr_t address) {
    pthread_mutex_lock(&lock);
    unsigned hole = find(address);
    if (known[hole].address) {
        live_bytes -= known[hole].size;
        for (unsigned i = (hole + 1) % SLOTS; known[i].address; i = (i + 1) % SLOTS) {
            unsigned from_home = (i - home(known[i].address)) % SLOTS;
            if (from_home >= (i - hole) % SLOTS) { /* move the entry into the hole */
                known[hole] = known[i];
                hole = i;
            }
        }
        known[hole].address = 0;
    }
    pthread_mutex_unlock(&lock);
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    static int (*real)(void **, size_t, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "posix_memalign");
    int failed = real(out, alignment, size);
    if (!failed && *out) add((uintptr_t)*out, (long)size);
    return failed;
}

void free(void *block) {
    static void (*real)(void *);
    if (!real) real = dlsym(RTLD_NEXT, "free");
    if (block) drop((uintptr_t)block);
    real(block);
}

void allocator_reset(void) {
    pthread_mutex_lock(&lock);
    peak_bytes = live_bytes;
    pthread_mutex_unlock(&lock);
}

long allocator_live(void) { return live_bytes; }

long allocator_peak(void) { return peak_bytes; }
