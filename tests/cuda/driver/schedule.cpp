// Streams are queues. An operation may run when the one before it in its stream has run and every event it waits for
// has been reached; which of those that may run does, and when, is decided by a seed and a policy. That is all the order
// CUDA promises, so a program that is right under every seed depends on nothing else.
#include <algorithm>
#include <cstdio>

#include "state.h"

namespace sim {
namespace {

bool ready(const StreamP &stream) {
    if (stream->queue.empty()) return false;
    for (const OpP &op : stream->queue.front()->before)
        if (!op->done) return false;
    return true;
}

std::vector<StreamP> ready_streams() {
    std::vector<StreamP> found;
    for (const StreamP &stream : state().streams)
        if (ready(stream)) found.push_back(stream);
    return found;
}

StreamP extreme(const std::vector<StreamP> &from, bool newest) {
    return *std::min_element(from.begin(), from.end(), [newest](const StreamP &a, const StreamP &b) {
        uint64_t x = a->queue.front()->number, y = b->queue.front()->number;
        return newest ? x > y : x < y;
    });
}

StreamP heaviest(const std::vector<StreamP> &from) {
    return *std::max_element(from.begin(), from.end(),
                             [](const StreamP &a, const StreamP &b) { return a->weight < b->weight; });
}

StreamP choose(std::vector<StreamP> from) {
    State &s = state();
    switch (s.policy) {
        case Policy::Newest: return extreme(from, true);
        case Policy::Oldest:
        case Policy::Eager: return extreme(from, false);
        case Policy::Priorities: {
            // Now and then the one in front falls to the back: a change point, as in probabilistic concurrency testing.
            if (random_unit() < s.change_rate) heaviest(from)->weight -= 1.0;
            return heaviest(from);
        }
        case Policy::Starve: {
            uint32_t victim = uint32_t(s.seed % std::max<uint32_t>(1, s.streams_made));
            std::vector<StreamP> others;
            for (const StreamP &stream : from)
                if (stream->id != victim) others.push_back(stream);
            if (!others.empty()) from = others;
            break;
        }
        case Policy::Uniform: break;
    }
    return from[random_number() % from.size()];
}

void check_source(const Op &op, const char *when) {
    if (hash_bytes(op.reads.begin, op.reads.size()) != op.hash)
        report("source-changed", "the host changed " + describe(op.reads.begin) + when + op_text(op));
}

void run(const StreamP &stream) {
    State &s = state();
    OpP op = stream->queue.front();
    stream->queue.pop_front();
    if (s.sticky == CUDA_SUCCESS) {
        s.running = op;
        if (setting(kTrace)) s.trace += op_text(*op) + "\n";
        if (op->hashed) {
            check_source(*op, " before it was read by ");
            op->hash = hash_bytes(op->reads.begin, op->reads.size());
            s.unlearned.push_back(op);
        }
        if (op->body) op->body(*op);
        if (!op->writes.empty()) rehash_sources(op->writes);
        s.running = nullptr;
        count("ops_run");
    }
    op->done = true;
    op->before.clear();
    op->body = nullptr;
    if (!stream->alive && stream->queue.empty()) {
        stream->last = nullptr;
        StreamP gone = stream;
        s.streams.erase(std::remove(s.streams.begin(), s.streams.end(), gone), s.streams.end());
    }
}

}  // namespace

uint64_t hash_bytes(uintptr_t begin, size_t bytes) {
    const uint8_t *p = reinterpret_cast<const uint8_t *>(begin);
    uint64_t h = 0x9E3779B97F4A7C15ull ^ bytes, word;
    for (; bytes >= 8; p += 8, bytes -= 8) {
        memcpy(&word, p, 8);
        h = (h ^ word) * 0xFF51AFD7ED558CCDull;
        h ^= h >> 29;
    }
    word = 0;
    memcpy(&word, p, bytes);
    h = (h ^ word) * 0xC4CEB9FE1A85EC53ull;
    return h ^ (h >> 32);
}

// A copy may be queued behind the one that produces its source: what the device wrote is no change by the host.
void rehash_sources(const Range &written) {
    auto again = [&written](const OpP &op) {
        if (op->hashed && op->reads.overlaps(written)) op->hash = hash_bytes(op->reads.begin, op->reads.size());
    };
    for (const StreamP &stream : state().streams)
        for (const OpP &op : stream->queue) again(op);
    for (const OpP &op : state().unlearned) again(op);
}

void forget_sources(const Range &freed) {
    auto &ops = state().unlearned;
    ops.erase(std::remove_if(ops.begin(), ops.end(), [&](const OpP &op) { return op->reads.overlaps(freed); }), ops.end());
    for (const StreamP &stream : state().streams)
        for (const OpP &op : stream->queue)
            if (op->reads.overlaps(freed)) op->hashed = false;
}

std::string op_text(const Op &op) {
    char text[64];
    const Stream &stream = *op.stream;
    snprintf(text, sizeof text, " #%llu", static_cast<unsigned long long>(op.number));
    return op.name + "(" + (stream.label.empty() ? "s" + std::to_string(stream.id) : stream.label) + text + ")";
}

void reseed(uint64_t seed, Policy policy) {
    State &s = state();
    s.seed = seed;
    s.policy = policy;
    s.random = seed * 0x9E3779B97F4A7C15ull + uint64_t(policy) + 1;
    // How much the device does by itself while the host goes on: nothing, some, much. The seed decides.
    const double choices[] = {0.0, 0.2, 0.5};
    s.eagerness = choices[random_number() % 3];
    const double rates[] = {0.01, 0.03, 0.1};
    s.change_rate = rates[random_number() % 3];
    s.host_weight = random_unit();
    for (const StreamP &stream : s.streams) stream->weight = random_unit();
}

StreamP new_stream(unsigned flags, int priority) {
    State &s = state();
    auto stream = std::make_shared<Stream>();
    stream->id = s.streams_made++;
    stream->blocking = !(flags & CU_STREAM_NON_BLOCKING);
    stream->priority = priority;
    stream->weight = random_unit();
    stream->context = current();
    bool taken[kSlots] = {true, true};
    for (const StreamP &other : s.streams) taken[other->slot] = true;
    stream->slot = kNullSlot;
    if (stream->id > 0) {  // the first one made is the default stream
        int slot = 2;
        while (slot < kSlots && taken[slot]) slot++;
        if (slot == kSlots) return nullptr;
        stream->slot = slot;
    }
    s.streams.push_back(stream);
    return stream;
}

StreamP stream_of(CUstream handle) {
    State &s = state();
    if (handle == nullptr || handle == CU_STREAM_LEGACY) return s.null_stream;
    auto found = s.stream_handles.find(handle);
    return found == s.stream_handles.end() ? nullptr : found->second;
}

OpP make_op(Work work, const StreamP &stream, std::string name) {
    auto op = std::make_shared<Op>();
    op->work = work;
    op->stream = stream;
    op->name = std::move(name);
    return op;
}

void enqueue(const OpP &op, double duration_ns, int engine) {
    State &s = state();
    Stream &stream = *op->stream;
    op->number = s.ops++;
    // The legacy default stream: it waits for all blocking streams, and they for it.
    if (op->stream == s.null_stream) {
        for (const StreamP &other : s.streams)
            if (other->blocking && other != op->stream && other->last) op->before.push_back(other->last);
    } else if (stream.blocking && s.null_stream->last) {
        op->before.push_back(s.null_stream->last);
    }
    op->clock = s.host;
    op->begin_ns = s.host_ns;
    auto after = [&op](const OpP &earlier) {
        op->clock.join(earlier->clock);
        op->begin_ns = std::max(op->begin_ns, earlier->end_ns);
    };
    if (stream.last) after(stream.last);
    for (const OpP &earlier : op->before) after(earlier);
    op->tick = ++s.ticks[stream.slot];
    op->clock.at[stream.slot] = op->tick;
    // Virtual time is fixed here, in the order of enqueueing, so that it is the same under every schedule.
    if (engine >= 0) op->begin_ns = std::max(op->begin_ns, s.engine_ns[engine]);
    op->end_ns = op->begin_ns + duration_ns;
    if (engine >= 0) s.engine_ns[engine] = op->end_ns;
    s.host_ns += double(setting(kHostCallNs));
    check_op(*op);
    stream.last = op;
    stream.queue.push_back(op);
    op->before.erase(std::remove_if(op->before.begin(), op->before.end(), [](const OpP &o) { return o->done; }),
                     op->before.end());
}

bool run_one() {
    std::vector<StreamP> from = ready_streams();
    if (from.empty()) return false;
    run(choose(from));
    return true;
}

void run_until(const OpP &op) {
    while (op && !op->done)
        if (!run_one()) {
            report("deadlock", "nothing can run, yet " + op_text(*op) + " has not run");
            return;
        }
}

void drain() {
    while (run_one()) {
    }
}

void progress() {
    State &s = state();
    if (s.running) return;
    switch (s.policy) {
        case Policy::Eager: drain(); return;
        case Policy::Newest:
        case Policy::Oldest: return;
        case Policy::Priorities:
            for (;;) {
                std::vector<StreamP> from = ready_streams();
                if (from.empty() || heaviest(from)->weight < s.host_weight) return;
                run(choose(from));
            }
        case Policy::Uniform:
        case Policy::Starve:
            while (random_unit() < s.eagerness)
                if (!run_one()) return;
    }
}

bool pending_use(const Range &range, bool writes_only) {
    for (const StreamP &stream : state().streams)
        for (const OpP &op : stream->queue)
            if (op->writes.overlaps(range) || (!writes_only && op->reads.overlaps(range))) return true;
    return false;
}

bool pending_args(const Alloc *alloc) {
    // A kernel that has not run names an allocation when one of its arguments points into it. Pages named in a table are
    // not seen here; the checker sees them when the kernel runs.
    for (const StreamP &stream : state().streams)
        for (const OpP &op : stream->queue)
            for (size_t at = 0; at + 8 <= op->args.size(); at += 8) {
                uint64_t value;
                memcpy(&value, op->args.data() + at, 8);
                if (value >= alloc->base && value < alloc->end()) return true;
            }
    return false;
}

void host_learns(const OpP &op) {
    if (!op) return;
    State &s = state();
    s.host.join(op->clock);
    s.host_ns = std::max(s.host_ns, op->end_ns);
    // A source may not change before the host knows that it was read, whether or not it has been by then: so this is
    // found under every schedule, the eager one too.
    std::vector<OpP> rest;
    for (const OpP &copy : s.unlearned)
        if (s.host.at[copy->stream->slot] >= copy->tick) check_source(*copy, " before it knew of the end of ");
        else rest.push_back(copy);
    s.unlearned.swap(rest);
}

void fail_context(CUresult error, const std::string &why) {
    State &s = state();
    report("fault", why);
    if (s.sticky == CUDA_SUCCESS) s.sticky = error;
}

}  // namespace sim
