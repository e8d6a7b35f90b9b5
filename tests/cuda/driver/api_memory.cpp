// Allocation, copies, memsets.
#include <algorithm>

#include "state.h"

using namespace sim;

namespace {

double copy_ns(size_t bytes) { return double(setting(kCopyNs)) + 1000.0 * double(bytes) / double(setting(kCopyBytesPerUs)); }

Range range(uintptr_t begin, size_t bytes) { return Range{begin, begin + bytes}; }
uintptr_t address(const void *p) { return reinterpret_cast<uintptr_t>(p); }

bool in_arena(uintptr_t at) { return at >= arena_begin() && at < arena_begin() + kArena; }

CUresult new_memory(CUdeviceptr *result, size_t bytes, Memory kind, unsigned flags, Setting failure) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (injected_failure(failure)) return CUDA_ERROR_OUT_OF_MEMORY;
    Alloc *made = allocate(bytes, kind, flags);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    *result = CUdeviceptr(made->base);
    return CUDA_SUCCESS;
}

// Freeing waits for the device, as the real driver does in practice, but a program that counts on it is reported.
CUresult free_memory(uintptr_t base, bool pinned) {
    Alloc *alloc = find(base);
    if (!alloc || alloc->base != base || (alloc->kind == Memory::Pinned) != pinned || !alloc->alive) {
        report("bad-free", describe(base));
        return CUDA_ERROR_INVALID_VALUE;
    }
    Clock known = state().host;
    bool pending = pending_use(range(base, alloc->size)) || pending_args(alloc);
    if (pending) report("free-pending", describe(base) + " is freed while an operation that uses it is pending");
    drain();
    if (!pending && !ordered_before_host(alloc, known))
        report("free-unsynchronised", describe(base) + " is freed, and the host has not waited for its last use");
    release(alloc);
    return CUDA_SUCCESS;
}

bool good_device_range(const Range &r, const char *what) {
    if (covering(r)) return true;
    Alloc *alloc = find(r.begin);
    report(alloc && !alloc->alive ? "use-after-free" : "out-of-bounds",
           std::string(what) + " of " + std::to_string(r.size()) + " bytes at " + describe(r.begin));
    return false;
}

// The host end of a copy: true when it is memory that the device can reach by itself, so that the copy is asynchronous.
CUresult host_end(const Range &r, const char *what, bool *pinned) {
    *pinned = false;
    if (!in_arena(r.begin)) return CUDA_SUCCESS;
    if (!good_device_range(r, what)) return CUDA_ERROR_INVALID_VALUE;
    *pinned = find(r.begin)->host_visible();
    if (*pinned) return CUDA_SUCCESS;
    report("bad-copy", std::string(what) + ": " + describe(r.begin) + " is no host memory");
    return CUDA_ERROR_INVALID_VALUE;
}

bool still_there(const Op &op, const Range &r) {
    if (!in_arena(r.begin) || covering(r)) return true;
    report("use-after-free", op_text(op) + " finds " + describe(r.begin) + " freed");
    return false;
}

void run_copy(Op &op) {
    if (!still_there(op, op.reads) || !still_there(op, op.writes)) return;
    size_t bytes = op.writes.size();
    const void *from = op.snapshot.empty() ? reinterpret_cast<const void *>(op.reads.begin) : op.snapshot.data();
    if (op.snapshot.empty()) check_access(op, op.reads.begin, bytes, SIM_READ, false);
    check_access(op, op.writes.begin, bytes, SIM_WRITE, false);
    if (op.work == Work::DeviceToDevice) copy_initialised(op.writes.begin, op.reads.begin, bytes);
    memmove(reinterpret_cast<void *>(op.writes.begin), from, bytes);
}

CUresult copy(Work work, uintptr_t to, uintptr_t from, size_t bytes, const StreamP &stream, bool host_waits) {
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (bytes == 0) return CUDA_SUCCESS;
    const char *names[] = {"h2d", "d2h", "d2d"};
    const char *name = names[int(work)];
    Range target = range(to, bytes), source = range(from, bytes);
    bool pinned = true;
    CUresult bad = CUDA_SUCCESS;
    if (work != Work::DeviceToHost && !good_device_range(target, name)) return CUDA_ERROR_INVALID_VALUE;
    if (work != Work::HostToDevice && !good_device_range(source, name)) return CUDA_ERROR_INVALID_VALUE;
    if (work == Work::HostToDevice) bad = host_end(source, name, &pinned);
    if (work == Work::DeviceToHost) bad = host_end(target, name, &pinned);
    if (bad != CUDA_SUCCESS) return bad;
    if (injected_failure(kFailCopy)) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;

    OpP op = make_op(work, stream, name);
    op->writes = target;
    op->reads = source;
    op->body = run_copy;
    count(std::string(name) + "_copies");
    count(std::string(name) + "_bytes", bytes);
    if (!pinned && !host_waits) count("pageable_copies");
    if (work == Work::HostToDevice && !pinned) {
        const uint8_t *p = reinterpret_cast<const uint8_t *>(from);
        op->snapshot.assign(p, p + bytes);
        op->reads = Range{};
    } else if (work == Work::HostToDevice && !host_waits) {
        op->hash = hash_bytes(from, bytes);
        op->hashed = true;
    } else if (work == Work::DeviceToHost && !pinned) {
        host_waits = true;  // as the real driver does with pageable memory
    }
    // Whoever reads the destination too early finds neither the old bytes nor the new ones.
    if (work == Work::DeviceToHost && !host_waits && !pending_use(target)) {
        memset(reinterpret_cast<void *>(to), kLanding, bytes);
        rehash_sources(target);
    }
    enqueue(op, copy_ns(bytes), work == Work::HostToDevice ? 0 : work == Work::DeviceToHost ? 1 : 2);
    if (host_waits) {
        run_until(op);
        host_learns(op);
    }
    return state().sticky;
}

