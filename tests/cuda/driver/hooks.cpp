// The checked build: g++ -fsanitize=thread puts a call before every load and store of a kernel, and these functions are
// what it calls; libtsan is never linked. Each address is judged by where it lies: shared memory here (bounds, reads of
// what nobody wrote, races within the block), the driver's memory there (SimHost.access) and here for races between the
// threads of one launch, a fiber's own stack and the module's own data not at all. Everything else is a wild address.
//
// A cell of two bytes remembers its last write and two reads, one of them by another warp than the other if there is one.
// That can lose a reader, never invent one. The kernels store nothing narrower than two bytes: two threads that stored the
// two bytes of one cell would be a false alarm.
#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include <unordered_map>

#include "fibers.h"

namespace sim {
namespace {

constexpr uintptr_t CELL = 2, CHUNK = 4096, SHARED_BYTES = 232 * 1024;
constexpr size_t CHUNKS_MAX = 4000;  // of 96 KiB

struct Cell {
    Stamp write, read, other;
};
struct Chunk {
    Cell cells[CHUNK / CELL];
};

Cell shared_cells[SHARED_BYTES / CELL];
std::unordered_map<uintptr_t, Chunk *> *chunks;
uint32_t chunks_of;  // the launch, by its first block, in which the chunks were last looked through
uintptr_t last_number;
Chunk *last_chunk;
uintptr_t module_begin, module_end;

int find_module(dl_phdr_info *info, size_t, void *) {
    const uintptr_t here = reinterpret_cast<uintptr_t>(&module_begin);
    uintptr_t begin = ~uintptr_t(0), end = 0;
    for (int n = 0; n < info->dlpi_phnum; ++n) {
        const auto &part = info->dlpi_phdr[n];
        if (part.p_type != PT_LOAD) continue;
        const uintptr_t from = info->dlpi_addr + part.p_vaddr;
        begin = from < begin ? from : begin;
        end = from + part.p_memsz > end ? from + part.p_memsz : end;
    }
    if (here < begin || here >= end) return 0;
    module_begin = begin;
    module_end = end;
    return 1;
}

// `since`: what a block before that one did is over, and does not count.
bool unordered(const Stamp &before, const Stamp &at, uint32_t since) {
    if (!before.used || before.block < since) return false;
    if (before.block != at.block) return true;
    if (before.thread == at.thread || before.barrier != at.barrier) return false;
    return before.warp() != at.warp() || before.warp_step == at.warp_step;
}

void note_read(Cell &cell, const Stamp &at) {
    const bool same_warp = cell.read.block == at.block && cell.read.warp() == at.warp();
    const bool other_counts = cell.other.used && cell.other.block == at.block && cell.other.barrier == at.barrier &&
                              cell.other.warp() != at.warp();
    if (cell.read.used && !(cell.read.block == at.block && cell.read.thread == at.thread) && !(same_warp && other_counts))
        cell.other = cell.read;
    cell.read = at;
}

void check_cell(Cell &cell, const char *where, uint32_t since, uintptr_t offset, bool write, void *pc) {
    const Stamp &at = watch.at;
    const Stamp *before = unordered(cell.write, at, since) ? &cell.write : nullptr;
    const bool was_write = before != nullptr;
    if (write && !before && unordered(cell.read, at, since)) before = &cell.read;
    if (write && !before && unordered(cell.other, at, since)) before = &cell.other;
    if (before) {
        char kind[32] = "race-";
        strcat(kind, where);
        tell(kind, "block (%u %u %u): thread %u %s %s memory at byte %lu (code +0x%lx), thread %u %s it%s before, "
             "with nothing between them", now.block_index[0], now.block_index[1], now.block_index[2], at.thread,
             write ? "writes" : "reads", where, (unsigned long)offset, (unsigned long)(uintptr_t(pc) - module_begin),
             before->thread, was_write ? "wrote" : "read", before->block != at.block ? " in another block" : "");
    }
    if (write) cell.write = at;
    else note_read(cell, at);
}

void touch_shared(uintptr_t address, uintptr_t bytes, bool write, void *pc) {
    const uintptr_t end = address + bytes;
    if (end > watch.dynamic_end && address < watch.static_begin)
        stop_launch("block (%u %u %u): thread %u %s %lu bytes at byte %lu of shared memory, which has %lu (code +0x%lx)",
                    now.block_index[0], now.block_index[1], now.block_index[2], watch.at.thread,
                    write ? "writes" : "reads", (unsigned long)bytes, (unsigned long)(address - watch.shared_begin),
                    (unsigned long)(watch.dynamic_end - watch.shared_begin),
                    (unsigned long)(uintptr_t(pc) - module_begin));
    const uintptr_t first = (address - watch.shared_begin) / CELL, last = (end - 1 - watch.shared_begin) / CELL;
    for (uintptr_t n = first; n <= last; ++n) {
        Cell &cell = shared_cells[n];
        if (!write && (!cell.write.used || cell.write.block != watch.at.block))
            tell("uninit-shared", "block (%u %u %u): thread %u reads byte %lu of shared memory, which nobody has written "
                 "(code +0x%lx)", now.block_index[0], now.block_index[1], now.block_index[2], watch.at.thread,
                 (unsigned long)(n * CELL), (unsigned long)(uintptr_t(pc) - module_begin));
        check_cell(cell, "shared", watch.at.block, n * CELL, write, pc);
    }
}

Chunk *chunk_of(uintptr_t number) {
    if (chunks_of != watch.first_block) {
        chunks_of = watch.first_block;
        last_chunk = nullptr;
        if (chunks && chunks->size() > CHUNKS_MAX) {
            for (auto &[key, chunk] : *chunks) delete chunk;
            chunks->clear();
        }
    }
    if (last_chunk && number == last_number) return last_chunk;
    if (!chunks) chunks = new std::unordered_map<uintptr_t, Chunk *>();
    Chunk *&found = (*chunks)[number];
    if (!found) found = new Chunk();
    last_number = number;
    return last_chunk = found;
}

void touch(void *pointer, uintptr_t bytes, bool write, void *pc) {
    const Watch &w = watch;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (!w.active || (address >= w.stacks_begin && address < w.stacks_end)) return;
    if (address >= w.shared_begin && address < w.shared_end) return touch_shared(address, bytes, write, pc);
    if (address >= w.host->arena_begin && address < w.host->arena_end) {
        w.host->access(address, uint32_t(bytes), write ? SIM_WRITE : SIM_READ);
        for (uintptr_t at = address & ~(CELL - 1); at < address + bytes; at += CELL)
            check_cell(chunk_of(at / CHUNK)->cells[at % CHUNK / CELL], "global", w.first_block,
                       at - w.host->arena_begin, write, pc);
        return;
    }
    if (!module_begin) dl_iterate_phdr(find_module, nullptr);
    if (address >= module_begin && address < module_end) return;
    if (!write && address >= w.args_begin && address + bytes <= w.args_end) return;
    stop_launch("block (%u %u %u): thread %u %s %lu bytes at the wild address 0x%lx (code +0x%lx)", now.block_index[0],
                now.block_index[1], now.block_index[2], w.at.thread, write ? "writes" : "reads", (unsigned long)bytes,
                (unsigned long)address, (unsigned long)(uintptr_t(pc) - module_begin));
}

}  // namespace
}  // namespace sim

#define PC __builtin_return_address(0)
#define HOOKS(SIZE)                                                                           \
    void __tsan_read##SIZE(void *at) { sim::touch(at, SIZE, false, PC); }                     \
    void __tsan_write##SIZE(void *at) { sim::touch(at, SIZE, true, PC); }                     \
    void __tsan_unaligned_read##SIZE(void *at) { sim::touch(at, SIZE, false, PC); }           \
    void __tsan_unaligned_write##SIZE(void *at) { sim::touch(at, SIZE, true, PC); }           \
    void __tsan_volatile_read##SIZE(void *at) { sim::touch(at, SIZE, false, PC); }            \
    void __tsan_volatile_write##SIZE(void *at) { sim::touch(at, SIZE, true, PC); }            \
    void __tsan_unaligned_volatile_read##SIZE(void *at) { sim::touch(at, SIZE, false, PC); }  \
    void __tsan_unaligned_volatile_write##SIZE(void *at) { sim::touch(at, SIZE, true, PC); }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void *at, unsigned long bytes) { sim::touch(at, bytes, false, PC); }
void __tsan_write_range(void *at, unsigned long bytes) { sim::touch(at, bytes, true, PC); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
}
