"""Loads adapters that OpenDelta saved (``config.json`` and ``pytorch_model.bin``).

Tensor names combine transformers' module names with OpenDelta's inner names; the pickle is read
with ``weights_only``. Only the compatibility package writes this format.
Source: opendelta 0.3.2, `utils/` and `delta_models/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.errors import CheckpointError, ConfigError
from bmforge.nn.attention import Attention
from bmforge.tune.delta.address import all_names, excludes_of, known_names
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.opendelta_names import INSIDE, LEAVES
from bmforge.tune.delta.types import adapter_types

__all__ = [
    "OLD_WEIGHTS_NAME",
    "is_opendelta",
    "load_opendelta",
    "old_type_of",
    "opendelta_type",
    "read_opendelta_config",
    "to_our_names",
]

OLD_WEIGHTS_NAME = "pytorch_model.bin"

# Name in OpenDelta's common structure -> generic target name of bmforge.
_COMMON = {
    "attn@": "attn",
    "attn@.q@": "attn.q",
    "attn@.k@": "attn.k",
    "attn@.v@": "attn.v",
    "attn@.proj@": "attn.o",
    "ff@": "mlp",
    "ff@.w1@": "mlp.up",
    "ff@.w2@": "mlp.down",
    "layer_norm@": "norm",
    "lm_head@.proj@": "lm_head",
}
# OpenDelta's type -> adapter class of bmforge.
_TYPES: Mapping[str, str] = {
    "lora": "Lora",
    "adapter": "Adapter",
    "low_rank_adapter": "LowRankAdapter",
    "compacter": "Compacter",
    "parallel_adapter": "ParallelAdapter",
    "bitfit": "BitFit",
    "prefix": "Prefix",
    "soft_prompt": "SoftPrompt",
}


def is_opendelta(directory: Path) -> bool:
    """Return True if a directory was written by OpenDelta's `save_finetuned`."""
    return (directory / OLD_WEIGHTS_NAME).exists() and (directory / "config.json").exists()


def read_opendelta_config(directory: Path) -> dict[str, Any]:
    """Read the config that OpenDelta's `save_finetuned` wrote, as a dict."""
    fields: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return fields


def old_type_of(kind: type[AttachedDelta]) -> str | None:
    """Return OpenDelta's name of an adapter type; None if OpenDelta does not have the type."""
    return next((name for name, class_name in _TYPES.items() if class_name == kind.__name__), None)


def opendelta_type(
    config: Mapping[str, Any], model: nn.Module | None = None
) -> tuple[type[AttachedDelta], dict[str, Any]]:
    """Convert OpenDelta's config to an adapter type and its options.

    Raises:
        ConfigError: bmforge does not have this type.
    """
    kind = str(config.get("delta_type"))
    if kind not in _TYPES:
        raise ConfigError(
            f"unknown delta type: delta_type={kind!r} (supported: {', '.join(_TYPES)})."
        )
    options: dict[str, Any] = {}
    names = config.get("modified_modules")
    if kind == "soft_prompt":
        options["length"] = config.get("soft_token_num", 100)
        return adapter_types()["SoftPrompt"], options
    if kind == "parallel_adapter" and not names and _is_their_t5(model):
        options["pairs"] = _THEIR_T5_PAIRS
    elif kind == "parallel_adapter" and names:
        options["pairs"] = _pairs(config, model)
    elif names and not (config.get("common_structure") and kind == "bitfit"):
        options["targets"] = [_COMMON.get(name, name) for name in names]
        options["exclude"] = tuple(config.get("exclude_modules") or ())
    options |= _OPTIONS[kind](config)
    return adapter_types()[_TYPES[kind]], options


# OpenDelta's default targets in transformers' T5: the attention sublayer with its norm, and the
# MLP.
_THEIR_T5_PAIRS = [("[r]layer\\.0", "[r]layer\\.0"), ("mlp.up", "mlp.down")]


