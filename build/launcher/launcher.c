/* The head of the one file: unpacks what hangs behind it into a cache folder, once, and becomes it.
 *
 * The file is   this program | archive | footer   (build/pack.py writes it; the footer's layout is in both).
 * The archive is a ustar, compressed by zstd or not. The folder it goes to is named after the archive's hash, so a later
 * start, or the start of another copy of the same release, only looks at that folder and execs. One process all along:
 * whoever started the file watches, signals and waits for the very process that serves.
 *
 * Who writes where (a "base" is a folder that holds such folders):
 *   - a base is used if it is ours, nobody else may write to it, and programs may be run from it;
 *   - BASE/HASH/ is complete: it was renamed there from BASE/.HASH.PID.NS/ after a sync;
 *   - a shared flock on BASE/HASH stays open through exec: while it is held, the folder is in use;
 *   - an exclusive flock on BASE is held while unpacking, so that of many first starts one works and the others wait;
 *     one that has waited for long enough unpacks too, which does no harm.
 *
 * Linked statically: the messages below must appear where the rest could not even be loaded. Hence no getpwuid and
 * nothing else that loads libraries. Exit code 126 for everything that goes wrong here.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "archive.h"
#include "glibc.h"

/* The tests compile these to other values. */
#ifndef SELF_EXE
#define SELF_EXE "/proc/self/exe"
#endif
#ifndef PATIENCE_MS
#define PATIENCE_MS 10000   /* for another start that unpacks; then we unpack too */
#endif
#ifndef SHARED_FOLDERS
#define SHARED_FOLDERS "/var/tmp", getenv("TMPDIR"), "/tmp", "/dev/shm"
#endif

#define PROGRAM "kvstream"
#define MAGIC "KVSTREAM-PACK-3"
#define HASH 32             /* hexadecimal digits in a folder's name */
#define NAME (HASH + 48)    /* of what is unfinished, or about to be deleted: .HASH.PID.NANOSECONDS */
#define BASES_MAX 8
#define OVERFLOW_UID 65534  /* in a user namespace: everybody who has no number in it, root mostly */
#define EXIT_HERE 126

struct footer {             /* the last 144 bytes of the file, little-endian; glibc is the N of the 2.N it needs, or 0 */
    uint64_t offset, length, raw, files, bytes, zstd, glibc;
    char hash[64];
    uint64_t check;         /* FNV-1a of what stands before it: the archive has a checksum, and so must what tells of it */
    char magic[16];
};

struct base {
    char path[PATH_MAX];
    size_t given;           /* the first characters of the path: that folder must be there, we make those below it */
    size_t owned;           /* the first characters of the path: that folder must be ours or root's, if it is there */
    int shared;             /* lies in a folder where everybody may make names */
    int fd;
    char why[160];          /* not usable: the reason */
};

static struct footer footer;
static const unsigned char *file_start;
static char hash[HASH + 1], file_path[PATH_MAX];

static int because(struct base *base, const char *format, ...) {
    va_list words;
    va_start(words, format);
    vsnprintf(base->why, sizeof base->why, format, words);
    va_end(words);
    return -1;
}

static void end(const char *format, ...) {
    va_list words;
    va_start(words, format);
    fprintf(stderr, PROGRAM ": ");
    vfprintf(stderr, format, words);
    fputc('\n', stderr);
    va_end(words);
    exit(EXIT_HERE);
}

/* --- the file itself ------------------------------------------------------------------------------------------- */

static void absolute(char *into, const char *path) {
    char here[PATH_MAX] = "";
    if (path[0] != '/' && getcwd(here, sizeof here) == NULL)
        end("%.60s: this path is relative, and the folder it is meant from is gone", path);
    if (snprintf(into, PATH_MAX, "%s%s%s", path[0] == '/' ? "" : here, path[0] == '/' ? "" : "/", path) >= PATH_MAX)
        end("%.60s...: this path is too long", path);
}

/* Returns whether the kernel could tell where the program is: not without /proc. */
static int find_self(void) {
    char link[PATH_MAX];
    ssize_t length = readlink(SELF_EXE, link, sizeof link - 1);
    const char *by_kernel = (const char *)getauxval(AT_EXECFN);
    link[length > 0 ? length : 0] = 0;
    absolute(file_path, length > 0 ? link : by_kernel ? by_kernel : "");
    return length > 0;
}

static uint64_t footer_check(void) {
    uint64_t sum = 0xcbf29ce484222325u;
    for (size_t n = 0; n < offsetof(struct footer, check); n++)
        sum = (sum ^ ((const unsigned char *)&footer)[n]) * 0x100000001b3u;
    return sum;
}

