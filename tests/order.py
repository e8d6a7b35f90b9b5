"""Which test files begin first where several processes share them.

Files of ten seconds of processor time or of waiting, those that wait most in front. Begun late, one of them would run
on alone at the end, beside a processor that has nothing to do. Those that need the simulated CUDA driver come behind
the others, as it is being compiled meanwhile.
"""

LONG_FIRST = (
    "sim/test_simulation.py", "test_fakes_slots.py", "sim/test_storm.py", "e2e/test_selfcheck.py",
    "e2e/test_slot_calls.py", "e2e/test_api_clients.py", "e2e/test_openai_client.py", "e2e/test_restore_effect.py",
    "e2e/test_process.py", "gateway/test_demo.py", "gateway/test_case_drain.py", "gateway/test_case_liveness.py",
    "gateway/test_embedded.py", "gateway/test_inject_journal.py", "gateway/test_case_bodies.py",
    "cuda/test_plan_machine.py", "gateway/test_config_effects.py", "gateway/test_case_preempt.py",
    "gateway/test_case_streams.py", "gateway/test_http_observed.py", "gateway/test_case_queue.py",
    "bench/test_kvgpu.py", "bench/test_kv.py", "bench/test_show.py", "cuda/test_policy.py",
    "build/test_executable.py",
    "cuda/test_streaming_pycuda.py", "cuda/test_streaming_random.py", "cuda/test_kernels_planted.py",
    "cuda/test_kernels_attend.py", "cuda/test_kernels_wide.py", "cuda/test_kernels_write.py",
    "cuda/test_streaming_wide.py", "cuda/test_faults.py", "cuda/test_streaming.py", "cuda/test_driver.py",
    "cuda/test_driver_faults.py", "cuda/test_plan_faults.py",
)
