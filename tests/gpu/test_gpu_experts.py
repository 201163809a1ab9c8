"""Experts are made where the model is; skips itself where there is no accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmforge.compress.moefy import MoEfyConfig, moefy
from bmforge.compress.prune import StructureConfig, shrink_
from bmforge.device import default_device
from bmforge.models import GPT2, GPT2Config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here"),
]
SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}


def build() -> tuple[GPT2, torch.Tensor]:
    ids = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(0))
    return GPT2.from_config(GPT2Config(**SIZES, max_seq_len=32)).eval().to(default_device()), ids


@pytest.mark.parametrize("router", ["two_layer", "linear", "similarity"])
@pytest.mark.parametrize("group", ["weights", "coactivation", "random"])
def test_experts_of_a_model_elsewhere(group: Any, router: Any) -> None:
    """All of them are the MLP, with batches that lie on the host."""
    if group == "coactivation":
        pytest.importorskip("pymetis")
    model, ids = build()
    there = ids.to(default_device())
    want = model(input_ids=there).logits
    config = MoEfyConfig(
        num_experts=4, share=1.0, group=group, router=router, always=8, epochs=1, relu=False
    )
    moefy(model, config, [{"input_ids": ids}])
    assert torch.allclose(model(input_ids=there).logits, want, rtol=1e-3, atol=1e-4)
    assert all(p.device == there.device for p in model.parameters())


@pytest.mark.parametrize("by", ["size", "activation", "taylor", "influence"])
def test_structure_of_a_model_elsewhere(by: Any) -> None:
    """Importance is measured there, with batches that lie on the host."""
    model, ids = build()
    config = StructureConfig(target="parameters", keep_ratio=0.6, by=by)
    shrink_(model, config, [{"input_ids": ids, "labels": ids}])
    assert model(input_ids=ids.to(default_device())).logits.isfinite().all()
