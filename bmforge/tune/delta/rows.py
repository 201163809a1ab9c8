"""Which rows of a batch have which delta: `delta_rows`, and the same as an argument of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError, ShapeError
from bmforge.nn.part import BesidePart
from bmforge.nn.row_group import group_rows_
from bmforge.surgery import wrap_forward_, wrappers_of
from bmforge.tune.delta.held import Held, deltas_of, find_delta, is_in_mixture, whole_model

__all__ = ["delta_rows", "end_choice_", "watch_rows_"]

_CHOSEN, _HELD = "_chosen_rows", "_holds_rows"
# Of a block: its parts, and how each is chosen.
_PARTS = "_chosen_parts"
# Places of wrappers in which a block may run a second time.
_RUN_AGAIN = frozenset({"weights", "recompute"})
# Arguments whose rows are the batch's.
_BATCHES = ("input_ids", "decoder_input_ids", "inputs_embeds", "pixel_values")


@contextmanager
def delta_rows(model: nn.Module, rows: Sequence[str | None]) -> Iterator[None]:
    """Inside it every row of a batch has the delta that it names, or none.

    A model's call takes the same as ``model(..., delta_rows=[...])``, for that batch and its
    backward. Several users' deltas can be trained so in one batch, each with its own rows' loss.
    Blocks that are recomputed in backward have what was chosen for their call. Of a pipeline each
    call inside a step, which is of one micro-batch, takes the argument.

    Args:
        model: with deltas, all attached.
        rows: name of a delta, or None, for every row.

    Raises:
        ConfigError: a name that the model does not know, or a delta that all rows must share.
    """
    _choose_(model, rows)
    model.__dict__[_HELD] = True
    try:
        yield
    finally:
        end_choice_(model)


def watch_rows_(model: nn.Module) -> None:
    """Let a model take the argument `delta_rows`."""
    if _take_rows not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_take_rows, with_kwargs=True, prepend=True)


def _take_rows(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The hook before a model with deltas: do what the argument `delta_rows` says of the batch."""
    if "delta_rows" not in kwargs and not hasattr(module, _CHOSEN):
        return None
    if "delta_rows" in kwargs:
        kwargs = dict(kwargs)
        rows = kwargs.pop("delta_rows")
        if module.__dict__.get(_HELD):
            raise ConfigError("delta_rows is given twice: leave it out inside of `delta_rows`.")
        if rows is None:
            end_choice_(module)
        elif not _is_chosen(module, rows):
            end_choice_(module)
            _choose_(module, rows)
    elif not module.__dict__.get(_HELD):
        end_choice_(module)
    if _CHOSEN not in module.__dict__:
        return args, kwargs
    named = (kwargs[name] for name in _BATCHES if isinstance(kwargs.get(name), Tensor))
    first = next((x for x in args if isinstance(x, Tensor)), next(named, None))
    count = len(module.__dict__[_CHOSEN].rows)
    if first is not None and first.shape[0] != count:
        raise ShapeError(f"the batch has {first.shape[0]} rows, delta_rows names {count}.")
    return args, kwargs


def _choose_(model: nn.Module, rows: Sequence[str | None]) -> None:
    """Let the parts of deltas work on the rows that name them."""
    whole = whole_model(model)
    for name in dict.fromkeys(name for name in rows if name is not None):
        delta = find_delta(model, name)
        if not all(_has_rows(whole, held) for held in delta.held):
            raise ConfigError(
                f"delta {name!r}, a {type(delta).__name__}, is for all rows of a batch: what it "
                "changes has no rows of its own. Use use_deltas."
            )
    device = next(model.parameters()).device
    for name, delta in deltas_of(model).items():
        mine = [number for number, one in enumerate(rows) if one == name]
        index = None if len(mine) == len(rows) else torch.tensor(mine, device=device)
        for held in delta.held:
            held.part.share = (delta.weight or 1.0) if mine else 0.0
            if isinstance(held.part, BesidePart):
                held.part.rows = index if mine else None
    _group_(model, rows)
    if torch.is_grad_enabled():
        _hand_to_blocks_(model)
    model.__dict__[_CHOSEN] = _Chosen(tuple(rows), _versions(model))


def _hand_to_blocks_(model: nn.Module) -> None:
    """Let blocks that run again in backward have what is chosen as an argument: it comes back."""
    for block in model.modules():
        places = {place for place, _ in wrappers_of(block)}
        if not places & _RUN_AGAIN:
            continue
        parts = [part for part in block.modules() if isinstance(part, BesidePart)]
        block.__dict__[_PARTS] = tuple((part, _state_of(part)) for part in parts)
        if "delta rows" not in places:
            wrap_forward_(block, _run_chosen, "delta rows")
            block.register_forward_pre_hook(_give_choice, with_kwargs=True)


def _state_of(part: BesidePart) -> tuple[Any, ...]:
    return part.share, part.rows, part.group


def _give_choice(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The hook before a block, outside of what recomputes it."""
    chosen = block.__dict__.get(_PARTS)
    return None if chosen is None else (args, {**kwargs, "delta_rows": chosen})


def _run_chosen(
    inner: Callable[..., Any], /, *args: Any, delta_rows: Any = (), **kwargs: Any
) -> Any:
    """Run a block's own forward with its parts as they were chosen for this call."""
    now = [(part, _state_of(part)) for part, _ in delta_rows]
    try:
        _set_states_(delta_rows)
        return inner(*args, **kwargs)
    finally:
        _set_states_(now)


def _set_states_(states: Iterable[tuple[BesidePart, tuple[Any, ...]]]) -> None:
    for part, state in states:
        part.share, part.rows, part.group = state


class _Chosen(NamedTuple):
    """What was chosen, in which mode, and how often the deltas' tensors had changed then."""

    rows: tuple[str | None, ...]
    versions: tuple[int, ...]


def _versions(model: nn.Module) -> tuple[int, ...]:
    deltas = deltas_of(model).values()
    versions = (p._version for delta in deltas for p in delta.parameters())
    return (int(model.training), *versions)


def _is_chosen(model: nn.Module, rows: Sequence[str | None]) -> bool:
    """Tell whether these rows are chosen already: from token to token they stay the same."""
    chosen = model.__dict__.get(_CHOSEN)
    return chosen is not None and chosen == (tuple(rows), _versions(model))


def _group_(model: nn.Module, rows: Sequence[str | None]) -> None:
    """Let the parts beside a layer, each with some rows, be joined at once."""
    beside: dict[str, list[tuple[BesidePart, list[int]]]] = {}
    for name, delta in deltas_of(model).items():
        mine = [number for number, one in enumerate(rows) if one == name]
        for held in delta.held if mine else ():
            beside.setdefault(held.owner, []).append((held.part, mine))
    for pairs in beside.values():
        group_rows_([part for part, _ in pairs], [own for _, own in pairs], len(rows))


def end_choice_(model: nn.Module) -> None:
    """Let all rows have what `use_deltas` says again."""
    if model.__dict__.pop(_CHOSEN, None) is None:
        return
    model.__dict__.pop(_HELD, None)
    for module in model.modules():
        module.__dict__.pop(_PARTS, None)
    for delta in deltas_of(model).values():
        delta.weigh_(delta.weight)
        for held in delta.held:
            if isinstance(held.part, BesidePart):
                held.part.rows = held.part.group = None


def _has_rows(model: nn.Module, held: Held) -> bool:
    """Tell whether what a part sees has the batch's rows first."""
    if not isinstance(held.part, BesidePart) or is_in_mixture(model, held.owner):
        return False
    return not getattr(model.get_submodule(held.owner), "asks_parts", False)
