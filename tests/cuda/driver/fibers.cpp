// See fibers.h. One block at a time; within it one fiber at a time, until it waits or ends. Who goes on is drawn from the
// launch's seed, and so is the kind of drawing: in turn, the latest first (a warp runs as far ahead of the others as the
// barriers let it), or at random. A kernel without barriers needs one fiber: whoever ends hands his to the next thread.
#include "fibers.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <string>
#include <vector>

namespace sim {

Now now;
Watch watch;

namespace {

constexpr int THREADS_MAX = 1024, LANES = 32;
constexpr size_t STACK = 128 * 1024, GUARD = 4096, SHARED_MAX = 228 * 1024, CANARY = 64;
constexpr int POISON = 0xff;  // as floats: NaN

enum State : uint8_t { NEW, READY, AT_BARRIER, AT_MEETING, ENDED };

struct Thread {
    State state;
    Meeting what;
    int fiber, line, count;
    float *values;
};

struct Static {
    const void *key;
    char *at;
};

struct Machine {
    char *stacks = nullptr;
    void *stack_pointers[THREADS_MAX];
    int fibers_made = 0;
    std::vector<int> fibers_free;

    Thread threads[THREADS_MAX];
    int thread_count, ended, at_barrier, current;
    int warp_waiting[THREADS_MAX / LANES];
    uint32_t warp_steps[THREADS_MAX / LANES];
    uint16_t ready[THREADS_MAX];  // a ring
    uint32_t ready_first, ready_count;
    enum Order { IN_TURN, LATEST, RANDOM } order;

