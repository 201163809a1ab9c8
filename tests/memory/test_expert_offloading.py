"""Experts that are read when they are chosen: the same bits, and no byte that was not used."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.memory.copies import make_copy_engine
from bmforge.memory.streamed_experts import ExpertStreamer, expert_bytes, stream_experts_
from bmforge.models import (
    CPM2,
    CPM2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    load_weights_,
    weight_reader,
)
from bmforge.models.changes import Change
from bmforge.testing import assert_equal_trees

HOST = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
}
IDS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(0))


def make_mixtral() -> Any:
    config = MixtralConfig(
        **SIZES, num_layers=3, num_kv_heads=2, num_experts=8, experts_per_token=2
    )
    return Mixtral.from_config(config, seed=1).eval()


def make_cpm2() -> Any:
    """Experts in some layers only, one per token, and not gated as Mixtral's."""
    model = CPM2.from_config(CPM2Config(**SIZES, num_layers=2), seed=1)
    model.change_(Change("resize", ("encoder.layers.1",), {"num_experts": 4}))
    return model.change_(Change("resize", ("decoder.layers.0",), {"num_experts": 6})).eval()


MAKERS = {"mixtral": make_mixtral, "cpm2": make_cpm2}


def away(model: Any, slots: int, **options: Any) -> tuple[Any, ExpertStreamer, list[Any]]:
    """A copy whose experts are away, and which of them were read."""
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    streamed, reads = copy.deepcopy(model), []

    def read(name: str, expert: int, out: Tensor) -> None:
        reads.append((name, expert))
        out.copy_(kept[name][expert])

    one = max(expert_bytes(m) for n, m in model.named_modules() if n.endswith(".experts"))
    streamer = stream_experts_(streamed, read, device=HOST, budget_bytes=slots * one, **options)
    return streamed, streamer, reads


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("slots", [2, 3, 5, 100])
def test_the_same_bits(kind: str, slots: int) -> None:
    model = MAKERS[kind]()
    want = generate(model, IDS, max_new_tokens=6, eos_token_id=())
    streamed, streamer, _ = away(model, slots)
    for _ in range(2):
        assert torch.equal(generate(streamed, IDS, max_new_tokens=6, eos_token_id=()), want)
    with torch.no_grad():
        inputs = {"input_ids": IDS, "labels": IDS}
        assert torch.equal(streamed(**inputs).loss, model(**inputs).loss)
    streamer.close()


def used_experts(model: Any, run: Any) -> list[tuple[int, int]]:
    """Which experts worked, layer by layer and call by call."""
    found: list[tuple[int, int]] = []
    layers = [m for n, m in model.named_modules() if n.endswith(".experts")]
    hooks = []
    for number, layer in enumerate(layers):

        def note(_: Any, args: Any, number: int = number) -> None:
            sizes = args[1].diff(prepend=args[1].new_zeros(1))
            found.extend((number, expert) for expert in sizes.nonzero()[:, 0].tolist())

        hooks.append(layer.register_forward_pre_hook(note))
    run(model)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("slots", [2, 4, 9, 100])
def test_no_byte_that_was_not_used(slots: int) -> None:
    """As many reads as a cache of the last used ones misses, and never more than uses."""
    model = make_mixtral()

    def run(one: Any) -> None:
        generate(one, IDS[:1], max_new_tokens=8, eos_token_id=())

    used = used_experts(model, run)
    streamed, streamer, reads = away(model, slots)
    run(streamed)
    one = expert_bytes(model.layers["0"].mlp.experts)
    assert streamer.read_bytes == len(reads) // 3 * one
    assert streamer.read_bytes <= len(used) * one
    if slots == 100:  # everything fits: each is read once
        assert len(reads) == 3 * len(set(used))
    before = streamer.read_bytes
    run(streamed)
    assert streamer.read_bytes - before <= len(used) * one
    assert slots < 100 or streamer.read_bytes == before
    streamer.close()


def test_those_that_are_here_work_first() -> None:
    """And what is missing has been asked for before they do."""
    model, engine = make_mixtral(), make_copy_engine(HOST, records=True)
    streamed, streamer, _ = away(model, 8, engine=engine)
    layer = streamed.layers["1"].mlp.experts
    x = torch.randn(8, 32)
    with torch.no_grad():
        layer(x[:2], torch.tensor([0, 0, 0, 0, 0, 1, 2, 2]))  # experts 5 and 6
        engine.events.clear()
        layer(x, torch.arange(1, 9))
    words = [(e.kind, e.label.rpartition(".")[2]) for e in engine.events]
    computed = [label for kind, label in words if kind == "computes"]
    assert computed[:2] == ["5", "6"]
    assert sorted(computed) == list("01234567")
    asked = words.index(("submitted", "0"))
    assert asked < words.index(("computes", "5"))
    streamer.close()


def test_from_a_directory(tmp_path: Path) -> None:
    """A model on meta is loaded without its experts; saving reads them all."""
    model = make_mixtral()
    model.save_pretrained(tmp_path / "a")
    want = generate(model, IDS, max_new_tokens=4)
    opened = Mixtral.from_config(model.config, device="meta").eval()
    read = weight_reader(opened, tmp_path / "a").read_expert
    one = expert_bytes(model.layers["0"].mlp.experts)
    streamer = stream_experts_(opened, read, device=HOST, budget_bytes=4 * one)
    load_weights_(opened, tmp_path / "a")
    assert torch.equal(generate(opened, IDS, max_new_tokens=4), want)
    opened.save_pretrained(tmp_path / "b")
    again = Mixtral.from_pretrained(tmp_path / "b")
    assert_equal_trees(dict(again.named_parameters()), dict(model.named_parameters()))
    streamer.close()


def test_what_cannot_be() -> None:
    model = make_mixtral()
    with pytest.raises(ConfigError, match="too small for two experts"):
        away(model, 1)
    plain = Llama.from_config(LlamaConfig(**SIZES, num_layers=2))
    with pytest.raises(ConfigError, match="has no MoE layers"):
        stream_experts_(plain, lambda *_: None, device=HOST, budget_bytes=1 << 20)
    streamed, streamer, _ = away(model, 4)
    with pytest.raises(ConfigError, match="do not support the backward pass"):
        streamed(input_ids=IDS, labels=IDS)
    streamer.close()


def test_a_failed_read_is_asked_for_again() -> None:
    model = make_mixtral()
    want = generate(model, IDS, max_new_tokens=3)
    streamed, streamer, _ = away(model, 4)
    own = streamer.read

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    streamer.read = fail
    with pytest.raises(OSError, match="gone"):
        generate(streamed, IDS, max_new_tokens=3)
    streamer.read = own
    assert torch.equal(generate(streamed, IDS, max_new_tokens=3), want)
    streamer.close()
