"""A tiny config of every family, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmforge.models import (
    BertConfig,
    CPM1Config,
    CPM2Config,
    CPMAntConfig,
    CPMBeeConfig,
    EVAConfig,
    GLMConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    LongformerConfig,
    MiniCPMConfig,
    MixtralConfig,
    Model,
    OPTConfig,
    QwenConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
)
from bmforge.models.hub import FAMILIES

__all__ = ["DECODERS", "TINY", "build", "family_of", "make_inputs"]

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 4,
    "max_seq_len": 32,
    "init_std": 0.2,
}
_WIDE: dict[str, Any] = {**_SIZES, "intermediate_size": 40}
_GROUPED: dict[str, Any] = {**_WIDE, "num_kv_heads": 2}
_LIVE: dict[str, Any] = {**_WIDE, "head_dim": 6, "num_buckets": 16, "init_std": 1.0}
_BOTH: dict[str, Any] = {**_WIDE, "head_dim": 6, "num_buckets": 16}

TINY: dict[str, Any] = {
    "bert": BertConfig(**_WIDE),
    "roberta": RobertaConfig(**_WIDE, pad_token_id=1),
    "longformer": LongformerConfig(**_WIDE, windows=(4, 8, 4)),
    "gpt2": GPT2Config(**_WIDE),
    "gptj": GPTJConfig(**_WIDE, rotary_dim=4),
    "opt": OPTConfig(**_WIDE),
    "llama": LlamaConfig(**_GROUPED),
    "qwen": QwenConfig(**_GROUPED, window=3, window_layers=[1, 2]),
    "minicpm": MiniCPMConfig(**_GROUPED),
    "mixtral": MixtralConfig(**_GROUPED, num_experts=3),
    "cpm1": CPM1Config(**_SIZES),
    "glm": GLMConfig(**_SIZES),
    "cpm_ant": CPMAntConfig(**_LIVE, prompt_types=3, prompt_length=4, segment_types=5),
    "cpm_bee": CPMBeeConfig(**_LIVE, num_relations=20),
    "t5": T5Config(**{**_BOTH, "init_std": 0.5}, num_decoder_layers=3),
    "cpm2": CPM2Config(**_BOTH),
    "eva": EVAConfig(**{**_BOTH, "init_std": 0.5}, decoder_start_token_id=2),
    "vit": ViTConfig(
        hidden_size=32, num_layers=3, num_heads=4, image_size=8, patch_size=4, init_std=0.2
    ),
}
DECODERS = [
    *("gpt2", "gptj", "opt", "llama", "qwen", "minicpm", "mixtral", "cpm1", "glm"),
    *("cpm_ant", "cpm_bee"),
]


def family_of(name: str) -> type[Model]:
    """Return a family's class."""
    return next(f for f in FAMILIES.values() if f.config_class is type(TINY[name]))


def build(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a tiny model with weights."""
    return family_of(name).from_config(TINY[name], dtype=dtype, **options).eval()


def make_inputs(name: str, rows: int = 2, length: int = 9) -> dict[str, Tensor]:
    """Return what its forward takes, without labels."""
    generator = torch.Generator().manual_seed(5)
    if name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator).double()}
    ids = torch.randint(6, 60, (rows, length), generator=generator)
    if name in ("t5", "cpm2", "eva"):
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :7].contiguous()}
    return {"input_ids": ids}