def _is_their_t5(model: nn.Module | None) -> bool:
    names = () if model is None else (name for name, _ in model.named_modules())
    return any(name.endswith("layer.0.SelfAttention") for name in names)


def _pairs(config: Mapping[str, Any], model: nn.Module | None) -> list[tuple[str, str]]:
    """Return the (read, write) targets of a parallel adapter.

    In some families, Hugging Face's attention module includes a norm that is separate in bmforge;
    the target is then the norm.
    """
    backbone = str(config.get("backbone_class", ""))
    names = [_COMMON.get(name, name) for name in config.get("modified_modules") or ()]
    if names[::2] == ["attn", "mlp.up"] and model is not None and not hasattr(model, "traits"):
        attn = "[r]layer\\.0" if backbone.startswith("T5") else "attn"
        return [(attn, attn), ("mlp.up", "mlp.down")]
    if names[::2] == ["attn", "mlp.up"]:
        if backbone.startswith("T5"):
            return [("attn_norm", "attn"), ("mlp", "mlp")]
        if backbone.startswith(("Bert", "Roberta")):
            return [("attn", "attn_norm"), ("mlp", "mlp")]
        return [("attn", "attn"), ("mlp", "mlp")]
    return list(zip(names[::2], names[1::2], strict=True))


_ACT = {"gelu_new": "gelu_new", "gelu_orig": "gelu", "gelu": "gelu"}


def _bottleneck(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    act = config.get("non_linearity") or "gelu_new"
    return {"activation": _ACT.get(act, act), **more}


def _reduced(config: Mapping[str, Any], usual: int) -> dict[str, Any]:
    return _bottleneck(config, reduction=config.get("reduction_factor") or usual)


def _compacter(config: Mapping[str, Any]) -> dict[str, Any]:
    rank = config.get("phm_rank", 1) if config.get("factorized_phm", True) else 0
    division = config.get("hypercomplex_division", 4)
    return {**_reduced(config, 16), "rank": rank, "division": division}


_OPTIONS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "lora": lambda c: {
        "rank": c.get("lora_r", 8),
        "alpha": float(c.get("lora_alpha", 16)),
        "dropout": float(c.get("lora_dropout", 0.0)),
    },
    "adapter": lambda c: _bottleneck(c, width=c.get("bottleneck_dim") or 24),
    "low_rank_adapter": lambda c: {**_reduced(c, 32), "rank": c.get("low_rank_rank", 1)},
    "compacter": _compacter,
    "parallel_adapter": lambda c: _bottleneck(
        c, width=c.get("bottleneck_dim") or 24, scale=float(c.get("scaled") or 1.0)
    ),
    "bitfit": lambda c: {},
    "prefix": lambda c: {"length": c.get("prefix_token_num", 6), "shift_positions": False},
}


def load_opendelta(model: nn.Module, directory: Path, name: str, **overrides: Any) -> AttachedDelta:
    """Load an adapter that OpenDelta saved, and attach it to a bmforge model.

    Args:
        model: bmforge model; its Hugging Face module names are those in OpenDelta's files.
        directory: directory with ``config.json`` and ``pytorch_model.bin``.
        name: name of the adapter.
        overrides: options common to every `Delta`.

    Raises:
        CheckpointError: tensors are missing, unexpected or of a wrong shape; all are listed.
        ConfigError: the type is unknown, or the model does not have a target module.
    """
    config = read_opendelta_config(directory)
    tensors = torch.load(directory / OLD_WEIGHTS_NAME, map_location="cpu", weights_only=True)
    kind, options = opendelta_type(config, model)
    if kind.kind == "shift":  # OpenDelta's set of biases depends on the base model
        names = all_names(model)
        owners = (name.rpartition(".")[0] for name in tensors)
        options = {
            "targets": [name_here for owner in owners for name_here in names.get(owner, [owner])]
        }
    else:
        options["modules_to_save"] = list(_read_fully_trained(model, tensors))
    if "exclude" in options:
        options["exclude"] = excludes_of(known_names(model), options["exclude"])
    delta: Any = kind(model, name=name, **options, **overrides)
    try:
        renamed = to_our_names(model, delta, tensors)
        own = delta.tensors()
        problems = [f"missing: {n}" for n in own if n not in renamed]
        problems += [f"unexpected: {n}" for n in renamed if n not in own]
        problems += [
            (
                f"wrong shape: {n} has {tuple(renamed[n].shape)}, but the adapter needs "
                f"{tuple(own[n].shape)}"
            )
            for n in own
            if n in renamed and renamed[n].shape != own[n].shape
        ]
        if problems:
            raise CheckpointError(
                f"the adapter in {str(directory)!r} does not match the model: "
                f"{'; '.join(problems[:20])}. Use the model that the adapter was trained on."
            )
    except (CheckpointError, ConfigError):
        delta.remove()
        raise
    with torch.no_grad():
        for n, parameter in own.items():
            parameter.copy_(renamed[n])
    return delta


