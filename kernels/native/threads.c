/* A few threads that stay for the next call.

   Workers watch for a job for some microseconds, since the layers of a block follow each other
   closely, and then sleep. A caller never waits for a worker that sleeps: it closes the job when
   no task is left and waits only for workers that joined. Threads are detached: at exit they end
   with the process. A forked child has none of them and starts its own. */

#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

enum { MAX_WORKERS = 255, SPINS_BEFORE_SLEEP = 2000 };

typedef struct {
    void (*task)(void *, size_t);
    void *context;
    size_t num_tasks;
    size_t places; /* workers that may still join */
    atomic_size_t next;
} Job;

static pthread_mutex_t callers = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t job_came = PTHREAD_COND_INITIALIZER;
static Job job;
static atomic_uint num_jobs; /* grows with every job: what idle workers watch */
static atomic_size_t num_joined;
static size_t num_workers;
static pid_t owner;

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_tasks(void) {
    for (;;) {
        size_t index = atomic_fetch_add(&job.next, 1);
        if (index >= job.num_tasks) return;
        job.task(job.context, index);
    }
}

static void *work(void *unused) {
    (void)unused;
    unsigned seen = 0;
    for (;;) {
        for (int spin = 0; spin < SPINS_BEFORE_SLEEP && atomic_load(&num_jobs) == seen; spin++)
            pause_briefly();
        pthread_mutex_lock(&lock);
        while (atomic_load(&num_jobs) == seen) pthread_cond_wait(&job_came, &lock);
        seen = atomic_load(&num_jobs);
        bool joins = job.places > 0;
        if (joins) {
            job.places--;
            atomic_fetch_add(&num_joined, 1);
        }
        pthread_mutex_unlock(&lock);
        if (joins) {
            take_tasks();
            atomic_fetch_sub(&num_joined, 1);
        }
    }
    return NULL;
}

static void start_workers(size_t wanted) {
    if (owner != getpid()) { /* first use, or a forked child */
        owner = getpid();
        num_workers = 0;
        atomic_store(&num_joined, 0);
        pthread_mutex_init(&lock, NULL);
        pthread_cond_init(&job_came, NULL);
    }
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (num_workers < wanted && num_workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, work, NULL)) break;
        num_workers++;
    }
    pthread_attr_destroy(&detached);
}

void run_tasks(size_t num_tasks, size_t num_threads, void (*task)(void *, size_t), void *context) {
    if (num_threads > num_tasks) num_threads = num_tasks;
    if (num_threads <= 1 || pthread_mutex_trylock(&callers)) {
        for (size_t index = 0; index < num_tasks; index++) task(context, index);
        return;
    }
    start_workers(num_threads - 1);

    pthread_mutex_lock(&lock);
    job.task = task;
    job.context = context;
    job.num_tasks = num_tasks;
    job.places = num_threads - 1;
    atomic_store(&job.next, 0);
    atomic_fetch_add(&num_jobs, 1);
    pthread_cond_broadcast(&job_came);
    pthread_mutex_unlock(&lock);

    take_tasks();
    pthread_mutex_lock(&lock);
    job.places = 0;
    pthread_mutex_unlock(&lock);
    for (int spin = 0; atomic_load(&num_joined) > 0; spin++) {
        if (spin < SPINS_BEFORE_SLEEP) pause_briefly();
        else sched_yield(); /* a worker has lost its processor */
    }
    pthread_mutex_unlock(&callers);
}
