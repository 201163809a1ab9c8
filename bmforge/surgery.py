"""Tools for module trees: find, replace, freeze and wrap modules by type or name glob.

A glob matches the whole dotted name of a module or parameter: `*` matches any text without a dot,
and `**` any text (`layers.*`, `layers.*.attn.q_proj`, `**.bias`). A glob without a match raises an
error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from inspect import signature
from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError, suggest

__all__ = [
    "PLACES",
    "View",
    "copy_to_meta",
    "Wrapper",
    "eval_mode",
    "find_modules",
    "find_parameters",
    "find_repeated_blocks",
    "freeze_",
    "match_glob",
    "match_names",
    "persistent_tensors",
    "repeated_names",
    "replace_module_",
    "shared_tensors",
    "unwrap_forward_",
    "view_parameters_",
    "wrap_forward_",
    "wrappers_of",
]

Wrapper = Callable[..., Any]
"""Called as ``wrapper(inner, *args, **kwargs)``; calls `inner` or not, and returns the result."""

View = Callable[[Tensor], Tensor]
"""Maps a module's parameter to the tensor that its forward sees."""

PLACES = (
    "part",  # computes the local part of a product and communicates (tensor parallelism)
    "draws",  # isolates the module's own random numbers
    "rounding",  # rounds local weights and inputs (quantization-aware training)
    "zeros",  # sets pruned weights to zero
    "gates",  # scales the effect of a block or sublayer on hidden states
    "width",  # ignores hidden dimensions whose gates are closed
    "views",  # replaces parameters by their local shards
    "child views",  # the same for parameters of children, which the module's own code may read
    "experts",  # selects the local experts
    "tokens",  # knows the length of sequences that are sharded over ranks
    "selection",  # applies the adapters that a recomputed call selected
    "window",  # all-gathers the tokens of a sharded sequence
    "weights",  # streams the weights in
    "recompute",  # recomputes the forward in backward
    "activations",  # offloads activations saved for backward
    "device",  # moves inputs to the module's device
    "stages",  # runs all stages of a pipeline
    "adapters",  # applies the adapters that the call selects
)
"""Kinds of wrappers around a module's forward, from the innermost to the outermost."""


def match_glob(name: str, glob: str) -> bool:
    """Return True if a dotted name matches a glob; `*` stops at dots, `**` does not."""
    return _compile(glob).fullmatch(name) is not None


@lru_cache(maxsize=256)
def _compile(glob: str) -> re.Pattern[str]:
    return re.compile(re.escape(glob).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))


def match_names(names: Iterable[str], globs: Iterable[str], what: str = "module") -> list[str]:
    """Return the names that match any of the globs, in their order.

    Args:
        names: all names.
        globs: globs, each of which must match at least one name.
        what: kind of the names, such as module, for the error message.

    Raises:
        ConfigError: a glob matches no name.
    """
    all_names = list(names)
    matching: dict[str, None] = {}
    for glob in globs:
        fits = _compile(glob).fullmatch
        hits = [name for name in all_names if fits(name)]
        if not hits:
            raise ConfigError(
                f"{what} pattern {glob!r} matches nothing.{suggest(glob, all_names)} Use names of "
                "this model."
            )
        matching.update(dict.fromkeys(hits))
    return [name for name in all_names if name in matching]


def find_modules(
    root: nn.Module, *, globs: Iterable[str] | None = None, kind: type | None = None
) -> dict[str, nn.Module]:
    """Return a dictionary from name to module of all matching descendants, in module order.

    Args:
        root: module to search.
        globs: name globs, any of which must match; None matches all names.
        kind: module type; None matches all types.

    Raises:
        ConfigError: a glob matches no module.
    """
    modules = dict(root.named_modules())
    names = list(modules) if globs is None else match_names(modules, globs)
    return {n: modules[n] for n in names if kind is None or isinstance(modules[n], kind)}


def find_parameters(root: nn.Module, globs: Iterable[str]) -> dict[str, nn.Parameter]:
    """Return a dictionary from name to parameter for the globs; tied parameters appear once.

    Raises:
        ConfigError: a glob matches no parameter.
    """
    parameters = dict(root.named_parameters())
    return {name: parameters[name] for name in match_names(parameters, globs, "parameter")}


