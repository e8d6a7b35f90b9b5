# Plain commands: every recipe can be copied into a shell. `just` comes with `pip install rust-just`.

python := env("PYTHON", if path_exists(".venv/bin/python") == "true" { ".venv/bin/python" } else { "python" })

# What there is
default:
    @just --list

# All tests
test *args:
    {{python}} -m pytest {{args}}

# Lint and types. There is no formatter: tables and wrapped calls are laid out by hand to be read.
check:
    {{python}} -m ruff check .
    {{python}} -m mypy

# The Hypothesis tests, long
fuzz *args:
    HYPOTHESIS_PROFILE=fuzz {{python}} -m pytest -m "not real" tests/core tests/adapters tests/test_config.py {{args}}

# The simulated runtime and its clients, many seeds
sim *args:
    SIM_RUNS="${SIM_RUNS:-60}" {{python}} -m pytest tests/sim/test_simulation.py {{args}}

# A whole gateway with every feature at once in bad weather, many seeds
storm *args:
    STORM_RUNS="${STORM_RUNS:-200}" {{python}} -m pytest tests/sim/test_storm.py {{args}}

# PyCUDA on the simulated CUDA driver, each number of seeds times CUDA_FUZZ
fuzz-cuda *args:
    CUDA_FUZZ="${CUDA_FUZZ:-20}" {{python}} -m pytest tests/cuda {{args}}

# Every fault planted in the CUDA part, and what noticed it (--json FILE, --csv FILE)
show-cuda-faults *args:
    {{python}} tests/cuda/show_faults.py {{args}}

# A real model on a real llama.cpp server
demo *args:
    {{python}} -m kvstream demo {{args}}

# Write kvstream.toml anew after a change to a key
config:
    {{python}} -m kvstream check-config --template > kvstream.toml.new
    mv kvstream.toml.new kvstream.toml

# Record the golden transcripts from the real server
record *args:
    {{python}} tests/record.py {{args}}

# What a scheduling step and a table append cost
bench-core:
    {{python}} tests/core/bench_core.py

# What the proxy adds to a request, beside a bare pass-through and LiteLLM (--litellm PATH of its executable)
bench-overhead *args:
    {{python}} tests/measure/overhead_table.py {{args}}

# Four clients on a pool that holds one: direct, all die; through KVStream, all finish
show-pool *args:
    {{python}} tests/measure/show_pool.py {{args}}

# Forty clients on four slots: the runtime's own queue stays empty
show-queue *args:
    {{python}} tests/measure/show_queue.py {{args}}

# Close a client in each phase: milliseconds until the slot is idle
show-cancel *args:
    {{python}} tests/measure/show_cancel.py {{args}}

# The soak: 10,000 streams, 1,000 of them aborted; memory, descriptors and tasks before and after
soak *args:
    {{python}} tests/measure/show_rss.py {{args}}

# Two long prompts join three streams: how long the streams stand still, directly and through KVStream
show-joining *args:
    {{python}} tests/measure/show_joining.py {{args}}

# Sixty-four clients on four slots: who is served in time, directly and through KVStream, one run of the bench
show-goodput *args:
    {{python}} tests/measure/show_goodput.py {{args}}

# Two keys, one floods: how long the other waits, in service times
show-fair *args:
    {{python}} tests/measure/show_fair.py {{args}}

# Sixteen identical requests at temperature 0: how many calls the runtime sees
show-coalesce *args:
    {{python}} tests/measure/show_coalesce.py {{args}}

# Hard inject beside direct, six measurements or those named: fanout restart turns preempt noop mixed
bench-inject *args:
    {{python}} tests/measure/show_inject.py {{args}}

# Compile the CUDA kernels for every GPU that is supported (needs nvcc); kernels.txt is what the compiler said
kernels *args:
    {{python}} build/kernels.py {{args}}

# On a machine with a GPU: everything that is to be seen there, in less than eight minutes (--wheels DIR: what it lacks)
gpu *args:
    {{python}} tests/cuda/gpu/run.py {{args}}

# Fill a folder with what `just gpu` needs on a machine without a network (--for 3.12: another Python there)
gpu-wheels *args:
    {{python}} build/gpu_wheels.py {{args}}

# The executable: one file with everything in it, dist/kvstream (build/DESIGN.md says what that needs)
bin *args:
    {{python}} build/executable.py {{args}}

# The same file for systems of the last years, built in a Debian 11 folder, which is made first if it is not there: as root
bin-old root *args:
    build/bullseye.sh {{root}}
    {{python}} build/in_root.py {{root}} {{args}}

# KVStream for a Python that is there already, in one file: dist/kvstream.pyz
zipapp *args:
    {{python}} build/zipapp.py {{args}}

# All that is handed out: dist/release (--root ROOT: for older systems; --twice: and prove that it is reproducible)
release *args:
    {{python}} build/release.py {{args}}

# The manual page, from the command line itself: dist/kvstream.1
man *args:
    {{python}} build/man.py {{args}}

# Exact versions and hashes for the executable, the zipapp and the release, from this environment
lock:
    {{python}} build/lock.py

# What a built executable does, tried one by one (--model M.gguf for the embedded llama.cpp)
smoke *args:
    {{python}} build/smoke.py {{args}}

# The unit under a real systemd, tried one by one; as root, in a debootstrap root booted by systemd-nspawn
test-unit *args:
    {{python}} build/systemd/test_unit.py {{args}}

# A built executable on bare Debian 12 and 11 systems: as root, with debootstrap (--model, --libcuda, --too-new, --json FILE)
show-roots *args:
    {{python}} build/roots.py {{args}}

# How long each form takes to start, beside python -m kvstream
show-starts *args:
    {{python}} tests/measure/show_starts.py {{args}}

# The image, built and run without an engine, a registry or a network (needs root, buildah, podman, runc, debootstrap)
test-image *args:
    {{python}} build/container/try_image.py {{args}}

# What a real Prometheus gets from a KVStream under load, for each expression of the dashboard (--picture FILE.png)
test-metrics *args:
    {{python}} tests/measure/show_metrics.py {{args}}

# The Grafana dashboard anew, after a change to build/container/dashboard.py
dashboard:
    {{python}} build/container/dashboard.py