CUresult fill(uintptr_t to, uint32_t value, size_t unit, size_t number, const StreamP &stream) {
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (number == 0) return CUDA_SUCCESS;
    Range target = range(to, unit * number);
    if (to % unit || !good_device_range(target, "memset")) return CUDA_ERROR_INVALID_VALUE;
    OpP op = make_op(Work::Set, stream, "memset");
    op->writes = target;
    op->body = [value, unit](Op &self) {
        if (!still_there(self, self.writes)) return;
        check_access(self, self.writes.begin, self.writes.size(), SIM_WRITE, false);
        for (uintptr_t at = self.writes.begin; at < self.writes.end; at += unit)
            memcpy(reinterpret_cast<void *>(at), &value, unit);  // little-endian
    };
    count("memsets");
    enqueue(op, copy_ns(target.size()), 2);
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuMemGetInfo(size_t *free, size_t *total) {
    ENTER(kContext | kHealthy);
    *total = size_t(setting(kDeviceBytes));
    *free = *total - std::min(*total, size_t(used_bytes(false)));
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *result, size_t bytes) {
    ENTER(kContext | kHealthy);
    return new_memory(result, bytes, Memory::Device, 0, kFailAlloc);
}

CUresult cuMemAllocManaged(CUdeviceptr *result, size_t bytes, unsigned flags) {
    ENTER(kContext | kHealthy);
    return new_memory(result, bytes, Memory::Managed, flags, kFailAlloc);
}

CUresult cuMemHostAlloc(void **result, size_t bytes, unsigned flags) {
    ENTER(kContext | kHealthy);
    CUdeviceptr made = 0;
    CUresult error = new_memory(&made, bytes, Memory::Pinned, flags, kFailHostAlloc);
    if (error == CUDA_SUCCESS) *result = reinterpret_cast<void *>(made);
    return error;
}

CUresult cuMemAllocHost(void **result, size_t bytes) { return cuMemHostAlloc(result, bytes, 0); }

CUresult cuMemFree(CUdeviceptr at) {
    ENTER(kContext | kHealthy);
    return at ? free_memory(at, false) : CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *p) {
    ENTER(kContext | kHealthy);
    return p ? free_memory(address(p), true) : CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr at) {
    ENTER(kContext);
    Alloc *alloc = find(at);
    if (!alloc || !alloc->alive) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = alloc->base;
    if (bytes) *bytes = alloc->size;
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *result, void *p, unsigned) {
    ENTER(kContext);
    Alloc *alloc = find(address(p));
    if (!alloc || alloc->kind != Memory::Pinned) return CUDA_ERROR_INVALID_VALUE;
    *result = address(p);
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned *flags, void *p) {
    ENTER(kContext);
    Alloc *alloc = find(address(p));
    if (!alloc || alloc->kind != Memory::Pinned) return CUDA_ERROR_INVALID_VALUE;
    *flags = alloc->flags;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr at) {
    ENTER(kContext);
    Alloc *alloc = find(at);
    if (!alloc || !alloc->alive) return CUDA_ERROR_INVALID_VALUE;
    bool pinned = alloc->kind == Memory::Pinned;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned *>(data) = pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr *>(data) = at; return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            *static_cast<unsigned *>(data) = alloc->kind == Memory::Managed;
            return CUDA_SUCCESS;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    ENTER(kContext | kHealthy);
    return copy(Work::HostToDevice, to, address(from), bytes, state().null_stream, true);
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    ENTER(kContext | kHealthy);
    return copy(Work::DeviceToHost, address(to), from, bytes, state().null_stream, true);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    ENTER(kContext | kHealthy);
    return copy(Work::DeviceToDevice, to, from, bytes, state().null_stream, false);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    ENTER(kContext | kHealthy);
    return copy(Work::HostToDevice, to, address(from), bytes, stream_of(stream), false);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(kContext | kHealthy);
    return copy(Work::DeviceToHost, address(to), from, bytes, stream_of(stream), false);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER(kContext | kHealthy);
    return copy(Work::DeviceToDevice, to, from, bytes, stream_of(stream), false);
}

CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t number) {
    ENTER(kContext | kHealthy);
    return fill(to, value, 1, number, state().null_stream);
}

CUresult cuMemsetD16(CUdeviceptr to, unsigned short value, size_t number) {
    ENTER(kContext | kHealthy);
    return fill(to, value, 2, number, state().null_stream);
}

CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t number) {
    ENTER(kContext | kHealthy);
    return fill(to, value, 4, number, state().null_stream);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t number, CUstream stream) {
    ENTER(kContext | kHealthy);
    return fill(to, value, 1, number, stream_of(stream));
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t number, CUstream stream) {
    ENTER(kContext | kHealthy);
    return fill(to, value, 2, number, stream_of(stream));
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t number, CUstream stream) {
    ENTER(kContext | kHealthy);
    return fill(to, value, 4, number, stream_of(stream));
}

CUresult cuMemAdvise(CUdeviceptr, size_t, CUmem_advise, CUmemLocation) {
    ENTER(kContext | kHealthy);
    return CUDA_SUCCESS;
}

CUresult cuMemPrefetchAsync(CUdeviceptr at, size_t bytes, CUmemLocation, unsigned, CUstream stream) {
    ENTER(kContext | kHealthy);
    if (!stream_of(stream)) return CUDA_ERROR_INVALID_HANDLE;
    return good_device_range(range(at, bytes), "prefetch") ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"
