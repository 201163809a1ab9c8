"""A model with a delta compiles whole, and computes what it did: loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig
from bmforge.testing.tolerance import assert_close
from bmforge.tune.delta import (
    IA3,
    Adapter,
    BitFit,
    Compacter,
    Lora,
    LowRankAdapter,
    ParallelAdapter,
    Prefix,
    SoftPrompt,
)

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "num_layers": 2}
MODELS = {
    "gpt2": lambda: GPT2.from_config(GPT2Config(**SIZES, max_seq_len=32)),
    "llama": lambda: Llama.from_config(LlamaConfig(**SIZES, intermediate_size=48, max_seq_len=32)),
}
TYPES: dict[type, dict[str, Any]] = {
    Lora: {},
    Adapter: {"width": 4},
    LowRankAdapter: {"reduction": 4},
    Compacter: {"reduction": 4},
    ParallelAdapter: {"width": 4},
    BitFit: {},
    IA3: {},
    Prefix: {"length": 3},
    SoftPrompt: {"length": 3},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("family", MODELS)
def test_a_model_with_a_delta_compiles_whole(family: str, kind: Any) -> None:
    """Without breaks but for a soft prompt, which looks whether the ids have it already."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = MODELS[family]()
    kind(model, **TYPES[kind])
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(0, 64, (2, 9))

    def run(ids: torch.Tensor) -> Any:
        return model(input_ids=ids, labels=ids).loss

    want = run(ids)
    compiled: Any = torch.compile(run, fullgraph=kind is not SoftPrompt, backend="aot_eager")
    got = compiled(ids)
    assert_close(got, want)
    for mine, theirs in zip(
        torch.autograd.grad(got, trained), torch.autograd.grad(want, trained), strict=True
    ):
        assert_close(mine, theirs)
    torch.compiler.reset()
