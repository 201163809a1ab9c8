"""Models under torch.autocast compute what they compute in fp32, up to the rounding to bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bmforge.models import (
    GPT2,
    OPT,
    T5,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    OPTConfig,
    Qwen,
    QwenConfig,
    T5Config,
)
from bmforge.nn.attention import compute_attention

_SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
_WIDE = {**_SIZES, "intermediate_size": 128}
MODELS: dict[str, Any] = {
    "llama": lambda: Llama.from_config(LlamaConfig(**_WIDE, num_kv_heads=2), seed=1),
    "qwen": lambda: Qwen.from_config(QwenConfig(**_WIDE), seed=1),
    "gpt2": lambda: GPT2.from_config(GPT2Config(**_SIZES, max_seq_len=64), seed=1),
    "opt": lambda: OPT.from_config(OPTConfig(**_WIDE, max_seq_len=64), seed=1),
    "bert": lambda: Bert.from_config(BertConfig(**_WIDE), seed=1),
    "t5": lambda: T5.from_config(T5Config(**_WIDE, head_dim=16), seed=1),
}


def gradients(model: Any, is_cast: bool) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_autocast(name: str) -> None:
    model = MODELS[name]()
    want_loss, want = gradients(model, is_cast=False)
    loss, grads = gradients(model, is_cast=True)
    assert loss == pytest.approx(want_loss, rel=5e-3)
    assert grads.keys() == want.keys()
    for key, gradient in want.items():
        off = (grads[key] - gradient).norm() / gradient.norm().clamp(min=1e-4)
        assert off < 0.1, f"{key}: {off}"


@pytest.mark.parametrize("keys", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_attention_of_mixed_dtypes_is_torchs(keys: torch.dtype, values: torch.dtype) -> None:
    """Under autocast, queries and keys may be fp32 and values bf16."""
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(2, 4, 32, 16, generator=generator).to(keys) for _ in range(2))
    value = torch.randn(2, 4, 32, 16, generator=generator).to(values)
    with torch.autocast("cpu", torch.bfloat16):
        got = compute_attention(query, key, value, None, None, True, None, 0.0)
        want = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert (got.float() - want.float()).abs().max() < 0.03
