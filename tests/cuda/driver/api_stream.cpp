// Streams and events.
#include <algorithm>

#include "state.h"

using namespace sim;

namespace {

CUresult create_stream(CUstream *result, unsigned flags, int priority) {
    if (flags & ~unsigned(CU_STREAM_NON_BLOCKING)) return CUDA_ERROR_INVALID_VALUE;
    StreamP stream = new_stream(flags, priority);
    if (!stream) return CUDA_ERROR_OUT_OF_MEMORY;
    state().stream_handles[stream.get()] = stream;
    *result = reinterpret_cast<CUstream>(stream.get());
    return CUDA_SUCCESS;
}

Event *event_of(CUevent handle) { return state().events.count(handle) ? reinterpret_cast<Event *>(handle) : nullptr; }

// A query makes the device go on a little, or a program that polls would hang.
CUresult query(const OpP &op) {
    if (op && !op->done) run_one();
    if (op && !op->done) return CUDA_ERROR_NOT_READY;
    host_learns(op);
    return state().sticky;
}

CUresult wait_for(const OpP &op) {
    run_until(op);
    host_learns(op);
    return state().sticky;
}

}  // namespace

extern "C" {

CUresult cuStreamCreate(CUstream *result, unsigned flags) {
    ENTER(kContext | kHealthy);
    return create_stream(result, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream *result, unsigned flags, int priority) {
    ENTER(kContext | kHealthy);
    return create_stream(result, flags, std::min(0, std::max(-5, priority)));
}

CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    ENTER(kContext | kHealthy);
    StreamP stream = stream_of(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream handle) {
    ENTER(kContext);
    State &s = state();
    StreamP stream = handle ? stream_of(handle) : nullptr;
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    s.stream_handles.erase(handle);
    stream->alive = false;
    if (!stream->queue.empty()) {
        count("streams_destroyed_with_work");  // allowed: the work goes on, and the stream ends with it
        return CUDA_SUCCESS;
    }
    stream->last = nullptr;
    s.streams.erase(std::remove(s.streams.begin(), s.streams.end(), stream), s.streams.end());
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    ENTER(kContext | kHealthy);
    StreamP stream = stream_of(handle);
    return stream ? wait_for(stream->last) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuStreamQuery(CUstream handle) {
    ENTER(kContext | kHealthy);
    StreamP stream = stream_of(handle);
    return stream ? query(stream->last) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
    ENTER(kContext | kHealthy);
    StreamP stream = stream_of(handle);
    Event *event = event_of(event_handle);
    if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
    count("waits");
    if (!event->record) {
        count("waits_never_recorded");
        return CUDA_SUCCESS;
    }
    OpP op = make_op(Work::Wait, stream, "wait");
    op->before.push_back(event->record);  // what was recorded last at this moment, whatever is recorded later
    enqueue(op, 0, -1);
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *result, unsigned flags) {
    ENTER(kContext | kHealthy);
    auto *event = new Event;
    event->timing = !(flags & CU_EVENT_DISABLE_TIMING);
    event->context = current();
    state().events.insert(event);
    *result = reinterpret_cast<CUevent>(event);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
    ENTER(kContext);
    Event *event = event_of(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    state().events.erase(handle);
    delete event;  // who waits for its record keeps the record
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    ENTER(kContext | kHealthy);
    Event *event = event_of(handle);
    StreamP stream = stream_of(stream_handle);
    if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
    event->record = make_op(Work::Record, stream, "record");
    count("records");
    enqueue(event->record, 0, -1);
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
    ENTER(kContext | kHealthy);
    Event *event = event_of(handle);
    return event ? query(event->record) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventSynchronize(CUevent handle) {
    ENTER(kContext | kHealthy);
    Event *event = event_of(handle);
    return event ? wait_for(event->record) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventElapsedTime(float *ms, CUevent begin_handle, CUevent end_handle) {
    ENTER(kContext | kHealthy);
    Event *begin = event_of(begin_handle), *end = event_of(end_handle);
    if (!begin || !end || !begin->timing || !end->timing || !begin->record || !end->record)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!begin->record->done || !end->record->done) return CUDA_ERROR_NOT_READY;
    *ms = float((end->record->end_ns - begin->record->end_ns) / 1e6);
    return CUDA_SUCCESS;
}

}  // extern "C"
