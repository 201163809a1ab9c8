"""Reference models of preference optimization.

A reference is a function (model, batch) -> summed log-probabilities of the rows. It is called
before the forward and backward of a step, so it works on every layout, pipelines included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.align.scoring import score_tokens
from bmforge.errors import ConfigError
from bmforge.parallel.zero import reshard_
from bmforge.surgery import evaluating
from bmforge.tune.delta.selection import choosing_deltas, list_deltas

__all__ = ["Reference", "adapter_off", "base_adapters", "frozen_copy", "score_rows", "score_start"]

# Function (policy, batch of input_ids and labels) -> summed log-probability of every row, (B,).
Reference = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


@torch.no_grad()
def score_rows(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the summed log-probability of every row's labels, without gradient or dropout.

    Args:
        model: model on any layout; all ranks call this together, outside of a training step.
        batch: dict with ``input_ids`` and ``labels``.

    Shape:
        batch: (B, T); returns (B,)
    """
    with evaluating(model):
        scores = score_tokens(model, {"input_ids": batch["input_ids"]}, batch["labels"])
    assert scores is not None  # outside of a step every pipeline stage gets the outputs
    return scores.logprobs.sum(1)


def adapter_off(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Score rows with the policy's base model, that is, with the trained adapters disabled.

    Raises:
        ConfigError: see `base_adapters`.
    """
    with choosing_deltas(model, base_adapters(model)):
        return score_rows(model, batch)


def score_start(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Score rows with a policy before its first step, with the adapters to train disabled."""
    with choosing_deltas(model, _frozen_adapters(model)):
        return score_rows(model, batch)


def base_adapters(model: nn.Module) -> tuple[str, ...]:
    """Return the adapters that stay enabled in the reference: those that are not trained.

    Args:
        model: policy whose trained weights are those of adapters.

    Raises:
        ConfigError: no adapter is trained, or weights of the base are trained too, so that the
            base is not the initial policy.
    """
    deltas = list_deltas(model).values()
    added = {id(p) for delta in deltas for p in delta.parameters()}
    in_place = {id(p) for delta in deltas for p in delta.wholes().values()}
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    outside = trained.keys() - added | trained.keys() & in_place
    if outside or not trained:
        reason = f"{trained[min(outside)]} is trained in place" if outside else "none is trained"
        raise ConfigError(
            f"the reference is the policy with its trained adapters disabled, but {reason}. Use a "
            "frozen copy as reference, or train adapters only."
        )
    return _frozen_adapters(model)


def _frozen_adapters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the enabled adapters without trained parameters."""
    return tuple(
        name
        for name, delta in list_deltas(model).items()
        if delta.weight and not any(p.requires_grad for p in delta.parameters())
    )


def frozen_copy(reference: Any) -> Reference:
    """Freeze a second model; return a reference function that scores rows with it."""
    reference.requires_grad_(False)

    def score(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        sums = score_rows(reference, batch)
        reshard_(reference)  # without a backward, gathered weights are not freed
        return sums

    return score
