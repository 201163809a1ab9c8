"""Registry of adapter kinds: the options of each kind, and how it is attached to modules.

Each kind has an entry in `PART_KINDS`, a dataclass of options, and a function that builds the
adapter of a module. Prefixes and prompts need bmforge modules; all other kinds also work on modules
of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bmforge.errors import ConfigError
from bmforge.nn.attention import Attention
from bmforge.nn.bottleneck import (
    Bottleneck,
    BottleneckInput,
    BottleneckOptions,
    build_bottleneck,
    in_width,
)
from bmforge.nn.channel import ScaleOptions, build_bias_adapter, build_scale_adapter, out_width
from bmforge.nn.latent_attention import LatentAttention
from bmforge.nn.low_rank import LowRankOptions, build_low_rank
from bmforge.nn.part import AdapterModule, attach_part_, detach_part_, find_like
from bmforge.nn.prefix import KeyValuePrefix
from bmforge.nn.prompt import ExtraEmbeddings
from bmforge.nn.token_rows import TOKENS_SLOT, attach_token_rows_

__all__ = ["PART_KINDS", "Kind", "NoOptions", "add_parts_", "refuse_name", "rename_options"]

# Names of options in adapter directories and configs of earlier versions -> names in PEFT.
_RENAMED_OPTIONS = {
    "magnitude": "use_dora",
    "root_scale": "use_rslora",
    "train_also": "modules_to_save",
}


@dataclass(frozen=True)
class Kind:
    """Adapter kind: its options and the function that adds it to a model.

    Args:
        options: dataclass of the kind's options.
        apply: function (model, module names, options, adapter name) that adds the adapters.
        about: description for error messages and documentation.
    """

    options: type[Any]
    apply: Callable[[nn.Module, Sequence[str], Any, str], None]
    about: str


@dataclass(frozen=True)
class LengthOptions:
    """Options of the adapter kind "prompt" (prompt tuning).

    Args:
        length: number of virtual tokens.
        std: standard deviation of the initialization.
    """

    length: int
    std: float = 0.02

    def __post_init__(self) -> None:
        """Raise `ConfigError` for invalid options."""
        if self.length < 1:
            raise ConfigError(
                f"length={self.length} must be at least 1. Pass the number of virtual tokens."
            )
        if not (self.std >= 0 and math.isfinite(self.std)):
            raise ConfigError(f"std={self.std} must be finite and at least 0.")


@dataclass(frozen=True)
class PrefixOptions(LengthOptions):
    """Options of the adapter kind "prefix" (prefix tuning).

    Args:
        length: number of virtual tokens, each with keys and values in every layer.
        std: standard deviation of the initialization.
        inner: width of a two-layer network that computes keys and values in training; 0 trains
            them directly.
        shift_positions: start the text's positions at `length`, as in PEFT, instead of 0.
    """

    inner: int = 0
    shift_positions: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for invalid options."""
        super().__post_init__()
        if self.inner < 0:
            raise ConfigError(f"inner={self.inner} must be at least 0.")


@dataclass(frozen=True)
class NoOptions:
    """Options of a kind that has no options."""


def refuse_name(name: str) -> None:
    """Raise `ConfigError` for an adapter name if adapters of the kind have no names."""
    if name:
        raise ConfigError(
            f"name={name!r} has no effect, because this change adds no adapter modules. Leave name "
            "out."
        )


def add_parts_(
    model: nn.Module,
    names: Sequence[str],
    name: str,
    build: Callable[[str, nn.Module], AdapterModule],
) -> None:
    """Attach an adapter to each of the named modules, or to none if one module is unsupported.

    Args:
        model: any model.
        names: names of the modules.
        name: name of the adapters.
        build: function (module name, module) -> adapter.
    """
    modules = [model.get_submodule(n) for n in names]
    if not name.isidentifier():
        raise ConfigError(
            f"name={name!r} is not a valid Python identifier. Use letters, digits and underscores."
        )
    taken = [n for n, module in zip(names, modules, strict=True) if hasattr(module, name)]
    if taken:
        raise ConfigError(
            f"{taken[0]} already has an attribute {name!r}. Rename the adapter, or "
            "leave the name out."
        )
    lists = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    listed = [n for n, module in zip(names, modules, strict=True) if isinstance(module, lists)]
    if listed:
        raise ConfigError(
            f"{listed[0]} is a {type(model.get_submodule(listed[0])).__name__}, a container of "
            "modules. Choose one of the modules in the container, such as the last."
        )
    parts = [build(n, module) for n, module in zip(names, modules, strict=True)]
    for module, part in zip(modules, parts, strict=True):
        part.train(module.training)
        attach_part_(module, name, part)


def _attach_(
    build: Callable[[str, nn.Module, Any], AdapterModule],
    usual: str,
    model: nn.Module,
    names: Sequence[str],
    options: Any,
    name: str,
) -> None:
    """Attach adapters of one kind, whose default name is `usual`, to modules."""
    add_parts_(model, names, name or usual, lambda n, module: build(n, module, options))