static void open_self(int kernel_knows) {
    int fd = open(kernel_knows ? SELF_EXE : file_path, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (fd < 0 || fstat(fd, &about) < 0)
        end("cannot read its own file %s: %s", file_path, strerror(errno));
    size_t size = (size_t)about.st_size;
    if (size > sizeof footer) {
        void *mapped = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (mapped == MAP_FAILED)
            end("cannot read its own file %s: %s", file_path, strerror(errno));
        file_start = mapped;
        memcpy(&footer, file_start + size - sizeof footer, sizeof footer);
    }
    close(fd);
    if (memcmp(footer.magic, MAGIC, sizeof footer.magic) != 0 || footer.offset > size || footer.length > size
        || footer.offset + footer.length + sizeof footer != size)
        end("%s is not whole: %zu bytes are there and its end is missing. Download it again.", file_path, size);
    if (footer_check() != footer.check)
        end("%s is damaged. Download it again.", file_path);
    memcpy(hash, footer.hash, HASH);
}

static void check_glibc(void) {
    unsigned here = 0;
    const char *place = footer.glibc == 0 ? NULL : glibc_too_old((unsigned)footer.glibc, &here);
    if (place != NULL)
        end("this file needs glibc 2.%u or newer, and this system has 2.%u (%s). kvstream.pyz runs with any glibc, on "
            "Python 3.11 or newer.", (unsigned)footer.glibc, here, place);
}

/* --- folders --------------------------------------------------------------------------------------------------- */

static int ours(const struct stat *about) {
    return S_ISDIR(about->st_mode) && about->st_uid == geteuid() && (about->st_mode & 022) == 0;
}

/* mkdir -p below what is given. On failure errno is that of the first level that could not be made: it tells most. */
static int make_path(const struct base *base) {
    char level[PATH_MAX];
    struct stat about;
    snprintf(level, sizeof level, "%s", base->path);
    for (char *slash = level + base->given;; *slash = '/') {
        slash = strchr(slash + 1, '/');
        if (slash != NULL)
            *slash = 0;
        if (mkdir(level, slash == NULL ? 0700 : 0755) < 0 && errno != EEXIST) {
            int failed = errno;
            if (stat(level, &about) < 0) {
                errno = failed;
                return -1;
            }
        }
        if (slash == NULL)
            return 0;
    }
}

/* Whether somebody else could put another folder in a base's place between our look at it and the exec: the environment
 * may be of another user (sudo -E), and so the home. What root does there would also be in that user's way. */
static int in_others_hands(struct base *base) {
    char folder[PATH_MAX];
    struct stat about;
    snprintf(folder, sizeof folder, "%.*s", (int)base->owned, base->path);
    if (base->owned == 0 || stat(folder, &about) < 0)
        return 0;
    if (about.st_uid != geteuid() && about.st_uid != 0 && about.st_uid != OVERFLOW_UID)
        return because(base, "%.100s belongs to another user", folder);
    if (base->shared && (about.st_mode & 022) != 0 && (about.st_mode & S_ISVTX) == 0)
        return because(base, "in %.80s anybody may rename anything (not sticky)", folder);
    return 0;
}

/* Opens a base. In a shared folder its own name must not be a link: somebody else may have made it. Elsewhere it may:
 * systemd's CACHE_DIRECTORY is one under DynamicUser. */
static int open_base(struct base *base, int make) {
    struct stat about;
    if (in_others_hands(base) < 0)
        return -1;
    if (make && make_path(base) < 0)
        return because(base, "%s", strerror(errno));
    base->fd = open(base->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | (base->shared ? O_NOFOLLOW : 0));
    if (base->fd < 0)
        return because(base, "%s", base->shared && errno == ENOTDIR ? "is a link, or not a folder" : strerror(errno));
    if (fstat(base->fd, &about) < 0 || about.st_uid != geteuid())
        return because(base, "belongs to another user");
    if (!ours(&about))
        return because(base, "others may write to it");
    return 0;
}

static int may_unpack(struct base *base) {
    struct statvfs about;
    uint64_t wanted = footer.bytes + 4096 * footer.files;
    if (fstatvfs(base->fd, &about) < 0)
        return because(base, "%s", strerror(errno));
    if (about.f_flag & ST_NOEXEC)
        return because(base, "no program may be run from there (mounted noexec)");
    uint64_t room = (uint64_t)about.f_bavail * about.f_frsize;
    if (room < wanted)
        return because(base, "too small: %llu MB are free", (unsigned long long)(room / 1000000));
    return 0;
}

/* A descriptor of BASE/HASH, locked as in use, if it is there, with all that is to be in it, and can be used; else -1.
 * It goes on through exec. Files go missing: folders for everybody are cleaned by the system, and ~/.cache by tools. */
static int enter(const struct base *base) {
    struct stat opened, named;
    uint64_t files = 0, bytes = 0;
    int fd = openat(base->fd, hash, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (fd < 0)
        return -1;
    flock(fd, LOCK_SH); /* waits for one who deletes it; on a file system without locks we go without */
    int usable = fstat(fd, &opened) == 0 && ours(&opened) && fstatat(base->fd, hash, &named, AT_SYMLINK_NOFOLLOW) == 0
                 && named.st_ino == opened.st_ino && faccessat(fd, PROGRAM, X_OK, 0) == 0;
    if (usable) {
        archive_count(openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), &files, &bytes);
        usable = files == footer.files && bytes == footer.bytes;
    }
    if (usable)
        return fd;
    close(fd);
    return -1;
}

/* A name that no other start has, on any machine or in any container that shares the base. */
static void make_name(char into[NAME], const char *digits) {
    struct timespec now = {0, 0};
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(into, NAME, ".%.*s.%d.%ld", HASH, digits, (int)getpid(), now.tv_nsec);
}

static void take_away(const struct base *base, const char *name) {
    char gone[NAME];
    make_name(gone, name + (name[0] == '.'));
    if (renameat(base->fd, name, base->fd, gone) == 0)
        archive_delete(base->fd, gone);
}

/* Folders of other releases that nobody uses, and what starts that were killed left behind. */
static void clean(const struct base *base) {
    DIR *folder = fdopendir(openat(base->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    struct dirent *entry;
    struct stat about;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        const char *name = entry->d_name, *digits = name + (name[0] == '.');
        int named_so = strspn(digits, "0123456789abcdef") == HASH && digits[HASH] == (name[0] == '.' ? '.' : 0);
        if (!named_so || strcmp(name, hash) == 0)
            continue;
        int fd = openat(base->fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd >= 0 && fstat(fd, &about) == 0 && ours(&about) && flock(fd, LOCK_EX | LOCK_NB) == 0)
            take_away(base, name);
        if (fd >= 0)
            close(fd);
    }
    if (folder != NULL)
        closedir(folder);
}

/* The base's lock, or 0 after a while, or at once on a file system that has none. */
static int lock_base(const struct base *base) {
    const struct timespec nap = {0, 20000000};
    for (int waited = 0; flock(base->fd, LOCK_EX | LOCK_NB) < 0; waited += 20) {
        if (errno != EWOULDBLOCK || waited >= PATIENCE_MS)
            return 0;
        nanosleep(&nap, NULL);
    }
    return 1;
}

/* The archive into BASE/NAME, on the disk, and then to BASE/HASH, unless that can be entered by now. */
static int unpack(struct base *base, const char *name) {
    int folder, failed, entered;
    if (mkdirat(base->fd, name, 0700) < 0
        || (folder = openat(base->fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0)
        return because(base, "%s", strerror(errno));
    flock(folder, LOCK_EX | LOCK_NB); /* so that nobody's clean() takes it for left behind */
    failed = archive_unpack(file_start + footer.offset, footer.length, footer.raw, footer.zstd != 0, folder);
    if (failed == 0 && syncfs(folder) < 0)
        failed = errno;
    if (failed != 0)
        archive_delete(base->fd, name);
    if (failed == ARCHIVE_DAMAGED)
        end("%s is damaged. Download it again.", file_path);
    if (failed == ENOSYS)
        end("%s is compressed, and its launcher was built without zstd", file_path);
    if (failed == 0 && (entered = enter(base)) >= 0) {
        close(entered);
    } else if (failed == 0) { /* what stands in the way, if anything, is of no use */
        take_away(base, hash);
        failed = renameat(base->fd, name, base->fd, hash) < 0 ? errno : 0;
    }
    close(folder);
    return failed == 0 ? 0 : because(base, "%s", strerror(failed));
}

/* BASE/HASH as of enter(), unpacked if need be. */
static int settle(struct base *base) {
    char name[NAME];
    int locked = lock_base(base), entered = enter(base);
    if (entered >= 0)
        return entered;
    if (may_unpack(base) < 0) { /* for want of what starts that were killed have left here, maybe */
        if (locked)
            clean(base);
        if (may_unpack(base) < 0)
            return -1;
    }
    make_name(name, hash);
    mode_t mask = umask(022);
    void (*too_large)(int) = signal(SIGXFSZ, SIG_IGN); /* ulimit -f: an error that is said, and no death */
    int unpacked = unpack(base, name);
    archive_delete(base->fd, name); /* there only if somebody was faster, or it could not be renamed */
    signal(SIGXFSZ, too_large);
    umask(mask);
    if (unpacked == 0 && (entered = enter(base)) < 0)
        because(base, "what was unpacked there cannot be used");
    if (locked && entered >= 0)
        clean(base);
    return entered;
}

/* --- the whole ------------------------------------------------------------------------------------------------- */

/* `below` is empty where the folder itself was chosen for this. */
static void add_base(struct base *bases, int *count, int shared, const char *folder, const char *below) {
    struct base *base = &bases[*count];
    if (folder == NULL || folder[0] != '/' || *count == BASES_MAX)
        return;
    base->shared = shared, base->fd = -1;
    base->owned = below[0] == '/' ? strlen(folder) : 0;
    base->given = base->owned;
    if (snprintf(base->path, PATH_MAX, shared ? "%s%s-%u" : "%s%s", folder, below, (unsigned)geteuid()) < PATH_MAX / 2)
        *count += 1;
}

static int bases_here(struct base bases[BASES_MAX]) {
    const char *named = getenv("KVSTREAM_CACHE_DIR"), *systemd = getenv("CACHE_DIRECTORY");
    const char *xdg = getenv("XDG_CACHE_HOME"), *shared[] = {SHARED_FOLDERS};
    char path[PATH_MAX];
    int count = 0;
    if (named != NULL && named[0] != 0) {
        absolute(path, named);
        add_base(bases, &count, 0, path, "");
        if (count == 0)
            end("%.60s...: this path is too long", path);
        return count;
    }
    if (systemd != NULL) { /* several are divided by colons; the first will do */
        snprintf(path, sizeof path, "%.*s", (int)strcspn(systemd, ":"), systemd);
        add_base(bases, &count, 0, path, "");
    }
    int before = count, is_xdg = xdg != NULL && xdg[0] == '/';
    add_base(bases, &count, 0, is_xdg ? xdg : getenv("HOME"), is_xdg ? "/" PROGRAM : "/.cache/" PROGRAM);
    if (is_xdg && count > before)
        bases[before].given = 0; /* may be made, where a home may not */
    for (size_t n = 0; n < sizeof shared / sizeof *shared; n++)
        add_base(bases, &count, 1, shared[n], "/" PROGRAM);
    return count;
}

/* Becomes the program. Comes back only if that fails. `fd` keeps the folder in use. */
static void become(struct base *base, int fd, char **argv, int kernel_knows) {
    static char program[PATH_MAX + HASH + 16];
    snprintf(program, sizeof program, "%s/%s/" PROGRAM, base->path, hash);
    setenv("KVSTREAM_FILE", file_path, 1);
    if (!kernel_knows) /* the program will not find its own folder by asking the kernel either: tell it by its name */
        argv[0] = program;
    execv(program, argv);
    if (errno == ENOENT)
        end("%s cannot be started: this system has no glibc (or not for this processor)", program);
    because(base, "cannot be run from there: %s", strerror(errno));
    close(fd);
}

/* Descriptors 0 to 2 are open in what we become: a lock on one of them would be taken for the standard output. */
static void open_standard(void) {
    int fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO)
        fd = open("/dev/null", O_RDWR);
    if (fd >= 0)
        close(fd);
}

int main(int argc, char **argv) {
    static struct base bases[BASES_MAX];
    open_standard();
    int fd, kernel_knows = find_self();
    (void)argc;
    if (getuid() != geteuid())
        end("%s is setuid, and takes folders from whoever starts it: take that away (chmod u-s)", file_path);
    open_self(kernel_knows);
    check_glibc();
    int count = bases_here(bases);
    for (int n = 0; n < count; n++) {
        if (open_base(&bases[n], 0) == 0 && (fd = enter(&bases[n])) >= 0)
            become(&bases[n], fd, argv, kernel_knows);
        if (bases[n].fd >= 0)
            close(bases[n].fd);
        bases[n].why[0] = 0;
    }
    for (int n = 0; n < count; n++)
        if (open_base(&bases[n], 1) == 0 && (fd = settle(&bases[n])) >= 0)
            become(&bases[n], fd, argv, kernel_knows);
    fprintf(stderr, PROGRAM ": found no place to unpack itself to (%llu MB, once):\n",
            (unsigned long long)((footer.bytes + 999999) / 1000000));
    for (int n = 0; n < count; n++)
        fprintf(stderr, "  %s: %s\n", bases[n].path, bases[n].why);
    end("give it one: KVSTREAM_CACHE_DIR=a folder of yours from which programs may be run");
}
