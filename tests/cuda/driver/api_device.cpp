// Initialisation, the device, contexts, errors.
#include <algorithm>
#include <cstdio>

#include "state.h"

using namespace sim;

namespace {

const char *const kName = "KVStream simulated device";

Context *new_context(unsigned flags, bool primary) {
    auto *made = new Context;  // never freed, so that a stale handle is never taken for a new one
    made->flags = flags;
    made->primary = primary;
    state().contexts.insert(made);
    return made;
}

bool valid(CUcontext context) { return state().contexts.count(context) && reinterpret_cast<Context *>(context)->alive; }

void end_context(Context *context) {
    State &s = state();
    drain();
    for (auto it = s.stream_handles.begin(); it != s.stream_handles.end();) {
        StreamP stream = it->second;
        if (stream->context == context) {
            stream->alive = false;
            stream->last = nullptr;
            s.streams.erase(std::remove(s.streams.begin(), s.streams.end(), stream), s.streams.end());
            it = s.stream_handles.erase(it);
        } else {
            ++it;
        }
    }
    release_all(context);
    context->alive = false;
    s.contexts.erase(context);
    s.sticky = CUDA_SUCCESS;  // it was the context's
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned flags) {
    ENTER(kNothing);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    State &s = state();
    if (!s.null_stream) {
        reseed(s.seed, s.policy);
        s.null_stream = new_stream(0, 0);
    }
    s.initialised = true;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    ENTER(kNothing);
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(kInit);
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *number) {
    ENTER(kInit);
    *number = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice) {
    ENTER(kInit);
    snprintf(name, size_t(length), "%s", kName);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice) {
    ENTER(kInit);
    snprintf(id, size_t(length), "0000:00:00.0");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *) {
    ENTER(kInit);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice) {
    ENTER(kInit);
    *bytes = size_t(setting(kDeviceBytes));
    return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice) {
    ENTER(kInit);
    *major = int(setting(kComputeCapability) / 10);
    *minor = int(setting(kComputeCapability) % 10);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
    ENTER(kInit);
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7FFFFFFF; break;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 * 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 64 * 1024; break;  // the least we support
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 2; break;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 1000000; break;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 128; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = int(setting(kComputeCapability) / 10); break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = int(setting(kComputeCapability) % 10); break;
        case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: *value = 1; break;
        case CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT:
        case CU_DEVICE_ATTRIBUTE_INTEGRATED:
        case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *value = 0; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice, CUdevice) {
    ENTER(kInit);
    *can = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate(CUcontext *context, CUctxCreateParams *, unsigned flags, CUdevice device) {
    ENTER(kInit);
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    Context *made = new_context(flags, false);
    context_stack().push_back(made);
    *context = reinterpret_cast<CUcontext>(made);
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext context) {
    ENTER(kInit);
    if (!valid(context)) return CUDA_ERROR_INVALID_CONTEXT;
    auto *gone = reinterpret_cast<Context *>(context);
    if (current() == gone) context_stack().pop_back();
    end_context(gone);
    return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext context) { return cuCtxDestroy(context); }

CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(kInit);
    if (!valid(context)) return CUDA_ERROR_INVALID_CONTEXT;
    context_stack().push_back(reinterpret_cast<Context *>(context));
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER(kInit);
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context) *context = reinterpret_cast<CUcontext>(current());
    context_stack().pop_back();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(kInit);
    if (context && !valid(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (!context_stack().empty()) context_stack().pop_back();
    if (context) context_stack().push_back(reinterpret_cast<Context *>(context));
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(kInit);
    *context = reinterpret_cast<CUcontext>(current());
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(kContext);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext, unsigned *version) {
    ENTER(kInit);
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    ENTER(kContext | kHealthy);
    drain();
    for (const StreamP &stream : state().streams) host_learns(stream->last);
    check_epoch();
    return state().sticky;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    ENTER(kContext);
    *value = current()->limits[limit];
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    ENTER(kContext);
    current()->limits[limit] = value;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCacheConfig(CUfunc_cache *config) {
    ENTER(kContext);
    *config = CU_FUNC_CACHE_PREFER_NONE;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCacheConfig(CUfunc_cache) {
    ENTER(kContext);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(kContext);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) {
    ENTER(kInit);
    State &s = state();
    if (!s.primary) s.primary = new_context(0, true);
    s.primary_users++;
    *context = reinterpret_cast<CUcontext>(s.primary);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) {
    ENTER(kInit);
    State &s = state();
    if (!s.primary) return CUDA_ERROR_INVALID_CONTEXT;
    if (--s.primary_users == 0) {
        end_context(s.primary);
        s.primary = nullptr;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice, unsigned) {
    ENTER(kInit);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
    ENTER(kInit);
    *flags = 0;
    *active = state().primary != nullptr;
    return CUDA_SUCCESS;
}

struct ErrorName {
    CUresult code;
    const char *name, *text;
};

static const ErrorName *error_name(CUresult code) {
    static const ErrorName known[] = {
        {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
        {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
        {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
        {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
        {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
        {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
        {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
        {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for the simulated device"},
        {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed"},
        {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
        {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
        {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
        {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
        {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested"},
        {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
        {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not supported by the simulated driver"},
    };
    for (const ErrorName &entry : known)
        if (entry.code == code) return &entry;
    return nullptr;
}

CUresult cuGetErrorString(CUresult code, const char **text) {
    const ErrorName *found = error_name(code);
    *text = found ? found->text : "unknown error";
    return CUDA_SUCCESS;  // not INVALID_VALUE: PyCUDA prints the text without looking at the result
}

CUresult cuGetErrorName(CUresult code, const char **text) {
    const ErrorName *found = error_name(code);
    *text = found ? found->name : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

}  // extern "C"
