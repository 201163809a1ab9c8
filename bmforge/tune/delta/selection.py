"""Per-call adapter selection: `adapter_names` per sample, `select_adapters` in a with block.

`use_deltas` sets the weights for calls without a selection. A selection is passed along with a call
(`nn.adapter_selection`); it is not stored on the model or its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError, ShapeError
from bmforge.nn.adapter_selection import (
    AdapterChoice,
    Selection,
    active_selection,
    run_with_selection,
)
from bmforge.nn.batched_low_rank import batch_choices
from bmforge.nn.part import AdapterModule
from bmforge.surgery import wrap_forward_, wrappers_of
from bmforge.tune.delta.attached import (
    AdapterLike,
    AttachedModule,
    deltas_of,
    find_delta,
    is_in_mixture,
    whole_model,
)

__all__ = [
    "BASE_NAME",
    "AdapterNames",
    "DeltaChoice",
    "DeltaNames",
    "accept_adapter_names_",
    "check_names",
    "choosing_deltas",
    "list_deltas",
    "per_sample_selection",
    "select_adapters",
    "tell_choice",
    "use_deltas",
]

BASE_NAME = "__base__"
"""Name of the model without adapters in `adapter_names`, as in PEFT; None means the same."""

AdapterNames: TypeAlias = Sequence[str | None]

DeltaChoice: TypeAlias = str | Sequence[str] | None
"""One adapter name, several, () for the base model alone, or None for the model's own state."""

DeltaNames: TypeAlias = tuple[str, ...] | None
"""Names of the enabled adapters in attachment order; None for the model's own state."""

# Wrappers that may run a block a second time, in the backward pass.
_RUN_AGAIN = frozenset({"weights", "recompute"})
# Arguments whose first dim is the batch.
_BATCHES = ("input_ids", "decoder_input_ids", "inputs_embeds", "pixel_values")
# The argument that passes the selection to the model, or to a block.
_ARGUMENT = "adapter_names"


def list_deltas(model: nn.Module) -> dict[str, Any]:
    """Return a dict from name to adapter of a model, in the order of attachment."""
    return dict(deltas_of(model))


def use_deltas(
    model: nn.Module,
    names: Sequence[str] | str,
    weights: Mapping[str, float] | Sequence[float] | None = None,
) -> None:
    """Enable some adapters for all later calls and disable all other adapters.

    Args:
        model: model with adapters; parallelized or not.
        names: adapters to enable; () to disable all.
        weights: dict from adapter name to the factor on its output, or factors in the order of
            `names` (default: 1).

    Raises:
        ConfigError: a name is unknown, an adapter does not support its weight, or the weight of a
            merged adapter would change. No adapter is changed in this case.
    """
    chosen = [names] if isinstance(names, str) else list(names)
    for name in chosen:
        find_delta(model, name)
    if isinstance(weights, Mapping):
        if unknown := [name for name in weights if name not in chosen]:
            raise ConfigError(
                f"weights contains the adapter {unknown[0]!r}, which is not selected "
                f"(names={chosen}). Add the adapter to names."
            )
        factors = {name: float(weights.get(name, 1.0)) for name in chosen}
    else:
        values = [1.0] * len(chosen) if weights is None else list(weights)
        if len(values) != len(chosen):
            raise ConfigError(
                f"weights has {len(values)} values for {len(chosen)} adapters. Pass one value per "
                "adapter."
            )
        factors = dict(zip(chosen, map(float, values), strict=True))
    adapters = deltas_of(model)
    for name, delta in adapters.items():
        delta.check_weight(factors.get(name, 0.0))
    for name, delta in adapters.items():
        delta.weigh_(factors.get(name, 0.0))


@contextmanager
def select_adapters(model: nn.Module, names: AdapterNames | Selection) -> Iterator[None]:
    """Context manager that applies one adapter, or none, to each sample in calls of the model.

    ``model(..., adapter_names=[...])`` does the same for one call and its backward pass. In this
    way the adapters of several users can be trained in one batch, each on its own samples.

    Args:
        model: model with adapters, all attached.
        names: name of an adapter for each sample, or None or "__base__" for the base model.

    Raises:
        ConfigError: a name is unknown, or an adapter cannot be selected per sample.
    """
    selection = names if isinstance(names, Selection) else per_sample_selection(model, names)
    with run_with_selection(selection):
        yield


