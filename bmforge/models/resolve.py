"""Finding a model's files: a directory, the Hugging Face cache, or the hub, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from bmforge.errors import ConfigError

__all__ = ["resolve_model"]

_WANTED = ["*.json", "*.safetensors", "*.bin", "tokenizer*", "vocab*", "merges*"]


def resolve_model(name: str | Path, hub_ids: Mapping[str, str] | None = None) -> Path:
    """Return the directory of a model: `name` itself, its cached copy, or a fresh download.

    Args:
        name: directory, hub id, or a name in `hub_ids`.
        hub_ids: short name -> hub id.

    Raises:
        ConfigError: no such directory, and neither the cache nor the hub has it.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{str(name)!r} is a file; give the directory that holds config.json.")
    name = (hub_ids or {}).get(str(name), str(name))
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, local_files_only=True))
    except HFValidationError as error:
        raise ConfigError(f"{str(name)!r} is neither a directory nor a hub id.") from error
    except LocalEntryNotFoundError:
        pass  # not cached: ask the hub next
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except Exception as error:
        raise ConfigError(
            f"{name!r} is not a directory, not in the Hugging Face cache, and the hub could "
            f"not be asked ({type(error).__name__}). Offline, put config.json and the weights into "
            f"the directory {str(path.absolute())!r}."
        ) from error
