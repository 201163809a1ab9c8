"""Exports the model or the adapter of a finished run.

An export is written to a temporary directory, which replaces the final one when it is complete. So
files of two exports are never mixed, and if the run is killed, the earlier export is unchanged.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from bmforge.device import parse_dtype
from bmforge.errors import ConfigError
from bmforge.files import find_export, replace_file
from bmforge.gguf_header import is_gguf
from bmforge.logging import get_logger
from bmforge.models import Model
from bmforge.models.config_file import GENERATION_KEY
from bmforge.models.formats.convert import copy_companion, find_companions, find_dtype
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.hub import find_model
from bmforge.parallel import World, run_on_first
from bmforge.provenance import write_provenance
from bmforge.recipes.adapters import ADAPTER_NAME
from bmforge.recipes.inputs.vocabulary import find_difference
from bmforge.tokenizers.chat_template import find_template
from bmforge.tokenizers.tokenizer_json import (
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    find_named_templates,
)
from bmforge.tune.delta import Delta, list_deltas

__all__ = [
    "SIDE_FILES",
    "copy_side_files",
    "describe_base",
    "export_run",
    "push_export",
    "read_dtypes",
    "swapped_directory",
]

# Files of a base model that are copied to every derived model.
SIDE_FILES = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
_TASK_TYPES = {"causal": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}


def export_run(
    model: Any,
    config: Any,
    save_tokenizer: Callable[[Path], None] | None,
    special_ids: dict[str, Any],
    world: World,
) -> None:
    """Write ``run_dir/export``: the trained model, or the adapter if the run trains one.

    The directory includes the tokenizer, the chat template and the base's generation config.

    Args:
        model: trained model, parallelized or not.
        config: the run's config.
        save_tokenizer: function that writes tokenizer and template to a directory.
        special_ids: fields of the exported config.json, such as ``eos_token_id``; they are also
            changed in generation_config.json if it has them. An adapter stores only label names.
        world: all processes; all of them call this function.
    """
    directory = config.run_dir / "export"
    adapter = None
    if config.adapter.kind is not None:
        adapter = list_deltas(model)[ADAPTER_NAME]
        if config.adapter.merge:
            adapter.merge()
            adapter = None
    if special_ids:
        model.config = _with_fields(model.config, special_ids)
    with swapped_directory(directory) as target:
        if adapter is not None:
            _save_adapter(adapter, model, config, target)
        else:
            _save_model(model, config, target)
        if world.rank == 0:
            # The card's title, which is the name of the temporary directory until now.
            write_provenance(target, model.provenance, name=config.run_dir.resolve().name)
            if config.init_from is not None:
                copy_side_files(find_model(config.init_from), target)
            if save_tokenizer is not None:
                save_tokenizer(target)
            if config.init_from is not None:
                copy_tokenizer_files(find_model(config.init_from), target)
    what = "model" if adapter is None else "adapter"
    get_logger().info("exported the %s to %s", what, directory)
    if config.push_to_hub is not None:
        run_on_first(lambda: push_export(directory, config.push_to_hub))


def _with_fields(config: Any, fields: dict[str, Any]) -> Any:
    """Return a model's config with changed fields of config.json and generation_config.json."""
    raw = {**config.raw, **fields}
    if generation := raw.get(GENERATION_KEY):
        changed = {n: v for n, v in fields.items() if n in generation}
        raw[GENERATION_KEY] = {**generation, **changed}
    # A field of the family's own is written in place of the raw value.
    own = {n: v for n, v in fields.items() if hasattr(config, n)}
    return config.replace(raw=raw, **own)


def check_push(repo_id: str, exports: bool) -> None:
    """Raise `ConfigError` if an export cannot be uploaded: checked before the training."""
    problem, advice = "", ""
    if not exports:
        problem, advice = "has no effect with export=False", "Leave one of them out."
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        problem, advice = "must be OWNER/NAME", "Use the name of your account as OWNER."
    elif HF_HUB_OFFLINE:
        problem, advice = "needs the network, but HF_HUB_OFFLINE=1 is set", "Unset it."
    elif get_token() is None:
        problem, advice = "needs an account of the hub", "Log in with `hf auth login`."
    if problem:
        raise ConfigError(f"push_to_hub={repo_id!r} {problem}. {advice}")


