"""Putting what deltas add into the base's weights, and taking it out again to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn.bottleneck import Bottleneck
from bmforge.nn.channel import Gain, Shift
from bmforge.nn.low_rank import EmbeddingLowRank, ExpertsLowRank, LowRank
from bmforge.nn.part import detach_part_
from bmforge.provenance import Part, Provenance, warn_of_licences
from bmforge.shards import is_streamed, local_box, local_tensor, whole_tensor
from bmforge.surgery import shared_tensors
from bmforge.tune.delta.delta import Delta
from bmforge.tune.delta.fingerprint import is_torchao
from bmforge.tune.delta.held import Held, is_laid_out, whole_model

__all__ = ["merge_", "unmerge_"]


def merge_(delta: Delta, dequantize: bool = False) -> None:
    """Merge a delta; see `Delta.merge`."""
    if delta.merged:
        raise ConfigError(f"delta {delta.name!r} is merged already.")
    if not delta.is_attached():
        raise ConfigError(f"delta {delta.name!r} is detached: attach it before merging.")
    plain = {held.owner: _dequantized(delta, held, dequantize) for held in delta.here()}
    changed = [pair for held in delta.here() for pair in _changes(delta, held, plain[held.owner])]
    shared = shared_tensors(delta.model)
    for name, tensor, _ in changed:
        if id(tensor) in shared:
            raise ConfigError(
                f"{name} is tied to another weight, which merging would change as well. Open the "
                "model with tie_word_embeddings=False, as two weights, before the delta comes."
            )
        if is_streamed(tensor):
            raise ConfigError(f"{name} is streamed: merge before its blocks stream.")
    kept: dict[str, Tensor] = {}
    for owner, weight in plain.items():
        if weight is not None:
            module: Any = delta.model.get_submodule(owner)
            kept[f"{owner}.weight"] = module.weight
            module.weight = nn.Parameter(weight, requires_grad=False)
    new = [(name, make()) for name, _, make in changed]
    # Not `detach`: what is merged is no longer beside, on any layout.
    with torch.no_grad():
        for name, value in new:
            tensor = _find(delta.model, name)
            kept.setdefault(name, local_tensor(tensor.detach()).clone())
            box = local_box(tensor)
            local_tensor(tensor.detach()).copy_(value[box.slices])
    _take_out_(delta)
    _join_licences_(delta)
    delta.base_weights, delta.merged = kept, True


def _join_licences_(delta: Delta) -> None:
    """Let a model of ours say what it is made of now."""
    model: Any = delta.model
    base, said = getattr(model, "provenance", None), delta.provenance
    if base is None or not said:
        return
    own = [Part("base", type(model).__name__, base.licence)] if base.licence else []
    if any(part.kind == "base" and part.licence == base.licence for part in said.parts):
        own = []  # named there
    more = said.as_parts("delta", delta.name) if said.licence else said.parts
    model.provenance = Provenance("", (*own, *base.parts)).joined(more)
    warn_of_licences(f"{type(model).__name__} with {delta.name}", model.provenance)


def _take_out_(delta: Delta) -> None:
    """Take the parts out of the model, also where it is laid out, and of its description."""
    if not is_laid_out(delta.model):
        delta.detach()
        return
    described: Any = whole_model(delta.model)
    for model in (delta.model, described) if described is not delta.model else (delta.model,):
        known = {name for name, _ in model.named_modules()}
        for owner, slot, _ in delta.held:
            if owner in known:
                detach_part_(model.get_submodule(owner), slot)
    delta.record_(False)
    described.config = delta.model.config


def unmerge_(delta: Delta) -> None:
    """Undo `merge_`."""
    if not delta.merged:
        raise ConfigError(f"delta {delta.name!r} is not merged.")
    if is_laid_out(delta.model):
        raise ConfigError("a model that is laid out is merged for good: load it again.")
    if not delta.base_weights:
        raise ConfigError(f"delta {delta.name!r} has forgotten the base's weights.")
    with torch.no_grad():
        for name, value in delta.base_weights.items():
            if isinstance(value, nn.Parameter):
                owner, _, key = name.rpartition(".")
                setattr(delta.model.get_submodule(owner), key, value)
            else:
                local_tensor(_find(delta.model, name).detach()).copy_(value)
    delta.base_weights, delta.merged = {}, False
    delta.attach()


def _find(model: nn.Module, name: str) -> Any:
    owner, _, key = name.rpartition(".")
    return getattr(model.get_submodule(owner), key)


def _dequantized(delta: Delta, held: Held, allowed: bool) -> Tensor | None:
    """Return the plain weight of a layer of torchao's; None for a layer that is plain already.

    Raises:
        ConfigError: a weight that is stored otherwise.
    """
    module: Any = delta.model.get_submodule(held.owner)
    weight = getattr(module, "weight", None)
    if hasattr(module, "packed") or (isinstance(weight, Tensor) and not weight.is_floating_point()):
        raise ConfigError(
            f"{held.owner} keeps its weight as integers, which cannot hold what a delta adds. Open "
            "the model unquantised, merge, and quantise it then."
        )
    turn = getattr(weight, "dequantize", None)
    if weight is None or type(weight) in (nn.Parameter, Tensor) or not is_torchao(weight):
        return None
    if not allowed:
        raise ConfigError(
            f"{held.owner} has a quantised weight ({type(weight).__name__}): merge(dequantize=True)"
            " makes it a plain one."
        )
    assert turn is not None
    return turn().detach()


Change = tuple[str, Tensor, Any]


def _changes(delta: Delta, held: Held, plain: Tensor | None) -> Iterator[Change]:
    """Yield name, tensor and how to make its new whole values, of what one part changes.

    Raises:
        ConfigError: no weight can hold what the part does.
    """
    owner, _, part = held
    module: Any = delta.model.get_submodule(owner)
    if isinstance(part, ExpertsLowRank):
        for key in part.keys:
            stack = getattr(module, key)
            yield f"{owner}.{key}", stack, lambda k=key, s=stack: _experts(part, k, s)
    elif isinstance(part, LowRank):
        yield f"{owner}.weight", module.weight, lambda: _low_rank(part, module, plain)
        if part.bias is not None:
            yield from _bias(
                owner, module, lambda: part.scale * part.share * whole_tensor(part.bias)
            )
    elif isinstance(part, Shift):
        last = _last_of(module)
        name = owner if last is None else f"{owner}.{last}"
        target = module if last is None else module.get_submodule(last)
        yield from _bias(name, target, lambda: part.share * whole_tensor(part.bias))
    elif isinstance(part, Gain):
        yield from _gain(owner, module, part)
    else:
        why = "an activation stands in it" if isinstance(part, Bottleneck) else "it is no product"
        raise ConfigError(
            f"a {type(delta).__name__} cannot be merged into weights: {why}. Save it beside the "
            "model."
        )


def _wide(tensor: Tensor) -> Tensor:
    """Merge in fp32 at least, and round once."""
    whole = whole_tensor(tensor.detach())
    return whole if whole.dtype == torch.float64 else whole.float()


def _low_rank(part: Any, module: Any, plain: Tensor | None) -> Tensor:
    weight = module.weight if plain is None else plain
    old, up, down = _wide(weight), _wide(part.up), _wide(part.down)
    turned = isinstance(part, EmbeddingLowRank) or not hasattr(module, "out_features")
    added = part.scale * (up @ down)
    added = added.t() if turned else added
    if part.magnitude is None:
        return old + part.share * added
    sums, dim = old + added, 0 if turned else 1
    factor = _wide(part.magnitude) / torch.linalg.vector_norm(sums, dim=dim)
    changed = sums * (factor if turned else factor[:, None])
    return changed if part.share == 1 else old + part.share * (changed - old)


def _experts(part: ExpertsLowRank, key: str, stack: Tensor) -> Tensor:
    up, down = (_wide(getattr(part, f"{key}_{side}")) for side in ("up", "down"))
    return _wide(stack) + part.scale * part.share * (up @ down)


def _bias(name: str, module: Any, added: Any) -> Iterator[Change]:
    bias = getattr(module, "bias", None)
    if not isinstance(bias, Tensor):
        raise ConfigError(
            f"{name}, a {type(module).__name__}, has no bias to merge into. Save the delta beside "
            "the model, or leave such layers out of its targets."
        )
    yield f"{name}.bias", bias, lambda: _wide(bias) + added()


def _last_of(module: nn.Module) -> str | None:
    """Return the last projection of an attention or MLP of ours, whose bias is its own."""
    for last in ("o_proj", "down_proj"):
        if isinstance(getattr(module, last, None), nn.Module):
            return last
    return None


def _gain(owner: str, module: Any, part: Gain) -> Iterator[Change]:
    def make() -> Tensor:
        factor = 1 + part.share * (_wide(part.weight) - 1)
        is_plain = hasattr(module, "out_features")  # (out, in); transformers' Conv1D is (in, out)
        by_row = part.enters != is_plain
        return _wide(module.weight) * (factor[:, None] if by_row else factor)

    yield f"{owner}.weight", module.weight, make
    bias = getattr(module, "bias", None)
    if bias is not None and not part.enters:
        yield (
            f"{owner}.bias",
            bias,
            lambda: _wide(bias) * (1 + part.share * (_wide(part.weight) - 1)),
        )
