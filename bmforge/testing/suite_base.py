"""Base class of the suites for model families: small configs, inputs and generated ids."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bmforge.infer import generate
from bmforge.memory.streaming import Streamer, stream_blocks_
from bmforge.models import Model, ModelConfig
from bmforge.surgery import find_modules, persistent_tensors
from bmforge.testing.batches import Batch, make_batch

__all__ = ["SuiteBase", "stream_all_blocks_"]

_WIDTH = 32  # columns per group of quantized weights
_SIZES = ("hidden_size", "intermediate_size", "expert_size", "shared_size", "embed_size")


class SuiteBase:
    """Small models of a model family and their inputs, used by all test suites.

    Attributes:
        model_class: the family.
    """

    model_class: ClassVar[type[Model]]

    def tiny_config(self) -> ModelConfig:
        """Return a tiny config of the family."""
        raise TypeError(f"{type(self).__name__} must define `tiny_config`.")

    def wide_config(self) -> ModelConfig:
        """Return the tiny config with widths divisible by 32."""
        config = self.tiny_config()
        field_names = {field.name for field in fields(config)}
        sizes = {name: getattr(config, name) for name in _SIZES if name in field_names}
        if config.num_heads * config.head_dim % _WIDTH:
            sizes["head_dim"] = config.head_dim
        rounded = {n: -(-size // _WIDTH) * _WIDTH for n, size in sizes.items() if size}
        return config.replace(**rounded)

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return the model's arguments other than labels."""
        return {"input_ids": make_batch(model, batch, seed=seed)}

    def write_text(self, model: Any) -> Tensor | None:
        """Return greedily generated ids; None for a family that does not generate."""
        if not model.traits.can_generate:
            return None
        return generate(model, make_batch(model, 2, length=6), max_new_tokens=5, do_sample=False)


def stream_all_blocks_(model: Model) -> tuple[Streamer, list[nn.Module]]:
    """Stream a model's blocks from copies of their weights; return the streamer and the blocks."""
    values = {name: t.detach().clone() for name, t in persistent_tensors(model).items()}
    blocks = find_modules(model, globs=model.layout_rules().recompute_units)
    streamer = stream_blocks_(
        model,
        lambda name, out: out.copy_(values[name]),
        device=torch.device("cpu"),
        blocks=list(blocks),
    )
    return streamer, list(blocks.values())
