"""Layer streaming: the same bits from two blocks' room, read one block ahead."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.memory.copies import CopyEngine, make_copy_engine
from bmforge.memory.streaming import Streamer, stream_blocks_
from bmforge.models import (
    GPT2,
    T5,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
    load_weights_,
    weight_reader,
)
from bmforge.testing import assert_equal_trees

HOST = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4}
FFN = {"intermediate_size": 48}
LLAMA = LlamaConfig(**SIZES, **FFN, num_layers=5, num_kv_heads=2, max_seq_len=64)
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (Llama, LLAMA),
    "gpt2": (GPT2, GPT2Config(**SIZES, num_layers=3, max_seq_len=64)),  # transposed in the file
    "t5": (T5, T5Config(**SIZES, **FFN, num_layers=2)),
    "mixtral": (
        Mixtral,
        MixtralConfig(
            **SIZES, **FFN, num_layers=2, num_kv_heads=2, num_experts=4, experts_per_token=2
        ),
    ),
}
IDS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    family, config = MODELS[request.param]
    model = family.from_config(config, seed=1)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def open_streamed(
    model: Any, directory: Path, engine: CopyEngine | None = None
) -> tuple[Any, Streamer]:
    streamed = type(model).from_config(model.config, device="meta")
    reader = weight_reader(streamed, directory)
    streamer = stream_blocks_(streamed, reader, device=HOST, engine=engine)
    return load_weights_(streamed, directory), streamer


def losses_and_gradients(model: Any, steps: int = 2) -> dict[str, Tensor]:
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.detach())
    return {
        "loss": torch.stack(losses),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


def test_gradients_equal(saved: tuple[Any, Path]) -> None:
    model, directory = saved
    streamed, _ = open_streamed(model, directory)
    want = losses_and_gradients(model)
    assert len(want) == 1 + len(list(model.parameters()))
    assert_equal_trees(losses_and_gradients(streamed), want)


def test_frozen_blocks(saved: tuple[Any, Path]) -> None:
    """Gradients reach the embedding through blocks that have none of their own."""
    model, directory = saved
    streamed, streamer = open_streamed(model, directory)
    for one in (model, streamed):
        frozen = set(streamer.names)
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name not in frozen)
    want = losses_and_gradients(model)
    assert set(want) == {"loss", *(n for n, p in model.named_parameters() if p.requires_grad)}
    assert_equal_trees(losses_and_gradients(streamed), want)


def test_saving_reads_what_is_streamed(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, directory = saved
    streamed, _ = open_streamed(model, directory)
    streamed.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again")
    assert_equal_trees(dict(again.named_parameters()), dict(model.named_parameters()))


def test_generation(tmp_path: Path) -> None:
    model = Llama.from_config(LLAMA, seed=1)
    model.save_pretrained(tmp_path)
    streamed, _ = open_streamed(model, tmp_path)
    want = generate(model, IDS, max_new_tokens=8)
    assert torch.equal(generate(streamed, IDS, max_new_tokens=8), want)


def test_blocks_come_one_ahead(tmp_path: Path) -> None:
    """While a block computes the next is asked for; backward in the other order; none twice."""
    model = Llama.from_config(LLAMA, seed=1)
    model.save_pretrained(tmp_path)
    engine = make_copy_engine(HOST, records=True)
    streamed, _ = open_streamed(model, tmp_path, engine)
    losses_and_gradients(streamed, steps=2)
    engine.run(lambda: None).wait()
    words = [
        (e.kind, e.label.removeprefix("read "))
        for e in engine.events
        if e.kind in ("submitted", "computes")
    ]
    order = [int(label[-1]) for kind, label in words if kind == "computes"]
    assert order == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0] * 2
    # The two blocks at a turn stay: what a step reads is the others, once in each direction.
    asked = [int(label[-1]) for kind, label in words if kind == "submitted" and label]
    assert asked == [0, 1, 2, 3, 4, 2, 1, 0, 2, 3, 4, 2, 1, 0]
    # A block is asked for before the one that runs before it computes.
    computed = [index for index, (kind, _) in enumerate(words) if kind == "computes"]
    for before, after in itertools.pairwise(computed):
        assert ("submitted", words[after][1]) not in words[before:after], words[before : after + 1]


def test_two_blocks_are_here(tmp_path: Path) -> None:
    """Whatever the depth, the weights of two blocks have memory; the others give NaN."""
    model = Llama.from_config(LLAMA, seed=1)
    model.save_pretrained(tmp_path)
    streamed, streamer = open_streamed(model, tmp_path)
    losses_and_gradients(streamed, steps=1)
    real = {
        n.split(".")[1]
        for n, p in streamed.named_parameters()
        if n.startswith("layers.") and not p.isnan().any()
    }
    assert len(real) <= 2
    here = sum(slot.memory.numel() for slot in streamer._slots)
    block = sum(p.numel() * 4 for p in model.layers["0"].parameters())
    assert here <= 2 * (block + 64 * 16)


def test_reading_fails(tmp_path: Path) -> None:
    """What goes wrong on the reading thread is raised where the block is needed."""
    model = Llama.from_config(LLAMA, seed=1)
    model.save_pretrained(tmp_path)
    streamed, _ = open_streamed(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(Exception, match=r"model\.safetensors"):
        streamed(input_ids=IDS)


def test_nothing_to_stream() -> None:
    with pytest.raises(ConfigError, match="no repeated blocks"):
        stream_blocks_(torch.nn.Linear(2, 2), lambda name, out: None, device=HOST)
