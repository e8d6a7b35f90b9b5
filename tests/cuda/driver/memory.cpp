// Device, managed and pinned memory: one range of addresses, guard zones, poison, nothing reused before a reset.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>

#include "state.h"

namespace sim {
namespace {

struct Arena {
    uintptr_t begin = 0, next = 0;
    std::map<uintptr_t, std::unique_ptr<Alloc>> allocs;  // by base; freed ones stay, so that a late use has a name
    std::array<Alloc *, 256> recent{};  // by address: kernels go to and fro between a few
    uint32_t made = 0;
    uint64_t device = 0, host = 0;

    Arena() {
        // Always the same addresses, so that one seed replays to the byte. A taken hint only costs that.
        void *hint = reinterpret_cast<void *>(uintptr_t(0x200000000000));
        void *got = mmap(hint, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (got == MAP_FAILED) {
            perror("libcuda (simulated): no address space");
            abort();
        }
        begin = next = reinterpret_cast<uintptr_t>(got);
    }
};

Arena &arena() {
    static Arena one;
    return one;
}

size_t up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

bool fence_holds(uintptr_t begin, size_t bytes) {
    const uint8_t *p = reinterpret_cast<const uint8_t *>(begin);
    return bytes == 0 || (p[0] == kFence && memcmp(p, p + 1, bytes - 1) == 0);
}

}  // namespace

uintptr_t arena_begin() { return arena().begin; }

uint64_t used_bytes(bool host) { return host ? arena().host : arena().device; }

Alloc *allocate(size_t bytes, Memory kind, unsigned flags) {
    Arena &a = arena();
    size_t limit = size_t(setting(kind == Memory::Device ? kDeviceBytes : kHostBytes));
    uint64_t &used = kind == Memory::Device ? a.device : a.host;  // managed memory may be more than the device has
    if (bytes == 0 || bytes > limit || used + bytes > limit) return nullptr;
    size_t span = kGuard + up(bytes, kPage) + kGuard;
    if (a.next + span + kPage > a.begin + kArena) return nullptr;
    uintptr_t at = a.next;
    if (mprotect(reinterpret_cast<void *>(at), span, PROT_READ | PROT_WRITE) != 0) return nullptr;
    a.next += span + kPage;  // a page that faults lies between any two

    auto made = std::make_unique<Alloc>();
    made->id = ++a.made;
    made->base = at + kGuard;
    made->size = bytes;
    made->back = span - kGuard - bytes;
    made->kind = kind;
    made->flags = flags;
    made->context = current();
    memset(reinterpret_cast<void *>(at), kFence, kGuard);
    memset(reinterpret_cast<void *>(made->base), kFresh, bytes);
    memset(reinterpret_cast<void *>(made->end()), kFence, made->back);
    used += bytes;
    const char *peak = kind == Memory::Device ? "peak_device_bytes" : "peak_host_bytes";
    uint64_t &high = state().counters[peak];
    high = std::max(high, used);
    Alloc *result = made.get();
    a.allocs[result->base] = std::move(made);
    return result;
}

void release(Alloc *alloc) {
    Arena &a = arena();
    guards_intact("free");
    alloc->alive = false;
    (alloc->kind == Memory::Device ? a.device : a.host) -= alloc->size;
    void *at = reinterpret_cast<void *>(alloc->base - kGuard);
    size_t span = kGuard + alloc->size + alloc->back;
    if (alloc->host_visible()) {
        // The host may still look at it by mistake: let it see poison, not die.
        memset(reinterpret_cast<void *>(alloc->base), kFreed, alloc->size);
    } else {
        madvise(at, span, MADV_DONTNEED);
        mprotect(at, span, PROT_NONE);
    }
    check_forget(alloc);
    forget_sources(Range{alloc->base, alloc->end()});
}

void release_all(Context *context) {
    for (auto &[base, alloc] : arena().allocs) {
        if (!alloc->alive || (context && alloc->context != context)) continue;
        count("leaked_allocations");
        count(alloc->kind == Memory::Device ? "leaked_device_bytes" : "leaked_host_bytes", alloc->size);
        release(alloc.get());
    }
}

void forget_memory() {
    Arena &a = arena();
    void *begin = reinterpret_cast<void *>(a.begin);
    madvise(begin, a.next - a.begin, MADV_DONTNEED);
    mprotect(begin, a.next - a.begin, PROT_NONE);
    a.next = a.begin;
    a.allocs.clear();
    a.recent.fill(nullptr);
    a.made = 0;
}

Alloc *find(uintptr_t address) {
    Arena &a = arena();
    Alloc *&recent = a.recent[address / kPage % a.recent.size()];
    if (recent && address >= recent->base && address < recent->end()) return recent;
    auto after = a.allocs.upper_bound(address);
    if (after == a.allocs.begin()) return nullptr;
    Alloc *alloc = std::prev(after)->second.get();
    if (address >= alloc->end()) return nullptr;
    return recent = alloc;
}

Alloc *covering(const Range &range) {
    Alloc *alloc = find(range.begin);
    return alloc && alloc->alive && range.end <= alloc->end() ? alloc : nullptr;
}

std::string describe(uintptr_t address) {
    Arena &a = arena();
    char text[96];
    for (auto &[base, alloc] : a.allocs) {
        if (address < alloc->base - kGuard || address >= alloc->end() + alloc->back) continue;
        std::string name = alloc->label;
        if (name.empty()) {
            const char *kinds[] = {"device", "managed", "pinned"};
            snprintf(text, sizeof text, "%s#%u", kinds[int(alloc->kind)], alloc->id);
            name = text;
        }
        long offset = long(address) - long(alloc->base);
        snprintf(text, sizeof text, "%s0x%lx", offset < 0 ? "-" : "+", offset < 0 ? -offset : offset);
        const char *note = !alloc->alive ? " (freed)" : offset < 0 || size_t(offset) >= alloc->size ? " (guard)" : "";
        return name + text + note;
    }
    snprintf(text, sizeof text, "0x%lx (no allocation)", static_cast<unsigned long>(address));
    return text;
}

bool guards_intact(const char *after) {
    bool intact = true;
    for (auto &[base, alloc] : arena().allocs) {
        if (!alloc->alive) continue;
        bool front = fence_holds(base - kGuard, kGuard), back = fence_holds(alloc->end(), alloc->back);
        if (front && back) continue;
        intact = false;
        report("guard", std::string("written ") + (front ? "behind " : "before ") + describe(base) + ", seen after " +
                            after);
        memset(reinterpret_cast<void *>(base - kGuard), kFence, kGuard);
        memset(reinterpret_cast<void *>(alloc->end()), kFence, alloc->back);
    }
    return intact;
}

}  // namespace sim
