"""Finds the modules of a model that its forward pass never calls.

Some layers read the weight of another module instead of calling it (Mamba's mixer multiplies by
`dt_proj.weight`). An adapter attached to such a module never trains, and packed storage breaks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bmforge.errors import ConfigError

__all__ = ["find_uncalled", "keep_called"]

_TOKENS = 4


def find_uncalled(model: Any, names: Sequence[str], *, unused: bool = False) -> list[str]:
    """Return the modules that are never called although their parent module is called.

    The model's own `uncalled` method is used if it exists; an unmodified transformers model is run
    on a short token sequence. The result is empty for other models and for models on the meta
    device.

    Args:
        model: any module.
        names: names of the modules to check.
        unused: include the modules inside submodules that a token sequence does not use at all,
            such as the cross-attention of a decoder without an encoder.
    """
    if callable(list_uncalled := getattr(model, "uncalled", None)):
        idle = list(list_uncalled(names))
        owners = set(list_uncalled([name.rpartition(".")[0] for name in idle]))
        return [name for name in idle if unused or name.rpartition(".")[0] not in owners]
    reads_ids = getattr(model, "main_input_name", None) == "input_ids"
    if not reads_ids or any(tensor.is_meta for tensor in model.parameters()):
        return []
    called = _run_and_note(model)
    if called is None:
        return []
    return [
        name
        for name in names
        if id(model.get_submodule(name)) not in called
        and id(model.get_submodule(name.rpartition(".")[0])) in called
        and any(True for _ in model.get_submodule(name).parameters(recurse=False))
    ]


def keep_called(model: nn.Module, names: Sequence[str], *, drops: bool) -> list[str]:
    """Return `names` without the modules that the model never calls; see `find_uncalled`.

    Args:
        model: any module.
        names: names of the modules to check.
        drops: True to remove such modules silently if other modules remain; False to raise an
            error.

    Raises:
        ConfigError: a module is never called, and `drops` is off or no other module remains.
    """
    uncalled = set(find_uncalled(model, names, unused=True))
    find_untrained: Any = getattr(model, "untrained", None)
    untrained = set(find_untrained(names) if callable(find_untrained) else ()) - uncalled
    excluded = uncalled | untrained
    if excluded and (not drops or len(excluded) == len(names)):
        first = sorted(excluded)[0]
        reason = (
            f"reads the weight of {first} without calling the module"
            if first in uncalled
            else f"passes no gradient to {first}"
        )
        raise ConfigError(
            f"{type(model).__name__} {reason} ({len(excluded)} such modules), so an adapter of the "
            "module would not train. Exclude the module from targets."
        )
    return [name for name in names if name not in excluded]


def _run_and_note(model: nn.Module) -> set[int] | None:
    """Run the model on a token sequence; return the `id`s of called modules, None on failure."""
    called: set[int] = set()
    hooks = [
        part.register_forward_pre_hook(lambda module, args: called.add(id(module)))
        for part in model.modules()
    ]
    was_training = [part for part in model.modules() if part.training]
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            model.eval()(input_ids=torch.ones(1, _TOKENS, dtype=torch.int64, device=device))
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
        return None  # the model needs inputs other than tokens
    finally:
        for hook in hooks:
            hook.remove()
        for part in was_training:
            part.training = True
    return called
