"""Reference models of preference optimization.

A reference is a function (model, batch) -> summed log-probability of each sequence. It is called
before the forward and backward pass of a step, so it works on every layout, including pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.align.prefix_sharing import model_inputs, sum_answers
from bmforge.align.scoring import score_tokens
from bmforge.errors import ConfigError
from bmforge.parallel.zero import reshard_
from bmforge.shards import local_tensor
from bmforge.surgery import eval_mode, persistent_tensors
from bmforge.tune.delta.selection import choosing_deltas, list_deltas

__all__ = [
    "HostWeights",
    "Reference",
    "adapter_off",
    "base_adapters",
    "frozen_copy",
    "score_rows",
    "score_start",
]

# Function (policy, batch of input_ids and labels) -> summed log-probability of every row, (B,).
Reference = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]


@torch.no_grad()
def score_rows(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the summed log-probability of each sequence's labels, without gradient or dropout.

    Args:
        model: model on any layout; all ranks call this together, outside of a training step.
        batch: dict with ``input_ids`` and ``labels``; or rows of `prefix_sharing`.

    Shape:
        batch: (B, T); returns (B,), or (2B,) for rows of `prefix_sharing`
    """
    with eval_mode(model):
        scores = score_tokens(model, model_inputs(batch), batch["labels"])
    assert scores is not None  # outside of a training step, every pipeline stage gets the outputs
    return sum_answers(scores.logprobs, batch)


def adapter_off(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Score a batch with the policy's base model, which has the trained adapters disabled.

    Raises:
        ConfigError: see `base_adapters`.
    """
    with choosing_deltas(model, base_adapters(model)):
        return score_rows(model, batch)


def score_start(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Score a batch with a policy before its first step; adapters to be trained are disabled."""
    with choosing_deltas(model, _frozen_adapters(model)):
        return score_rows(model, batch)


def base_adapters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the adapters that are not trained and stay enabled in the reference.

    Args:
        model: policy whose trained weights all belong to adapters.

    Raises:
        ConfigError: no adapter is trained, or base weights are trained too, so that the base is not
            the initial policy.
    """
    deltas = list_deltas(model).values()
    added = {id(p) for delta in deltas for p in delta.parameters()}
    in_place = {id(p) for delta in deltas for p in delta.fully_trained_parameters().values()}
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    outside = trained.keys() - added | trained.keys() & in_place
    if outside or not trained:
        reason = (
            f"the base weight {trained[min(outside)]} is trained too"
            if outside
            else "no adapter is trained"
        )
        raise ConfigError(
            f"the reference is computed by the policy with its adapters disabled, but {reason}. "
            "Use a frozen copy as reference, or train adapters only."
        )
    return _frozen_adapters(model)


def _frozen_adapters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the enabled adapters without trained parameters."""
    return tuple(
        name
        for name, delta in list_deltas(model).items()
        if delta.weight and not any(p.requires_grad for p in delta.parameters())
    )


def frozen_copy(reference: Any, is_offloaded: bool = False) -> Reference:
    """Freeze a second model; return a reference function that scores batches with it.

    Args:
        reference: model with the initial weights, in the layout of the policy.
        is_offloaded: keep the weights in host memory, and copy them to the device only during each
            call.
    """
    reference.requires_grad_(False)
    weights = HostWeights(reference) if is_offloaded else None

    def score(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        with nullcontext() if weights is None else weights.on_device():
            sums = score_rows(reference, batch)
            reshard_(reference)  # without a backward pass, gathered weights are not freed
        return sums

    return score


class HostWeights:
    """Weights of a frozen model that are on the device only within a context manager.

    Outside of the context, the storages on the device are empty, and the values are in host memory
    (pinned with CUDA). The tensor objects stay the same, so parallelized models need no changes.

    Args:
        model: frozen model, whose device memory is released.
    """

    def __init__(self, model: nn.Module) -> None:
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        for tensor in persistent_tensors(model).values():
            local = local_tensor(tensor.detach())
            storage = local.untyped_storage()
            on_device = torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
            on_host = torch.empty(len(on_device), dtype=torch.uint8, pin_memory=local.is_cuda)
            copies.setdefault(storage._cdata, (on_device, on_host))
        self._copies = list(copies.values())
        for on_device, on_host in self._copies:
            on_host.copy_(on_device)
        self._free()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context manager within which the weights are on the device."""
        for on_device, on_host in self._copies:
            on_device.untyped_storage().resize_(len(on_host))
            on_device.copy_(on_host, non_blocking=True)
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        for on_device, _ in self._copies:
            on_device.untyped_storage().resize_(0)
