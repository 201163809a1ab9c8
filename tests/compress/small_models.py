"""Tiny models and texts for the tests of compression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig, Mixtral, MixtralConfig

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 32,
    "init_std": 0.2,
}


def gpt2(**more: Any) -> GPT2:
    return GPT2.from_config(GPT2Config(**SIZES, **more)).eval()


def llama(**more: Any) -> Llama:
    sizes = {"intermediate_size": 64, "num_kv_heads": 2, **more}
    return Llama.from_config(LlamaConfig(**{**SIZES, **sizes})).eval()


def mixtral() -> Mixtral:
    config = MixtralConfig(
        **SIZES, num_kv_heads=2, intermediate_size=32, num_experts=3, experts_per_token=2
    )
    return Mixtral.from_config(config).eval()


def hf_gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


def hf_bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(config).eval()


def texts(count: int = 4, rows: int = 4, length: int = 16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 61, (rows, length), generator=generator) for _ in range(count)]


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits
