"""Adapters on disk: ``adapter_config.json``, ``adapter_model.safetensors`` and a model card.

Types that PEFT supports are written in PEFT's format; other types use the same two files with a
`peft_type` and tensor names of bmforge. Pickles are never written; OpenDelta's are read with
``weights_only``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from bmforge.errors import CheckpointError, ConfigError
from bmforge.files import find_export
from bmforge.nn.token_rows import TOKENS_SLOT
from bmforge.provenance import read_provenance
from bmforge.shards import local_box, local_tensor, whole_tensor
from bmforge.tune.delta import peft_format, peft_write
from bmforge.tune.delta.adapter_file import (
    MARK,
    copies_apart,
    read_labels,
    read_options,
    read_pickle,
    read_weights,
    set_labels_,
)
from bmforge.tune.delta.attached import is_parallelized, whole_model
from bmforge.tune.delta.base import AttachedDelta
from bmforge.tune.delta.base_check import BaseCheck, FileFingerprint, names_base
from bmforge.tune.delta.card import write_card
from bmforge.tune.delta.fingerprint import fingerprint_of, library_of
from bmforge.tune.delta.opendelta_format import (
    is_opendelta,
    load_opendelta,
    opendelta_type,
    read_opendelta_config,
)
from bmforge.tune.delta.types import adapter_types

__all__ = [
    "CONFIG_NAME",
    "WEIGHTS_NAME",
    "is_delta_dir",
    "load_delta",
    "save_delta",
    "type_of_delta",
]

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
OLD_WEIGHTS_NAME, CARD_NAME = "adapter_model.bin", "README.md"
_OURS, _VERSION = MARK, 1


def is_delta_dir(directory: str | Path) -> bool:
    """Return True if a directory contains an adapter saved by bmforge, PEFT or OpenDelta."""
    return (Path(directory) / CONFIG_NAME).exists()


def save_delta(delta: AttachedDelta, directory: Path, facts: Mapping[str, Any]) -> None:
    """Write an adapter as `Delta.save` does; collective on a parallelized model."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    mark: dict[str, Any] = {"version": _VERSION, **read_labels(delta.model)}
    keeps_origin = delta.origin is not None and peft_write.can_write(delta)
    # A quantized base has another fingerprint than the 16-bit weights that it was quantized from.
    is_quantized = any(hasattr(module, "packed") for module in delta.model.modules())
    base: dict[str, Any] = {"base": None, "base_library": library_of(delta.model)}
    if not keeps_origin and not is_quantized:
        base["base"] = fingerprint_of(delta.model, peft_write.written_whole(delta))
    with _gathered(delta) as fully_trained:
        if keeps_origin:
            assert delta.origin is not None
            config = dict(delta.origin)
            tensors = peft_write.write_tensors(delta, fully_trained)[0]
            mark = peft_write.fold_weight_(config, delta)
        elif peft_write.can_write(delta):
            tensors, blocks, patterns = peft_write.write_tensors(delta, fully_trained)
            config = peft_write.write_config(delta, patterns, fully_trained)
            mark |= {"shift_positions": True} if delta.kind == "prefix" else {}
            mark |= base | ({"blocks": blocks} if blocks else {})
            mark |= peft_write.fold_weight_(config, delta)
        else:
            tensors = _own_tensors(delta) | fully_trained
            kind = delta.peft_type if delta.peft_type.startswith("BMFORGE") else "BMFORGE_OTHER"
            config = {"peft_type": kind, _OURS: _describe(delta)}
            mark |= base
        card = write_card(delta, facts)
    if not is_first:
        return
    directory.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"} | ({_OURS: json.dumps(mark)} if mark else {})
    save_file(copies_apart({**tensors, **delta.extra}), directory / WEIGHTS_NAME, metadata)
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True), "utf-8")
    (directory / CARD_NAME).write_text(card, encoding="utf-8")


