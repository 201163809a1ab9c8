"""The one tree tool: find, replace, freeze and wrap modules by type or by name glob.

A glob is matched against the whole dotted name of a module or parameter: `*` stands for any text
without a dot, `**` for any text (`layers.*`, `layers.*.attn.q_proj`, `**.bias`). A glob that
matches nothing is an error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError, suggest

__all__ = [
    "PLACES",
    "View",
    "copy_to_meta",
    "Wrapper",
    "evaluating",
    "find_modules",
    "find_parameters",
    "find_repeated_blocks",
    "freeze_",
    "match_glob",
    "match_names",
    "persistent_tensors",
    "replace_module_",
    "shared_tensors",
    "unwrap_forward_",
    "view_parameters_",
    "wrap_forward_",
    "wrappers_of",
]

Wrapper = Callable[..., Any]
"""Called as ``wrapper(inner, *args, **kwargs)``; runs `inner`, or not, and returns the result."""

View = Callable[[Tensor], Tensor]
"""What a module sees of one of its parameters."""

PLACES = (
    "part",  # computes what is here of a module's product, and joins it over processes
    "draws",  # draws random numbers of its own
    "rounding",  # rounds what is here of its weights, and what goes in
    "zeros",  # keeps the weights that are 0
    "width",  # counts only the hidden features whose gates are open
    "views",  # sees what is here of its parameters
    "experts",  # sees the experts that are here
    "tokens",  # knows how many tokens a row has that are divided
    "delta rows",  # its parts are as they were chosen for this call
    "window",  # sees all tokens where each process has a share
    "weights",  # its weights come when it runs
    "recompute",  # runs again in backward
    "activations",  # what it keeps for backward goes away
    "device",  # what goes in comes to its own device
    "stages",  # all stages of a pipeline run
)
"""Where a wrapper of a module's forward stands, from the innermost to the outermost."""


def match_glob(name: str, glob: str) -> bool:
    """Tell whether a dotted name fits a glob (`*` within one part, `**` across parts)."""
    return _compile(glob).fullmatch(name) is not None


@lru_cache(maxsize=256)
def _compile(glob: str) -> re.Pattern[str]:
    return re.compile(re.escape(glob).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))


def match_names(names: Iterable[str], globs: Iterable[str], what: str = "module") -> list[str]:
    """Return the names that fit any of the globs, in their order.

    Args:
        names: of all there are.
        globs: name globs, each of which must match.
        what: what the message calls them.

    Raises:
        ConfigError: a glob matches no name.
    """
    known = list(names)
    found: dict[str, None] = {}
    for glob in globs:
        fits = _compile(glob).fullmatch
        hits = [name for name in known if fits(name)]
        if not hits:
            raise ConfigError(f"{what} glob {glob!r} matches nothing.{suggest(glob, known)}")
        found.update(dict.fromkeys(hits))
    return [name for name in known if name in found]


def find_modules(
    root: nn.Module, *, globs: Iterable[str] | None = None, kind: type | None = None
) -> dict[str, nn.Module]:
    """Return name -> module of all descendants that fit, in the tree's order.

    Args:
        root: where to look.
        globs: name globs, any of which must match; None takes every name.
        kind: a module type; None takes every type.

    Raises:
        ConfigError: a glob matches no module.
    """
    modules = dict(root.named_modules())
    names = list(modules) if globs is None else match_names(modules, globs)
    return {n: modules[n] for n in names if kind is None or isinstance(modules[n], kind)}


def find_parameters(root: nn.Module, globs: Iterable[str]) -> dict[str, nn.Parameter]:
    """Return name -> parameter for the globs; tied parameters come once.

    Raises:
        ConfigError: a glob matches no parameter.
    """
    parameters = dict(root.named_parameters())
    return {name: parameters[name] for name in match_names(parameters, globs, "parameter")}


def persistent_tensors(root: nn.Module) -> dict[str, Tensor]:
    """Return everything that a model holds and a file of it must: name -> tensor.

    Parameters, then persistent buffers; a tied one comes once, under its first name. This is the
    one list that drawing, loading, saving, checkpoints and plans walk, so none leaves out a tensor
    that another knows.
    """
    found: dict[str, Tensor] = dict(root.named_parameters())
    seen = {id(tensor) for tensor in found.values()}
    for prefix, module in root.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{prefix}.{key}" if prefix else key] = buffer
    return found


def shared_tensors(root: nn.Module) -> set[int]:
    """Return the ids of parameters and buffers that a model has in several places."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in root.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            (shared if id(tensor) in seen else seen).add(id(tensor))
    return shared


def copy_to_meta(root: nn.Module) -> Any:
    """Return a copy of a module that has no memory: what it looks like, and nothing else."""
    memo: dict[int, Any] = {}
    for tensor in (*root.parameters(), *root.buffers()):
        described: Tensor = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            described = nn.Parameter(described, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = described
    return copy.deepcopy(root, memo)


def replace_module_(root: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Put `new` where the descendant `name` stood and return the old one."""
    parent_name, _, child = name.rpartition(".")
    parent = root.get_submodule(parent_name)
    old = parent.get_submodule(child)
    setattr(parent, child, new)
    return old


