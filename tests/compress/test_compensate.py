"""Reconstruction after structured pruning against closed forms and least squares."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from small_models import gpt2, llama, logits, texts
from torch import Tensor

from bmforge.compress.prune import StructureConfig, shrink_
from bmforge.compress.prune.apply_plan import apply_plan_
from bmforge.compress.prune.compensate import reconstruct_
from bmforge.compress.prune.plan import KeptIndices, PruningPlan
from bmforge.compress.prune.shrink import choose_structure
from bmforge.errors import ConfigError
from bmforge.models import T5, T5Config
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close, assert_equal_trees

KEPT = tuple(range(16, 128))
PLAN = PruningPlan({"layers.0": KeptIndices(features=KEPT)})


def watch(model: Any, module: str, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the inputs and outputs of a linear layer in a call, a token per row."""
    seen: list[Tensor] = []
    handle = model.get_submodule(module).register_forward_hook(
        lambda own, args, out: seen.extend((args[0].flatten(0, -2), out.flatten(0, -2)))
    )
    with torch.no_grad():
        model(**call)
    handle.remove()
    return seen[0], seen[1]


def test_constant_neurons_are_removed_exactly() -> None:
    model = gpt2()
    with torch.no_grad():
        model.layers["0"].mlp.up_proj.weight[:16] = 0
        model.layers["0"].mlp.up_proj.bias[:16] = torch.linspace(0.5, 2, 16)
    batches = texts(2)
    want = logits(model, batches[0])
    plain = copy.deepcopy(model)
    apply_plan_(plain, PLAN)
    assert (logits(plain, batches[0]) - want).abs().max() > 1e-2
    reconstruct_(model, PLAN, batches)
    apply_plan_(model, PLAN)
    assert_close(logits(model, batches[0]), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_fit_is_that_of_least_squares(make: Any) -> None:
    """The new layer solves the ridge regression, written as one system of equations."""
    model, ids = make().double(), texts(1, rows=8)[0]
    name = "layers.0.mlp.down_proj"
    x, y = watch(model, name, {"input_ids": ids})
    old = model.get_submodule(name).weight.detach().clone()
    stay = torch.arange(10, old.shape[1])
    reconstruct_(
        model, PruningPlan({"layers.0": KeptIndices(features=tuple(stay.tolist()))}), [ids]
    )
    layer = model.get_submodule(name)
    has_bias = layer.bias is not None
    x_kept = x[:, stay]
    centered = x_kept - x_kept.mean(0) * has_bias
    ridge = 0.01 * centered.square().sum(0).mean()
    ones = torch.ones(len(x), int(has_bias), dtype=x.dtype)
    rows = torch.cat((x_kept, ones), 1)
    damping = torch.eye(len(stay), rows.shape[1], dtype=x.dtype) * ridge.sqrt()
    wanted = torch.cat((y, damping[:, : len(stay)] @ old[:, stay].t()))
    solution = torch.linalg.lstsq(torch.cat((rows, damping)), wanted, driver="gelsd").solution
    assert_close(layer.weight.detach()[:, stay], solution[: len(stay)].t(), rtol=1e-7, atol=1e-9)
    assert not layer.weight[:, :10].any()
    if has_bias:
        assert_close(layer.bias.detach(), solution[-1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "kept",
    [
        KeptIndices(features=KEPT),
        KeptIndices(heads=(0, 3)),
        KeptIndices(heads=(1,), features=KEPT[:32]),
    ],
)
def test_the_mean_output_is_kept(kept: KeptIndices) -> None:
    """Over the calibration tokens, padding left out, both halves have the mean output they had."""
    model, ids = gpt2(), texts(1, rows=3)[0]
    mask = torch.ones_like(ids)
    mask[1, 9:] = mask[2, 4:] = 0
    call = {"input_ids": ids, "attention_mask": mask}
    plan = PruningPlan({"layers.0": kept})
    # The MLP's input changes where heads went before it.
    names = ["attn.o_proj"] if kept.heads else ["attn.o_proj", "mlp.down_proj"]

    def means() -> dict[str, Tensor]:
        outputs = {name: watch(model, f"layers.0.{name}", call)[1] for name in names}
        return {name: out[mask.flatten().bool()].mean(0) for name, out in outputs.items()}

    before = means()
    reconstruct_(model, plan, [call])
    apply_plan_(model, plan)
    assert_close(means(), before, rtol=1e-4, atol=1e-5)


def t5() -> T5:
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    return T5.from_config(T5Config(**sizes, head_dim=8, intermediate_size=64)).eval()


MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5}
SIZES: list[dict[str, int]] = [
    {"intermediate_size": 24},
    {"num_heads": 2},
    {"num_heads": 2, "intermediate_size": 40},
    {"intermediate_size": 24, "num_layers": 1},
]
CASES = list(product(MODELS, SIZES, ("size", "activation"), (torch.float32, torch.bfloat16)))


@pytest.mark.parametrize(
    ("family", "sizes", "by", "dtype"),
    [pytest.param(*c, marks=[pytest.mark.long] if n % 5 else []) for n, c in enumerate(CASES)],
)
def test_fitted_models_are_closer_to_the_full_one(
    family: str, sizes: dict[str, int], by: Any, dtype: torch.dtype
) -> None:
    """On texts that calibration did not see, logits are closer than without the fit."""
    model = MODELS[family]().to(dtype)
    targets = {"decoder_input_ids": texts(1, rows=8, seed=5)[0]} if family == "t5" else {}
    batches = [{"input_ids": ids, **targets} for ids in texts(24, rows=8)]
    other = {"input_ids": texts(1, rows=8, seed=9)[0], **targets}
    config = StructureConfig(**sizes, by=by)
    plan = choose_structure(model, config, batches)
    full = copy.deepcopy(model)
    reference = copy.deepcopy(full)  # removed blocks are not compensated
    apply_plan_(reference, PruningPlan({}, plan.gone))
    dropped, fitted = copy.deepcopy(full), copy.deepcopy(full)
    apply_plan_(dropped, plan)
    shrink_(fitted, config, batches)
    with torch.no_grad():
        want, plain, ours = (m(**other).logits.double() for m in (reference, dropped, fitted))
    assert (ours - want).norm() < (plain - want).norm()


def test_refused_plans_leave_the_model_unchanged() -> None:
    biased, batches = gpt2(), texts(2)
    before = {n: t.clone() for n, t in persistent_tensors(biased).items()}
    layers = {"layers.0": {"intermediate_size": 64}}
    with pytest.raises(ConfigError, match="uniform=True"):
        shrink_(biased, StructureConfig(layers=layers, by="activation", uniform=True), batches)
    assert_equal_trees(dict(persistent_tensors(biased)), before)
