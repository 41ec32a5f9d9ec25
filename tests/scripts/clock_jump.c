/* Preloaded into the driver: its clock of the day is off by the seconds that a file says.
 *
 * Only programs with CLOCK_JUMP_WORD among their arguments are concerned. The monotonic clock stays,
 * as it does when somebody sets the time of a machine.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int concerned = -1;

static ssize_t content(const char *path, char *buffer, size_t size) {
  int fd = path ? open(path, O_RDONLY) : -1;
  ssize_t count = fd < 0 ? 0 : read(fd, buffer, size - 1);
  if (fd >= 0) close(fd);
  buffer[count > 0 ? count : 0] = 0;
  return count;
}

static long offset(void) {
  char buffer[1 << 14];
  if (concerned < 0) {
    const char *word = getenv("CLOCK_JUMP_WORD");
    ssize_t count = content("/proc/self/cmdline", buffer, sizeof buffer);
    concerned = word && count > 0 && memmem(buffer, count, word, strlen(word)) != NULL;
  }
  if (!concerned) return 0;
  content(getenv("CLOCK_JUMP_FILE"), buffer, sizeof buffer);
  return atol(buffer);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(clock, now);
  if (status == 0 && clock == CLOCK_REALTIME) now->tv_sec += offset();
  return status;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval *result, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  result->tv_sec = now.tv_sec;
  result->tv_usec = now.tv_nsec / 1000;
  (void)zone;
  return 0;
}
