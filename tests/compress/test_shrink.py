"""Smaller models: they compute what the whole ones do in which the lost parts are silent."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from masked_models import KINDS, has_kind, mostly_long, plan_of, run, silence_, stir
from tiny_models import TINY, build, make_inputs

from bmforge.compress.prune.apply_plan import apply_plan_
from bmforge.compress.prune.plan import PruningPlan, blocks_of
from bmforge.compress.prune.shrink import shrink_
from bmforge.compress.prune.structure_config import StructureConfig
from bmforge.errors import ConfigError
from bmforge.models import AutoModel
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close, assert_equal_trees
from bmforge.testing.batches import make_labels


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("kind", mostly_long([*KINDS, "all"], ["all"]))
def test_shrunk_is_the_masked_model(name: str, kind: str) -> None:
    """Each kind and all at once, of every family."""
    if not has_kind(name, kind):
        pytest.skip("the family has no such part")
    kinds = [k for k in KINDS if has_kind(name, k)] if kind == "all" else [kind]
    whole = stir(name)
    small = copy.deepcopy(whole)
    plan = plan_of(whole, name, *kinds)
    shrunk = apply_plan_(small, plan)
    assert shrunk.parameters_after < shrunk.parameters_before
    assert shrunk.parameters_after == sum(t.numel() for t in persistent_tensors(small).values())
    silence_(whole, plan)
    assert_close(run(small, name), run(whole, name))


@pytest.mark.parametrize("name", mostly_long(TINY, ["t5", "cpm_ant", "bert"]))
def test_shrunk_saves_and_opens(name: str, tmp_path: Path) -> None:
    """By AutoModel, with the same bits, and with everything lost that the family can lose."""
    model = stir(name, torch.float32)
    kinds = [kind for kind in KINDS if has_kind(name, kind)]
    apply_plan_(model, plan_of(model, name, *kinds))
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config.changes == model.config.changes
    assert_equal_trees(again.state_dict(), model.state_dict())
    inputs = {k: t.float() if t.is_floating_point() else t for k, t in make_inputs(name).items()}
    for one, other in zip(again(**inputs), model(**inputs), strict=True):
        if torch.is_tensor(one):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", mostly_long(["llama", "t5", "bert", "mixtral"], ["llama"]))
def test_a_shrunk_model_trains(name: str) -> None:
    """Gradients reach what is left, and are those of the masked model."""
    whole = stir(name)
    small = copy.deepcopy(whole)
    plan = plan_of(whole, name, "heads", "features", "halves")
    apply_plan_(small, plan)
    silence_(whole, plan)
    inputs = make_inputs(name)
    inputs |= make_labels(whole, inputs)
    for model in (whole, small):
        model(**inputs).loss.backward()
    assert_close(small.embed.weight.grad, whole.embed.weight.grad)


def test_plans_are_json() -> None:
    """A plan written and read again is the plan."""
    plan = plan_of(build("mixtral"), "mixtral", "heads", "features", "experts", "hidden", "blocks")
    assert PruningPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ConfigError, match="has the unknown field 'head'"):
        PruningPlan.from_json({"layers": {"layers.0": {"head": [1]}}})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"num_heads": 3}, "nearest valid value is 4"),
        (
            "llama",
            {"num_heads": 2, "num_kv_heads": 1, "tensor_parallel": 4},
            "num_heads=2 is not divisible",
        ),
        ("llama", {"head_dim": 3}, "split a rotary pair. The nearest valid value is 4"),
        (
            "llama",
            {"intermediate_size": 41},
            "intermediate_size=41 is more than the layer's intermediate_size=40",
        ),
        ("llama", {"num_experts": 2}, "it applies to no layer of this Llama"),
        ("llama", {"target": "parameters", "keep_ratio": 0.001}, "cannot be reached"),
        ("llama", {"target": "parameters", "num_heads": 2}, "cannot be used together"),
        ("llama", {"hidden_size": 64}, "must be below"),
        ("cpm_bee", {"hidden_size": 16}, "cannot be pruned"),
        ("bert", {"num_heads": 2, "uniform": True}, "transformers' config has no fields"),
        (
            "cpm2",
            {"layers": {"encoder.layers.0": {"attn": False}}, "by": "taylor"},
            "needs calibration batches",
        ),
    ],
)
def test_what_cannot_be_is_said(name: str, options: dict[str, Any], message: str) -> None:
    """Before anything is touched, with the nearest that fits."""
    model = build(name)
    before = {n: t.clone() for n, t in persistent_tensors(model).items()}
    with pytest.raises(ConfigError, match=message):
        shrink_(model, StructureConfig(**options))
    assert_equal_trees(dict(persistent_tensors(model)), before)


@pytest.mark.parametrize("by", ["size", "activation", "taylor", "influence"])
def test_importance_finds_what_matters(by: str) -> None:
    """Heads and features that do nothing, and a block that is nearly nothing, go first."""
    model = stir("llama")
    with torch.no_grad():
        block = model.layers["1"]
        for rows in (block.attn.q_proj.weight, block.attn.o_proj.weight.t()):
            rows[8:24] *= 1e-4  # heads 1 and 2, one of each group
        for rows in (block.mlp.up_proj.weight, block.mlp.gate_proj.weight):
            rows[5:25] *= 1e-4
        block.mlp.down_proj.weight[:, 5:25] *= 1e-4
        for last in (model.layers["2"].attn.o_proj, model.layers["2"].mlp.down_proj):
            last.weight *= 1e-5
        if by == "size":
            for parameter in model.layers["2"].parameters():
                parameter *= 1e-5
    inputs = make_inputs("llama")
    inputs |= make_labels(model, inputs)
    whole = run(model, "llama")
    config = StructureConfig(
        layers={"layers.1": {"num_heads": 2, "intermediate_size": 20}}, num_layers=2, by=by
    )
    shrunk = shrink_(model, config, [inputs])
    assert shrunk.plan.gone == ("layers.2",)
    assert shrunk.plan.layers["layers.1"].heads == (0, 3)
    assert shrunk.plan.layers["layers.1"].features == (*range(5), *range(25, 40))
    assert model.config.num_layers == 2
    assert (run(model, "llama") - whole).abs().max() < 1e-2 * whole.abs().max()


@pytest.mark.parametrize("name", ["llama", "gptj", "t5"])
def test_halves_that_matter_least_go(name: str) -> None:
    """A layer's attention and another one's MLP that add nearly nothing, in every stack."""
    model = stir(name)
    with torch.no_grad():
        for block_name, block in blocks_of(model).items():
            if block_name.endswith(".1"):
                block.attn.o_proj.weight *= 1e-6
            if block_name.endswith(".2"):
                block.mlp.down_proj.weight *= 1e-6
    by = "influence" if name != "t5" else "activation"
    config = StructureConfig(attn_layers=2, mlp_layers=2, by=by)
    plan = shrink_(model, config, [make_inputs(name)]).plan
    lost = {name: (kept.attn, kept.mlp) for name, kept in plan.layers.items()}
    assert len(lost) == 2 * (2 if name == "t5" else 1)
    assert all(v == ((False, True) if k.endswith(".1") else (True, False)) for k, v in lost.items())


@pytest.mark.parametrize(
    ("name", "uniform"),
    [("llama", False), ("gpt2", False), ("t5", False), ("llama", True), ("t5", True)],
)
def test_half_of_the_parameters(name: str, uniform: bool) -> None:
    """What is left of the blocks is half, whatever the layers' shares, or the same in all."""
    model = stir(name)
    before = sum(p.numel() for b in blocks_of(model).values() for p in b.parameters())
    config = StructureConfig(target="parameters", keep_ratio=0.5, uniform=uniform)
    shrunk = shrink_(model, config)
    after = sum(p.numel() for b in blocks_of(model).values() for p in b.parameters())
    assert shrunk.opens_elsewhere == uniform
    assert 0.44 < after / before <= 0.5
    # A bias on the scores that layers share becomes narrower with them.
    assert shrunk.parameters_before - shrunk.parameters_after >= before - after
