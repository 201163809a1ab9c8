"""`bmforge convert`: convert a checkpoint to Hugging Face's format or to a GGUF file."""

from __future__ import annotations

from bmforge.cli.options import ConvertCommand
from bmforge.device import parse_dtype
from bmforge.errors import ConfigError
from bmforge.models.formats.convert import convert_checkpoint
from bmforge.models.formats.gguf_export import export_gguf
from bmforge.recipes.adapter_dirs import merged_model

__all__ = ["run_convert"]


def run_convert(command: ConvertCommand) -> None:
    """Convert a checkpoint to Hugging Face's format or to a GGUF file."""
    if command.target.suffix == ".gguf":
        _export(command)
        return
    if command.type is not None:
        raise ConfigError(
            f"type={command.type!r} has no effect: the target {str(command.target)!r} is not a "
            ".gguf file. Choose a target that ends in .gguf, or use --dtype."
        )
    if command.max_file_gb <= 0:
        raise ConfigError(
            f"max_file_gb={command.max_file_gb} must be above 0. Pass the largest size of a "
            "weight file in GB."
        )
    with merged_model(command.source, command.target) as source:
        convert_checkpoint(
            source,
            command.target,
            dtype=None if command.dtype is None else parse_dtype(command.dtype),
            max_file_bytes=int(command.max_file_gb * 1e9),
            family=command.family,
            allow_unknown=command.allow_unknown,
            preset=command.preset,
            megatron_degree=command.megatron_degree,
        )


def _export(command: ConvertCommand) -> None:
    """Write a GGUF file; options that only apply to other formats raise an error."""
    usual = ConvertCommand(source=command.source, target=command.target)
    names = ("dtype", "max_file_gb", "family", "preset", "megatron_degree")
    ineffective = [name for name in names if getattr(command, name) != getattr(usual, name)]
    if ineffective:
        raise ConfigError(f"{', '.join(ineffective)} has no effect on a GGUF file. Leave it out.")
    kind = command.type or "q8_0"
    with merged_model(command.source, command.target) as source:
        export_gguf(source, command.target, kind, allow_unknown=command.allow_unknown)