def freeze_(root: nn.Module, globs: Iterable[str] = ("**",)) -> nn.Module:
    """Switch gradients off for the parameters that match; return `root`."""
    for parameter in find_parameters(root, globs).values():
        parameter.requires_grad_(False)
    return root


def find_repeated_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of any model: what ZeRO units and recompute work on.

    A container (ModuleList, ModuleDict, Sequential) whose children, at least two, are of one class
    with parameters holds blocks, of which some may be empty; of lists of lists the inner ones do,
    as only their children run.
    Blocks inside blocks are not listed.
    """
    blocks: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if any(name == b or name.startswith(b + ".") for b in blocks):
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            children = dict(module.named_children())
            kinds = {type(child) for child in children.values()}
            has_parameters = any(True for _ in module.parameters())
            runs = not kinds & {nn.ModuleList, nn.ModuleDict}
            if len(children) >= 2 and len(kinds) == 1 and has_parameters and runs:
                prefix = f"{name}." if name else ""
                blocks.update({prefix + key: child for key, child in children.items()})
    return blocks


@dataclass
class _Wrapping:
    """What stands around a module's forward.

    Args:
        own: what the module itself had in place of its class's forward, if anything.
        found: place -> wrapper.
        made: the forward that was made of them.
    """

    own: Callable[..., Any] | None
    found: dict[str, Wrapper] = field(default_factory=dict)
    made: Callable[..., Any] | None = None


def wrap_forward_(module: nn.Module, wrapper: Wrapper, place: str) -> None:
    """Put a wrapper around a module's forward; where it stands among others its place says.

    Hooks, `module.compile()` and what shards a module stay outside of all wrappers, and copies of
    the module have copies of them.

    Args:
        module: its class and its names stay.
        wrapper: a module-level function, or a `partial` that binds what it takes before `inner`.
        place: one of `PLACES`, each of which has room for one.

    Raises:
        ConfigError: the place is taken.
    """
    if place in (wrapping := _wrapping_of(module)).found:
        raise ConfigError(
            f"{type(module).__name__} is wrapped at place={place!r} already. Take the first one "
            "off (unwrap_forward_), or lay out a fresh model."
        )
    wrapping.found[place] = wrapper
    _compose_(module, wrapping)


def unwrap_forward_(module: nn.Module, place: str) -> Wrapper:
    """Take the wrapper at a place off and return it; after the last one all is as it was.

    Raises:
        ConfigError: there is none.
    """
    wrapping = _wrapping_of(module)
    if place not in wrapping.found:
        raise ConfigError(
            f"{type(module).__name__} is not wrapped at place={place!r}, only at "
            f"{[name for name, _ in wrappers_of(module)]}."
        )
    wrapper = wrapping.found.pop(place)
    _compose_(module, wrapping)
    return wrapper


def wrappers_of(module: nn.Module) -> list[tuple[str, Wrapper]]:
    """Return (place, wrapper) of all that stands around a module's forward, the innermost first."""
    wrapping = module.__dict__.get(_WRAPPING)
    if wrapping is None:
        return []
    return [(place, wrapping.found[place]) for place in PLACES if place in wrapping.found]


_WRAPPING = "_forward_wrapping"


def _wrapping_of(module: nn.Module) -> _Wrapping:
    now = module.__dict__.get("forward")
    wrapping: _Wrapping | None = module.__dict__.get(_WRAPPING)
    if wrapping is None:
        return _Wrapping(own=now)
    if wrapping.made is not now:
        raise ConfigError(
            f"the forward of a {type(module).__name__} was replaced from outside after it had been "
            f"wrapped at {[name for name, _ in wrappers_of(module)]}. Replace it before the model "
            "is laid out."
        )
    return wrapping


def _compose_(module: nn.Module, wrapping: _Wrapping) -> None:
    """Set the forward that the wrappers make; plain partials, which cost a call nothing."""
    module.__dict__.pop("forward", None)
    module.__dict__.pop(_WRAPPING, None)
    if wrapping.own is not None:
        module.__dict__["forward"] = wrapping.own
    if not wrapping.found:
        return
    forward = module.forward
    module.__dict__[_WRAPPING] = wrapping
    for _, wrapper in wrappers_of(module):
        forward = partial(wrapper, forward)
    module.__dict__["forward"] = wrapping.made = forward


def view_parameters_(module: nn.Module, views: Mapping[str, View], place: str) -> None:
    """Let a module's forward see something else in the place of its own parameters.

    Args:
        module: its parameters stay what they are.
        views: name of a parameter -> what the module sees of it.
        place: where this stands among wrappers, one of `PLACES`.

    Raises:
        ConfigError: the place is taken.
    """
    wrap_forward_(module, partial(_on_views, module, views), place)


def _on_views(
    module: nn.Module,
    views: Mapping[str, View],
    inner: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    own = module._parameters
    whole = {key: own[key] for key in views}
    try:
        for key, view in views.items():
            own[key] = view(whole[key])  # type: ignore[assignment,arg-type]
        return inner(*args, **kwargs)
    finally:
        own.update(whole)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and afterwards give every module its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
