"""Measures models within enforced memory budgets, in a separate process.

    python -m bmforge.testing.limited_engine DIRECTORY SHARE TOKENS DTYPE REQUESTS

loads a model with the budget `smallest + SHARE * (all weights - smallest)`, runs it with sequences
of `TOKENS` tokens in a control group of this size, and prints the measurements as JSON. If
`REQUESTS` is not 0, this number of concurrent requests is measured instead of `generate`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, GenerationConfig
from bmforge.infer.engine.budget import plan_memory
from bmforge.infer.engine.native_step import load_step
from bmforge.infer.engine.request import Request
from bmforge.infer.generation import generate
from bmforge.models import (
    GPT2,
    T5,
    AutoModel,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
)
from bmforge.models.changes import Change
from bmforge.models.quantize import quantize_
from bmforge.testing.memory_group import limit_memory

__all__ = ["ALLOWANCE", "CASES", "MODELS", "Case", "run_limited"]

# Allowance for memory that the engine's budget does not cover.
ALLOWANCE = 1.02
_SIZES: dict[str, Any] = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1408}


def _make_llama(layers: int = 12) -> Any:
    config = LlamaConfig(**_SIZES, num_layers=layers, num_heads=8, num_kv_heads=4, max_seq_len=2048)
    return Llama.from_config(config)


def _make_unlike() -> Any:
    model = _make_llama(8)
    model.change_(Change("resize", ("layers.1",), {"intermediate_size": 200}))
    model.change_(Change("resize", ("layers.2",), {"attn": False}))
    model.change_(Change("resize", ("layers.4",), {"num_experts": 4}))
    return model


def _make_mixtral() -> Any:
    sizes = {**_SIZES, "intermediate_size": 704}
    config = MixtralConfig(
        **sizes, num_layers=6, num_heads=8, num_kv_heads=4, num_experts=8, experts_per_token=2
    )
    return Mixtral.from_config(config)


def _make_gpt2() -> Any:
    sizes: dict[str, Any] = {"vocab_size": 8000, "hidden_size": 512, "num_heads": 8}
    return GPT2.from_config(GPT2Config(**sizes, num_layers=12, max_seq_len=1024))


def _make_small() -> Any:
    """Return a model of the same size as that of the quickstart."""
    sizes: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 192, "num_layers": 4}
    return GPT2.from_config(GPT2Config(**sizes, num_heads=6, max_seq_len=128))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _make_llama,
    "llama int4": lambda: quantize_(_make_llama(), "int4"),
    "unlike": _make_unlike,
    "mixtral": _make_mixtral,
    "gpt2": _make_gpt2,
    "t5": lambda: T5.from_config(T5Config(**_SIZES, num_layers=6, num_heads=8)),
    "small": _make_small,
    "small int4": lambda: quantize_(_make_small(), "int4"),
    "bert": lambda: Bert.from_config(BertConfig(**_SIZES, num_layers=12, num_heads=8)),
}


class Case(NamedTuple):
    """A measurement: the model and its budget.

    Attributes:
        model: a name in `MODELS`.
        share: size of the budget, from the smallest possible one (0) to all weights (1).
        tokens: maximum sequence length.
        dtype: dtype of the weights.
        requests: number of concurrent requests; 0 for calls of one sequence.
    """

    model: str
    share: float
    tokens: int
    dtype: str
    requests: int = 0


CASES = (
    Case("llama", 0.4, 256, "float32"),
    Case("llama", 0.0, 256, "float32"),
    Case("llama", 0.5, 2048, "float32"),
    Case("llama", 0.0, 256, "bfloat16"),
    Case("llama", 0.5, 512, "bfloat16"),
    Case("gpt2", 0.0, 256, "bfloat16"),
    Case("llama", 1.0, 512, "float32"),
    Case("unlike", 0.0, 512, "float32"),
    Case("unlike", 0.5, 512, "float32"),
    Case("mixtral", 0.0, 512, "float32"),
    Case("mixtral", 0.5, 512, "bfloat16"),
    Case("gpt2", 0.3, 1024, "float32"),
    Case("t5", 0.0, 512, "float32"),
    Case("t5", 0.5, 512, "float32"),
    Case("small", 0.0, 128, "float32"),
    Case("small", 1.0, 128, "float32"),
    Case("small int4", 0.0, 128, "float32"),
    Case("small int4", 0.5, 128, "float32"),
    Case("llama int4", 0.0, 256, "float32"),
    Case("bert", 0.3, 512, "float32"),
    Case("llama", 1.0, 512, "float32", requests=16),
    Case("llama", 0.3, 512, "float32", requests=16),
    Case("llama", 0.0, 512, "bfloat16", requests=16),
    Case("llama int4", 1.0, 512, "float32", requests=16),
    Case("mixtral", 0.5, 256, "float32", requests=8),
    Case("gpt2", 1.0, 64, "float32", requests=16),
)


def run_limited(directory: Path, case: Case) -> dict[str, Any]:
    """Run a measurement in a subprocess and return the results.

    Raises:
        RuntimeError: the subprocess failed, or the kernel killed it for using too much memory.
    """
    load_step()  # compile in this process, whose memory is not limited
    arguments = [str(directory), str(case.share), str(case.tokens), case.dtype, str(case.requests)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{case} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _main(
    directory: str, share: float, tokens: int, dtype: str, requests: int
) -> dict[str, object]:
    """Run the measurement that the module describes and print the results."""
    rows = max(1, requests)
    config = EngineConfig(max_tokens=tokens, max_rows=rows, only_requests=bool(requests))
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "config": config}
    least = _smallest(directory, options)
    unlimited = _smallest(directory, options, for_all=True)
    budget = int(least + share * (unlimited - least))
    group = limit_memory(int(ALLOWANCE * budget))
    engine = Engine(directory, device_budget_bytes=budget, **options)
    model, plan = engine.model, engine.plan
    ids = torch.randint(1, model.config.vocab_size, (1, tokens - 4))
    if requests:
        _answer_requests(engine, tokens, requests)
    elif model.traits.can_generate:
        for _ in range(2):
            generate(model, ids, max_new_tokens=4, eos_token_id=())
    else:
        engine.embed(ids)
        with torch.no_grad():
            model(input_ids=ids)
    peak = group.peak_bytes()
    engine.close()
    group.leave()
    return {
        "kind": group.kind,
        "budget": budget,
        "planned": plan.used_bytes,
        "peak": peak,
        "resident": len(plan.resident),
        "moved": len(plan.on_disk),
        "weights": plan.weights_bytes + plan.moved_bytes,
    }


def _answer_requests(engine: Engine, tokens: int, count: int) -> None:
    """Send concurrent sampling requests of maximum length, half of them with `prompt_logprobs`."""
    generator = torch.Generator().manual_seed(0)
    size = count, tokens - 4
    prompts = torch.randint(1, engine.model.config.vocab_size, size, generator=generator)
    handles = []
    for number, prompt in enumerate(prompts.tolist()):
        options = GenerationConfig(
            max_new_tokens=4, do_sample=True, top_p=0.9, eos_token_id=(), seed=number, logprobs=2,
            prompt_logprobs=2 if number % 2 else None,
        )  # fmt: skip
        handles.append(engine.submit(Request(prompt, options)))
    for handle in handles:
        handle.wait()


def _smallest(directory: str, options: dict[str, Any], for_all: bool = False) -> int:
    """Return the smallest budget; with `for_all`, the smallest one without weight streaming."""
    try:
        Engine(directory, device_budget_bytes=1, **options)
    except ConfigError as error:
        least = int(str(error).split("too small: ")[1].split()[0])
    if not for_all:
        return least
    model, _ = AutoModel.describe_pretrained(directory, dtype=options["dtype"])
    plan = plan_memory(model, [torch.device("cpu")], options["config"], least, None)
    return least + plan.moved_bytes - plan.slots_bytes


if __name__ == "__main__":
    path, part, length, kind, number = sys.argv[1:]
    print(json.dumps(_main(path, float(part), int(length), kind, int(number))))
