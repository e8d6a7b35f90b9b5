// Modules, functions, launches.
#include <cstdio>

#include "state.h"

using namespace sim;

namespace {

Function *function_of(CUfunction handle) {
    return state().functions.count(handle) ? reinterpret_cast<Function *>(handle) : nullptr;
}

Module *module_of(CUmodule handle) { return state().modules.count(handle) ? reinterpret_cast<Module *>(handle) : nullptr; }

CUresult load(CUmodule *result, const void *image) {
    Module *module = nullptr;
    CUresult error = load_image(image, &module);
    if (error == CUDA_SUCCESS) *result = reinterpret_cast<CUmodule>(module);
    return error;
}

CUresult bad_launch(const Function *function, const std::string &why) {
    report("bad-launch", function->name + ": " + why);
    return CUDA_ERROR_INVALID_VALUE;
}

// What `extra` holds: the packed arguments, which die when the call returns.
bool packed(void **extra, const void **buffer, size_t *bytes) {
    *buffer = nullptr;
    *bytes = 0;
    for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) *buffer = extra[1];
        else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) *bytes = *static_cast<size_t *>(extra[1]);
        else return false;
    }
    return true;
}

CUresult check_shape(const Function *f, const SimLaunch &l) {
    uint64_t threads = uint64_t(l.block[0]) * l.block[1] * l.block[2];
    if (!l.grid[0] || !l.grid[1] || !l.grid[2] || !threads) return bad_launch(f, "an empty grid or block");
    if (threads > 1024 || l.block[0] > 1024 || l.block[1] > 1024 || l.block[2] > 64)
        return bad_launch(f, "a block of " + std::to_string(threads) + " threads");
    if (l.grid[0] > 0x7FFFFFFFu || l.grid[1] > 65535 || l.grid[2] > 65535) return bad_launch(f, "the grid is too large");
    if (int(l.shared_bytes) > f->dynamic_shared_max || f->static_shared + l.shared_bytes > 64 * 1024)
        return bad_launch(f, std::to_string(l.shared_bytes) + " bytes of dynamic shared memory, " +
                                 std::to_string(f->dynamic_shared_max) + " are allowed");
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuModuleLoadDataEx(CUmodule *result, const void *image, unsigned number, CUjit_option *options, void **values) {
    ENTER(kContext | kHealthy);
    // PyCUDA passes log buffers it has not initialised, and prints as many bytes as we say there are.
    for (unsigned i = 0; i < number; i++)
        if (options[i] == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES || options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
            values[i] = nullptr;
    return load(result, image);
}

CUresult cuModuleLoadData(CUmodule *result, const void *image) {
    ENTER(kContext | kHealthy);
    return load(result, image);
}

CUresult cuModuleLoad(CUmodule *result, const char *path) {
    ENTER(kContext | kHealthy);
    FILE *file = fopen(path, "rb");
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    std::vector<char> bytes;
    char part[65536];
    for (size_t got; (got = fread(part, 1, sizeof part, file)) > 0;) bytes.insert(bytes.end(), part, part + got);
    fclose(file);
    return bytes.size() > 16 ? load(result, bytes.data()) : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuModuleUnload(CUmodule handle) {
    ENTER(kContext);
    Module *module = module_of(handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    for (const StreamP &stream : state().streams)
        for (const OpP &op : stream->queue)
            if (op->work == Work::Kernel && !op->done) {
                report("module-pending", "a module is unloaded while " + op_text(*op) + " is pending");
                drain();
                close_module(module);
                return CUDA_SUCCESS;
            }
    close_module(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *result, CUmodule handle, const char *name) {
    ENTER(kContext | kHealthy);
    Module *module = module_of(handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    Function *function = nullptr;
    CUresult error = find_function(module, name, &function);
    if (error == CUDA_SUCCESS) *result = reinterpret_cast<CUfunction>(function);
    return error;
}

CUresult cuModuleGetGlobal(CUdeviceptr *, size_t *, CUmodule, const char *) {
    ENTER(kContext | kHealthy);
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
    ENTER(kContext);
    Function *function = function_of(handle);
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = int(function->static_shared); break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function->dynamic_shared_max; break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = int(setting(kComputeCapability)); break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    ENTER(kContext | kHealthy);
    Function *function = function_of(handle);
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        if (value < 0 || value > 64 * 1024 - int(function->static_shared)) return CUDA_ERROR_INVALID_VALUE;
        function->dynamic_shared_max = value;
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache) {
    ENTER(kContext | kHealthy);
    return function_of(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncSetBlockShape(CUfunction handle, int, int, int) {  // PyCUDA still calls it before each prepared launch
    ENTER(kContext | kHealthy);
    return function_of(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuLaunchKernel(CUfunction handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared_bytes, CUstream stream_handle, void **params, void **extra) {
    ENTER(kContext | kHealthy);
    Function *function = function_of(handle);
    StreamP stream = stream_of(stream_handle);
    if (!function || !stream) return CUDA_ERROR_INVALID_HANDLE;
    if (params) return CUDA_ERROR_NOT_SUPPORTED;  // their sizes are not known here; PyCUDA packs
    const void *buffer;
    size_t bytes;
    if (!packed(extra, &buffer, &bytes)) return bad_launch(function, "an unknown entry in `extra`");
    if (bytes != function->params)
        return bad_launch(function, "the arguments are packed into " + std::to_string(bytes) + " bytes, the kernel takes " +
                                        std::to_string(function->params));
    SimLaunch launch{};
    const unsigned shape[] = {gx, gy, gz, bx, by, bz};
    for (int i = 0; i < 3; i++) launch.grid[i] = shape[i], launch.block[i] = shape[3 + i];
    launch.shared_bytes = shared_bytes;
    launch.args_bytes = uint32_t(bytes);
    CUresult bad = check_shape(function, launch);
    if (bad != CUDA_SUCCESS) return bad;
    if (injected_failure(kFailLaunch)) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;

    OpP op = make_op(Work::Kernel, stream, function->name);
    const uint8_t *p = static_cast<const uint8_t *>(buffer);
    op->args.assign(p, p + bytes);
    launch.seed = (state().seed + 1) * 0x9E3779B97F4A7C15ull ^ state().ops;  // the same under every policy
    op->body = [function, launch](Op &self) { run_kernel(self, function, launch); };
    if (function->source) {
        uint64_t size = 0;
        function->source(op->args.data(), &op->reads.begin, &size);
        op->reads.end = op->reads.begin + size;
        Alloc *alloc = covering(op->reads);
        op->hashed = alloc && alloc->kind == Memory::Pinned;
        if (op->hashed) op->hash = hash_bytes(op->reads.begin, op->reads.size());
    }
    count("launches");
    count("launch:" + function->name);
    enqueue(op, double(setting(kKernelNs)), 2);
    return CUDA_SUCCESS;
}

}  // extern "C"