def per_sample_selection(model: nn.Module, names: AdapterNames) -> Selection:
    """Build the selection that applies one adapter, or none, to each sample.

    Args:
        model: model with adapters.
        names: adapter name of each sample, as in `select_adapters`.

    Raises:
        ConfigError: same as in `select_adapters`.
    """
    rows = [None if name == BASE_NAME else name for name in names]
    samples: dict[str, list[int]] = {name: [] for name in deltas_of(model)}
    for number, name in enumerate(rows):
        if name is not None:
            _check_per_sample(model, find_delta(model, name))
            samples[name].append(number)
    device = next(model.parameters()).device
    choices: dict[nn.Module, AdapterChoice] = {}
    attached: dict[str, dict[AdapterModule, AdapterChoice]] = {}
    numbers: dict[AdapterModule, list[int]] = {}
    for name, delta in deltas_of(model).items():
        own_samples = samples[name]
        index = None if len(own_samples) == len(rows) else torch.tensor(own_samples, device=device)
        choice = AdapterChoice((delta.weight or 1.0), index) if own_samples else AdapterChoice(0.0)
        for owner, _, part in delta.held:
            choices[part] = choice
            if own_samples:
                attached.setdefault(owner, {})[part] = choice
                numbers[part] = own_samples
    if not torch.is_grad_enabled():
        for parts in attached.values():
            choices |= batch_choices(parts, numbers, len(rows))
    return Selection(choices, len(rows))


def _check_per_sample(model: nn.Module, delta: AdapterLike) -> None:
    """Raise `ConfigError` for an adapter that cannot be selected per sample."""
    _check_available(delta)
    full_model = whole_model(model)
    if not all(_has_samples(full_model, part) for part in delta.held):
        raise ConfigError(
            f"adapter {delta.name!r}, a {type(delta).__name__}, can be applied only to whole "
            "batches, because it changes a module whose inputs are not separated by sample. Use "
            "use_deltas instead."
        )


def _check_available(delta: AdapterLike) -> None:
    if delta.merged or not delta.is_attached():
        state = "merged" if delta.merged else "detached"
        raise ConfigError(
            f"adapter {delta.name!r} is {state} and cannot be selected. Call "
            f"{'unmerge' if delta.merged else 'attach'}() first."
        )


def _has_samples(model: nn.Module, attached: AttachedModule) -> bool:
    """Return True if the first dimension of the module's input is the batch dimension."""
    if not isinstance(attached.part, AdapterModule) or is_in_mixture(model, attached.owner):
        return False
    return not getattr(model.get_submodule(attached.owner), "applies_adapters", False)


def accept_adapter_names_(model: nn.Module) -> None:
    """Make the model's call accept the argument `adapter_names`."""
    if _prepare not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_prepare, with_kwargs=True, prepend=True)
        wrap_forward_(model, _run, "adapters")


