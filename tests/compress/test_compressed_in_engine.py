"""Shrunk models and split MLPs in the engine: read from files, streamed, packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from masked_models import mostly_long, plan_of, stir
from tiny_models import TINY, make_inputs

from bmforge.compress.moefy import ExpertsMethod, MoEfyConfig
from bmforge.compress.prune import StructureConfig, StructureMethod
from bmforge.compress.prune.apply_plan import apply_plan_
from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, generate
from bmforge.models import AutoModel
from bmforge.models.sizes import sizes_of
from bmforge.models.stack import find_block
from bmforge.testing import assert_close

_CONFIG = EngineConfig(max_rows=4, max_tokens=24)


def smallest(directory: Path, **options: Any) -> int:
    with pytest.raises(ConfigError, match="is the smallest that works") as caught:
        Engine(directory, device_budget_bytes=1, config=_CONFIG, **options)
    return int(str(caught.value).split("too small: ")[1].split()[0])


def make(name: str, kind: str) -> Any:
    model: Any = stir(name, torch.float32)
    inputs = make_inputs(name)
    if kind == "split":
        config = MoEfyConfig(num_experts=4, share=0.5, always=8, epochs=1)
        ExpertsMethod(config, [inputs]).attach_(model)
    else:
        apply_plan_(model, plan_of(model, name, "heads", "features", "halves", "hidden"))
    return model


@pytest.mark.parametrize("name", mostly_long(["llama", "gpt2", "t5"], ["gpt2"]))
@pytest.mark.parametrize("kind", ["split", "shrunk"])
def test_streamed_from_files(name: str, kind: str, tmp_path: Path) -> None:
    """With the smallest budget it computes and writes what it does in memory."""
    model, inputs = make(name, kind), make_inputs(name)
    ids = inputs["input_ids"]
    with torch.no_grad():
        want = model(**inputs).logits
        text = generate(model, ids, max_new_tokens=5, eos_token_id=None)
    model.save_pretrained(tmp_path)
    with Engine(tmp_path, device_budget_bytes=smallest(tmp_path), config=_CONFIG) as engine:
        assert engine.plan.moved_bytes
        with torch.no_grad():
            assert_close(engine.model(**inputs).logits, want)
        assert torch.equal(generate(engine.model, ids, max_new_tokens=5, eos_token_id=None), text)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_packed_as_it_is_read(name: str, tmp_path: Path) -> None:
    """Experts whose file has the dense MLP are packed while it is read, to int8 rows."""
    model, inputs = make(name, "split"), make_inputs(name)
    with torch.no_grad():
        want = model(**inputs).logits
        model.save_pretrained(tmp_path)
        got = AutoModel.from_pretrained(tmp_path, quantize="int8-dynamic")(**inputs).logits
    assert (got - want).abs().median() < 0.05 * want.abs().max()


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_counts_are_those_of_the_modules(name: str) -> None:
    """What configs say of split and shrunk layers, for FLOPs, caches and plans."""
    for kind in ("split", "shrunk"):
        model = make(name, kind)
        for stack, layers in model.config.stack_sizes().items():
            found = [sizes_of(block.spec) for block in model.get_submodule(stack).values()]
            assert found == layers
        dense = type(model).from_config(TINY[name], device="meta")
        assert model.config.flops_per_token(9) < dense.config.flops_per_token(9)
    block = find_block(make("llama", "split"), "layers.1.mlp.router.first.weight")
    layer = sizes_of(block.spec)
    assert (layer.num_experts, layer.experts_per_token, layer.intermediate_size) == (4, 2, 8)
    assert layer.shared_size == 8
    assert layer.count_weights(32) == layer_weights()


def layer_weights() -> int:
    """Of the tiny Llama: q and o of 32, k and v of 16; 8 + 2 x 8 features of three matrices each;
    a router of 32 x 4 and 4 x 4.
    """
    return 32 * (32 + 32 + 16 + 16) + 3 * 32 * (8 + 16) + 32 * 4 + 16


def test_structure_at_once_is_a_method() -> None:
    """Put in, it is done; the facts say what became of the model."""
    model = stir("llama")
    method = StructureMethod(StructureConfig(intermediate_size=24, num_layers=2))
    method.attach_(model)
    assert method.extra_loss(model, 0) is None
    facts = method.finish_(model)
    assert (model.config.intermediate_size, model.config.num_layers) == (24, 2)
    assert facts["opens_elsewhere"]
    assert facts["parameters_after"] == sum(p.numel() for p in model.parameters())
