"""Rows of `run.py` in the order in which they run, and the sections of its page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["ROWS", "SECTIONS", "Row"]

SECTIONS = {
    "Exactness": "Results on the device against the CPU's: equal bits for products and "
    "dequantization, largest difference for the rest.",
    "Bandwidth": "Copies of one buffer, median of several; the table's figures are those of "
    "`bmforge/gpu_specs.py`.",
    "Training": "Random tokens, AdamW, clipped gradients; median step. The plan is the planner's "
    "peak, the peak that of torch's allocator.",
    "Adapters": "Rank 16 on all linear layers of the blocks; the base model is frozen.",
    "Sharding": "Step time of a sharded model compared with an unsharded one, in turns, in a "
    "process group without communication: the overhead of sharding itself, without links. With "
    "tensor parallelism, the step time is multiplied by its degree, so 1 is perfect.",
    "Decoding": "Prompts of 512 random tokens, greedy; decoding is timed over 96 tokens after the "
    "16th. Roofline: one read of all weights per step at the table's bandwidth. transformers runs "
    "`generate` with its default settings, in turns in the same process; the ratios are those of "
    "the speeds (median and 95 % interval).",
    "Other engines": "Engines that are installed, with the prompts and lengths of the section "
    "above.",
    "Streaming": "Bytes of streamed blocks over the time of a forward pass, against the "
    "bandwidth measured in the same process.",
    "Offload": "Step with offload against the step without it. Hidden: part of the time of the "
    "copies that the computation covers.",
}


@dataclass(frozen=True)
class Row:
    """One row of the page, measured by one process.

    Args:
        name: unique name, for `--only`.
        section: section of the page.
        function: module of `benchmarks.gpu` and function, as ``module:function``.
        options: keyword arguments of the function.
        tiny: arguments that replace some of them in a rehearsal.
        limit_s: time limit of the process in seconds.
    """

    name: str
    section: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 40.0

    def arguments(self, rehearse: bool) -> dict[str, Any]:
        """Return the keyword arguments of a real run or of a rehearsal."""
        return self.options | (self.tiny if rehearse else {})


_TINY_STEP = {"preset": "tiny", "rows": 2, "length": 32, "steps": 3, "compile": False}
_TINY_TURNS = {"preset": "tiny", "rows": 2, "length": 32, "steps": 3}
_TINY_DECODING = {"presets": ["tiny"], "prompt": 8, "new": 4, "rounds": 3}


def _training(name: str, preset: str, rows: int, length: int, **options: Any) -> Row:
    usual = {"preset": preset, "rows": rows, "length": length, "steps": 12}
    return Row(f"train-{name}", "Training", "training:train", usual | options, _TINY_STEP, 75.0)


def _adapter(name: str, preset: str, base_dtype: str) -> Row:
    options = {"preset": preset, "rows": 2, "length": 2048, "steps": 8, "base_dtype": base_dtype}
    tiny = {k: v for k, v in _TINY_STEP.items() if k != "compile"}
    return Row(f"lora-{name}", "Adapters", "training:tune", options, tiny)


def _sharding(name: str, world: int, **layout: Any) -> Row:
    options = {"preset": "gpt2-small", "rows": 8, "length": 1024, "steps": 12}
    options |= {"world": world, "layout": layout}
    return Row(name, "Sharding", "training:shard", options, _TINY_TURNS)


def _decoding(scheme: str, count: int) -> Row:
    options: dict[str, Any] = {
        "presets": ["llama-3-8b", "llama-3.2-1b"],
        "scheme": scheme,
        "count": count,
        "prompt": 512,
        "new": 96,
        "rounds": 3 if count == 64 else 4,
    }
    return Row(
        f"decode-{scheme}-{count}", "Decoding", "decoding:decode", options, _TINY_DECODING, 90.0
    )


def _engine(name: str, function: str) -> Row:
    options = {"preset": "llama-3.2-1b", "prompt": 512, "new": 32, "counts": [1, 16, 64]}
    tiny = {"preset": "tiny", "prompt": 8, "new": 4, "counts": [1, 2]}
    return Row(name, "Other engines", f"engines:{function}", options, tiny, 60.0)


def _offload(name: str, **options: Any) -> Row:
    usual = {"preset": "llama-3.2-1b", "rows": 4, "length": 2048, "steps": 8}
    return Row(name, "Offload", "transfers:offload", usual | options, _TINY_TURNS)


# The most important rows first, if the budget does not suffice for all.
ROWS = (
    Row("products", "Exactness", "exactness:products", {"rows": 4096, "columns": 4096},
        {"rows": 37, "columns": 128, "tokens": [1, 3]}, 60.0),
    Row("kernels", "Exactness", "exactness:kernels", limit_s=60.0),
    Row("model", "Exactness", "exactness:whole_model"),
    Row("copies", "Bandwidth", "transfers:copies", {"mib": 1024}, {"mib": 4}),
    *(_decoding(scheme, 1) for scheme in ("int4", "int8", "fp16")),
    _training("8b", "llama-3-8b", 2, 4096, recompute=True),
    _training("8b-compiled", "llama-3-8b", 2, 4096, recompute=True, compile=True),
    _adapter("8b-bf16", "llama-3-8b", "bf16"),
    _adapter("8b-int8", "llama-3-8b", "int8"),
    _adapter("8b-int4", "llama-3-8b", "int4"),
    _sharding("zero-3", 8, zero=3),
    Row("stream-host", "Streaming", "transfers:stream",
        {"preset": "llama-3.2-1b", "source": "host"}, {"preset": "tiny"}),
    Row("stream-disk", "Streaming", "transfers:stream",
        {"preset": "llama-3.2-1b", "source": "disk"}, {"preset": "tiny"}, 60.0),
    _offload("offload-activations", activations=True),
    _offload("offload-states", states=True),
    *(_decoding(scheme, count) for count in (16, 64) for scheme in ("int4", "int8", "fp16")),
    _training("1b", "llama-3.2-1b", 8, 2048),
    _training("1b-compiled", "llama-3.2-1b", 8, 2048, compile=True),
    _training("125m", "gpt2-small", 32, 1024),
    _training("125m-compiled", "gpt2-small", 32, 1024, compile=True),
    _training("tiny", "tiny", 64, 512),
    _adapter("1b-bf16", "llama-3.2-1b", "bf16"),
    _sharding("zero-2", 8, zero=2),
    _sharding("tp-2", 2, zero=0, tp=2),
    _engine("llama.cpp", "llama_cpp"),
    _engine("vllm", "vllm"),
)  # fmt: skip