    void *main_stack;
    void (*enter)(const void *);
    const void *args;
    uint64_t random;
    uint32_t blocks_run = 0;
    size_t shared_bytes;
    std::vector<Static> statics;
    std::vector<uint32_t> block_order;
    std::vector<std::string> told;
};

Machine machine;
alignas(4096) char arena[SHARED_MAX + 2 * CANARY];

uint64_t draw() {
    uint64_t x = (machine.random += 0x9e3779b97f4a7c15ull);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

uint32_t below(uint32_t limit) { return uint32_t((draw() >> 32) * limit >> 32); }

}  // namespace

// Saves what a call must preserve, and goes on where the other stack was left.
extern "C" void kvs_switch_stack(void **left, void *entered);
#if defined(__x86_64__)
asm(R"(
.text
.hidden kvs_switch_stack
.globl kvs_switch_stack
.type kvs_switch_stack, @function
kvs_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size kvs_switch_stack, .-kvs_switch_stack
)");
constexpr int SAVED_REGISTERS = 6;
#else
#error "the simulated driver's fibers are written for x86-64"
#endif

namespace {

void push_ready(int thread) {
    machine.threads[thread].state = machine.threads[thread].fiber < 0 ? NEW : READY;
    machine.ready[(machine.ready_first + machine.ready_count++) % THREADS_MAX] = uint16_t(thread);
}

int pop_ready() {
    if (machine.ready_count == 0) return -1;
    uint16_t *ring = machine.ready;
    const uint32_t first = machine.ready_first, last = (first + machine.ready_count - 1) % THREADS_MAX;
    if (machine.order == Machine::RANDOM)
        std::swap(ring[last], ring[(first + below(machine.ready_count)) % THREADS_MAX]);
    --machine.ready_count;
    if (machine.order != Machine::IN_TURN) return ring[last];
    machine.ready_first = (first + 1) % THREADS_MAX;
    return ring[first];
}

void set_current(int thread) {
    machine.current = thread;
    const uint32_t x = now.block_size[0], y = now.block_size[1], index = uint32_t(thread);
    now.thread_index[0] = index % x;
    now.thread_index[1] = index / x % y;
    now.thread_index[2] = index / (x * y);
    watch.at.thread = uint16_t(thread);
    watch.at.warp_step = machine.warp_steps[thread / LANES];
}

std::string who(State state, int line) {  // "threads 3 5 6 ..." in that state
    std::string text;
    int found = 0;
    for (int t = 0; t < machine.thread_count; ++t) {
        const Thread &thread = machine.threads[t];
        if (thread.state != state || (line && thread.line != line)) continue;
        if (++found <= 4) text += (text.empty() ? "" : " ") + std::to_string(t);
    }
    return std::to_string(found) + " threads (" + text + (found > 4 ? " ...)" : ")");
}

[[noreturn]] void stuck() {
    std::string text = "nobody can go on:";
    for (int t = 0; t < machine.thread_count; ++t) {
        const Thread &thread = machine.threads[t];
        const bool waits = thread.state == AT_BARRIER || thread.state == AT_MEETING;
        bool first = waits;
        for (int before = 0; before < t && first; ++before)
            first = machine.threads[before].state != thread.state || machine.threads[before].line != thread.line;
        if (first)
            text += " " + who(thread.state, thread.line) + " wait at a " +
                    (thread.state == AT_BARRIER ? "barrier" : "warp operation") + " in line " +
                    std::to_string(thread.line) + ",";
    }
    stop_launch("%s %s have ended", text.c_str(), who(ENDED, 0).c_str());
}

void fiber_main();

void prepare(int fiber) {
    void **top = reinterpret_cast<void **>(machine.stacks + size_t(fiber + 1) * (STACK + GUARD) - 64);
    *--top = nullptr;  // alignment: a function is entered with the stack 8 off a multiple of 16
    *--top = reinterpret_cast<void *>(fiber_main);
    for (int n = 0; n < SAVED_REGISTERS; ++n) *--top = nullptr;
    machine.stack_pointers[fiber] = top;
}

int take_fiber() {
    if (machine.fibers_free.empty()) {
        const int fiber = machine.fibers_made++;
        mprotect(machine.stacks + size_t(fiber) * (STACK + GUARD), GUARD, PROT_NONE);
        prepare(fiber);
        return fiber;
    }
    const int fiber = machine.fibers_free.back();
    machine.fibers_free.pop_back();
    return fiber;
}

// Leaves the stack whose pointer is kept in `left` for the thread that is next.
void go_to(int thread, void **left) {
    Thread &next = machine.threads[thread];
    if (next.fiber < 0) next.fiber = take_fiber();
    set_current(thread);
    kvs_switch_stack(left, machine.stack_pointers[next.fiber]);
}

void wait_turn() {
    const int me = machine.current, next = pop_ready();
    if (next < 0) stuck();
    if (next == me) return set_current(me);
    go_to(next, &machine.stack_pointers[machine.threads[me].fiber]);
}

void fiber_main() {
    for (;;) {
        machine.enter(machine.args);
        Thread &me = machine.threads[machine.current];
        const int fiber = me.fiber;
        me.state = ENDED;
        me.fiber = -1;
        ++machine.ended;
        const int next = pop_ready();
        if (next < 0 && machine.ended < machine.thread_count) stuck();
        if (next >= 0 && machine.threads[next].fiber < 0) {  // it has not begun: it gets this fiber
            machine.threads[next].fiber = fiber;
            set_current(next);
            continue;
        }
        machine.fibers_free.push_back(fiber);
        if (next < 0) kvs_switch_stack(&machine.stack_pointers[fiber], machine.main_stack);
        else go_to(next, &machine.stack_pointers[fiber]);
    }
}

void guard_shared() {
    memset(arena + machine.shared_bytes, 0xa5, CANARY);
    memset(arena + SHARED_MAX + CANARY, 0xa5, CANARY);
}

void check_guards() {
    for (size_t n = 0; n < CANARY; ++n)
        if (uint8_t(arena[machine.shared_bytes + n]) != 0xa5 || uint8_t(arena[SHARED_MAX + CANARY + n]) != 0xa5)
            stop_launch("writes beyond its %zu bytes of shared memory", machine.shared_bytes);
}

void run_block(uint32_t block) {
    const uint32_t x = now.grid_size[0], y = now.grid_size[1];
    now.block_index[0] = block % x;
    now.block_index[1] = block / x % y;
    now.block_index[2] = block / (x * y);
    machine.ended = machine.at_barrier = 0;
    machine.ready_first = machine.ready_count = 0;
    machine.order = Machine::Order(below(3));
    machine.statics.clear();
    memset(machine.warp_waiting, 0, sizeof machine.warp_waiting);
    memset(machine.warp_steps, 0, sizeof machine.warp_steps);
    memset(arena, POISON, machine.shared_bytes);
    guard_shared();
    watch.at.block = ++machine.blocks_run;
    watch.at.barrier = 0;
    watch.static_begin = watch.shared_end;
    for (int t = 0; t < machine.thread_count; ++t) {
        machine.threads[t].fiber = -1;
        push_ready(t);
    }
    watch.active = true;
    go_to(pop_ready(), &machine.main_stack);
    watch.active = false;
    check_guards();
}

}  // namespace

void run_grid(const SimLaunch *launch, void (*enter)(const void *)) {
    if (!machine.stacks) {
        void *got = mmap(nullptr, THREADS_MAX * (STACK + GUARD), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (got == MAP_FAILED) abort();
        machine.stacks = static_cast<char *>(got);
    }
    // The last launch may have been left in the middle: its fibers begin anew.
    machine.fibers_free.clear();
    for (int fiber = 0; fiber < machine.fibers_made; ++fiber) {
        prepare(fiber);
        machine.fibers_free.push_back(fiber);
    }
    machine.told.clear();
    machine.random = launch->seed;
    machine.enter = enter;
    machine.args = launch->args;
    machine.shared_bytes = launch->shared_bytes;
    for (int n = 0; n < 3; ++n) {
        now.grid_size[n] = launch->grid[n];
        now.block_size[n] = launch->block[n];
    }
    const uint64_t threads = uint64_t(launch->block[0]) * launch->block[1] * launch->block[2];
    const uint64_t blocks = uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2];
    watch.stacks_begin = uintptr_t(machine.stacks);
    watch.stacks_end = watch.stacks_begin + THREADS_MAX * (STACK + GUARD);
    watch.args_begin = uintptr_t(launch->args);
    watch.args_end = watch.args_begin + launch->args_bytes;
    watch.shared_begin = uintptr_t(arena);
    watch.dynamic_end = watch.shared_begin + launch->shared_bytes;
    watch.shared_end = watch.shared_begin + SHARED_MAX + CANARY;
    watch.first_block = machine.blocks_run + 1;
    watch.at.used = 1;
    if (threads < 1 || threads > THREADS_MAX) stop_launch("a block of %llu threads", (unsigned long long)threads);
    if (launch->shared_bytes > SHARED_MAX) stop_launch("%u bytes of shared memory", launch->shared_bytes);
    machine.thread_count = int(threads);
    machine.block_order.resize(blocks);
    for (uint64_t n = 0; n < blocks; ++n) machine.block_order[n] = uint32_t(n);
    for (uint64_t n = blocks; n > 1; --n)
        std::swap(machine.block_order[n - 1], machine.block_order[below(uint32_t(n))]);
    for (uint64_t n = 0; n < blocks; ++n) run_block(machine.block_order[n]);
}

void block_wait(int line) {
    Thread &me = machine.threads[machine.current];
    me.state = AT_BARRIER;
    me.line = line;
    if (++machine.at_barrier < machine.thread_count) return wait_turn();
    for (int t = 0; t < machine.thread_count; ++t)
        if (machine.threads[t].line != line)
            stop_launch("a divergent barrier: thread %d waits in line %d, thread %d in line %d", machine.current, line, t,
                        machine.threads[t].line);
    machine.at_barrier = 0;
    ++watch.at.barrier;
    for (int t = 0; t < machine.thread_count; ++t) push_ready(t);
    wait_turn();
}

namespace {

void reduce(Meeting what, Thread *lanes, int count) {
    const bool quad = what == MEET_QUAD || what == MEET_QUAD_MAX;
    for (int index = 0; index < count; ++index) {
        float value[LANES], other[LANES];
        for (int n = 0; n < LANES; ++n) value[n] = lanes[n].values[index];
        const int widest = quad ? 2 : 16;  // the tree of port.cuh: outwards in a quad, inwards in a warp
        for (int step = 1; step <= widest; step <<= 1) {
            const int apart = quad ? step : widest / step;
            for (int n = 0; n < LANES; ++n) other[n] = value[n ^ apart];
            for (int n = 0; n < LANES; ++n) {
                const float a = value[n], b = other[n];
                if (what != MEET_MAX && what != MEET_QUAD_MAX) value[n] = a + b;
                else value[n] = a != a ? b : b != b ? a : a > b ? a : b;
            }
        }
        for (int n = 0; n < LANES; ++n) lanes[n].values[index] = value[n];
    }
}

float half_in(const float *words, int index) {
    uint16_t bits;
    memcpy(&bits, reinterpret_cast<const char *>(words) + 2 * index, 2);
    _Float16 half;
    memcpy(&half, &bits, 2);
    return float(half);
}

// Where the PTX ISA puts the matrices of m16n8k16. A sum goes over k in ascending order, each product fused into it; a
// device keeps more bits within a product of four or eight and cuts the sum off, in an order of its own. So results
// differ in the last bits of f32.
void multiply(Thread *lanes) {
    float a[16][16], b[16][8], c[16][8];  // [row][k], [k][column], [row][column]
    for (int lane = 0; lane < LANES; ++lane) {
        const float *registers = lanes[lane].values;
        const int g = lane / 4, t = lane % 4;
        for (int n = 0; n < 8; ++n)  // two halves of a0, a1, a2, a3
            a[g + (n & 2 ? 8 : 0)][2 * t + (n & 1) + (n & 4 ? 8 : 0)] = half_in(registers + 4, n);
        for (int n = 0; n < 4; ++n)  // of b0, b1
            b[2 * t + (n & 1) + (n & 2 ? 8 : 0)][g] = half_in(registers + 8, n);
        for (int n = 0; n < 4; ++n) c[g + (n & 2 ? 8 : 0)][2 * t + (n & 1)] = registers[n];
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column)
                c[row][column] = __builtin_fmaf(a[row][k], b[k][column], c[row][column]);
    for (int lane = 0; lane < LANES; ++lane)
        for (int n = 0; n < 4; ++n)
            lanes[lane].values[n] = c[lane / 4 + (n & 2 ? 8 : 0)][2 * (lane % 4) + (n & 1)];
}

}  // namespace

void meet(Meeting what, float *values, int count, int line) {
    const int me = machine.current, warp = me / LANES, first = warp * LANES;
    Thread &mine = machine.threads[me];
    mine.state = AT_MEETING;
    mine.what = what;
    mine.line = line;
    mine.count = count;
    mine.values = values;
    if (first + LANES > machine.thread_count) stop_launch("a warp operation (line %d) in a warp of less than 32", line);
    if (++machine.warp_waiting[warp] < LANES) return wait_turn();
    Thread *lanes = machine.threads + first;
    for (int n = 0; n < LANES; ++n)
        if (lanes[n].line != line || lanes[n].what != what || lanes[n].count != count)
            stop_launch("a divergent warp operation: thread %d is in line %d, thread %d in line %d", me, line, first + n,
                        lanes[n].line);
    machine.warp_waiting[warp] = 0;
    if (what == MEET_SYNC) ++machine.warp_steps[warp];
    if (what == MEET_MMA) multiply(lanes);
    else if (count) reduce(what, lanes, count);
    for (int n = 0; n < LANES; ++n)
        if (first + n != me) push_ready(first + n);
    mine.state = READY;
    set_current(me);
}

void *dynamic_shared() { return arena; }

void *static_shared(const void *key, size_t bytes) {
    for (const Static &known : machine.statics)
        if (known.key == key) return known.at;
    const uintptr_t at = (watch.static_begin - bytes) & ~uintptr_t(127);
    if (at < watch.dynamic_end + CANARY) stop_launch("its shared arrays do not fit into %zu bytes", SHARED_MAX);
    watch.static_begin = at;
    memset(reinterpret_cast<void *>(at), POISON, bytes);
    machine.statics.push_back({key, reinterpret_cast<char *>(at)});
    return reinterpret_cast<void *>(at);
}

void stop_launch(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    watch.active = false;
    watch.host->abandon(text);
    abort();
}

void tell(const char *kind, const char *format, ...) {
    for (const std::string &before : machine.told)
        if (before == kind) return;
    machine.told.push_back(kind);
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    watch.host->report(kind, text);
}

}  // namespace sim

extern "C" __attribute__((visibility("default"))) int sim_attach(const SimHost *host) {
    sim::watch.host = host;
    return host->version == SIM_VERSION ? 0 : 1;
}
