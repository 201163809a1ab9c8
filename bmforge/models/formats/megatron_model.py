"""Converts models to and from Megatron's shards; `megatron.py` reads and writes the files.

Shards have no config.json, so the preset is identified by the tensor shapes. A `config.json` with
the original program's fields next to the shards has priority, and is required for models that do
not match a preset.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from bmforge.errors import CheckpointError, ConfigError
from bmforge.models.base import Model
from bmforge.models.config import ModelConfig, read_config_file
from bmforge.models.cpm1 import CPM1
from bmforge.models.cpm2 import CPM2
from bmforge.models.eva import EVA
from bmforge.models.formats.hf_format import WeightFiles, has_weights
from bmforge.models.formats.megatron import holds_shards, write_shards
from bmforge.models.load import load_weights_
from bmforge.models.weights import assemble_source, expand_rules, group_by_source

__all__ = ["is_megatron", "load_megatron", "reshard_megatron", "save_megatron"]

_Family = type[CPM1] | type[CPM2] | type[EVA]


def is_megatron(directory: Path) -> bool:
    """Return True if the weights of a directory are Megatron shards."""
    return holds_shards(directory) and not has_weights(directory)


def load_megatron(
    directory: str | Path,
    *,
    preset: str | None = None,
    dtype: torch.dtype | None = None,
    allow_unknown: tuple[str, ...] = (),
) -> Model:
    """Load shards of any parallel degree as a model.

    Args:
        directory: directory with the shards or with a tracker file.
        preset: preset of the model, if config.json and the sizes are ambiguous.
        dtype: dtype of the parameters (default: that of the shards).
        allow_unknown: names of unknown config fields to ignore.

    Raises:
        CheckpointError: shards are missing, damaged, of different degrees, or of another model.
        ConfigError: the model cannot be identified.
    """
    files = WeightFiles(directory)
    family = _tell_family(files)
    stored = files.dtype(next(iter(files.shapes)))
    config = _find_config(family, files, preset, allow_unknown)
    model = family.from_config(config, device="meta", dtype=dtype or stored)
    return load_weights_(model, files).eval()


def _tell_family(files: WeightFiles) -> _Family:
    if "word_embeddings.weight" in files.shapes:
        return CPM1
    if "word_embeds.weight" in files.shapes:
        return EVA if "role_embeds.weight" in files.shapes else CPM2
    raise CheckpointError(
        f"the shards in {str(files.directory)!r} have neither word_embeddings.weight (CPM-1) nor "
        "word_embeds.weight (CPM-2, EVA). Other models are not supported."
    )


def _find_config(
    family: _Family, files: WeightFiles, preset: str | None, allow_unknown: tuple[str, ...]
) -> ModelConfig:
    """Return the config of the preset, of config.json, or else of the only matching preset."""
    config_class = family.config_class
    if preset is not None:
        return family.complete_from_shapes(config_class.preset(preset), files.shapes)
    if (files.directory / "config.json").is_file():
        raw = read_config_file(files.directory)
        config = family.complete_from_shapes(config_class.from_hf(raw, allow_unknown), files.shapes)
        return config.replace(
            vocab_size=raw.get("vocab_size") or files.shapes[_embedding(files)][0]
        )
    fitting = [n for n in config_class.presets if _fits(family, n, files.shapes)]
    if len(fitting) == 1:
        return family.complete_from_shapes(config_class.preset(fitting[0]), files.shapes)
    match = f"fit the presets {', '.join(fitting)}" if fitting else "fit no preset"
    raise ConfigError(
        f"the shards in {str(files.directory)!r} contain a {family.__name__}, but their sizes "
        f"{match}. Select a preset with preset=..., or add the model's config.json."
    )


def _embedding(files: WeightFiles) -> str:
    return next(n for n in ("word_embeddings.weight", "word_embeds.weight") if n in files.shapes)


def _fits(family: _Family, preset: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    model = family.from_config(family.config_class.preset(preset), device="meta")
    return _shard_shapes(model).items() <= shapes.items()


def _shard_shapes(model: CPM1 | CPM2 | EVA) -> dict[str, tuple[int, ...]]:
    """Return a dict from a tensor's name in the shards to its unsplit shape."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    rules = expand_rules(model.megatron_rules(), shapes)
    return {rule.source: rule.source_shape(shapes[rule.parameter]) for rule in rules}


def save_megatron(model: Model, directory: str | Path, degree: int) -> None:
    """Write an unmodified model as shards for the models' original code, with its config.json.

    Args:
        model: CPM1, CPM2 (without experts) or EVA model.
        directory: output directory, created if needed.
        degree: number of shards.

    Raises:
        ConfigError: the family was never published as shards, or the model has changes.
        CheckpointError: shards already exist, or the model is not divisible by `degree`.
    """
    has_experts = isinstance(model, CPM2) and model.config.num_experts > 0
    if not isinstance(model, CPM1 | CPM2 | EVA) or has_experts:
        raise ConfigError(
            f"{type(model).__name__} cannot be saved as Megatron shards (supported: CPM1, EVA, "
            "and CPM2 without experts)."
        )
    if model.config.changes:
        kinds = ", ".join(dict.fromkeys(change.kind for change in model.config.changes))
        raise ConfigError(
            f"this {type(model).__name__} has changes that Megatron shards do not support: "
            f"{kinds}. Save the model with save_pretrained."
        )
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    rules = expand_rules(
        model.megatron_rules(), {name: tuple(p.shape) for name, p in parameters.items()}
    )
    groups = group_by_source(rules)
    write_shards(
        _shard_shapes(model),
        lambda name: assemble_source(groups[name], parameters.__getitem__),
        Path(directory),
        degree,
        model.tied_copies(),
    )
    text = json.dumps(model.config.to_hf(), indent=2) + "\n"
    (Path(directory) / "config.json").write_text(text, encoding="utf-8")


def reshard_megatron(source: str | Path, target: str | Path, degree: int) -> None:
    """Convert shards to another parallel degree exactly, tensor by tensor.

    Args:
        source: directory as in `load_megatron`.
        target: directory to create.
        degree: number of shards to write.

    Raises:
        CheckpointError: as in `load_megatron` and `save_megatron`.
    """
    files = WeightFiles(source)
    copies = {
        f"{stack}.{name}.weight": f"{name}.weight"
        for stack in ("encoder", "decoder")
        for name in ("word_embeds", "role_embeds")
    }
    copies = {copy: name for copy, name in copies.items() if copy in files.shapes}
    shapes = {name: shape for name, shape in files.shapes.items() if name not in copies}
    write_shards(shapes, files.read, Path(target), degree, copies)
    config = files.directory / "config.json"
    if config.is_file():
        shutil.copyfile(config, Path(target) / "config.json")