@contextmanager
def _gathered(delta: AttachedDelta) -> Iterator[dict[str, Tensor]]:
    """Context manager that gathers an adapter's tensors, and yields the parameters trained in full.

    Comm: an all-gather of each tensor; with a pipeline, the stages also exchange their tensors.
    """
    own = {
        f"{owner}.{slot}.{key}": whole_tensor(parameter).detach()
        for owner, slot, part in delta.here()
        for key, parameter in part.named_parameters()
    }
    fully_trained = {
        name: whole_tensor(p).detach() for name, p in delta.fully_trained_parameters().items()
    }
    if not is_parallelized(delta.model):
        yield fully_trained
        return
    if whole_model(delta.model) is not delta.model:
        everybody: list[Any] = [None] * dist.get_world_size()
        local = [{n: t.cpu() for n, t in group.items()} for group in (own, fully_trained)]
        dist.all_gather_object(everybody, local)
        own = {n: t for parts, _ in everybody for n, t in parts.items()}
        fully_trained = {n: t for _, more in everybody for n, t in more.items()}
    own_parts = []
    for owner, slot, part in delta.held:
        for key, parameter in list(part._parameters.items()):
            if parameter is not None:
                own_parts.append((part, key, parameter))
                plain = own[f"{owner}.{slot}.{key}"]
                part._parameters[key] = nn.Parameter(plain, requires_grad=False)
    try:
        yield fully_trained
    finally:
        for part, key, parameter in own_parts:
            part._parameters[key] = parameter


def _own_tensors(delta: AttachedDelta) -> dict[str, Tensor]:
    """Return a dict from saved name (without the adapter's name) to tensor of an adapter.

    The reparameterization layers of a prefix are replaced by the keys and values that they compute.
    """
    collected: dict[str, Tensor] = {}
    for owner, slot, part in delta.held:
        named = dict(part.named_parameters())
        if getattr(part, "inner", 0):
            named = dict(zip(("key", "value"), type(part).forward(part), strict=True))
        start = owner if slot == delta.name else f"{owner}.{slot}"
        collected |= {f"{start}.{key}": tensor for key, tensor in named.items()}
    return collected


def _describe(delta: AttachedDelta) -> dict[str, Any]:
    """Return the config fields from which the adapter can be rebuilt."""
    description = delta.describe()
    if delta.kind == "prefix":
        description["options"]["inner"] = 0
    owners = [h.owner for h in delta.held if not h.slot.endswith(("_reader", TOKENS_SLOT))]
    places = owners or delta.places()  # trained norms have no modules attached
    saved = {"places": places, "modules_to_save": sorted(delta.fully_trained_parameters())}
    return {**description, "version": _VERSION, "weight": float(delta.weight), **saved}


def load_delta(
    model: nn.Module,
    directory: str | Path,
    *,
    name: str = "default",
    allow_other_base: bool = False,
    base_fingerprint: FileFingerprint | None = None,
    kind: type[AttachedDelta] | None = None,
    trainable: bool = True,
) -> AttachedDelta:
    """Load a saved adapter of any type and attach it to a model.

    Args:
        model: base model with its weights; not parallelized.
        directory: adapter directory of bmforge, PEFT or OpenDelta, or directory of a run.
        name: name of the adapter in the model.
        allow_other_base: True to accept a base model other than that of the training.
        base_fingerprint: function that computes the base's fingerprint from its files, for a model
            that is quantized or streamed (`bmforge.models.file_fingerprint`); without it, such a
            base is not checked.
        kind: required adapter type (default: any type).
        trainable: True to train the adapter further; False to freeze it.

    Raises:
        CheckpointError: there is no adapter, it was trained on a different base, or tensors are
            missing, unexpected, not finite or of a wrong shape (all are listed). The model is
            unchanged.
        ConfigError: the adapter's type, version or a setting is unknown, or a run has no export.
    """
    directory = Path(find_export(directory))
    if not (directory / CONFIG_NAME).exists() and is_opendelta(directory):
        delta = load_opendelta(model, directory, name)
    else:
        delta = _load(model, directory, name, BaseCheck(allow_other_base, base_fingerprint), kind)
    if kind is not None and not isinstance(delta, kind):
        delta.remove()
        raise ConfigError(
            f"{str(directory)!r} contains a {type(delta).__name__}, not a {kind.__name__}. Use "
            "load_delta, which loads any adapter type."
        )
    delta.provenance = read_provenance(directory)
    return delta if trainable else delta.requires_grad_(False)


