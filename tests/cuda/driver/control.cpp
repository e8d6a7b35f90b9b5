// What tests call by ctypes (control.py): seeds, schedules, settings, reports. Not part of CUDA.
#include <algorithm>

#include "state.h"

using namespace sim;

namespace {

int64_t derived(const std::string &key, bool *known) {
    State &s = state();
    *known = true;
    if (key == "pending") {
        size_t sum = 0;
        for (const StreamP &stream : s.streams) sum += stream->queue.size();
        return int64_t(sum);
    }
    if (key == "reports") return int64_t(s.reports_total);
    if (key == "sticky") return s.sticky;
    if (key == "device_bytes_used") return int64_t(used_bytes(false));
    if (key == "host_bytes_used") return int64_t(used_bytes(true));
    if (key == "contexts") return int64_t(s.contexts.size());
    if (key == "streams") return int64_t(s.stream_handles.size());
    if (key == "events") return int64_t(s.events.size());
    if (key == "modules") return int64_t(s.modules.size());
    if (key == "virtual_ns") return int64_t(s.host_ns);
    *known = false;
    return 0;
}

int64_t give(const std::string &text, char *buffer, int64_t size) {
    if (buffer && size > 0) {
        size_t length = std::min(text.size(), size_t(size) - 1);
        memcpy(buffer, text.data(), length);
        buffer[length] = 0;
    }
    return int64_t(text.size());
}

void drop_everything() {
    State &s = state();
    for (auto &stream : s.streams) {
        stream->queue.clear();
        stream->last = nullptr;
    }
    s.streams.clear();
    s.unlearned.clear();
    s.stream_handles.clear();
    for (void *context : s.contexts) static_cast<Context *>(context)->alive = false;
    s.contexts.clear();
    s.events.clear();  // not deleted: a record of Python's may still be asked for by its old handle
    s.modules.clear();
    s.functions.clear();
    s.primary = nullptr;
    s.primary_users = 0;
    context_stack().clear();
}

}  // namespace

extern "C" {

int sim_version(void) { return int(SIM_VERSION); }

// Everything as on the first day, except settings: memory, streams and contexts that a test left behind are dropped
// without running what they had pending, and their handles become invalid. The same addresses are handed out again.
// Returns how many contexts had been left.
int sim_reset(uint64_t seed, int policy) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    State &s = state();
    int left = int(s.contexts.size());
    drop_everything();
    release_all(nullptr);
    forget_memory();
    s.sticky = CUDA_SUCCESS;
    s.reports.clear();
    s.reports_total = 0;
    s.counters.clear();
    s.trace.clear();
    s.ops = 0;
    s.streams_made = 0;
    s.host = Clock{};
    s.ticks.fill(0);
    s.host_ns = 0;
    for (double &at : s.engine_ns) at = 0;
    check_clear();
    reseed(seed, Policy(policy));
    s.null_stream = new_stream(0, 0);
    s.null_stream->context = nullptr;
    return left;
}

// Another seed or policy from here on; nothing is lost.
void sim_schedule(uint64_t seed, int policy) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    reseed(seed, Policy(policy));
}

// How often the device goes on by itself between driver calls, instead of what the seed drew: 0 (only when the host
// waits) to 1000 (as far as it can). Uniform and starve only.
void sim_eagerness(int per_mille) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    state().eagerness = per_mille / 1000.0;
}

int sim_set(const char *key, int64_t value) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    for (int i = 0; i < kSettings; i++)
        if (key == std::string(setting_name(i))) {
            state().settings[i] = value;
            return 0;
        }
    return -1;
}

// A setting, a figure that is always known, or a counter (0 until something was counted).
int64_t sim_get(const char *key) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    for (int i = 0; i < kSettings; i++)
        if (key == std::string(setting_name(i))) return state().settings[i];
    bool known;
    int64_t value = derived(key, &known);
    if (known) return value;
    auto found = state().counters.find(key);
    return found == state().counters.end() ? 0 : int64_t(found->second);
}

// "reports", "trace", "counters": lines of text. Returns the length; writes at most size - 1 bytes and a zero.
int64_t sim_text(const char *what, char *buffer, int64_t size) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    std::string text, which(what);
    if (which == "reports")
        for (const std::string &line : state().reports) text += line + "\n";
    if (which == "trace") text = state().trace;
    if (which == "counters")
        for (auto &[key, value] : state().counters) text += key + "=" + std::to_string(value) + "\n";
    return give(text, buffer, size);
}

void sim_clear_reports(void) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    state().reports.clear();
    state().reports_total = 0;
}

void sim_clear_counters(void) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    state().counters.clear();
}

void sim_clear_sticky(void) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    state().sticky = CUDA_SUCCESS;
}

// Runs all that is pending. The host learns nothing by it: a program still has to wait before it frees or reads.
void sim_drain(void) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    drain();
}

// Runs at most `number` operations; returns how many.
int sim_step(int number) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    int ran = 0;
    while (ran < number && run_one()) ran++;
    return ran;
}

// numpy is not instrumented: a test says by this what the host is about to read or write.
void sim_host_access(uint64_t address, uint64_t bytes, int writes) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    Range range{uintptr_t(address), uintptr_t(address + bytes)};
    if (pending_use(range, !writes))
        report("host-access", std::string("the host ") + (writes ? "writes " : "reads ") + describe(address) +
                                  " while an operation on it is pending");
    else
        check_host(address, bytes, writes != 0);
}

int sim_label_stream(CUstream handle, const char *label) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    StreamP stream = stream_of(handle);
    if (!stream) return -1;
    stream->label = label;
    return 0;
}

int sim_label_memory(uint64_t address, const char *label) {
    std::lock_guard<std::recursive_mutex> held(state().lock);
    Alloc *alloc = find(address);
    if (!alloc) return -1;
    alloc->label = label;
    return 0;
}

}  // extern "C"
