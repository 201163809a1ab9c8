"""What the planner is told of a model: how to build it, feed it, and take its loss."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from bmforge.errors import ConfigError, suggest
from bmforge.models import Model
from bmforge.models.config import ModelConfig
from bmforge.models.hub import find_config
from bmforge.models.init import materialize_
from bmforge.nn import remake
from bmforge.parallel.planner.trace import Workload
from bmforge.recipes.run import family_of

__all__ = ["read_model", "workload_of"]


def read_model(name: str, changes: Sequence[str] = ()) -> tuple[type[Model], ModelConfig]:
    """Return family and config of a preset or of a model directory, with fields changed.

    Args:
        name: preset or directory.
        changes: "field=value" each.

    Raises:
        ConfigError: neither a preset nor a model; a field that the config does not have.
    """
    family, config = find_config(name)
    if not changes:
        return family, config
    known = {f.name for f in fields(config)} - {"raw"}
    values = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in known:
            raise ConfigError(
                f"--set {change!r}: write field=value.{suggest(key, known)} Fields: "
                f"{', '.join(sorted(known))}."
            )
        values[key] = _parse_value(text)
    return family, config.with_implied().replace(**values)


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def workload_of(name: str, config: ModelConfig, row_tokens: int) -> Workload:
    """Describe training a model on rows of so many tokens.

    Raises:
        ConfigError: rows longer than the model's positions, or below one token.
    """
    family = family_of(config)
    if row_tokens < 2:
        raise ConfigError(f"--seq {row_tokens} must be at least 2 tokens.")
    decoder = getattr(config, "num_decoder_layers", 0)
    if decoder not in (0, config.num_layers):
        raise ConfigError(
            f"{name} has {config.num_layers} encoder and {decoder} decoder blocks; the planner "
            "needs equally many. Use --set num_decoder_layers and num_layers to make them so."
        )
    # Rotary positions go on; what is too long for learned ones is said before anything is traced.
    limit = family.from_config(config, device="meta").position_limit
    if limit is not None and row_tokens > limit:
        raise ConfigError(
            f"--seq {row_tokens} is longer than the {limit} positions of {name}. Use a shorter "
            f"one, or --set max_seq_len={row_tokens}."
        )
    return Workload(
        name,
        partial(_build, family, config),
        partial(_make_batch, row_tokens),
        _loss,
        materialize_,
        config.num_layers,
        row_tokens,
        config.hidden_size,
        config.flops_per_token(row_tokens),
        seen_as_plain,
    )


def _build(family: type[Model], config: ModelConfig, depth: int) -> Model:
    return family.from_config(_with_depth(config, depth), device="meta")


def _with_depth(config: ModelConfig, depth: int) -> ModelConfig:
    stacks = [f.name for f in fields(config) if f.name in ("num_layers", "num_decoder_layers")]
    return config.replace(**dict.fromkeys(stacks, depth))


def _make_batch(row_tokens: int, rows: int) -> dict[str, Tensor]:
    ids = torch.zeros(rows, row_tokens, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch, num_items_in_batch=1.0).loss
    return loss


@contextmanager
def seen_as_plain() -> Iterator[None]:
    """Let `nn.remake` treat fake tensors as it treats plain ones: by the place of their values.

    It drops what it can make again, for plain tensors only, and knows them by their address. Fake
    tensors have none; their storages stand for it.
    """
    module: Any = remake
    kind: Any = FakeTensor
    before = module.Tensor
    module.Tensor = FakeTensor
    kind.data_ptr = lambda tensor: tensor.untyped_storage()._cdata
    try:
        yield
    finally:
        module.Tensor = before
        del kind.data_ptr
