// What the simulated driver knows: memory, streams, operations, events, and who happens before whom.
//
// One lock (taken by `Enter`) guards all of it. Operations run inside driver calls only, on the calling thread; nothing
// here ever waits for Python, so holding the lock while PyCUDA holds the GIL cannot deadlock.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "sim.h"

namespace sim {

// --- limits and patterns ---------------------------------------------------------------------------------------------

constexpr size_t kPage = 4096, kGuard = 4096;        // guard zones before and after each allocation
constexpr size_t kArena = size_t(64) << 30;          // addresses, not memory: never reused before a reset
constexpr uint8_t kFresh = 0xCB, kFreed = 0xFD, kFence = 0xE7, kLanding = 0xD5;  // allocated, freed, guard, copy pending
constexpr int kSlots = 32, kHostSlot = 0, kNullSlot = 1;  // of vector clocks: host, default stream, other streams

// --- clocks ----------------------------------------------------------------------------------------------------------

struct Clock {
    std::array<uint32_t, kSlots> at{};
    void join(const Clock &other) {
        for (int i = 0; i < kSlots; i++) at[i] = std::max(at[i], other.at[i]);
    }
};

// --- memory ----------------------------------------------------------------------------------------------------------

enum class Memory : uint8_t { Device, Managed, Pinned };
struct Granule;
struct Context;

struct Alloc {
    uint32_t id = 0;
    uintptr_t base = 0;
    size_t size = 0, back = 0;       // bytes asked for; bytes of guard behind them
    Memory kind = Memory::Device;
    unsigned flags = 0;
    bool alive = true;
    Context *context = nullptr;
    std::string label;
    Granule *shadow = nullptr;       // made by the checker when it is first needed
    size_t shadow_bytes = 0;
    std::array<uint32_t, kSlots> used{};  // per slot the clock of the last operation that touched it
    uintptr_t end() const { return base + size; }
    bool host_visible() const { return kind != Memory::Device; }
};

struct Range {
    uintptr_t begin = 0, end = 0;
    bool overlaps(const Range &other) const { return begin < other.end && other.begin < end; }
    bool empty() const { return begin >= end; }
    size_t size() const { return empty() ? 0 : end - begin; }
};

Alloc *allocate(size_t bytes, Memory kind, unsigned flags);
void release(Alloc *alloc);
void release_all(Context *context);             // what lives in a context; null: in any
void forget_memory();                           // after release_all(nullptr): the same addresses again
Alloc *find(uintptr_t address);                 // alive or freed, guards excluded
Alloc *covering(const Range &range);            // alive and holding all of the range, or null
std::string describe(uintptr_t address);        // "pool+0x40", "freed #3+0x0", "outside"
bool guards_intact(const char *after);          // reports and repairs
uintptr_t arena_begin();
uint64_t used_bytes(bool host);

// --- operations ------------------------------------------------------------------------------------------------------

enum class Work : uint8_t { HostToDevice, DeviceToHost, DeviceToDevice, Set, Kernel, Record, Wait };
struct Stream;
struct Op;
using OpP = std::shared_ptr<Op>;
using StreamP = std::shared_ptr<Stream>;

struct Op {
    uint64_t number = 0;             // in the order of enqueueing; also the index of its entry in the checker's table
    Work work = Work::Record;
    std::string name;
    StreamP stream;
    std::vector<OpP> before;         // besides the one before it in its stream
    bool done = false;
    Clock clock;
    uint32_t tick = 0;               // its own place in its slot
    double begin_ns = 0, end_ns = 0; // virtual time
    Range reads, writes;             // what a copy or memset touches
    uint64_t hash = 0;               // of a pinned source, as it was when the copy was enqueued
    bool hashed = false;
    std::vector<uint8_t> snapshot;   // of a pageable source
    std::vector<uint8_t> args;       // of a kernel
    std::function<void(Op &)> body;
};

struct Stream {
    uint32_t id = 0;
    int slot = kNullSlot;
    bool blocking = true, alive = true;
    int priority = 0;
    double weight = 0;               // of the schedule with random priorities
    std::string label;
    std::deque<OpP> queue;
    OpP last;                        // the last one enqueued, done or not
    Context *context = nullptr;
};

struct Event {
    bool timing = true;
    OpP record;                      // the latest, or none
    Context *context = nullptr;
};

struct Context {
    unsigned flags = 0;
    bool primary = false, alive = true;
    std::map<int, size_t> limits;
};

struct Module;
struct Function {
    Module *module = nullptr;
    std::string name;
    SimKernel call = nullptr;
    SimSource source = nullptr;
    uint32_t params = 0, static_shared = 0;
    int dynamic_shared_max = 48 * 1024;
};
struct Module {
    void *library = nullptr;                        // never closed: the same image loads the same library again
    SimFault fault = nullptr;
    Context *context = nullptr;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

// --- the whole -------------------------------------------------------------------------------------------------------

enum Setting : int {
    kChecker,          // happens-before checker on or off
    kUninitialised,    // report a kernel's read of memory that nobody has written
    kTrace,            // keep the order in which operations ran
    kDeviceBytes, kHostBytes,              // what can be allocated
    kHostCallNs, kCopyNs, kCopyBytesPerUs, kKernelNs,  // virtual time
    kFailAlloc, kFailHostAlloc, kFailLaunch, kFailCopy,  // the first n succeed, the others fail; -1: none fails
    kComputeCapability,                    // 75, 90, 120
    kSettings
};
const char *setting_name(int setting);

enum class Policy : int { Uniform, Starve, Priorities, Newest, Oldest, Eager };

struct State {
    std::recursive_mutex lock;
    bool initialised = false;
    CUresult sticky = CUDA_SUCCESS;
    // schedule
    Policy policy = Policy::Uniform;
    uint64_t seed = 0, random = 1;
    double eagerness = 0, host_weight = 0, change_rate = 0;
    std::vector<StreamP> streams;    // those that live or still have work
    StreamP null_stream;
    uint64_t ops = 0;
    uint32_t streams_made = 0;
    Clock host;
    std::array<uint32_t, kSlots> ticks{};
    OpP running;
    std::vector<OpP> unlearned;      // copies from pinned memory that are done and that the host does not know to be
    // virtual time
    double host_ns = 0, engine_ns[3] = {0, 0, 0};
    // what is registered
    std::unordered_set<void *> contexts, events, modules, functions;
    std::map<void *, StreamP> stream_handles;
    Context *primary = nullptr;
    int primary_users = 0;
    // what tests ask for
    std::array<int64_t, kSettings> settings{};
    std::map<std::string, uint64_t> counters;
    std::vector<std::string> reports;
    uint64_t reports_total = 0;
    std::string trace;
};

State &state();
inline int64_t setting(Setting key) { return state().settings[key]; }
std::vector<Context *> &context_stack();  // of the calling thread
Context *current();
void count(const std::string &key, uint64_t by = 1);
void report(const std::string &kind, const std::string &what);
uint64_t random_number();
double random_unit();
bool injected_failure(Setting what);

// --- the schedule (schedule.cpp) -------------------------------------------------------------------------------------

void reseed(uint64_t seed, Policy policy);
StreamP new_stream(unsigned flags, int priority);
StreamP stream_of(CUstream handle);      // null when there is no such stream
OpP make_op(Work work, const StreamP &stream, std::string name);
void enqueue(const OpP &op, double duration_ns, int engine);
bool run_one();                          // false when nothing is ready
void run_until(const OpP &op);
void drain();
void progress();                         // what the device does by itself at the end of a driver call
bool pending_use(const Range &range, bool writes_only = false);
bool pending_args(const Alloc *alloc);
void host_learns(const OpP &op);         // the host has seen that it is done
void fail_context(CUresult error, const std::string &why);
std::string op_text(const Op &op);
void rehash_sources(const Range &written);
void forget_sources(const Range &freed);
uint64_t hash_bytes(uintptr_t begin, size_t bytes);

// --- the checker (checker.cpp) ---------------------------------------------------------------------------------------

void check_access(Op &op, uintptr_t address, size_t bytes, int kind, bool from_kernel);
void check_clear();
void check_forget(Alloc *alloc);
void check_epoch();                      // everything so far happens before everything to come
void check_op(const Op &op);             // remembers its name and clock for reports
bool ordered_before_host(const Alloc *alloc, const Clock &host);
void check_host(uintptr_t address, size_t bytes, bool writes);
void copy_initialised(uintptr_t to, uintptr_t from, size_t bytes);

// --- launches (launch.cpp) -------------------------------------------------------------------------------------------

CUresult load_image(const void *image, Module **module);
CUresult find_function(Module *module, const char *name, Function **function);
void close_module(Module *module);
void run_kernel(Op &op, Function *function, SimLaunch launch);

// --- entry to every driver call --------------------------------------------------------------------------------------

enum Need { kNothing = 0, kInit = 1, kContext = 2, kHealthy = 4 };

struct Enter {
    std::unique_lock<std::recursive_mutex> held;
    CUresult error = CUDA_SUCCESS;
    Enter(const char *name, int need);
    ~Enter() { progress(); }
};

#define ENTER(need)                     \
    sim::Enter entered(__func__, need); \
    if (entered.error != CUDA_SUCCESS) return entered.error

}  // namespace sim
