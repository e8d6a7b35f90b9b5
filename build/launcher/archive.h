#include <stdint.h>

#define ARCHIVE_DAMAGED (-1)

/* Writes what is in the `length` bytes at `start`, `raw` bytes when decompressed, into the folder of the descriptor
 * `into`. Returns 0, an errno (ENOSYS: it is compressed, and zstd was not compiled in), or ARCHIVE_DAMAGED. */
int archive_unpack(const unsigned char *start, uint64_t length, uint64_t raw, int zstd, int into);

/* rm -r of `name` in the folder of the descriptor `at`; follows no links; what cannot be deleted stays. */
void archive_delete(int at, const char *name);

/* Adds up the files and links below `folder`, a descriptor that is closed, and the bytes of the files. */
void archive_count(int folder, uint64_t *files, uint64_t *bytes);
