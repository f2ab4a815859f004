/* A clock that can be set, for one process: CLOCK_REALTIME is ahead by what the file named in CHAOS_CLOCK says
   (nanoseconds, a 64 bit integer). Everything that measures durations has the monotonic clock, which stays. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *ahead;

void attend_clock(const char *path) {
  int file = path ? open(path, O_RDONLY) : -1;
  if (file < 0) return;
  void *found = mmap(0, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) ahead = found;
  close(file);
}

__attribute__((constructor)) static void open_clock(void) { attend_clock(getenv("CHAOS_CLOCK")); }

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (failed || !ahead || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
  long long nanos = now->tv_nsec + *ahead;
  now->tv_sec += nanos / 1000000000LL;
  now->tv_nsec = nanos % 1000000000LL;
  if (now->tv_nsec < 0) {
    now->tv_nsec += 1000000000LL;
    now->tv_sec -= 1;
  }
  return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
