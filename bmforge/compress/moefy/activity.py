"""Measures how active the features of an MLP are on real tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.compress.batches import prepare_batches
from bmforge.errors import ConfigError
from bmforge.nn import MLP
from bmforge.surgery import eval_mode

__all__ = ["collect_inputs", "each_activity", "sum_groups"]

_CHUNK = 1024


@torch.no_grad()
def collect_inputs(
    model: nn.Module,
    names: Sequence[str],
    batches: Iterable[Any],
    max_tokens: int,
) -> dict[str, Tensor]:
    """Return a dict from module name to the module's input hidden states, without padding.

    Args:
        model: any model.
        names: names of modules whose first argument contains hidden states.
        batches: keyword arguments of the model's forward, or only token ids; `attention_mask`
            marks padding.
        max_tokens: maximum number of tokens to collect for each module.

    Shape:
        returns (M, D) for each module

    Raises:
        ConfigError: there are no batches, or a module receives no tokens.
    """
    tokens: dict[str, list[Tensor]] = {name: [] for name in names}
    counts = dict.fromkeys(names, 0)

    def collect(name: str, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0].detach()
        part = x.flatten(0, -2)[: max_tokens - counts[name]]
        counts[name] += part.shape[0]
        tokens[name].append(part.clone())

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: collect(name, args)  # type: ignore[misc]
        )
        for name in names
    ]
    try:
        with eval_mode(model):
            for batch in prepare_batches(model, list(batches)):
                model(**batch)
                if all(count >= max_tokens for count in counts.values()):
                    break
    finally:
        for hook in hooks:
            hook.remove()
    if empty := [name for name, count in counts.items() if not count]:
        raise ConfigError(
            f"no token of the calibration batches reaches {empty[0]}. Pass more batches, or "
            "exclude that layer from `where`."
        )
    return {name: torch.cat(parts) for name, parts in tokens.items()}


@torch.no_grad()
def each_activity(mlp: MLP, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the activity of each feature on each token, in chunks of tokens.

    The activity is the norm of the feature's contribution to the MLP's output: the absolute value
    of the down projection's input times the norm of its column.

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
    """Return the total activity of every group of features, for each token.

    Shape:
        activity: (M, F); groups: (F,), -1 for no group; returns (M, count)
    """
    groups = groups.to(activity.device)
    inside = groups >= 0
    out = activity.new_zeros(activity.shape[0], count)
    return out.index_add_(1, groups[inside], activity[:, inside])
