"""`bmforge info`: describe a model or an adapter."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bmforge.cli.options import InfoCommand
from bmforge.config import config_to_dict
from bmforge.files import find_export
from bmforge.models.config import ModelConfig
from bmforge.models.hub import FAMILIES, Backend, find_config
from bmforge.provenance import describe_provenance, read_provenance
from bmforge.surgery import persistent_tensors
from bmforge.tune.delta.files import is_delta_dir

__all__ = ["describe_delta", "describe_model", "run_info"]


def run_info(command: InfoCommand) -> None:
    """Print the sizes of a model, an adapter's model card, or the names of all presets."""
    if command.name is None:
        presets = {name: list(family.config_class.presets) for name, family in FAMILIES.items()}
        print(json.dumps(presets, indent=1) if command.json else describe_presets(presets))
        return
    name = str(find_export(command.name))
    if is_delta_dir(name):
        if command.json:
            print((Path(name) / "adapter_config.json").read_text(encoding="utf-8").strip())
            return
        print(describe_delta(Path(name)))
        return
    if command.json:
        print(json.dumps(measure_model(name, command.seq_len, command.backend), indent=1))
        return
    print(describe_model(name, command.seq_len, command.backend))


def describe_presets(presets: Mapping[str, Sequence[str]]) -> str:
    """Return a paragraph per native family with the names of its presets."""
    paragraphs = [
        textwrap.fill(
            f"{family}: {', '.join(names)}", 100, subsequent_indent="    ", break_on_hyphens=False
        )
        for family, names in presets.items()
        if names
    ]
    return "\n".join(paragraphs)


def describe_delta(directory: Path) -> str:
    """Return an adapter's model card, or its config if it has no model card."""
    card = directory / "README.md"
    file = card if card.exists() else directory / "adapter_config.json"
    provenance = describe_provenance(read_provenance(directory))
    return "\n".join((file.read_text(encoding="utf-8").strip(), "", *provenance))


def describe_model(name: str, seq_len: int | None = None, backend: Backend = "auto") -> str:
    """Return a description of a preset or a model directory.

    Args:
        name: name of a preset, or a directory.
        seq_len: sequence length for the FLOPs (default: the model's maximum).
        backend: implementation of the architecture, as in `AutoModel.family_of`.

    Raises:
        ConfigError: `name` is neither a preset nor a model directory.
    """
    figures = measure_model(name, seq_len, backend)
    lines = [f"{name}: {figures['family']}"]
    lines += [f"  {key:<28}{value}" for key, value in figures["config"].items()]
    flops, length = figures["training_flops_per_token"], figures["seq_len"]
    lines += [
        f"  {'parameters':<28}{figures['parameters']:,}",
        f"  {'training FLOPs per token':<28}{flops:.4g} at {length} tokens",
        f"  {'KV-cache bytes per token':<28}{figures['kv_cache_bytes_per_token']:,} in bf16",
    ]
    lines += _describe_layers(find_config(name, backend)[1])
    if Path(name).exists():
        lines += [f"  {line}" for line in describe_provenance(read_provenance(name))]
    return "\n".join(lines)


def measure_model(
    name: str, seq_len: int | None = None, backend: Backend = "auto"
) -> dict[str, Any]:
    """Return a dict with a model's family, config and sizes, as printed by `bmforge info --json`.

    Args:
        name, seq_len, backend: arguments of `describe_model`.
    """
    family, config = find_config(name, backend)
    model = family.from_config(config, device="meta")
    length = seq_len or config.max_seq_len
    hidden = {field.name for field in dataclasses.fields(config) if not field.repr}
    fields = {
        k: v for k, v in config_to_dict(config).items() if k not in hidden and v not in ("", [])
    }
    return {
        "family": f"{family.__name__}{describe_backend(model)}",
        "config": fields,
        "parameters": sum(tensor.numel() for tensor in persistent_tensors(model).values()),
        "seq_len": length,
        "training_flops_per_token": config.flops_per_token(length),
        "kv_cache_bytes_per_token": config.kv_bytes_per_token(),
    }


def describe_backend(model: Any) -> str:
    """Return the other library's class that implements a model; "" for a native family."""
    foreign = getattr(model, "foreign", None)
    if foreign is None:
        return ""
    library = type(foreign).__module__.partition(".")[0]
    return f" (backend {library}: {type(foreign).__name__})"


def _describe_layers(config: ModelConfig) -> Iterator[str]:
    """Yield a line for each distinct layer size of a stack, with the indices of these layers."""
    for stack, layers in config.stack_sizes().items():
        kinds = dict.fromkeys(layers)
        for kind in kinds if len(kinds) > 1 else ():
            numbers = ", ".join(str(i) for i, layer in enumerate(layers) if layer == kind)
            yield f"  {stack} {numbers}: {kind}"