def add_low_ranks_(
    model: nn.Module, names: Sequence[str], options: LowRankOptions, name: str
) -> None:
    """Attach LoRA modules to modules, after the trained token rows (`trainable_token_indices`)."""
    name = name or "low_rank"
    owners = attach_token_rows_(model, name, options.trainable_token_indices)
    try:
        add_parts_(model, names, name, lambda n, module: build_low_rank(n, module, options))
    except ConfigError:
        for owner in owners:
            detach_part_(model.get_submodule(owner), f"{name}{TOKENS_SLOT}")
        raise


def add_bottlenecks_(
    model: nn.Module, names: Sequence[str], options: BottleneckOptions, name: str
) -> None:
    """Attach bottlenecks, and a `BottleneckInput` to each module whose input a bottleneck reads."""
    name = name or "bottleneck"
    far = {n: at for n, at in options.reads_at.items() if n != at}
    if unknown := sorted(set(far) - set(names)):
        raise ConfigError(
            f"reads_at contains {unknown[0]!r}, which is not one of the targets. Use names of "
            "target modules."
        )
    readers = {n: BottleneckInput() for n in far}
    add_parts_(
        model,
        list(far.values()),
        f"{name}_reader",
        lambda at, _: next(readers[n] for n in far if far[n] == at),
    )

    def build(n: str, module: nn.Module) -> AdapterModule:
        if n not in far:
            return build_bottleneck(n, module, options)
        ins, outs = in_width(far[n], model.get_submodule(far[n])), out_width(n, module)
        return Bottleneck(ins, outs, options.of(n, ins, outs), find_like(module), readers[n])

    try:
        add_parts_(model, names, name, build)
    except ConfigError:
        for at in far.values():
            detach_part_(model.get_submodule(at), f"{name}_reader")
        raise


def put_prefixes_(
    model: nn.Module, names: Sequence[str], options: PrefixOptions, name: str
) -> None:
    """Attach trained prefix keys and values to attention modules."""

    def build(attn: Any) -> KeyValuePrefix:
        if isinstance(attn, LatentAttention):
            raise ConfigError(
                "multi-head latent attention does not support a trained prefix. Use a soft prompt "
                "or LoRA."
            )
        heads = attn.k_proj.out_features // attn.head_dim
        sizes = heads, options.length, attn.head_dim
        return KeyValuePrefix(*sizes, options.std, options.inner, options.shift_positions)

    _fill_slots_(model, names, "prefix", Attention, build, name)


def put_prompts_(model: nn.Module, names: Sequence[str], options: LengthOptions, name: str) -> None:
    """Attach a soft prompt (trained rows after the vocabulary's rows) to the token embedding."""

    tokens: Any = getattr(model, "embed", None)
    if getattr(model, "foreign", None) is not None:  # transformers' forward rejects prompt ids
        raise ConfigError(
            f"soft prompts need a model that bmforge implements, but {type(model).__name__} is an "
            "architecture of transformers. Use another model, or trainable_token_indices of a "
            "LoRA."
        )

    def build(table: Any) -> ExtraEmbeddings:
        if table is not tokens:
            raise ConfigError(
                "a soft prompt needs a token embedding named `embed`, which this model does "
                "not have. Use another adapter."
            )
        return ExtraEmbeddings(options.length, table.embedding_dim, options.std)

    _fill_slots_(model, names, "prompt", nn.Embedding, build, name)


def _fill_slots_(
    model: nn.Module,
    names: Sequence[str],
    slot: str,
    kind: type[nn.Module],
    build: Callable[[Any], nn.Module],
    name: str,
) -> None:
    """Set the attribute `slot` of each named module, which must be a `kind`, to a new adapter."""
    refuse_name(name)
    modules = {n: model.get_submodule(n) for n in names}
    for n, module in modules.items():
        if not isinstance(module, kind):
            raise ConfigError(
                f"{n} is a {type(module).__name__}, which does not support a {slot} adapter. "
                f"Choose modules of type {kind.__name__}."
            )
        if getattr(module, slot, None) is not None:
            raise ConfigError(f"{n} already has a {slot} adapter. Detach it first.")
    parts = []
    for module in modules.values():
        like = find_like(module)
        with torch.device(like.device):
            parts.append(build(module).to(like.dtype).train(module.training))
    for module, part in zip(modules.values(), parts, strict=True):
        setattr(module, slot, part)


PART_KINDS: Mapping[str, Kind] = {
    "low_rank": Kind(
        LowRankOptions,
        add_low_ranks_,
        "low-rank adapters on linear layers, embeddings and experts",
    ),
    "bottleneck": Kind(
        BottleneckOptions,
        add_bottlenecks_,
        "bottleneck adapters after modules, or parallel to them",
    ),
    "shift": Kind(
        NoOptions,
        partial(_attach_, build_bias_adapter, "shift"),
        "bias vectors added to the outputs of modules",
    ),
    "gain": Kind(
        ScaleOptions,
        partial(_attach_, build_scale_adapter, "gain"),
        "one scale per input or output channel of linear layers",
    ),
    "prefix": Kind(
        PrefixOptions, put_prefixes_, "trained keys and values before those of each attention"
    ),
    "prompt": Kind(LengthOptions, put_prompts_, "trained rows after the token embedding"),
}


def rename_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return adapter options that were read from a file, under their current names."""
    return {_RENAMED_OPTIONS.get(name, name): value for name, value in options.items()}
