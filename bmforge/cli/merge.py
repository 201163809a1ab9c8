"""`bmforge merge ADAPTER --out DIR`: merge an adapter into its base model."""

from __future__ import annotations

from bmforge.cli.options import MergeCommand
from bmforge.device import parse_dtype
from bmforge.recipes.adapter_dirs import merge_adapter

__all__ = ["run_merge"]


def run_merge(command: MergeCommand) -> None:
    """Merge an adapter into its base model and save the result as a normal model directory."""
    dtype = None if command.dtype is None else parse_dtype(command.dtype)
    merge_adapter(
        command.adapter,
        command.out,
        base=command.base,
        dtype=dtype,
        allow_other_base=command.allow_other_base,
    )
