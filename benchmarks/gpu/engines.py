"""Rows of other engines, if they are installed: llama.cpp and vLLM on models of equal shape."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.decoding import prompts_of
from benchmarks.gpu.measure import SkippedRowError, Values, build_model, config_of, time_once
from bmforge.models.formats.gguf_export import export_gguf

__all__ = ["llama_cpp", "vllm"]


def require(module: str) -> None:
    """Skip the row if a module is not installed."""
    if find_spec(module) is None:
        raise SkippedRowError(f"{module} is not installed")


def llama_cpp(preset: str, prompt: int, new: int, counts: list[int]) -> Values:
    """Time llama.cpp on GGUF files of f16, q8_0 and q4_0."""
    require("llama_cpp")
    import sys

    from benchmarks.serving.batched_requests import Peer

    yield {"engine": "llama.cpp", "model": preset}
    model = build_model(config_of(preset, prompt + new), torch.float16)
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("f16", "q8_0", "q4_0"):
            path = Path(folder) / f"{kind}.gguf"
            export_gguf(model, path, kind)
            for count in counts:
                peer = Peer(sys.executable, path, 1, count)
                peer.ask(count, min(prompt, 128), new)
                seconds = peer.ask(count, min(prompt, 128), new)
                peer.close()
                yield {f"{kind}, {count} requests: tokens/s": count * (new - 1) / seconds}


def vllm(preset: str, prompt: int, new: int, counts: list[int]) -> Values:
    """Time vLLM in fp16 with random weights."""
    require("vllm")
    from vllm import LLM, SamplingParams

    config = config_of(preset, prompt + new)
    yield {"engine": "vLLM", "model": preset}
    with tempfile.TemporaryDirectory() as folder:
        build_model(config, torch.float16).save_pretrained(folder)
        engine = LLM(
            model=folder,
            dtype="float16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.6,
        )
        start = 0

        def write(count: int, tokens: int) -> None:
            nonlocal start
            ids = prompts_of(count, prompt, config.vocab_size, start)
            start += count
            options = SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            engine.generate([{"prompt_token_ids": row} for row in ids], options)

        for count in counts:
            write(count, 1 + new)
            first = time_once(lambda count=count: write(count, 1))  # type: ignore[misc]
            total = time_once(lambda count=count: write(count, 1 + new))  # type: ignore[misc]
            yield {
                f"{count} requests: decode tokens/s": count * new / max(total - first, 1e-9),
                f"{count} requests: prefill tokens/s": count * prompt / first,
            }
