"""Combines several adapters into one, as a weighted sum of their contributions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.low_rank import LowRank
from bmforge.tune.delta.attached import deltas_of, find_delta
from bmforge.tune.delta.delta import Delta
from bmforge.tune.delta.lora import Lora

__all__ = ["combine_deltas"]


def combine_deltas(
    model: nn.Module,
    weights: Mapping[str, float],
    into: str,
    how: str = "concatenate",
    rank: int | None = None,
) -> Delta:
    """Attach a new adapter whose output is a weighted sum of the outputs of other adapters.

    The other adapters stay attached, but are disabled.

    Args:
        model: model with the adapters; not parallelized.
        weights: dict from adapter name to weight.
        into: name of the new adapter.
        how: "concatenate" (LoRAs only) is exact; the new rank is the sum of the ranks. "svd" (LoRAs
            only) computes the best approximation of rank `rank`. "sum" adds each tensor with its
            weight, for adapters of the same type, targets and options; for LoRAs this is not the
            sum of their outputs.
        rank: rank of the new adapter for "svd"; None for the other methods.

    Raises:
        ConfigError: the adapters cannot be combined in this way.
    """
    deltas = [find_delta(model, name) for name in weights]
    if not deltas:
        raise ConfigError("weights is empty. Pass at least one adapter with its weight.")
    if how not in ("concatenate", "svd", "sum"):
        raise ConfigError(f"unknown method: how={how!r} (supported: concatenate, svd, sum).")
    if (rank is not None) != (how == "svd"):
        raise ConfigError(
            f"rank={rank} cannot be used with how={how!r}. Pass a rank with how='svd', and "
            "leave rank out with other methods."
        )
    if how == "sum":
        combined = _sum(model, deltas, weights, into)
    else:
        combined = _concatenate(model, deltas, weights, into, rank)
    for delta in deltas:
        delta.weigh_(0.0)
    return combined


def _sum(model: nn.Module, deltas: list[Delta], weights: Mapping[str, float], into: str) -> Delta:
    first = deltas[0]
    alike = all(
        type(d) is type(first) and d.options == first.options and d.places() == first.places()
        for d in deltas
    )
    if not alike or first.kind in ("prefix", "prompt"):
        raise ConfigError(
            "how='sum' needs adapters of one type on the same modules with the same "
            "options. Use how='concatenate' for LoRAs."
        )
    total = _like(model, first, into)
    with torch.no_grad():
        for number, target in enumerate(total.parameters()):
            values = [list(d.parameters())[number] * weights[d.name] for d in deltas]
            target.copy_(torch.stack(values).sum(0))
    return total


def _like(model: nn.Module, delta: Delta, name: str) -> Delta:
    options = {**delta.options}
    return type(delta)(model, list(dict.fromkeys(delta.places())), name=name, **options)


Factors = tuple[Tensor, Tensor]


def _concatenate(
    model: nn.Module,
    deltas: list[Delta],
    weights: Mapping[str, float],
    into: str,
    rank: int | None,
) -> Delta:
    factors: dict[str, list[Factors]] = {}
    for delta in deltas:
        for owner, _, part in delta.held:
            if type(part) is not LowRank or part.magnitude is not None or part.bias is not None:
                raise ConfigError(
                    f"adapter {delta.name!r} has a {type(part).__name__} at {owner} (supported: "
                    "Lora on linear layers, without use_dora and bias)."
                )
            up = part.up.detach() * (weights[delta.name] * part.scale)
            factors.setdefault(owner, []).append((up, part.down.detach()))
    joined = {owner: _join(each, rank) for owner, each in factors.items()}
    ranks = {owner: down.shape[0] for owner, (_, down) in joined.items()}
    refused = into in deltas_of(model)
    if refused:
        raise ConfigError(f"the model already has an adapter {into!r}. Choose another name.")
    usual = max(ranks.values())
    differing = {owner: r for owner, r in ranks.items() if r != usual}
    delta = Lora(model, list(joined), name=into, rank=usual, alpha=None, ranks=differing)
    with torch.no_grad():
        for owner, _, part in delta.held:
            part.up.copy_(joined[owner][0])
            part.down.copy_(joined[owner][1])
    return delta


def _join(each: list[Factors], rank: int | None) -> Factors:
    up, down = torch.cat([u for u, _ in each], 1), torch.cat([d for _, d in each])
    if rank is None:
        return up, down
    left, sizes, right = torch.linalg.svd(up @ down, full_matrices=False)
    if rank > len(sizes):
        raise ConfigError(
            f"rank={rank} is out of range for a layer whose smaller dimension is {len(sizes)} "
            f"(allowed: 1 to {len(sizes)})."
        )
    root = sizes[:rank].sqrt()
    return left[:, :rank] * root, root[:, None] * right[:rank]
