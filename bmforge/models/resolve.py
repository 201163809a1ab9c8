"""Finds a model's files: a directory, the Hugging Face cache or the hub, in this order."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Mapping
from pathlib import Path

from bmforge.errors import ConfigError, suggest
from bmforge.gguf_header import is_gguf
from bmforge.logging import get_logger
from bmforge.model_names import check_model_path, find_neighbors
from bmforge.models.formats.hf_format import has_all_weights

__all__ = ["resolve_model"]

_WANTED = ["*.json", "README.md", "*.jinja", "*.model", "*.txt", "tokenizer*", "vocab*", "merges*"]
# ModelCenter's short names whose weights were only on its own server, never on the hub.
_SERVER = "ModelCenter provided it on its own server (openbmb.oss-cn-hongkong.aliyuncs.com)"
_NOT_ON_HUB = {
    "kv-plm": "The same BERT was published with the paper, at github.com/thunlp/KV-PLM.",
    "cpm1-large": "The CPM-1 of the paper is another model: TsinghuaAI/CPM-Generate on the hub is "
    "that model as a GPT-2, and bmforge convert reads its published shards.",
    "cpm2-large": "The CPM-2 of the paper was published as shards, which bmforge convert reads.",
}
_TIMEOUT_S = 10.0
# Repositories often contain the weights in several formats; only the first match is downloaded.
_WEIGHTS = ["model*.safetensors", "bmforge_model*.safetensors", "pytorch_model*.bin", "*.pt"]


def resolve_model(name: str | Path, hub_ids: Mapping[str, str] | None = None) -> Path:
    """Return the path of a model: `name` itself, its cached copy, or a download.

    An incomplete cached copy is completed. If the hub is not reachable, the incomplete copy is
    returned, for callers that need only config or tokenizer.

    Args:
        name: directory, GGUF file, hub id, or short name in `hub_ids`.
        hub_ids: mapping from short name to hub id.

    Raises:
        ConfigError: the model is neither a directory, nor in the cache, nor on the hub.
    """
    path = Path(name)
    if path.is_dir() or is_gguf(path):
        return path
    if path.exists():
        raise ConfigError(
            f"{str(name)!r} is neither a directory nor a GGUF file. Pass a directory with "
            "config.json, or a .gguf file."
        )
    check_model_path(path)
    name = (hub_ids or {}).get(str(name), str(name))
    hint = suggest(str(path), find_neighbors(path))
    if name in _NOT_ON_HUB:
        raise ConfigError(
            f"{name!r} is not on the hub. {_SERVER}. If you have its config.json and "
            f"pytorch_model.pt, copy them into the directory {str(path.absolute())!r}. "
            f"{_NOT_ON_HUB[name]}"
        )
    cached = _find_cached(name, hint)
    if cached is not None and has_all_weights(cached):
        return cached
    if cached is None and "/" not in name:
        raise ConfigError(
            f"{name!r} is neither a directory nor in the Hugging Face cache.{hint} To download a "
            "model from the hub, pass its full id: OWNER/NAME."
        )
    try:
        return _download(name)
    except Exception as error:
        if cached is not None:
            get_logger().warning(
                "%s: the cached copy %s has no weights, and the hub cannot be reached (%s).",
                *(name, cached, type(error).__name__),
            )
            return cached
        raise ConfigError(
            f"{name!r} is neither a directory nor in the Hugging Face cache, and the hub cannot "
            f"be reached ({type(error).__name__}).{hint} Without a network, copy config.json and "
            f"the weights into the directory {str(path.absolute())!r}."
        ) from error


def _find_cached(name: str, hint: str) -> Path | None:
    """Return the cached copy, which may be incomplete; None if there is none."""
    from huggingface_hub import snapshot_download  # slow to import: loads an HTTP client
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError as error:
        raise ConfigError(
            f"{name!r} is neither a directory nor a model on the Hugging Face hub.{hint} Check "
            "the path or the id."
        ) from error
    except LocalEntryNotFoundError:
        return None


def _download(name: str) -> Path:
    """Download the needed files from the root of a hub repository, and its chat templates."""
    from huggingface_hub import model_info, snapshot_download

    from bmforge.tokenizers.tokenizer_json import TEMPLATE_DIR

    # Unlike list_repo_files, model_info does not retry: without a network it fails at once.
    siblings = model_info(name, timeout=_TIMEOUT_S).siblings or ()
    paths = [file.rfilename.rpartition("/") for file in siblings]
    files = [name for folder, _, name in paths if not folder]
    folders = sorted({folder for folder, *_ in paths} - {"", TEMPLATE_DIR})
    forms = [pattern for pattern in _WEIGHTS if fnmatch.filter(files, pattern)]
    return Path(
        snapshot_download(
            name,
            allow_patterns=[*_WANTED, *forms[:1]],
            ignore_patterns=[f"{glob.escape(folder)}/*" for folder in folders],
        )
    )
