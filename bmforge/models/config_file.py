"""Reads config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError
from bmforge.gguf_header import is_gguf
from bmforge.models.formats.compressed_tensors import without_compression
from bmforge.models.formats.gguf_config import read_gguf_config
from bmforge.models.formats.gptq import without_packing
from bmforge.models.formats.mxfp4 import without_mxfp4

__all__ = ["GENERATION_FILE", "GENERATION_KEY", "read_config_file"]

# Key of `ModelConfig.raw` under which the contents of generation_config.json are kept.
GENERATION_KEY = "generation_config"
GENERATION_FILE = "generation_config.json"


def read_config_file(directory: str | Path) -> dict[str, Any]:
    """Return the contents of ``directory/config.json``, or the equivalent of a GGUF file.

    The contents of generation_config.json are added under `GENERATION_KEY`.

    Raises:
        ConfigError: the file is missing (an adapter's directory has none), or is not a JSON object.
        CheckpointError: the GGUF file is damaged or has an unsupported architecture.
    """
    if is_gguf(directory):
        return read_gguf_config(directory)
    file = Path(directory) / "config.json"
    if not file.is_file():
        if file.with_name("adapter_config.json").is_file():
            raise ConfigError(
                f"{str(directory)!r} is an adapter, not a model. Merge it first: bmforge merge "
                f"{directory} --out DIR."
            )
        raise ConfigError(
            f"{str(directory)!r} is not a model directory: it contains no config.json. Pass a "
            "directory with config.json and weights."
        )
    raw = _read_object(file)
    generation = file.with_name(GENERATION_FILE)
    if generation.is_file():
        raw[GENERATION_KEY] = _read_object(generation)
    return without_mxfp4(without_compression(without_packing(raw)))


def _read_object(file: Path) -> dict[str, Any]:
    """Parse a file that must contain a JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{str(file)!r} is not valid JSON: {error}. Download the file again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{str(file)!r} must contain a JSON object, not a {type(content).__name__}."
        )
    return content
