"""What the features of an MLP do with real tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.calibrate import prepare_batch
from bmforge.errors import ConfigError
from bmforge.nn import MLP
from bmforge.surgery import evaluating

__all__ = ["collect_inputs", "each_activity", "sum_groups"]

_CHUNK = 1024


@torch.no_grad()
def collect_inputs(
    model: nn.Module,
    names: Sequence[str],
    batches: Iterable[Any],
    max_tokens: int,
) -> dict[str, Tensor]:
    """Return what goes into modules while batches run: name -> tokens; padding is left out.

    Args:
        model: any.
        names: of modules that take hidden states.
        batches: arguments of its forward, or token ids alone; `attention_mask` tells padding.
        max_tokens: so many are kept of each.

    Shape:
        returns (M, D) each

    Raises:
        ConfigError: there are no batches, or no token in them.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    counts = dict.fromkeys(names, 0)
    mask: list[Tensor | None] = [None]

    def keep(name: str, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0].detach()
        shown = mask[0]
        fits = shown is not None and shown.shape == x.shape[:-1]
        tokens = x[shown.bool()] if fits and shown is not None else x.flatten(0, -2)
        tokens = tokens[: max_tokens - counts[name]]
        counts[name] += tokens.shape[0]
        found[name].append(tokens.clone())

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: keep(name, args)  # type: ignore[misc]
        )
        for name in names
    ]
    try:
        with evaluating(model):
            for batch in batches:
                given = prepare_batch(model, batch)
                given.pop("labels", None)
                mask[0] = given.get("attention_mask")
                model(**given)
                if all(count >= max_tokens for count in counts.values()):
                    break
    finally:
        for hook in hooks:
            hook.remove()
    if any(not count for count in counts.values()):
        raise ConfigError("the batches hold no tokens to look at: give some calibration batches.")
    return {name: torch.cat(parts) for name, parts in found.items()}


@torch.no_grad()
def each_activity(mlp: MLP, tokens: Tensor) -> Iterator[Tensor]:
    """Yield how active each feature is on each token, some tokens at a time.

    It is the size of what the feature adds to the result: the absolute value of what goes into the
    last projection, times the norm of its column there.

    Shape:
        tokens: (M, D); yields (m, F)
    """
    norms = mlp.down_proj.weight.detach().float().norm(dim=0)
    for part in tokens.split(_CHUNK):
        up = mlp.up_proj(part)
        inner = mlp.activation(up)
        if mlp.gate_proj is not None:
            inner = mlp.activation(mlp.gate_proj(part)) * up
        yield inner.float().abs() * norms


def sum_groups(activity: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the activity of every group of features.

    Shape:
        activity: (M, F); groups: (F,), -1 in none; returns (M, count)
    """
    groups = groups.to(activity.device)
    inside = groups >= 0
    out = activity.new_zeros(activity.shape[0], count)
    return out.index_add_(1, groups[inside], activity[:, inside])
