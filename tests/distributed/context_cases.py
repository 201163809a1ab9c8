"""Tiny models of every kind with inputs and labels, for the tests of context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bmforge.models import (
    GLM,
    GPT2,
    T5,
    Bert,
    BertConfig,
    CPMAnt,
    CPMAntConfig,
    CPMBee,
    CPMBeeConfig,
    GLMConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    Longformer,
    LongformerConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
    ViT,
    ViTConfig,
)

COMMON: dict[str, Any] = {"vocab_size": 29, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
BATCH, LENGTH = 4, 13
METHODS = ("gather", "ring", "ulysses")
Case = tuple[Any, Any, dict[str, Tensor], dict[str, Tensor]]


def draw(*shape: int, high: int = 28, seed: int = 1) -> Tensor:
    """Random integers."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def text(length: int = LENGTH) -> dict[str, Tensor]:
    """Token ids."""
    return {"input_ids": draw(BATCH, length)}


def labels(length: int = LENGTH, high: int = 28) -> dict[str, Tensor]:
    """Labels, of which a whole row and some others do not count."""
    found = draw(BATCH, length, high=high, seed=2)
    found[0], found[1, :4] = -100, -100
    return {"labels": found}


def padding(length: int = LENGTH) -> dict[str, Tensor]:
    """A mask of rows that are padded on either side."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[0, -5:], mask[1, :3] = 0, 0
    return {"attention_mask": mask}


def documents(length: int = LENGTH) -> dict[str, Tensor]:
    """Rows packed from documents of different lengths."""
    return {"document_ids": draw(BATCH, length, high=2, seed=4).cumsum(1)}


def gpt2(length: int = LENGTH, **more: Any) -> Case:
    config = GPT2Config(**COMMON, max_seq_len=32, **more)
    return GPT2, config, text(length), labels(length)


def llama(length: int = LENGTH, kv_heads: int = 2) -> Case:
    config = LlamaConfig(**COMMON, intermediate_size=24, num_kv_heads=kv_heads, head_dim=6)
    return Llama, config, text(length), labels(length)


def packed(length: int = LENGTH) -> Case:
    model, config, inputs, wanted = llama(length)
    return model, config, inputs | documents(length), wanted


def bert(length: int = LENGTH) -> Case:
    config = BertConfig(**COMMON, max_seq_len=32, intermediate_size=24)
    return Bert, config, text(length) | padding(length), labels(length)


def classifier(length: int = LENGTH) -> Case:
    model, config, inputs, _ = bert(length)
    config = config.replace(head="sequence_classification", num_labels=3)
    return model, config, inputs, {"labels": torch.tensor([0, 2, 1, 1])}


def t5(length: int = LENGTH) -> Case:
    config = T5Config(**COMMON, intermediate_size=24, num_buckets=8, max_distance=10)
    inputs = text(length) | padding(length)
    return T5, config, inputs, labels(max(1, length - 4))


def longformer(length: int = 150) -> Case:
    config = LongformerConfig(
        **COMMON, intermediate_size=24, max_seq_len=160, windows=(8, 24), sep_token_id=2
    )
    chosen = torch.zeros(BATCH, length, dtype=torch.long)
    chosen[0, [0, length // 2]] = chosen[1, length - 1] = 1
    inputs = text(length) | padding(length) | {"global_attention_mask": chosen}
    return Longformer, config, inputs, labels(length)


def vit() -> Case:
    config = ViTConfig(
        hidden_size=32, intermediate_size=24, num_layers=2, num_heads=4, image_size=16,
        patch_size=4, num_labels=5,
    )  # fmt: skip
    images = torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return ViT, config, {"pixel_values": images}, {"labels": torch.tensor([0, 4, 1, 1])}


def mixtral(length: int = LENGTH) -> Case:
    config = MixtralConfig(
        **COMMON, intermediate_size=24, num_kv_heads=2, num_experts=4, experts_per_token=2,
        output_router_logits=True, router_aux_loss_coef=0.3, window=5,
    )  # fmt: skip
    return Mixtral, config, text(length) | padding(length), labels(length)


def glm(length: int = LENGTH) -> Case:
    config = GLMConfig(**COMMON, max_seq_len=32)
    prefix = {"attention_mask": torch.tensor([5, 3, 0, 13])}
    return GLM, config, text(length) | prefix, labels(length)


def cpm_bee(length: int = LENGTH) -> Case:
    config = CPMBeeConfig(
        **COMMON, intermediate_size=24, head_dim=6, num_buckets=8, num_relations=4, max_seq_len=32
    )
    inputs = text(length) | padding(length) | documents(length)
    # As many rows beyond the vocabulary as the batch has.
    inputs["ext_table_ids"] = torch.tensor([3, 1, 4, 1])
    return CPMBee, config, inputs, labels(length, high=33)


def cpm_ant(length: int = LENGTH) -> Case:
    config = CPMAntConfig(
        **COMMON, intermediate_size=24, head_dim=6, num_buckets=8, max_seq_len=32,
        prompt_types=3, prompt_length=3, segment_types=4,
    )  # fmt: skip
    inputs = text(length)
    inputs["input_ids"][:, :3] = torch.arange(3)
    inputs |= {
        "segment": draw(BATCH, length, high=4, seed=5),
        "context": draw(BATCH, length, high=2, seed=6),
        "span": draw(BATCH, length, high=2, seed=7).cumsum(1),
        "length": torch.tensor([length, 9, 5, length]),
    }
    return CPMAnt, config, inputs, labels(length)


CASES: dict[str, Callable[..., Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "packed": packed,
    "bert": bert,
    "classifier": classifier,
    "t5": t5,
    "longformer": longformer,
    "vit": vit,
    "mixtral": mixtral,
    "glm": glm,
    "cpm_bee": cpm_bee,
    "cpm_ant": cpm_ant,
}