def _load(
    model: nn.Module,
    directory: Path,
    name: str,
    check: BaseCheck,
    kind: type[AttachedDelta] | None,
) -> AttachedDelta:
    config, tensors, mark = _read(directory)
    own_config = config.get(_OURS)
    for version in (mark.get("version", 0), (own_config or {}).get("version", 0)):
        if version > _VERSION:
            raise ConfigError(
                f"{str(directory)!r} has format version {version}, but this bmforge "
                f"supports {_VERSION}. Update bmforge."
            )
    delta_type = _type_of(config, directory)
    if kind is not None and not issubclass(delta_type, kind):
        raise ConfigError(
            f"{str(directory)!r} contains a {delta_type.__name__}, not a {kind.__name__}. Use "
            "load_delta, which loads any adapter type."
        )
    config = config | mark.get("unfolded", {})
    with names_base(config):
        return _attach(model, directory, name, check, delta_type, config, tensors, mark)


def _attach(
    model: nn.Module,
    directory: Path,
    name: str,
    check: BaseCheck,
    delta_type: type[AttachedDelta],
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    mark: Mapping[str, Any],
) -> AttachedDelta:
    """Attach an adapter with the options and tensors from its directory; see `load_delta`."""
    own_config = config.get(_OURS)
    if own_config:
        options = read_options(own_config)
    else:
        options = peft_format.options_of(model, config, tensors)
    if "base" in mark and not own_config and delta_type.kind == "prefix":
        options["shift_positions"] = bool(mark.get("shift_positions"))
    blocks = mark.get("blocks", {})
    if blocks:
        _ranks_of_blocks(model, options, blocks)
    requires = {n: p.requires_grad for n, p in model.named_parameters()}
    delta = delta_type.from_places(model, name, options)
    try:
        check(delta, config, mark, directory)
        renamed = (
            _own_names(delta, tensors)
            if own_config
            else peft_format.read_tensors(delta, tensors, blocks)
        )
        if not own_config:
            peft_format.tie_factors_(delta, blocks)
        _fill(delta, renamed, directory)
    except BaseException:
        delta.remove()
        for n, parameter in model.named_parameters():
            parameter.requires_grad_(requires.get(n, parameter.requires_grad))
        raise
    delta.weigh_(float(own_config.get("weight", 1.0) if own_config else mark.get("weight", 1.0)))
    if not own_config and "base" not in mark and not config.get("target_parameters"):
        delta.origin = dict(config)
        delta.extra = {n: t for n, t in tensors.items() if n.endswith(".base_layer.weight")}
    set_labels_(model, mark)
    return delta


def type_of_delta(directory: str | Path) -> type[AttachedDelta]:
    """Return the type of a saved adapter, which bmforge, PEFT or OpenDelta may have written.

    Raises:
        CheckpointError: the directory contains no adapter.
        ConfigError: the adapter's type is unknown.
    """
    directory = Path(find_export(directory))
    if not (directory / CONFIG_NAME).exists() and is_opendelta(directory):
        return opendelta_type(read_opendelta_config(directory))[0]
    return _type_of(_read(directory)[0], directory)


