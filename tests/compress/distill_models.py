"""Tiny students and teachers for the tests of distillation; called in the pool's workers too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bmforge.models import T5, Bert, BertConfig, Llama, LlamaConfig, T5Config
from bmforge.testing.batches import make_labels

VOCAB, LENGTH = 29, 7
SIZES = {"vocab_size": VOCAB, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 32}


def make_llama(seed: int, layers: int = 2, width: int = 16, **fields: Any) -> Llama:
    """A Llama with two heads to a key, in float64."""
    sizes = {**SIZES, "hidden_size": width, "num_layers": layers, "intermediate_size": 24}
    config = LlamaConfig(**{**sizes, **fields})
    model = Llama.from_config(config, dtype=torch.float64, seed=seed)
    return stir_(model, seed)


def make_bert(seed: int, layers: int = 2, head: str = "masked_lm") -> Bert:
    """A Bert in float64, without dropout."""
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=layers,
        num_heads=4,
        intermediate_size=24,
        max_seq_len=32,
        head=head,
        num_labels=3,
        dropout=0.0,
        attn_dropout=0.0,
    )
    return stir_(Bert.from_config(config, dtype=torch.float64, seed=seed), seed)


def make_t5(seed: int, layers: int = 2) -> T5:
    """A T5 in float64, without dropout."""
    config = T5Config(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=4,
        head_dim=4,
        intermediate_size=24,
        dropout=0.0,
    )
    return stir_(T5.from_config(config, dtype=torch.float64, seed=seed), seed)


def stir_(model: Any, seed: int) -> Any:
    """Let every parameter matter, norms and biases included."""
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=0.1)
    return model.train()


def make_inputs(model: nn.Module, rows: int = 3, padded: bool = True) -> dict[str, Tensor]:
    """Ids, a mask and labels, some of them -100."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB - 1, (rows, LENGTH), generator=generator)
    batch = {"input_ids": ids}
    if padded:
        mask = torch.ones_like(ids)
        mask[-1, -2:] = 0
        batch["attention_mask"] = mask
    batch |= make_labels(model, batch)
    if padded and batch["labels"].shape == ids.shape:
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batch


def task_loss(model: Any, batch: Any, num_items: float) -> Any:
    """As `train.causal_lm`."""
    return model(**batch, num_items_in_batch=num_items).loss
