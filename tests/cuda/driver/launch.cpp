// Module images and the running of kernels.
#include <dlfcn.h>
#include <execinfo.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

#include "state.h"

namespace sim {
namespace {

struct InLaunch {
    bool active = false;
    sigjmp_buf back;
    std::string why;
    CUresult error = CUDA_SUCCESS;
    struct sigaction previous {};
};

InLaunch &in_launch() {
    static InLaunch one;
    return one;
}

[[noreturn]] void leave(CUresult error, const std::string &why) {
    InLaunch &now = in_launch();
    now.error = error;
    now.why = why;
    siglongjmp(now.back, 1);
}

void on_access(uintptr_t address, uint32_t bytes, int kind) {
    Op &op = *state().running;
    Alloc *alloc = find(address);
    if (!alloc || !alloc->alive || address + bytes > alloc->end()) {
        const char *verb = kind == SIM_READ ? " reads " : " writes ";
        leave(CUDA_ERROR_ILLEGAL_ADDRESS, op_text(op) + verb + std::to_string(bytes) + " bytes at " + describe(address));
    }
    check_access(op, address, bytes, kind, true);
}

[[noreturn]] void on_abandon(const char *what) { leave(CUDA_ERROR_LAUNCH_FAILED, op_text(*state().running) + ": " + what); }

void on_report(const char *kind, const char *what) {
    const OpP &op = state().running;
    report(kind, (op ? op_text(*op) + ": " : std::string()) + what);
}

void on_segv(int signal, siginfo_t *info, void *) {
    InLaunch &now = in_launch();
    if (now.active) {
        char text[64];
        snprintf(text, sizeof text, " touches 0x%lx", reinterpret_cast<unsigned long>(info->si_addr));
        uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
        bool ours = address >= arena_begin() && address < arena_begin() + kArena;
        std::string where = ours ? " touches " + describe(address) : text;
        leave(CUDA_ERROR_ILLEGAL_ADDRESS, op_text(*state().running) + where);
    }
    // Not ours: say where, and let whoever was there before (Python's faulthandler) say more. gdb has been seen to hang on
    // this process.
    const char head[] = "libcuda (simulated): segmentation fault outside of a launch\n";
    if (write(2, head, sizeof head - 1) < 0) {
    }
    void *frames[64];
    backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
    sigaction(signal, &now.previous, nullptr);
}

void catch_faults() {
    thread_local std::vector<char> stack;  // a fiber that ran out of its stack cannot run a handler on it
    if (stack.empty()) {
        stack.resize(256 * 1024);
        stack_t alternate{};
        alternate.ss_sp = stack.data();
        alternate.ss_size = stack.size();
        sigaltstack(&alternate, nullptr);
    }
    struct sigaction action {};
    action.sa_sigaction = on_segv;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    static bool installed = false;
    if (installed) return;
    installed = true;
    sigaction(SIGBUS, &action, nullptr);
    sigaction(SIGSEGV, &action, &in_launch().previous);
}

const SimHost &host_table() {
    static const SimHost host = {SIM_VERSION, arena_begin(), arena_begin() + kArena, on_access,
                                 on_abandon,  on_report};
    return host;
}

}  // namespace

CUresult load_image(const void *image, Module **module) {
    const char *bytes = static_cast<const char *>(image);
    if (memcmp(bytes, "KVSIMSO1", 8) != 0) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    uint64_t size;
    memcpy(&size, bytes + 8, 8);
    static std::map<uint64_t, void *> loaded;
    void *&library = loaded[hash_bytes(reinterpret_cast<uintptr_t>(bytes + 16), size)];
    if (!library) {
        // The file stays open: its number is in the path, and to the loader the same path would be the same library.
        int file = memfd_create("kvsim-module", 0);
        for (uint64_t at = 0; at < size;) {
            ssize_t wrote = write(file, bytes + 16 + at, size - at);
            if (wrote <= 0) return CUDA_ERROR_OPERATING_SYSTEM;
            at += uint64_t(wrote);
        }
        void *opened = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!opened) {
            report("bad-module", dlerror());
            return CUDA_ERROR_INVALID_IMAGE;
        }
        auto attach = reinterpret_cast<SimAttach>(dlsym(opened, "sim_attach"));
        if (!attach || attach(&host_table()) != 0) {
            report("bad-module", "no sim_attach, or another version of sim.h");
            return CUDA_ERROR_INVALID_IMAGE;
        }
        library = opened;
    }
    auto made = std::make_unique<Module>();
    made->library = library;
    made->fault = reinterpret_cast<SimFault>(dlsym(library, "sim_fault"));
    made->context = current();
    *module = made.release();
    state().modules.insert(*module);
    return CUDA_SUCCESS;
}

CUresult find_function(Module *module, const char *name, Function **function) {
    auto known = module->functions.find(name);
    if (known == module->functions.end()) {
        auto symbol = [&](const char *prefix) { return dlsym(module->library, (std::string(prefix) + name).c_str()); };
        void *call = symbol("sim_kernel_");
        auto params = static_cast<const uint32_t *>(symbol("sim_params_"));
        if (!call || !params) return CUDA_ERROR_NOT_FOUND;
        auto made = std::make_unique<Function>();
        made->module = module;
        made->name = name;
        made->call = reinterpret_cast<SimKernel>(call);
        made->params = *params;
        made->source = reinterpret_cast<SimSource>(symbol("sim_source_"));
        if (auto shared = static_cast<const uint32_t *>(symbol("sim_static_shared_"))) made->static_shared = *shared;
        known = module->functions.emplace(name, std::move(made)).first;
        state().functions.insert(known->second.get());
    }
    *function = known->second.get();
    return CUDA_SUCCESS;
}

void close_module(Module *module) {
    State &s = state();
    for (auto &[name, function] : module->functions) s.functions.erase(function.get());
    s.modules.erase(module);
    delete module;
}

void run_kernel(Op &op, Function *function, SimLaunch launch) {
    InLaunch &now = in_launch();
    catch_faults();
    launch.name = function->name.c_str();
    launch.args = op.args.data();
    now.active = true;
    if (sigsetjmp(now.back, 1) == 0) {
        function->call(&launch);
        now.active = false;
        if (function->module->fault)
            if (const char *what = function->module->fault())
                fail_context(CUDA_ERROR_LAUNCH_FAILED, op_text(op) + ": " + what);
    } else {
        now.active = false;
        fail_context(now.error, now.why);
    }
    guards_intact(op_text(op).c_str());
}

}  // namespace sim
