"""Layers of other sizes on every kind of layout: one process's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_models import TINY, family_of, make_inputs
from torch import Tensor

from bmforge.infer import generate
from bmforge.models import init_weights_
from bmforge.models.resize import resize_
from bmforge.models.sizes import Sizes
from bmforge.parallel import Layout, init_distributed, parallelize
from bmforge.testing import run_distributed
from bmforge.testing.batches import make_labels
from bmforge.testing.layouts import check_layout


@dataclass(frozen=True)
class Resized:
    """A family whose first layer has half the heads, whose second is narrow and whose last lacks
    attention; it builds as the family does.
    """

    name: str
    experts: bool = False

    def from_config(self, config: Any, **options: Any) -> Any:
        """Build it on meta."""
        model = family_of(self.name).from_config(config, **options)
        stacks = ("encoder.layers", "decoder.layers") if hasattr(model, "encoder") else ("layers",)
        for stack in stacks:
            resize_(model, [f"{stack}.0"], Sizes(num_heads=2, num_kv_heads=2))
            resize_(model, [f"{stack}.1"], Sizes(head_dim=4, intermediate_size=20))
            if self.name != "gptj":
                resize_(model, [f"{stack}.2"], Sizes(attn=False))
            if self.experts:
                resize_(model, [f"{stack}.1"], Sizes(num_experts=2))
        return model


def check(name: str, world: int, experts: bool = False, **fields: Any) -> None:
    """Train on a layout and on one process."""
    family, config = Resized(name, experts), TINY[name]
    model = family_of(name).from_config(config, device="meta")
    inputs = make_inputs(name, rows=4, length=8)
    if name in ("t5", "cpm2", "eva"):
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)[:, :7].contiguous()
    labels = make_labels(model, inputs)
    rows = 2 if "pp" in fields else 1
    layout = Layout(**fields)
    check_layout(family, config, inputs, labels, world=world, layout=layout, micro_batches=rows)


@pytest.mark.parametrize("name", ["llama", "t5", "cpm_bee", "longformer"])
def test_tensor_parallel(name: str) -> None:
    """Every layer is cut by its own heads, and takes its columns of a shared bias."""
    check(name, 2, tp=2)


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_context_parallel(method: str) -> None:
    """Tokens divided, with a bias for each number of heads."""
    check("t5", 2, cp=2, cp_method=method)


def test_pipeline_and_zero() -> None:
    """Stages of other layers, one without attention; shards of other shapes."""
    check("llama", 2, pp=2)
    check("llama", 2, zero=3, experts=True)


@pytest.mark.long
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"cp": 2},
        {"cp": 2, "cp_method": "ring"},
        {"cp": 2, "cp_method": "ulysses"},
        {"pp": 2},
        {"zero": 3},
    ],
)
def test_train_all_families(name: str, fields: dict[str, Any]) -> None:
    """All of them."""
    if name == "vit" and fields.get("sequence_parallel"):
        pytest.skip("five tokens: tp does not divide them")
    check(name, 2, **fields)


def write_some(name: str, layout: Layout) -> Tensor:
    """Continue padded prompts, on every worker."""
    init_distributed()
    model = Resized(name).from_config(TINY[name], device="meta", dtype=torch.float64)
    init_weights_(parallelize(model, layout), seed=3)
    ids = make_inputs(name)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return generate(model.eval(), ids, attention_mask=mask, max_new_tokens=5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_over_stages(name: str) -> None:
    """The last stage stores nothing and still counts the tokens that went by."""
    (want,) = run_distributed(write_some, 1, name, Layout())
    for layout in (Layout(pp=2, pp_cut=(2, 1)), Layout(tp=2)):
        for got in run_distributed(write_some, 2, name, layout):
            assert torch.equal(got, want)
