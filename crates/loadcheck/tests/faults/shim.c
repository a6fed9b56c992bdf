/* Put before the C library (LD_PRELOAD), this counts the calls of a program on the files below a path, over all of its processes, and
 * lets something happen at them. What is set in the environment:
 *
 *   SHIM_PATH            the files it is about
 *   SHIM_STATE           a file of 4096 zeros that all processes share: struct state
 *   SHIM_SIGNAL          this signal, to the whole process group, at the call of number SHIM_SIGNAL_AT
 *   SHIM_SIGNAL_WHEN_STALLED  this signal, to the whole process group, when the first such call hangs
 *   SHIM_STALL_MS        each call that moves bytes takes so long, from the call of number SHIM_STALL_AT on
 *   SHIM_STALL_BYTES     only if it asks for so many bytes
 *   SHIM_STALL_MOST      only the first so many
 *   SHIM_SHORT           no call moves more bytes than a random number up to this
 *   SHIM_EINTR_EVERY     each such call of that number is interrupted
 *   SHIM_CLOCK           the wall clock jumps to and fro by so many seconds at each look
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct state {
    _Atomic uint64_t points;
    _Atomic uint64_t fired_ns; /* CLOCK_REALTIME, when the signal was sent or the first stall began */
    _Atomic uint64_t short_reads;
    _Atomic uint64_t interrupts;
    _Atomic uint64_t stalls;
    _Atomic uint64_t clock_looks;
    _Atomic uint64_t moves;
};

static struct state nowhere, *state = &nowhere;
static const char *path;
static uint64_t signal_at, signal_number, stall_at, stall_ms, short_max, eintr_every, clock_seconds, stall_signal, stall_bytes, stall_most;

static uint64_t setting(const char *name) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : 0;
}

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("SHIM_STATE");
    path = getenv("SHIM_PATH");
    signal_at = setting("SHIM_SIGNAL_AT");
    signal_number = setting("SHIM_SIGNAL");
    stall_at = setting("SHIM_STALL_AT");
    stall_ms = setting("SHIM_STALL_MS");
    short_max = setting("SHIM_SHORT");
    eintr_every = setting("SHIM_EINTR_EVERY");
    clock_seconds = setting("SHIM_CLOCK");
    stall_bytes = setting("SHIM_STALL_BYTES");
    stall_most = setting("SHIM_STALL_MOST");
    stall_signal = setting("SHIM_SIGNAL_WHEN_STALLED");
    int fd = file ? (int)syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED) state = memory;
    close(fd);
}

#define REAL(name)                                                                                                                 \
    static __typeof__(&name) real;                                                                                                 \
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

static uint64_t now_ns(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int is_ours(int fd) {
    char link[64], target[4096];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, target, sizeof target - 1);
    errno = before;
    if (len < 0 || !path) return 0;
    target[len] = 0;
    return strncmp(target, path, strlen(path)) == 0;
}

static int is_name(const char *name) { return path && name && strncmp(name, path, strlen(path)) == 0; }

/* True for whoever is first. */
static int mark(void) {
    uint64_t none = 0;
    return atomic_compare_exchange_strong(&state->fired_ns, &none, now_ns());
}

static uint64_t point(void) {
    uint64_t number = atomic_fetch_add(&state->points, 1) + 1;
    if (signal_at && number == signal_at) {
        mark();
        kill(0, (int)signal_number);
    }
    return number;
}

/* A disk that does not answer: signals do not end the wait. */
static void stall(uint64_t number, size_t size) {
    if (!stall_ms || number < stall_at || size < stall_bytes) return;
    if (stall_most && atomic_load(&state->stalls) >= stall_most) return;
    int is_first = mark();
    atomic_fetch_add(&state->stalls, 1);
    if (is_first && stall_signal) kill(0, (int)stall_signal);
    struct timespec rest = {(time_t)(stall_ms / 1000), (long)(stall_ms % 1000) * 1000000};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {}
}

/* True if the call is to be interrupted instead of being made. */
static int interrupted(void) {
    uint64_t move = atomic_fetch_add(&state->moves, 1) + 1;
    if (!eintr_every || move % eintr_every) return 0;
    atomic_fetch_add(&state->interrupts, 1);
    errno = EINTR;
    return 1;
}

/* How many bytes are said to have arrived; what is behind them is overwritten. Whole blocks are asked for whatever comes of it: the
 * file may be read past the page cache. */
static ssize_t shortened(char *buffer, ssize_t count) {
    if (!short_max || count <= 1) return count;
    uint64_t word = atomic_load(&state->moves) * 0x9E3779B97F4A7C15;
    ssize_t kept = 1 + (ssize_t)((word ^ (word >> 29)) % short_max);
    if (kept >= count) return count;
    atomic_fetch_add(&state->short_reads, 1);
    memset(buffer + kept, 0xEE, (size_t)(count - kept));
    return kept;
}

ssize_t pread64(int fd, void *buffer, size_t size, off64_t offset) {
    REAL(pread64);
    if (!is_ours(fd)) return real(fd, buffer, size, offset);
    stall(point(), size);
    if (interrupted()) return -1;
    return shortened(buffer, real(fd, buffer, size, offset));
}

ssize_t read(int fd, void *buffer, size_t size) {
    REAL(read);
    if (!is_ours(fd)) return real(fd, buffer, size);
    stall(point(), size);
    if (interrupted()) return -1;
    return shortened(buffer, real(fd, buffer, size));
}

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long local_count, const struct iovec *remote,
                         unsigned long remote_count, unsigned long flags) {
    REAL(process_vm_readv);
    stall(point(), local->iov_len);
    if (interrupted()) return -1;
    return shortened(local->iov_base, real(pid, local, local_count, remote, remote_count, flags));
}

int open64(const char *name, int flags, ...) {
    REAL(open64);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & O_CREAT) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (is_name(name)) point();
    return real(name, flags, mode);
}

void *mmap64(void *address, size_t len, int protection, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    if (fd >= 0 && is_ours(fd)) point();
    return real(address, len, protection, flags, fd, offset);
}

struct statx;
int statx(int fd, const char *restrict name, int flags, unsigned int mask, struct statx *restrict answer) {
    REAL(statx);
    if (is_name(name) || (name && !*name && is_ours(fd))) point();
    return real(fd, name, flags, mask, answer);
}

/* Queues of reads come in this way. */
long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
    long d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_io_uring_setup || number == SYS_io_uring_register) point();
    if (number == SYS_io_uring_enter) stall(point(), SIZE_MAX);
    return real(number, a, b, c, d, e, f);
}

int clock_gettime(clockid_t clock, struct timespec *answer) {
    REAL(clock_gettime);
    int done = real(clock, answer);
    if (done == 0 && clock == CLOCK_REALTIME && clock_seconds) {
        uint64_t look = atomic_fetch_add(&state->clock_looks, 1);
        answer->tv_sec += (look % 2 ? 1 : -1) * (time_t)clock_seconds;
    }
    return done;
}