def _type_of(config: Mapping[str, Any], directory: Path) -> type[AttachedDelta]:
    own_config = config.get(_OURS)
    types = adapter_types()
    by_peft = {name: t for t in types.values() for name in (t.peft_type, *t.peft_reads)}
    delta_type = (
        types.get(own_config["type"]) if own_config else by_peft.get(str(config.get("peft_type")))
    )
    if delta_type is None:
        supported = ", ".join(name for name in by_peft if not name.startswith("BMFORGE"))
        raise ConfigError(
            f"{str(directory)!r} has peft_type={config.get('peft_type')!r}, which this "
            f"version of bmforge does not support (supported: {supported})."
        )
    return delta_type


def _ranks_of_blocks(
    model: nn.Module, options: dict[str, Any], blocks: Mapping[str, list[int]]
) -> None:
    """Set the LoRA rank and alpha of each bmforge layer that is part of a fused layer in the file.

    The file lists one rank per bmforge layer; layers with rank 0 are removed from the targets.
    """
    names = peft_format.Names(model)
    scale = options["alpha"] / options["rank"]
    for published, ranks in blocks.items():
        total = options["ranks"].get(names.own[published][0], options["rank"])
        alpha = options["alphas"].get(names.own[published][0], options["alpha"])
        scale = alpha / (total**0.5 if options["use_rslora"] else total)
        for own_name, rank in zip(names.own[published], ranks, strict=True):
            if rank == 0:
                options["targets"].remove(own_name)
                for option in ("ranks", "alphas"):
                    options[option].pop(own_name, None)
                continue
            options["ranks"][own_name] = rank
            options["alphas"][own_name] = scale * (rank**0.5 if options["use_rslora"] else rank)


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """Read the config, the tensors and bmforge's own metadata from an adapter directory."""
    weights = directory / WEIGHTS_NAME
    old = directory / OLD_WEIGHTS_NAME
    if not (directory / CONFIG_NAME).exists() or not (weights.exists() or old.exists()):
        raise CheckpointError(
            f"{str(directory)!r} is not an adapter directory: it needs {CONFIG_NAME} and "
            f"{WEIGHTS_NAME}. Check the path."
        )
    try:
        config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
        tensors, mark = read_weights(weights) if weights.exists() else (read_pickle(old), {})
    except (ValueError, SafetensorError, OSError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"the adapter in {str(directory)!r} is damaged: {error}.") from error
    if not isinstance(config, dict) or not isinstance(mark, dict):
        raise CheckpointError(
            f"{CONFIG_NAME} in {str(directory)!r} is not a JSON object. Save the adapter again."
        )
    return config, tensors, mark


def _own_names(delta: AttachedDelta, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Insert the adapter's name, which files omit, into the tensor names."""
    owners = {part.owner: part for part in delta.held if part.slot == delta.name}
    renamed = {}
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition(".")
        is_part = owner in owners and key in dict(owners[owner].part.named_parameters())
        renamed[f"{owner}.{delta.name}.{key}" if is_part else name] = tensor
    return renamed


def _fill(delta: AttachedDelta, loaded: Mapping[str, Tensor], directory: Path) -> None:
    """Check loaded tensors against the adapter's, and copy them into the adapter."""
    own, expected = delta.tensors(), set(delta.names())
    problems = [f"missing: {name}" for name in own if name not in loaded]
    problems += [f"unexpected: {name}" for name in loaded if name not in own.keys() | expected]
    for name, tensor in own.items():
        if name in loaded and loaded[name].shape != tensor.shape:
            problems.append(
                f"wrong shape: {name} has {tuple(loaded[name].shape)}, but the adapter "
                f"needs {tuple(tensor.shape)}"
            )
        elif name in loaded and not bool(loaded[name].isfinite().all()):
            problems.append(f"not finite: {name}")
    if problems:
        more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(
            f"the adapter in {str(directory)!r} does not match the model: "
            f"{'; '.join(problems[:20])}{more}. Use the model that the adapter was trained on."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if not tensor.is_meta:
                value = loaded[name][local_box(tensor).slices]
                local_tensor(tensor.detach()).copy_(value)