def persistent_tensors(root: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint contains, as a dictionary from name to tensor.

    The parameters come first, then the persistent buffers. A tied tensor appears once, under its
    first name. Initialization, loading, saving, checkpoints and the planner all use this function.
    """
    tensors: dict[str, Tensor] = dict(root.named_parameters())
    seen = {id(tensor) for tensor in tensors.values()}
    for prefix, module in root.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                tensors[f"{prefix}.{key}" if prefix else key] = buffer
    return tensors


def repeated_names(model: nn.Module) -> set[str]:
    """Return the additional names of tied parameters, such as that of a tied head's weight."""
    first = {name for name, _ in model.named_parameters()}
    return {n for n, _ in model.named_parameters(remove_duplicate=False)} - first


def shared_tensors(root: nn.Module) -> set[int]:
    """Return the ids of parameters and buffers that several modules of a model share."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in root.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            (shared if id(tensor) in seen else seen).add(id(tensor))
    return shared


def copy_to_meta(root: nn.Module) -> Any:
    """Return a copy of a module on the meta device, which needs no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*root.parameters(), *root.buffers()):
        meta: Tensor = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = meta
    return copy.deepcopy(root, memo)


def replace_module_(root: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Replace the descendant called `name` with `new`; return the old module."""
    parent_name, _, child = name.rpartition(".")
    parent = root.get_submodule(parent_name)
    old = parent.get_submodule(child)
    setattr(parent, child, new)
    return old


def freeze_(root: nn.Module, globs: Iterable[str] = ("**",)) -> nn.Module:
    """Set `requires_grad` of the matching parameters to False; return `root`."""
    for parameter in find_parameters(root, globs).values():
        parameter.requires_grad_(False)
    return root


def find_repeated_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of any model, which are sharded or recomputed as units.

    Blocks are the children of a container (ModuleList, ModuleDict, Sequential) with at least two
    children of one class and with parameters; some of them may have no parameters. In nested lists
    they are the children of the innermost list, because only those are called. Blocks inside of
    other blocks are not listed. If there is no such container, the only item of a ModuleList is a
    block, as in ALBERT, whose layers share their weights.
    """
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return _find_blocks(root, lists, 2) or _find_blocks(root, (nn.ModuleList,), 1)


def _find_blocks(
    root: nn.Module, lists: tuple[type[nn.Module], ...], least: int
) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if any(name == b or name.startswith(b + ".") for b in blocks):
            continue
        if isinstance(module, lists):
            children = dict(module.named_children())
            kinds = {type(child) for child in children.values()}
            has_parameters = any(True for _ in module.parameters())
            runs = not kinds & {nn.ModuleList, nn.ModuleDict}
            if len(children) >= least and _are_alike(kinds) and has_parameters and runs:
                prefix = f"{name}." if name else ""
                blocks.update({prefix + key: child for key, child in children.items()})
    return blocks


def _are_alike(kinds: set[type[nn.Module]]) -> bool:
    """Return True if all classes are the same, or have a common base class that is not torch's.

    Hybrid models have blocks of several classes, such as recurrence and attention, in one list.
    """
    shared = set.intersection(*(set(kind.__mro__) for kind in kinds))
    return len(kinds) == 1 or any(
        issubclass(base, nn.Module) and not base.__module__.startswith("torch.") for base in shared
    )


@dataclass
class _Wrapping:
    """The wrappers of a module's forward.

    Args:
        own: the module's instance attribute `forward` before wrapping, if it had one.
        wrappers: dictionary from order key (see `PLACES`) to wrapper.
        composed: the forward that calls all wrappers.
    """

    own: Callable[..., Any] | None
    wrappers: dict[str, Wrapper] = field(default_factory=dict)
    composed: Callable[..., Any] | None = None


def wrap_forward_(module: nn.Module, wrapper: Wrapper, order_key: str) -> None:
    """Wrap a module's forward: calls of the module call the wrapper instead.

    Hooks, `module.compile()` and FSDP are outside of all wrappers. Copies of the module have copies
    of the wrappers.

    Args:
        module: module to wrap; its class and parameter names do not change.
        wrapper: module-level function, or a `partial` that binds the arguments before `inner`.
        order_key: one of `PLACES`, which are the kinds of wrappers from the innermost to the
            outermost; a module has at most one of each kind.

    Raises:
        ConfigError: the module already has a wrapper with this `order_key`.
    """
    if order_key in (wrapping := _wrapping_of(module)).wrappers:
        raise ConfigError(
            f"{type(module).__name__} already has a wrapper with order_key={order_key!r}. Remove "
            "the wrapper first with unwrap_forward_, or wrap another module."
        )
    wrapping.wrappers[order_key] = wrapper
    _compose_(module, wrapping)


def unwrap_forward_(module: nn.Module, order_key: str) -> Wrapper:
    """Remove and return a wrapper of a module's forward.

    Raises:
        ConfigError: the module has no wrapper with this `order_key`.
    """
    wrapping = _wrapping_of(module)
    if order_key not in wrapping.wrappers:
        raise ConfigError(
            f"{type(module).__name__} has no wrapper with order_key={order_key!r} (existing: "
            f"{[name for name, _ in wrappers_of(module)]})."
        )
    wrapper = wrapping.wrappers.pop(order_key)
    _compose_(module, wrapping)
    return wrapper


def wrappers_of(module: nn.Module) -> list[tuple[str, Wrapper]]:
    """Return the order keys and wrappers of a module's forward, innermost first."""
    wrapping = module.__dict__.get(_WRAPPING)
    if wrapping is None:
        return []
    return [(p, wrapping.wrappers[p]) for p in PLACES if p in wrapping.wrappers]


_WRAPPING = "_forward_wrapping"


def _wrapping_of(module: nn.Module) -> _Wrapping:
    forward = module.__dict__.get("forward")
    wrapping: _Wrapping | None = module.__dict__.get(_WRAPPING)
    if wrapping is None:
        return _Wrapping(own=forward)
    if wrapping.composed is not forward:
        raise ConfigError(
            f"the forward of a {type(module).__name__} was replaced after it was wrapped "
            f"(wrappers: {[name for name, _ in wrappers_of(module)]}). Replace the forward before "
            "the model is parallelized."
        )
    return wrapping


def _compose_(module: nn.Module, wrapping: _Wrapping) -> None:
    """Replace a module's forward with nested partials that call all wrappers.

    Partials add no measurable cost to a call.
    """
    module.__dict__.pop("forward", None)
    module.__dict__.pop(_WRAPPING, None)
    if wrapping.own is not None:
        module.__dict__["forward"] = wrapping.own
    if not wrapping.wrappers:
        return
    forward = own = module.forward
    module.__dict__[_WRAPPING] = wrapping
    for _, wrapper in wrappers_of(module):
        forward = partial(wrapper, forward)
    # Programs such as `generate` of transformers look up arguments in the forward's signature.
    forward.__signature__ = signature(own)  # type: ignore[attr-defined]
    module.__dict__["forward"] = wrapping.composed = forward


def view_parameters_(module: nn.Module, views: Mapping[str, View], order_key: str) -> None:
    """Replace parameters with values computed from them during a module's forward.

    Args:
        module: module; its parameters themselves do not change.
        views: dictionary from parameter name, which may be that of a child ("child.weight"), to
            the function that computes the value.
        order_key: one of `PLACES`; determines the order if the module has several wrappers.

    Raises:
        ConfigError: the module already has a wrapper with this `order_key`.
    """
    wrap_forward_(module, partial(_on_views, module, views), order_key)


def _on_views(
    module: nn.Module,
    views: Mapping[str, View],
    inner: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    originals: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, view in views.items():
            owner, _, key = name.rpartition(".")
            parameters: dict[str, Any] = module.get_submodule(owner)._parameters
            originals.append((parameters, key, parameters[key]))
            parameters[key] = view(parameters[key])
        return inner(*args, **kwargs)
    finally:
        for parameters, key, original in originals:
            parameters[key] = original


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that sets eval mode and restores each module's mode on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
