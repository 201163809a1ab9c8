"""What a step is planned to need, against storages followed in the step itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bmforge.infer.decoder_factory import start_decoder
from bmforge.infer.engine.workspace import find_workspace
from bmforge.models import (
    GPT2,
    T5,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
)
from bmforge.models.pack import quantize_
from bmforge.parallel.planner.storage_tracker import StorageTracker
from bmforge.surgery import copy_to_meta, persistent_tensors

SIZES: dict[str, Any] = {"vocab_size": 500, "hidden_size": 64, "num_heads": 4, "num_layers": 3}
WIDE = {**SIZES, "intermediate_size": 256}
MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: Llama.from_config(LlamaConfig(**WIDE, num_kv_heads=2)),
    "gpt2": lambda: GPT2.from_config(GPT2Config(**SIZES, max_seq_len=256)),
    "t5": lambda: T5.from_config(T5Config(**WIDE)),
    "mixtral": lambda: Mixtral.from_config(
        MixtralConfig(**WIDE, num_kv_heads=2, num_experts=4, experts_per_token=2)
    ),
    "bert": lambda: Bert.from_config(BertConfig(**WIDE)),
}


def follow(model: Any, run: Callable[[Any], Any]) -> int:
    """Bytes that are alive at once at most while a real model runs, without its weights."""
    follower = StorageTracker()
    follower.register(persistent_tensors(model).values())
    with torch.no_grad(), follower:
        run(model)
    return max(itertools.accumulate(size for size, _, _ in follower.events))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 200), (3, 60)])
def test_it_is_what_a_step_takes(kind: str, rows: int, tokens: int) -> None:
    """Never less, and hardly more: the description is followed as the model would be."""
    model = MAKERS[kind]().eval()
    ids = torch.randint(1, 500, (rows, tokens))

    def write(one: Any) -> None:
        new = tokens - 1 if one.traits.attention == "encoder-decoder" else 1
        decoder, start = start_decoder(one, ids[:, :-1], None, new)
        decoder.run(start)
        decoder.run(start[:, -1:])

    runs: list[Callable[[Any], Any]] = [lambda one: one(input_ids=ids)]
    if model.traits.can_generate:
        runs = [write, lambda one: one(input_ids=ids, labels=ids)]
    real = max(follow(model, run) for run in runs)
    found = find_workspace(model, rows, tokens)
    planned = found.cache_bytes + found.step_bytes
    assert 0.97 * real <= planned <= 1.5 * real + 40 * rows * 500
    described = find_workspace(copy_to_meta(model), rows, tokens)
    assert described == found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_chunks_of_prompts_need_less_than_whole_prompts(kind: str) -> None:
    """The KV cache is that of all sequences, the step that of one sequence of maximum length."""
    model = MAKERS[kind]()
    whole, chunked = find_workspace(model, 16, 256), find_workspace(model, 16, 256, 128)
    one, short = find_workspace(model, 1, 256), find_workspace(model, 16, 32, 128)
    assert chunked.cache_bytes == whole.cache_bytes == 16 * one.cache_bytes
    assert chunked.step_bytes == max(one.step_bytes, 500 * max(16 * 40, 128 * 8))
    assert one.step_bytes <= chunked.step_bytes < whole.step_bytes / 4
    assert short.step_bytes >= find_workspace(model, 4, 32).step_bytes  # 4 x 32 = 128 tokens


def test_a_packed_head_is_never_a_matrix_of_floats() -> None:
    """Scoring is planned with some of its rows, and takes no more."""
    sizes = {**WIDE, "vocab_size": 96_000, "hidden_size": 256, "num_layers": 1}
    model = quantize_(Llama.from_config(LlamaConfig(**sizes)).eval(), "int8")
    ids = torch.randint(1, 500, (1, 40))
    real = follow(model, lambda one: one(input_ids=ids, labels=ids))
    found = find_workspace(model, 1, 40)
    assert 0.97 * real <= found.step_bytes < 0.95 * 96_000 * 256 * 4


def test_the_cache_is_what_the_config_says() -> None:
    """Keys and values of all layers, in the model's dtype."""
    model = Llama.from_config(LlamaConfig(**WIDE, num_kv_heads=2), dtype=torch.bfloat16)
    found = find_workspace(model, 2, 100)
    assert found.cache_bytes == 2 * 100 * model.config.kv_bytes_per_token(2)
