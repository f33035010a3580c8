/* A few threads that stay for the next call. */

#ifndef SHOAL_THREADS_H
#define SHOAL_THREADS_H

#include <stddef.h>

/* Call task(context, index) once for every index below num_tasks, on at most num_threads threads
   including the caller's, and return when all are done. When another caller has the threads, or
   they cannot be started, the calling thread does everything. */
void run_tasks(size_t num_tasks, size_t num_threads, void (*task)(void *, size_t), void *context);

#endif