def _prepare(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a model with adapters: checks the names and builds a `Selection`."""
    if "delta_rows" in kwargs:  # name of the argument in earlier versions
        kwargs = dict(kwargs)
        kwargs.setdefault(_ARGUMENT, kwargs.pop("delta_rows"))
    names = kwargs.get(_ARGUMENT)
    selection = active_selection() if names is None else names
    if selection is None or (names is None and not _concerns(selection, module)):
        return args, kwargs
    if not isinstance(selection, Selection):
        selection = per_sample_selection(module, selection)
    named = (kwargs[name] for name in _BATCHES if isinstance(kwargs.get(name), Tensor))
    first = next((x for x in args if isinstance(x, Tensor)), next(named, None))
    count = selection.batch_size
    if first is not None and count is not None and first.shape[0] != count:
        raise ShapeError(
            f"adapter_names has {count} entries, but the batch has {first.shape[0]} samples. Pass "
            "one entry per sample."
        )
    if torch.is_grad_enabled():
        _pass_to_recomputed_(module)
    return args, {**kwargs, _ARGUMENT: selection}


def _concerns(selection: Any, model: nn.Module) -> bool:
    return any(part.part in selection.choices for d in deltas_of(model).values() for part in d.held)


def _run(inner: Callable[..., Any], /, *args: Any, adapter_names: Any = None, **kwargs: Any) -> Any:
    """Forward wrapper of a model with adapters: runs the model with the call's selection."""
    if adapter_names is None:
        return inner(*args, **kwargs)
    with run_with_selection(adapter_names):
        return inner(*args, **kwargs)


def _pass_to_recomputed_(model: nn.Module) -> None:
    """Make blocks that are recomputed in the backward pass use the selection of their first run.

    The selection becomes an argument of the block, because the second run happens outside of the
    model's call and, on accelerators, on another thread.
    """
    for block in model.modules():
        places = {order_key for order_key, _ in wrappers_of(block)}
        if places & _RUN_AGAIN and "selection" not in places:
            wrap_forward_(block, _run, "selection")
            block.register_forward_pre_hook(_give_selection, with_kwargs=True)


def _give_selection(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a recomputed block: passes the active selection to the block."""
    selection = active_selection()
    return None if selection is None else (args, {**kwargs, _ARGUMENT: selection})


def check_names(model: nn.Module, selection: DeltaChoice) -> DeltaNames:
    """Check adapter names, and return them in attachment order.

    Args:
        model: model with adapters, or without.
        selection: names of adapters to enable; if None, None is returned.

    Raises:
        ConfigError: a name is unknown, or an adapter is merged or detached.
    """
    if selection is None:
        return None
    names = (selection,) if isinstance(selection, str) else tuple(selection)
    for name in names:
        _check_available(find_delta(model, name))
    return tuple(name for name in deltas_of(model) if name in names)


def tell_choice(model: nn.Module, names: DeltaNames) -> str:
    """Return a cache key for a selection: equal for equal selections, "" for the base model."""
    weights = {name: _weight(delta, names) for name, delta in deltas_of(model).items()}
    working = {name: weight for name, weight in weights.items() if weight}
    return repr(working) if working else ""


@contextmanager
def choosing_deltas(model: nn.Module, names: DeltaNames) -> Iterator[None]:
    """Context manager that enables adapters by name for all samples, in calls on this thread.

    An enabled adapter keeps the weight that `use_deltas` gave it, or 1 if it was disabled.

    Args:
        model: model with adapters, or without.
        names: adapters to enable; if None, those that `use_deltas` enabled.
    """
    if names is None:
        yield
        return
    adapters = deltas_of(model).values()
    choices = {
        part.part: AdapterChoice(_weight(delta, names)) for delta in adapters for part in delta.held
    }
    with run_with_selection(Selection(choices)):
        yield


def enabled_parts(model: nn.Module, names: DeltaNames) -> list[nn.Module]:
    """Return the adapter modules that `choosing_deltas` enables for these names."""
    adapters = deltas_of(model).values()
    return [part.part for delta in adapters if _weight(delta, names) for part in delta.held]


def per_token_selection(
    model: nn.Module, names: Sequence[DeltaNames], counts: Sequence[int]
) -> Selection:
    """Build the selection for concatenated sequences with different adapters.

    It selects adapters per token instead of per sample, which only the C++ decoding step
    supports.

    Args:
        model: model with adapters.
        names: adapters of each sequence; see `choosing_deltas`.
        counts: number of tokens of each sequence.
    """
    sizes = torch.tensor(counts)
    choices: dict[nn.Module, AdapterChoice] = {}
    for delta in deltas_of(model).values():
        enabled = torch.tensor([_weight(delta, own) != 0 for own in names])
        tokens = enabled.repeat_interleave(sizes).nonzero()[:, 0]
        weight = (float(delta.weight) or 1.0) if len(tokens) else 0.0
        choices |= dict.fromkeys((part.part for part in delta.held), AdapterChoice(weight, tokens))
    return Selection(choices, sum(counts))


def _weight(delta: AdapterLike, names: DeltaNames) -> float:
    weight = float(delta.weight)
    return weight if names is None else (weight or 1.0) if delta.name in names else 0.0
