"""A mixture whose experts are read when they are chosen: the bits, the budget, the bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, generate
from bmforge.infer.engine.budget import plan_memory
from bmforge.memory.streamed_experts import expert_bytes
from bmforge.models import CPM2, AutoModel, CPM2Config, Llama, LlamaConfig, Mixtral, MixtralConfig
from bmforge.models.quantize import quantize_
from bmforge.surgery import persistent_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4
}  # fmt: skip
CONFIG = EngineConfig(max_rows=2, max_tokens=24, stream_experts=True)
IDS = torch.randint(1, 96, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = MixtralConfig(**SIZES, num_layers=3, num_kv_heads=2, num_experts=8)
    Mixtral.from_config(config, seed=1).save_pretrained(tmp_path)
    return tmp_path


def smallest(directory: Path, **options: Any) -> int:
    with pytest.raises(ConfigError, match="is the smallest that works") as caught:
        Engine(directory, device_budget_bytes=1, config=CONFIG, **options)
    found = re.search(r"too small: (\d+)", str(caught.value))
    assert found is not None
    return int(found[1])


def count_uses(model: Any) -> list[int]:
    """A list that grows by the number of experts of every layer that runs."""
    uses: list[int] = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _, args: uses.append(int((args[1].diff(prepend=args[1][:1] * 0) > 0).sum()))
            )
    return uses


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_bits_budget_and_bytes(directory: Path, scheme: str | None) -> None:
    """With the smallest budget, with some more, and with room for all; also packed."""
    plain: Any = AutoModel.from_pretrained(directory, quantize=scheme)
    one = expert_bytes(plain.layers["0"].mlp.experts)
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": ()}
    uses = count_uses(plain)
    want = generate(plain, IDS, **options)
    needed, least, read = sum(uses), smallest(directory, quantize=scheme), []
    for more in (0, 5, 100):
        budget = least + more * one
        with Engine(
            directory, device_budget_bytes=budget, quantize=scheme, config=CONFIG
        ) as engine:
            assert engine.plan.used_bytes <= budget
            assert engine.plan.experts_bytes == min(2 + more, 24) * one
            assert "cached experts" in str(engine.plan)
            assert torch.equal(engine.generate(IDS, **options), want)
            streamer: Any = next(iter(engine._streamers))
            assert streamer.num_slots * one == engine.plan.experts_bytes
            read.append(streamer.read_bytes)
    assert read[0] <= needed * one
    assert read == sorted(read, reverse=True)
    assert read[-1] <= 24 * one


def test_what_cannot_be(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="create the engine with its directory"):
        Engine(AutoModel.from_pretrained(directory), config=CONFIG)
    Llama.from_config(LlamaConfig(**SIZES, num_layers=2)).save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match="needs a model with MoE layers"):
        Engine(tmp_path / "llama", config=CONFIG)


@pytest.mark.parametrize("streams", [True, False])
def test_198b_is_planned_for_a_disk(streams: bool) -> None:
    """CPM-2's mixture in int4, a hundred times larger than what it is given."""
    config = CPM2Config.preset("cpm2-moe-198b")
    model = quantize_(CPM2.from_config(config, device="meta").eval(), "int4")
    plan = plan_memory(
        model,
        [torch.device("cpu")],
        EngineConfig(max_tokens=128, stream_experts=streams),
        device_budget_bytes=6 << 30,
        host_budget_bytes=None,
    )
    assert plan.used_bytes <= 6 << 30
    total = sum(tensor.nbytes for tensor in persistent_tensors(model).values())
    assert total > 100e9
    if streams:
        assert not plan.on_disk
        assert plan.experts_bytes > 0
    else:
        assert len(plan.on_disk) == len(model.encoder.layers) + len(model.decoder.layers)
        assert plan.moved_bytes > 100e9
