"""Mean compensation of structured pruning against closed forms."""

from __future__ import annotations

import copy

import pytest
import torch
from small_models import gpt2, llama, logits, texts

from bmforge.compress.prune import StructureConfig, shrink_
from bmforge.compress.prune.carry import carry_out_
from bmforge.compress.prune.compensate import fold_means_
from bmforge.compress.prune.plan import Kept, Plan
from bmforge.errors import ConfigError
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close, assert_equal_trees

KEPT = tuple(range(16, 128))
PLAN = Plan({"layers.0": Kept(features=KEPT)})


def test_constant_neurons_are_removed_exactly() -> None:
    model = gpt2()
    with torch.no_grad():
        model.layers["0"].mlp.up_proj.weight[:16] = 0
        model.layers["0"].mlp.up_proj.bias[:16] = torch.linspace(0.5, 2, 16)
    batches = texts(2)
    want = logits(model, batches[0])
    plain = copy.deepcopy(model)
    carry_out_(plain, PLAN)
    assert (logits(plain, batches[0]) - want).abs().max() > 1e-2
    fold_means_(model, PLAN, batches)
    carry_out_(model, PLAN)
    assert_close(logits(model, batches[0]), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kept", [Kept(features=KEPT), Kept(heads=(0, 3)), Kept(heads=(1,), features=KEPT[:32])]
)
def test_the_mean_output_is_kept(kept: Kept) -> None:
    """Over the calibration tokens, padding left out, both halves have the mean output they had."""
    model, ids = gpt2(), texts(1, rows=3)[0]
    mask = torch.ones_like(ids)
    mask[1, 9:] = mask[2, 4:] = 0
    parts = {"attn": "attn.o_proj", "mlp": "mlp.down_proj"}

    def means() -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = {}
        block = model.layers["0"]
        handles = [
            block.get_submodule(part).register_forward_hook(
                lambda own, args, out, name=name: outputs.update({name: out[mask.bool()].mean(0)})
            )
            for name, part in parts.items()
        ]
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask)
        for handle in handles:
            handle.remove()
        return outputs

    before = means()
    plan = Plan({"layers.0": kept})
    fold_means_(model, plan, [{"input_ids": ids, "attention_mask": mask}])
    carry_out_(model, plan)
    after = means()
    # The MLP's input changes where heads went before it.
    for name in ("attn",) if kept.heads else ("attn", "mlp"):
        assert_close(after[name], before[name], rtol=1e-4, atol=1e-5)


def test_layers_without_bias_and_refused_plans_are_left_alone() -> None:
    model, batches = llama(), texts(2)
    before = {n: t.clone() for n, t in persistent_tensors(model).items()}
    fold_means_(model, Plan({"layers.0": Kept(features=tuple(range(32)))}), batches)
    assert_equal_trees(dict(persistent_tensors(model)), before)
    biased = gpt2()
    before = {n: t.clone() for n, t in persistent_tensors(biased).items()}
    layers = {"layers.0": {"intermediate_size": 64}}
    with pytest.raises(ConfigError, match="uniform=True"):
        shrink_(biased, StructureConfig(layers=layers, by="activation", uniform=True), batches)
    assert_equal_trees(dict(persistent_tensors(biased)), before)
