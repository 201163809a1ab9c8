"""`bmforge convert`: read any checkpoint, write Hugging Face's form."""

from __future__ import annotations

from bmforge.cli.options import ConvertCommand
from bmforge.device import parse_dtype
from bmforge.errors import ConfigError
from bmforge.models.formats.convert import convert_checkpoint

__all__ = ["run_convert"]


def run_convert(command: ConvertCommand) -> None:
    """Read any checkpoint, write Hugging Face's form."""
    if command.max_file_gb <= 0:
        raise ConfigError(f"max_file_gb={command.max_file_gb} must be positive.")
    convert_checkpoint(
        command.source,
        command.target,
        dtype=None if command.dtype is None else parse_dtype(command.dtype),
        max_file_bytes=int(command.max_file_gb * 1e9),
        family=command.family,
        allow_unknown=command.allow_unknown,
        preset=command.preset,
        megatron_degree=command.megatron_degree,
    )
