"""The shapes of a runtime's answers: pure functions from a job to JSON values and SSE bytes.

Copied from answers of the real llama.cpp server (``tests/test_fakes.py`` compares the two); the openai dialect follows
vLLM's source and documentation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import tokens as T
from .engine import Engine, Job, Slot
from .script import RuntimeConfig

DONE = b"data: [DONE]\n\n"
CREATED = 1_700_000_000

PARAMS: dict[str, Any] = {
    "seed": 4294967295, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0,
    "max_tokens": -1, "n_predict": -1, "n_keep": 0, "ignore_eos": False, "stream": False, "n_probs": 0,
    "chat_format": "Content-only", "reasoning_format": "none", "samplers": ["top_k", "top_p", "temperature"],
    "timings_per_token": False, "lora": [],
}  # fmt: skip


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def event(value: Any) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


def error(status: int, message: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"error": {"code": status, "message": message, "type": kind, **more}}


def too_long(tokens: int, n_ctx: int) -> dict[str, Any]:
    text = f"request ({tokens} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
    return error(400, text, "exceed_context_size_error", n_prompt_tokens=tokens, n_ctx=n_ctx)


def timings(job: Job) -> dict[str, Any]:
    n, m = len(job.prompt) - job.cached, job.generated
    fill, dec = job.prefill_s * 1000 or 0.001, job.decode_s * 1000 or 0.001
    return {
        "cache_n": job.cached, "prompt_n": n, "prompt_ms": fill, "prompt_per_token_ms": fill / max(n, 1),
        "prompt_per_second": n / fill * 1000, "predicted_n": m, "predicted_ms": dec,
        "predicted_per_token_ms": dec / max(m, 1), "predicted_per_second": m / dec * 1000,
    }  # fmt: skip


def usage(job: Job, cached_reported: bool = True) -> dict[str, Any]:
    out: dict[str, Any] = {
        "completion_tokens": job.generated,
        "prompt_tokens": len(job.prompt),
        "total_tokens": job.generated + len(job.prompt),
    }
    return {**out, "prompt_tokens_details": {"cached_tokens": job.cached}} if cached_reported else out


class Shapes:
    """The frames of one answer. ``chat`` tells the two OpenAI routes apart, ``native`` is ``/completion``."""

    done = DONE
    return_tokens = False

    def __init__(self, config: RuntimeConfig, jobs: Sequence[Job], *, chat: bool, native: bool = False) -> None:
        self.config, self.jobs, self.chat, self.native = config, jobs, chat, native
        if native:
            self.done = b""
        self.vllm = config.dialect == "openai"
        self.id = f"{'chatcmpl' if chat or not self.vllm else 'cmpl'}-fake{jobs[0].task}"

    def _frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        base = {"id": self.id, "object": kind, "created": CREATED, "model": self.config.model}
        if not self.vllm:
            base["system_fingerprint"] = self.config.build
        return event({"choices": choices, **base, **more})

    def _choice(self, index: int, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        if self.chat:
            extra = {"logprobs": None} if self.vllm else {}
            return {"finish_reason": reason, "index": index, "delta": delta, **extra}
        return {"text": delta.get("content", ""), "index": index, "logprobs": None, "finish_reason": reason}

    def role(self, job: Job) -> bytes:
        if not self.chat:
            return b""
        return self._frame([self._choice(job.index, {"role": "assistant", "content": "" if self.vllm else None})])

    def progress(self, job: Job, processed: int, ms: float) -> bytes:
        value = {"total": len(job.prompt), "cache": job.cached, "processed": processed, "time_ms": int(ms)}
        if self.native:
            return event({**self._partial(job, ""), "prompt_progress": value})
        delta = {"role": "assistant", "content": None}
        return self._frame([self._choice(job.index, delta)], prompt_progress=value)

    def _partial(self, job: Job, text: str) -> dict[str, Any]:
        return {
            "index": job.index, "content": text, "tokens": T.ids_of(text), "stop": False, "id_slot": -1,
            "tokens_predicted": job.generated, "tokens_evaluated": len(job.prompt),
        }  # fmt: skip

    def token(self, job: Job, text: str, count: int = 1) -> bytes:
        if self.native:
            return event(self._partial(job, text))
        return self._frame([self._choice(job.index, {"content": text})])

    def finish(self, job: Job, reason: str, with_usage: bool, last: bool) -> bytes:
        """The finish chunk. ``with_usage``: the client asked for usage; ``last``: no other choice is running."""
        if self.native:
            return event(self.native_final(job, reason, streamed=True))
        more: dict[str, Any] = {}
        style, reports = self.config.usage_style, self.config.cached_reported
        # llama.cpp's /v1/completions puts usage on the finish chunk, asked or not
        always = not self.vllm and not self.chat and style != "none"
        if always or (with_usage and style == "finish"):
            more["usage"] = usage(job, reports)
        if not self.vllm and not (self.chat and with_usage and style == "chunk"):
            more["timings"] = timings(job)
        return self._frame([self._choice(job.index, {}, reason)], **more)

    def usage_chunk(self) -> bytes:
        if self.native or self.config.usage_style != "chunk" or not (self.chat or self.vllm):
            return b""
        more = {} if self.vllm else {"timings": timings(self.jobs[0])}
        return self._frame([], usage=usage(self.jobs[0], self.config.cached_reported), **more)

    def native_final(self, job: Job, reason: str, streamed: bool = False) -> dict[str, Any]:
        ids = [T.piece_id(piece) for piece in job.text] if self.return_tokens and not streamed else []
        return {
            "index": job.index, "content": "" if streamed else "".join(job.text), "tokens": ids,
            "id_slot": job.slot.id if job.slot else -1, "stop": True, "model": self.config.model,
            "tokens_predicted": job.generated, "tokens_evaluated": len(job.prompt), "generation_settings": PARAMS,
            "prompt": "", "has_new_line": False, "truncated": False,
            "stop_type": "eos" if reason == "stop" else "limit", "stopping_word": "",
            "tokens_cached": len(job.prompt) + job.generated - 1, "timings": timings(job),
        }  # fmt: skip

    def whole(self, reasons: Mapping[int, str]) -> dict[str, Any]:
        """A non-stream answer."""
        if self.native:
            return self.native_final(self.jobs[0], reasons[0])
        choices = []
        for job in self.jobs:
            text = "".join(job.text)
            choice: dict[str, Any] = {"finish_reason": reasons[job.index], "index": job.index}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice |= {"text": text, "logprobs": None}
            choices.append(choice)
        out = {
            "choices": choices, "created": CREATED, "model": self.config.model, "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "usage": usage(self.jobs[0], self.config.cached_reported),
        }  # fmt: skip
        return out if self.vllm else {**out, "system_fingerprint": self.config.build, "timings": timings(self.jobs[0])}


# --- status endpoints ---


def slot_object(slot: Slot) -> dict[str, Any]:
    out: dict[str, Any] = {"id": slot.id, "n_ctx": slot.n_ctx, "speculative": False, "is_processing": slot.busy}
    job = slot.last
    if job is None:
        return out
    running = slot.job is job
    left = job.limit - job.generated if running else -1
    next_token = {"has_next_token": running, "has_new_line": False, "n_remain": left, "n_decoded": job.generated}
    return {
        **out, "id_task": job.task, "n_prompt_tokens": len(slot.kv),
        "n_prompt_tokens_processed": job.processed - job.cached if running else 0,
        "n_prompt_tokens_cache": job.cached if running else 0,
        "params": PARAMS, "next_token": [next_token],
    }  # fmt: skip


def props(config: RuntimeConfig, n_ctx: int, starts: int = 0, asleep: bool = False) -> dict[str, Any]:
    return {
        "default_generation_settings": {"params": PARAMS, "n_ctx": n_ctx}, "total_slots": config.slots,
        "model_alias": config.model, "model_ftype": "Q4_1",
        "model_path": config.model_path or f"/models/{config.model}.gguf",
        "modalities": {"vision": bool(config.mmproj), "video": False, "audio": False},
        "media_marker": f"<__media_{starts}__>",
        "endpoint_slots": True, "endpoint_props": False, "endpoint_metrics": config.metrics, "ui": True,
        "ui_settings": {}, "chat_template": "{% for message in messages %}...{% endfor %}",
        "chat_template_caps": {"supports_tools": False, "supports_system_role": True},
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "build_info": config.build, "is_sleeping": asleep,
        "cors_proxy_enabled": False,
    }  # fmt: skip


def models(config: RuntimeConfig, n_ctx: int) -> dict[str, Any]:
    if config.dialect == "openai":
        card = {"id": config.model, "object": "model", "created": CREATED, "owned_by": "vllm", "root": config.model}
        limit = config.max_model_len if config.max_model_len is not None else config.n_ctx
        names = (config.model, *config.models)
        cards = [{**card, "id": name, "root": name, "parent": None, "max_model_len": limit} for name in names]
        return {"object": "list", "data": cards}
    meta = {"vocab_type": 2, "n_vocab": 49152, "n_ctx": n_ctx, "n_ctx_train": 8192, "n_embd": 576,
            "n_params": 134515008, "size": 96576768, "ftype": "Q4_1"}  # fmt: skip
    card = {"id": config.model, "aliases": [config.model], "tags": [], "object": "model",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "created": CREATED, "owned_by": "llamacpp", "meta": meta}  # fmt: skip
    listing = {"name": config.model, "model": config.model, "type": "model", "capabilities": ["completion"]}
    return {"models": [listing], "object": "list", "data": [card]}


def metrics(config: RuntimeConfig, engine: Engine) -> bytes:
    running, waiting, t = len(engine.running), len(engine.deferred), engine.totals
    if config.dialect == "openai":
        blocks = config.gpu_blocks if config.gpu_blocks is not None else config.n_ctx // config.block_size
        label = f'block_size="{config.block_size}",cache_dtype="auto",num_gpu_blocks="{blocks}",engine="0"'
        rows = [("gauge", f"vllm:cache_config_info{{{label}}}", 1.0)]
        tag = f'{{model_name="{config.model}",engine="0"}}'
        for name, value in (("num_requests_running", running), ("num_requests_waiting", waiting),
                            ("kv_cache_usage_perc", engine.cells / max(1, config.n_ctx))):  # fmt: skip
            rows.append(("gauge", f"vllm:{name}{tag}", value))
    else:
        rows = [
            ("counter", "llamacpp:prompt_tokens_total", t["prompt"]),
            ("counter", "llamacpp:prompt_tokens_cached_total", t["cached"]),
            ("counter", "llamacpp:prompt_seconds_total", t["prompt_s"]),
            ("counter", "llamacpp:tokens_predicted_total", t["predicted"]),
            ("counter", "llamacpp:tokens_predicted_seconds_total", t["predicted_s"]),
            ("counter", "llamacpp:n_decode_total", t["steps"]),
            ("gauge", "llamacpp:requests_processing", running),
            ("gauge", "llamacpp:requests_deferred", waiting),
        ]
    return "".join(f"# TYPE {n.partition('{')[0]} {kind}\n{n} {v:g}\n" for kind, n, v in rows).encode()
