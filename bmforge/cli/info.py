"""What `bmforge info` says of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bmforge.cli.options import InfoCommand
from bmforge.config import config_to_dict
from bmforge.models.config import ModelConfig
from bmforge.models.hub import Backend, find_config
from bmforge.provenance import describe_provenance, read_provenance
from bmforge.recipes.adapter_dirs import find_export
from bmforge.surgery import persistent_tensors
from bmforge.tune.delta.files import is_delta_dir

__all__ = ["describe_delta", "describe_model", "run_info"]


def run_info(command: InfoCommand) -> None:
    """Parameters, FLOPs and cache size of a model, or the card of a delta."""
    name = str(find_export(command.name))
    if is_delta_dir(name):
        print(describe_delta(Path(name)))
        return
    print(describe_model(name, command.seq_len, command.backend))


def describe_delta(directory: Path) -> str:
    """Return a delta's card, or what its config says where it has none."""
    card = directory / "README.md"
    file = card if card.exists() else directory / "adapter_config.json"
    said = describe_provenance(read_provenance(directory))
    return "\n".join((file.read_text(encoding="utf-8").strip(), "", *said))


def describe_model(name: str, seq_len: int | None = None, backend: Backend = "auto") -> str:
    """Return a description of a preset or of a model directory.

    Args:
        name: preset or directory.
        seq_len: tokens per row for the FLOPs; None takes the longest context.
        backend: see `AutoModel.family_of`.

    Raises:
        ConfigError: neither a preset nor a model.
    """
    family, config = find_config(name, backend)
    model = family.from_config(config, device="meta")
    parameters = sum(tensor.numel() for tensor in persistent_tensors(model).values())
    length = seq_len or config.max_seq_len
    flops = config.flops_per_token(length)
    hidden = {field.name for field in dataclasses.fields(config) if not field.repr}
    fields = {
        k: v for k, v in config_to_dict(config).items() if k not in hidden and v not in ("", [])
    }
    lines = [f"{name}: {family.__name__}{describe_backend(model)}"]
    lines += [f"  {key:<28}{value}" for key, value in fields.items()]
    lines += [
        f"  {'parameters':<28}{parameters:,}",
        f"  {'training FLOPs per token':<28}{flops:.4g} at {length} tokens",
        f"  {'KV-cache bytes per token':<28}{config.kv_bytes_per_token():,} in bf16",
    ]
    lines += _describe_layers(config)
    if Path(name).exists():
        lines += [f"  {line}" for line in describe_provenance(read_provenance(name))]
    return "\n".join(lines)


def describe_backend(model: Any) -> str:
    """Return which class of another library implements a model; "" for a native family."""
    foreign = getattr(model, "foreign", None)
    if foreign is None:
        return ""
    library = type(foreign).__module__.partition(".")[0]
    return f" (backend {library}: {type(foreign).__name__})"


def _describe_layers(config: ModelConfig) -> Iterator[str]:
    """Yield which layers have which sizes, of stacks in which they are not all the same."""
    for stack, layers in config.stack_sizes().items():
        kinds = dict.fromkeys(layers)
        for kind in kinds if len(kinds) > 1 else ():
            numbers = ", ".join(str(i) for i, layer in enumerate(layers) if layer == kind)
            yield f"  {stack} {numbers}: {kind}"