def to_our_names(
    model: nn.Module, delta: AttachedDelta, tensors: Mapping[str, Tensor], minus_base: bool = True
) -> dict[str, Tensor]:
    """Return a dict from bmforge's name to tensor, for tensors or gradients in OpenDelta's format.

    Args:
        model: bmforge model with the adapter.
        delta: adapter built from OpenDelta's config.
        tensors: dict from OpenDelta's tensor name to tensor.
        minus_base: True to subtract the model's biases, which OpenDelta's biases replace, while
            bmforge adds the adapter's biases to them.
    """
    published = all_names(model)
    renamed = {} if delta.kind == "shift" else _read_fully_trained(model, tensors)
    reparams = {n.partition("reparams.")[2]: t for n, t in tensors.items() if "reparams." in n}
    if reparams:
        return {**renamed, **_fold(delta, reparams)}
    for name, tensor in tensors.items():
        match = INSIDE.fullmatch(name)
        if match is None and delta.kind != "shift":
            continue
        if match is None:
            renamed |= _biases(model, delta, published, name, tensor, minus_base)
            continue
        published_name, what, leaf = match.groups()
        key = LEAVES.get(leaf)
        if key is None:
            raise CheckpointError(
                f"the adapter has the tensor {name!r}, which no supported delta type of OpenDelta "
                "has. Check that delta_type in its config is the type of the saved delta."
            )
        if what == "soft_prompt_layer":
            renamed[f"{_place(delta, 'embed')}.{key}"] = tensor
        elif what == "lora":
            renamed |= _low_rank(
                model, delta, published.get(published_name, [published_name]), key, tensor
            )
        else:
            place_name = _place(delta, _owner(model, delta, published, published_name))
            renamed[f"{place_name}.{key}"] = (
                _as_heads(delta, tensor) if what == "prefix" else tensor
            )
    return renamed


def _owner(
    model: nn.Module, delta: AttachedDelta, published: Mapping[str, list[str]], published_name: str
) -> str:
    """Return the bmforge name of the module that holds the adapter of a Hugging Face module."""
    own = {part.owner for part in delta.held}
    reads_at = delta.options.get("reads_at") or {}
    written = [writes for writes, reads in reads_at.items() if reads == published_name]
    mapped = [name for name in published.get(published_name, ()) if name in own]
    if published_name in own and not written:
        return published_name
    return next(iter(written or mapped), "") or _side(model, published, published_name)


