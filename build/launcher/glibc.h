/* The glibc of the system, which is not ours: the launcher is linked statically. */
#ifndef KVSTREAM_GLIBC_H
#define KVSTREAM_GLIBC_H

/* The path of the system's glibc, and the N of its version 2.N in `here`, if that is older than 2.`wanted`. NULL if it
 * is new enough, or not found: the dynamic loader then has the last word. */
const char *glibc_too_old(unsigned wanted, unsigned *here);

#endif
