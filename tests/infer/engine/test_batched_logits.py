"""Logits of many hidden states are bit-identical to one hidden state at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmforge.infer.engine.packed_step import PackedStep
from bmforge.models import GPT2, OPT, Gemma, GemmaConfig, GPT2Config, Llama, LlamaConfig, OPTConfig

SIZES: dict[str, Any] = {"vocab_size": 40, "num_layers": 1, "num_heads": 4, "max_seq_len": 32}
MODELS: dict[str, Any] = {
    "rms": lambda width: Llama.from_config(
        LlamaConfig(**SIZES, hidden_size=width, intermediate_size=16, num_kv_heads=2), seed=1
    ),
    "rms with offset": lambda width: Gemma.from_config(
        GemmaConfig(**SIZES, hidden_size=width, intermediate_size=16, num_kv_heads=2), seed=1
    ),
    "layer": lambda width: GPT2.from_config(GPT2Config(**SIZES, hidden_size=width), seed=1),
    "projected": lambda width: OPT.from_config(
        OPTConfig(**SIZES, hidden_size=width, embed_size=24), seed=1
    ),
}


# From 16,384 values on, RMSNorm uses a kernel that rounds differently.
@pytest.mark.parametrize(("width", "rows"), [(64, 3), (64, 300), (320, 70), (16384, 2)])
@pytest.mark.parametrize("kind", list(MODELS))
def test_logits_of_rows_do_not_depend_on_other_rows(kind: str, width: int, rows: int) -> None:
    if width > 320 and kind != "rms":
        pytest.skip("no other kind of norm has a kernel for large inputs")
    step = PackedStep(MODELS[kind](width).eval(), 4)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)) * 3
    with torch.no_grad():
        together = step._score(x)
        alone = torch.cat([step._score(row[None]) for row in x])
    assert torch.equal(together, alone)
