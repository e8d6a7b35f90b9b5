// The happens-before checker. Each operation has a vector clock from stream order, events, the default stream and what
// the host had seen when it enqueued it; the schedule has no part in it. Two accesses to one byte, one of them a write,
// with neither before the other, are a race, in whichever order they were run. To the byte: two streams may share a
// granule, as a row being written and the row before it being saved do.
#include <sys/mman.h>

#include <algorithm>
#include <set>

#include "state.h"

namespace sim {

constexpr size_t kUnit = 16;  // bytes per granule
constexpr int kCells = 6;     // remembered accesses per granule

struct Cell {
    uint32_t op;
    uint16_t mask;
    uint8_t kind, used;
};

struct Granule {
    uint32_t epoch;
    uint16_t initialised;
    uint16_t pad;
    Cell cells[kCells];
};

namespace {

struct Known {  // what a report says about an operation, and what ordering needs
    uint32_t tick;
    uint8_t slot;
    std::string text;
};

struct Checker {
    std::vector<Known> ops;
    uint32_t epoch = 1;
    std::set<std::string> told;  // one report per pair of operations' names and allocation
    uint64_t evicted = 0;
};

Checker &checker() {
    static Checker one;
    return one;
}

bool before(const Cell &cell, const Op &op) {
    const Known &known = checker().ops[cell.op];
    return op.clock.at[known.slot] >= known.tick;
}

Granule *shadow_of(Alloc *alloc) {
    if (!alloc->shadow) {
        size_t count = (alloc->size + kUnit - 1) / kUnit + 1;
        alloc->shadow_bytes = count * sizeof(Granule);
        void *made = mmap(nullptr, alloc->shadow_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED) return nullptr;
        alloc->shadow = static_cast<Granule *>(made);
    }
    return alloc->shadow;
}

const char *verb(int kind) { return kind == SIM_READ ? "reads" : kind == SIM_WRITE ? "writes" : "updates"; }

std::string name_of(const std::string &text) { return text.substr(0, text.rfind(" #")); }

void tell_race(const Cell &cell, const Op &op, int kind, const Alloc *alloc, uintptr_t at) {
    count("races");
    const std::string &other = checker().ops[cell.op].text, self = op_text(op);
    std::string key = name_of(other) + name_of(self) + char('0' + cell.kind) + char('0' + kind) +
                      std::to_string(alloc->id);
    if (!checker().told.insert(key).second) return;
    report("race", other + " " + verb(cell.kind) + " and " + self + " " + verb(kind) + " " + describe(at) +
                       ", neither before the other");
}

bool conflict(int a, int b) { return (a != SIM_READ || b != SIM_READ) && !(a == SIM_ATOMIC && b == SIM_ATOMIC); }

void remember(Granule &g, const Op &op, uint16_t mask, int kind) {
    Cell *free = nullptr;
    for (Cell &cell : g.cells) {
        if (!cell.used) {
            if (!free) free = &cell;
            continue;
        }
        if (cell.op == uint32_t(op.number) && cell.kind == kind) {
            cell.mask |= mask;
            return;
        }
        // What is covered by a later access that is ordered after it says nothing more: whoever is ordered after the
        // later one is ordered after it too. A read does not stand for an earlier write, nor an atomic update for a plain
        // access, because two atomic updates do not conflict.
        bool stands_for = kind == SIM_WRITE || kind == cell.kind;
        if (stands_for && cell.op != uint32_t(op.number) && before(cell, op)) {
            cell.mask &= uint16_t(~mask);
            if (!cell.mask) {
                cell.used = 0;
                if (!free) free = &cell;
            }
        }
    }
    if (!free) {
        // No room: forget a read, rather one that is ordered already. It can only cost a report, never invent one.
        checker().evicted++;
        count("checker_evictions");
        free = &g.cells[0];
        for (Cell &cell : g.cells)
            if (cell.kind == SIM_READ && before(cell, op)) free = &cell;
    }
    *free = Cell{uint32_t(op.number), mask, uint8_t(kind), 1};
}

bool already(const Granule &g, uint32_t op, uint16_t mask, int kind) {
    for (const Cell &cell : g.cells)
        if (cell.used && cell.op == op && cell.kind == kind && (cell.mask & mask) == mask) return true;
    return false;
}

void tell_uninitialised(const Op &op, const Alloc *alloc, uintptr_t at) {
    std::string key = "u" + name_of(op_text(op)) + std::to_string(alloc->id);
    if (checker().told.insert(key).second)
        report("uninitialised", op_text(op) + " reads " + describe(at) + ", which nobody has written");
}

}  // namespace

void check_access(Op &op, uintptr_t address, size_t bytes, int kind, bool from_kernel) {
    Alloc *alloc = find(address);
    if (!alloc) return;
    alloc->used[op.stream->slot] = op.tick;
    if (!setting(kChecker)) return;
    Granule *shadow = shadow_of(alloc);
    if (!shadow) return;
    const bool told_reads = from_kernel && kind != SIM_WRITE && alloc->kind != Memory::Pinned && setting(kUninitialised);
    uint32_t epoch = checker().epoch;
    size_t offset = address - alloc->base, end = offset + bytes;
    while (offset < end) {
        size_t index = offset / kUnit, from = offset % kUnit, upto = std::min(kUnit, from + (end - offset));
        uint16_t mask = uint16_t(((1u << (upto - from)) - 1) << from);
        Granule &g = shadow[index];
        if (g.epoch != epoch) {
            g.epoch = epoch;
            for (Cell &cell : g.cells) cell.used = 0;
        }
        if (!already(g, uint32_t(op.number), mask, kind)) {
            for (const Cell &cell : g.cells)
                if (cell.used && (cell.mask & mask) && cell.op != uint32_t(op.number) && conflict(cell.kind, kind) &&
                    !before(cell, op))
                    tell_race(cell, op, kind, alloc, alloc->base + offset);
            if (told_reads && (g.initialised & mask) != mask) tell_uninitialised(op, alloc, alloc->base + offset);
            remember(g, op, mask, kind);
            if (kind != SIM_READ) g.initialised |= mask;
        }
        offset += upto - from;
    }
}

void copy_initialised(uintptr_t to, uintptr_t from, size_t bytes) {
    // A copy between device addresses makes its destination exactly as initialised as its source. Called after
    // check_access has marked the destination as written.
    Alloc *target = find(to), *source = find(from);
    if (!target || !source || !target->shadow || !source->shadow || source->kind == Memory::Pinned) return;
    for (size_t i = 0; i < bytes; i++) {
        size_t s = from + i - source->base, t = to + i - target->base;
        if (!(source->shadow[s / kUnit].initialised >> (s % kUnit) & 1))
            target->shadow[t / kUnit].initialised &= uint16_t(~(1u << (t % kUnit)));
    }
}

void check_host(uintptr_t address, size_t bytes, bool writes) {
    Alloc *alloc = find(address);
    if (!alloc || !alloc->shadow || !setting(kChecker)) return;
    const Clock &host = state().host;
    for (size_t offset = address - alloc->base; offset < address - alloc->base + bytes; offset++) {
        Granule &g = alloc->shadow[offset / kUnit];
        if (g.epoch != checker().epoch) continue;
        for (const Cell &cell : g.cells) {
            if (!cell.used || !(cell.mask >> (offset % kUnit) & 1) || (cell.kind == SIM_READ && !writes)) continue;
            const Known &known = checker().ops[cell.op];
            if (host.at[known.slot] >= known.tick) continue;
            report("host-access", std::string("the host ") + (writes ? "writes " : "reads ") +
                                      describe(alloc->base + offset) + ", not ordered after " + known.text);
            return;
        }
    }
}

void check_op(const Op &op) {
    checker().ops.push_back(Known{op.tick, uint8_t(op.stream->slot), op_text(op)});
}

void check_epoch() { checker().epoch++; }

void check_clear() {
    Checker &c = checker();
    c.ops.clear();
    c.told.clear();
    c.evicted = 0;
    c.epoch++;
}

void check_forget(Alloc *alloc) {
    if (alloc->shadow) munmap(alloc->shadow, alloc->shadow_bytes);
    alloc->shadow = nullptr;
}

bool ordered_before_host(const Alloc *alloc, const Clock &host) {
    for (int slot = 0; slot < kSlots; slot++)
        if (alloc->used[slot] > host.at[slot]) return false;
    return true;
}

}  // namespace sim
