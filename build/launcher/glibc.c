/* Reads which glibc the system has. Without this the loader's message would come, after the unpacking, and name a symbol.
 *
 * The library is read and not asked: it cannot be loaded into a static program, and starting it costs a process. It holds
 * the names of the versions of its symbols, near its beginning, so that a look at some pages mostly suffices at each
 * start; not every version has such a name. Its own version stands further down, in the line that it prints when run.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "glibc.h"

/* Where systems keep it; the tests compile this to other values. */
#ifndef GLIBC_PLACES
#define GLIBC_PLACES "/lib/x86_64-linux-gnu/libc.so.6", "/lib/aarch64-linux-gnu/libc.so.6", "/lib64/libc.so.6", \
                     "/usr/lib64/libc.so.6", "/usr/lib/libc.so.6"
#endif
#define LINE "release version 2."

static unsigned number(const char *at, const char *end) {
    unsigned value = 0;
    while (at < end && *at >= '0' && *at <= '9' && value < 10000)
        value = value * 10 + (unsigned)(*at++ - '0');
    return value;
}

/* The N of the 2.N of the library at a path; `wanted` if it is at least that; 0 if it cannot be told. */
static unsigned version_at(const char *path, unsigned wanted) {
    char symbols[32];
    size_t length = (size_t)snprintf(symbols, sizeof symbols, "GLIBC_2.%u", wanted) + 1; /* with the 0 behind it */
    struct stat about;
    unsigned found = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    if (fstat(fd, &about) == 0 && about.st_size > 0) {
        size_t size = (size_t)about.st_size;
        char *start = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0), *line;
        if (start != MAP_FAILED) {
            if (memmem(start, size, symbols, length) != NULL)
                found = wanted;
            else if ((line = memmem(start, size, LINE, strlen(LINE))) != NULL)
                found = number(line + strlen(LINE), start + size);
            munmap(start, size);
        }
    }
    close(fd);
    return found;
}

const char *glibc_too_old(unsigned wanted, unsigned *here) {
    const char *places[] = {GLIBC_PLACES}, *old = NULL;
    for (size_t n = 0; n < sizeof places / sizeof *places; n++) {
        unsigned found = version_at(places[n], wanted);
        if (found >= wanted) /* several may lie about, and the loader knows which one it takes */
            return NULL;
        if (found != 0)
            *here = found, old = places[n];
    }
    return old;
}
