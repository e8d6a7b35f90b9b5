/* The archive: a ustar, compressed by zstd or not, written into a folder; and what can be done with such a folder. */
#define _GNU_SOURCE
#include "archive.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef WITH_ZSTD
#include <zstd.h>
#include <zstd_errors.h>
#endif

#define HEADER 512

struct source {             /* pulled from piece by piece */
    const unsigned char *at, *end;
    uint64_t pulled;
    void *zstd;
    size_t left;            /* 0 when a zstd frame is over, its checksum compared */
    int failed;             /* ARCHIVE_DAMAGED or an errno */
};

#ifdef WITH_ZSTD
/* One step of zstd's. */
static void decompress(struct source *source, ZSTD_outBuffer *out) {
    ZSTD_inBuffer in = {source->at, (size_t)(source->end - source->at), 0};
    size_t before = out->pos;
    source->left = ZSTD_decompressStream(source->zstd, out, &in);
    source->at += in.pos;
    if (ZSTD_isError(source->left) || (in.pos == 0 && out->pos == before))
        source->failed = ZSTD_getErrorCode(source->left) == ZSTD_error_memory_allocation ? ENOMEM : ARCHIVE_DAMAGED;
}
#endif

/* Exactly `wanted` bytes of the archive, or 0. */
static int pull(struct source *source, void *into, size_t wanted) {
#ifdef WITH_ZSTD
    if (source->zstd != NULL) {
        ZSTD_outBuffer out = {into, wanted, 0};
        while (out.pos < out.size && source->failed == 0)
            decompress(source, &out);
        source->pulled += out.pos;
        return source->failed == 0;
    }
#endif
    if (source->failed != 0 || wanted > (size_t)(source->end - source->at))
        return source->failed = ARCHIVE_DAMAGED, 0;
    memcpy(into, source->at, wanted);
    source->at += wanted, source->pulled += wanted;
    return 1;
}

static int write_file(struct source *source, int fd, uint64_t size) {
    static unsigned char buffer[1 << 20];
    uint64_t padded = (size + 511) / 512 * 512;
    for (uint64_t done = 0; done < padded;) {
        size_t part = padded - done < sizeof buffer ? (size_t)(padded - done) : sizeof buffer;
        if (!pull(source, buffer, part))
            return -1;
        size_t ours_of_it = done >= size ? 0 : size - done < part ? (size_t)(size - done) : part;
        for (size_t written = 0; written < ours_of_it;) {
            ssize_t step = write(fd, buffer + written, ours_of_it - written);
            if (step < 0)
                return -1;
            written += (size_t)step;
        }
        done += part;
    }
    return 0;
}

/* Whether a header is as pack.py wrote it: zstd's checksum comes last, and by then things would lie where a damaged name
 * leads. */
static int is_header(const unsigned char *header) {
    unsigned long sum = 0;
    for (int n = 0; n < HEADER; n++)
        sum += n >= 148 && n < 156 ? ' ' : header[n];
    return sum == strtoul((const char *)header + 148, NULL, 8);
}

/* One entry of the archive; 1 after the last. pack.py writes folders before what is in them, and no name with "..". */
static int unpack_entry(struct source *source, int into) {
    static char header[HEADER + 1]; /* and a 0, whatever stands in it */
    char name[260], link[101];
    if (!pull(source, header, HEADER))
        return -1;
    if (header[0] == 0)
        return 1;
    if (!is_header((const unsigned char *)header))
        return source->failed = ARCHIVE_DAMAGED, -1;
    snprintf(name, sizeof name, "%.155s%s%.100s", header + 345, header[345] ? "/" : "", header);
    snprintf(link, sizeof link, "%.100s", header + 157);
    mode_t mode = (mode_t)strtoul(header + 100, NULL, 8) & 0755;
    uint64_t size = strtoull(header + 124, NULL, 8);
    if (header[156] == '5')
        return mkdirat(into, name, mode);
    if (header[156] == '2')
        return symlinkat(link, into, name);
    int fd = openat(into, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    int done = fd < 0 ? -1 : write_file(source, fd, size);
    return fd >= 0 && close(fd) < 0 ? -1 : done;
}

/* Behind the last entry the archive is padded, and behind that stands zstd's checksum: all of it is pulled. */
static void pull_rest(struct source *source, uint64_t raw) {
    char rest[512];
    while (source->pulled < raw && pull(source, rest, sizeof rest))
        ;
#ifdef WITH_ZSTD
    ZSTD_outBuffer none = {rest, 0, 0};
    if (source->zstd != NULL && source->failed == 0 && source->left != 0)
        decompress(source, &none);
    if (source->left != 0 && source->failed == 0)
        source->failed = ARCHIVE_DAMAGED;
#endif
    if (source->failed == 0 && source->pulled != raw)
        source->failed = ARCHIVE_DAMAGED;
}

int archive_unpack(const unsigned char *start, uint64_t length, uint64_t raw, int zstd, int into) {
    struct source source = {start, start + length, 0, NULL, 0, 0};
    int said = 0, failed;
#ifdef WITH_ZSTD
    if (zstd && (source.zstd = ZSTD_createDStream()) == NULL)
        return ENOMEM;
#endif
    if (zstd && source.zstd == NULL)
        return ENOSYS;
    while (said == 0)
        said = unpack_entry(&source, into);
    failed = errno;
    if (said == 1)
        pull_rest(&source, raw);
#ifdef WITH_ZSTD
    ZSTD_freeDStream(source.zstd);
#endif
    return source.failed != 0 ? source.failed : said == 1 ? 0 : failed;
}

void archive_delete(int at, const char *name) {
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *folder = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0
            && unlinkat(fd, entry->d_name, 0) < 0 && (errno == EISDIR || errno == EPERM))
            archive_delete(fd, entry->d_name);
    if (folder != NULL)
        closedir(folder);
    if (unlinkat(at, name, AT_REMOVEDIR) < 0 && errno == ENOTDIR) /* somebody put a file or a link there */
        unlinkat(at, name, 0);
}

void archive_count(int folder, uint64_t *files, uint64_t *bytes) {
    DIR *open_folder = fdopendir(folder);
    struct dirent *entry;
    struct stat about;
    while (open_folder != NULL && (entry = readdir(open_folder)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0
            || fstatat(dirfd(open_folder), entry->d_name, &about, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        if (S_ISDIR(about.st_mode))
            archive_count(openat(dirfd(open_folder), entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC),
                          files, bytes);
        else
            *files += 1, *bytes += S_ISREG(about.st_mode) ? (uint64_t)about.st_size : 0;
    }
    if (open_folder != NULL)
        closedir(open_folder);
}