def push_export(directory: Path, repo_id: str) -> None:
    """Upload an export with its card to the Hugging Face hub; a new repository is private.

    Args:
        directory: the export, which stays on disk even if the upload fails.
        repo_id: OWNER/NAME of the repository.

    Raises:
        ConfigError: the hub refuses the upload, or cannot be reached.
    """
    api = HfApi()
    try:
        api.create_repo(repo_id, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=str(directory))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise ConfigError(
            f"push_to_hub={repo_id!r} failed ({error}). The export is in {str(directory)!r}. "
            "Log in with `hf auth login` and run the same command again."
        ) from error
    get_logger().info("uploaded %s to https://huggingface.co/%s", directory, repo_id)


def _save_model(model: Model, config: Any, target: Path) -> None:
    """Save a model in the dtypes of the model from which the run started."""
    dtype = None
    if config.export_dtype is not None:
        dtype = parse_dtype(config.export_dtype)
    elif config.init_from is not None:
        dtype = read_dtypes(find_model(config.init_from))
    model.save_pretrained(target, dtype=dtype)


def read_dtypes(directory: Path) -> Callable[[str], torch.dtype] | None:
    """Return a function from a checkpoint tensor's name to the dtype of the exported tensor.

    The dtype is that of the base's tensor with this name, or the most common dtype of the base's
    tensors. Returns None for a base without unquantized weights (GGUF).
    """
    if is_gguf(directory):
        return None
    files = WeightFiles(directory)
    dtypes = {name: files.dtype(name) for name in files.shapes}
    floats = {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}
    if not floats:
        return None
    usual = find_dtype(files)
    return lambda name: floats.get(name, usual)


def _save_adapter(adapter: Delta, model: Any, config: Any, target: Path) -> None:
    """Save an adapter with its model card and the name of its base model."""
    provenance = model.provenance
    data = dict.fromkeys(f"{p.name} ({p.license})" for p in provenance.parts if p.kind == "data")
    card = {"base": config.init_from, "command": f"run.toml of {config.run_dir.name}"}
    card |= {"data": ", ".join(data), "license": provenance.license}
    adapter.save(target, **{key: value for key, value in card.items() if value})
    run_on_first(lambda: describe_base(target, config.init_from, model.traits.attention))


def describe_base(adapter: Path, base: str | None, attention: str) -> None:
    """Write the base model's name to an adapter's config, where PEFT's AutoPeftModel reads it.

    Args:
        adapter: adapter directory.
        base: directory or hub id of the base model; a directory is written as absolute path.
        attention: attention pattern of the base model (`Traits.attention`), which determines PEFT's
            `task_type`.
    """
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if base is not None:
        base_dir = Path(find_export(base))
        config["base_model_name_or_path"] = str(base_dir.resolve()) if base_dir.is_dir() else base
    if not str(config.get("peft_type", "")).startswith("BMFORGE"):
        config["task_type"] = config.get("task_type") or _TASK_TYPES.get(attention)
    replace_file(file, json.dumps(config, indent=2, sort_keys=True) + "\n")


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the files of a base model other than its weights, config and tokenizer."""
    for name in SIDE_FILES:
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)


def copy_tokenizer_files(base: Path, target: Path) -> None:
    """Copy tokenizer files of the base model, such as the chat template, that an export lacks.

    If the export's tokenizer differs from the base's, nothing is copied, since the base's template
    may use tokens that the export's tokenizer lacks.

    Args:
        base: directory or GGUF file of the base model.
        target: export of the run.
    """
    names = [] if is_gguf(base) else find_companions(base)
    if not is_gguf(base) and set(names) <= set(SIDE_FILES):
        return
    lacks_tokenizer = set(find_companions(target)) <= set(SIDE_FILES)
    if not lacks_tokenizer and find_difference(target, base) is not None:
        return
    template = find_template(base)
    if template is not None and find_template(target) is None:
        replace_file(target / TEMPLATE_FILE, template)
    has_same_file = (target / TOKENIZER_FILE).is_file() and (base / TOKENIZER_FILE).is_file()
    if not lacks_tokenizer:  # the named templates are saved with the run's template
        names = [name for name in names if name not in find_named_templates(base)]
    for name in names if lacks_tokenizer or has_same_file else ():
        copy_companion(base, target, name)


@contextmanager
def swapped_directory(directory: Path) -> Iterator[Path]:
    """Context manager that yields a new directory, which replaces `directory` on success.

    Every process must enter it; the first process renames the directories. If it is killed between
    the two renames, the earlier export keeps its temporary name, and the next call restores it.
    """
    new, old = (directory.with_name(f".{directory.name}.{word}") for word in ("new", "old"))

    def prepare() -> None:
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        new.mkdir(parents=True)

    def swap() -> None:
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
        shutil.rmtree(old, ignore_errors=True)

    run_on_first(prepare)
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    run_on_first(swap)