def _read_fully_trained(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a dict from bmforge's name to tensor, of parameters that OpenDelta trained in full."""
    published, renamed = all_names(model), {}
    for name, tensor in tensors.items():
        if INSIDE.fullmatch(name) is None and "reparams." not in name:
            owner, _, leaf = name.rpartition(".")
            (own_name, *others) = published.get(owner, [owner])
            if others:
                raise CheckpointError(
                    f"{name} in the adapter corresponds to a part of a fused weight in this model "
                    f"({own_name} and others), which is not supported. Train the adapter "
                    "again with bmforge."
                )
            renamed[f"{own_name}.{leaf}"] = tensor
    return renamed


def _place(delta: AttachedDelta, beginning: str) -> str:
    """Return the name of the first adapter module whose base module has this name prefix."""
    for owner, slot, part in delta.held:
        if owner.startswith(beginning) and list(part.parameters()):
            return f"{owner}.{slot}"
    raise CheckpointError(
        f"the adapter has no tensors for the module {beginning!r}. Use the model "
        "that the adapter was trained on."
    )


def _side(model: nn.Module, published: Mapping[str, list[str]], published_name: str) -> str:
    """Return the bmforge name of the attention or MLP that contains a Hugging Face module."""
    inside = [
        n
        for t in published
        if t == published_name or t.startswith(f"{published_name}.")
        for n in published[t]
    ]
    for name in inside:
        owner = name.rpartition(".")[0]
        if isinstance(model.get_submodule(owner), Attention):
            return owner
    for name in inside:
        if ".mlp." in name:
            return name[: name.index(".mlp.") + 4]
    raise CheckpointError(
        f"the adapter changes {published_name}, which this {type(model).__name__} does not have. "
        "Use the model that the adapter was trained on."
    )


def _low_rank(
    model: nn.Module, delta: AttachedDelta, names: list[str], key: str, tensor: Tensor
) -> dict[str, Tensor]:
    parts = [f"{n}.{delta.name}" for n in names]
    if key == "down":
        return {f"{part}.down": tensor for part in parts}
    rows = [model.get_submodule(part).up.shape[0] for part in parts]  # type: ignore[union-attr]
    return {f"{p}.up": t for p, t in zip(parts, tensor.split(rows), strict=True)}  # type: ignore[arg-type]


def _biases(
    model: nn.Module,
    delta: AttachedDelta,
    published: Mapping[str, list[str]],
    name: str,
    tensor: Tensor,
    minus_base: bool,
) -> dict[str, Tensor]:
    published_name, _, leaf = name.rpartition(".")
    names = published.get(published_name, [published_name])
    if leaf != "bias":
        raise CheckpointError(
            f"the adapter has the tensor {name!r}, but a bias delta has only biases. Check that "
            "delta_type in its config is the type of the saved delta."
        )
    modules: list[Any] = [model.get_submodule(n) for n in names]
    rows = [len(module.bias) for module in modules]
    biases = {}
    for own_name, module, own in zip(names, modules, tensor.split(rows), strict=True):
        owner, _, last = own_name.rpartition(".")
        target = owner if last in ("o_proj", "down_proj") else own_name
        value = own - module.bias.detach() if minus_base else own
        biases[f"{target}.{delta.name}.bias"] = value
    return biases


def _as_heads(delta: AttachedDelta, tensor: Tensor) -> Tensor:
    """Reshape a prefix of P tokens to K heads of size H: (P, K * H) -> (K, P, H)."""
    heads, _, width = delta.held[0].part.key.shape
    return tensor.unflatten(1, (heads, width)).transpose(0, 1)


def _fold(delta: AttachedDelta, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the keys and values of all layers that a prefix's reparameterization MLP computes."""
    mid = torch.tanh(
        tensors["wte.weight"] @ tensors["control_trans.0.weight"].T
        + tensors["control_trans.0.bias"]
    )
    computed = mid @ tensors["control_trans.2.weight"].T + tensors["control_trans.2.bias"]
    folded = {}
    for number, each in enumerate(computed.chunk(len(delta.held), 1)):
        owner, slot, _ = delta.held[number]
        for key, half in zip(("key", "value"), each.chunk(2, 1), strict=True):
            folded[f"{owner}.{slot}.{key}"] = _as_heads(delta, half)
    return folded
