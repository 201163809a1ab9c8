"""Saves a model on any layout as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bmforge.errors import CheckpointError
from bmforge.logging import get_logger, track
from bmforge.models.changes import Change
from bmforge.models.config_file import GENERATION_FILE, GENERATION_KEY
from bmforge.models.formats.hf_format import has_weights, plan_files, write_file, write_index
from bmforge.models.weights import assemble_source, group_by_source
from bmforge.provenance import write_provenance
from bmforge.shards import whole_tensor
from bmforge.surgery import persistent_tensors

__all__ = ["needs_bmforge", "write_config", "write_model"]


def write_model(
    model: Any,
    out: Path,
    overwrite: bool = False,
    max_file_bytes: int = 4 << 30,
    alone: bool = False,
    dtype: torch.dtype | Callable[[str], torch.dtype] | None = None,
) -> None:
    """Write a model; see `Model.save_pretrained`.

    Args:
        model: model, parallelized or not.
        out: output directory.
        overwrite: replace existing weights.
        max_file_bytes: size above which the weights are split over several files.
        alone: True if this rank has the full model and writes it alone.
        dtype: dtype of the written float tensors, or a function from tensor name in the file to
            dtype (default: the model's).
    """
    if has_weights(out) and not overwrite:
        raise CheckpointError(
            f"{str(out)!r} already contains a model. Choose another path, or pass overwrite=True."
        )
    rank, world = (0, 1) if alone else _rank_and_world()
    if world > 1:
        dist.barrier()  # no rank writes before all have checked
    out.mkdir(parents=True, exist_ok=True)
    tensors = persistent_tensors(model)
    full_model = model.whole()
    gather, meta_tensors = _Whole(tensors), persistent_tensors(full_model)
    groups = group_by_source(full_model.active_rules())
    sizes = {
        name: sum(
            rule.stored_numel(tuple(tensor.shape)) * _dtype_of(tensor, name, dtype).itemsize
            for rule in rules
            for tensor in (meta_tensors[rule.parameter],)
        )
        for name, rules in groups.items()
    }
    stages = {name: model._stage_rank(rules[0].parameter) for name, rules in groups.items()}
    files = plan_files(sizes, max_file_bytes, stages, changed=needs_bmforge(model))
    stage, members = model._stage_and_members(rank, world)
    for number, (file, names) in enumerate(track(list(files.items()), "save weights")):
        if stages[names[0]] != stage:
            continue
        writes = number % members == rank % members
        tensors_to_write = {}
        for name in names:
            tensor = assemble_source(groups[name], gather)
            if writes:
                tensors_to_write[name] = tensor.to("cpu", _dtype_of(tensor, name, dtype))
        if writes:
            write_file(out / file, tensors_to_write)
    if rank == 0:
        floats = (n for n in groups if meta_tensors[groups[n][0].parameter].is_floating_point())
        first = next(floats, None)
        main = (
            None
            if first is None
            else _dtype_of(meta_tensors[groups[first][0].parameter], first, dtype)
        )
        write_config(model, out, tensors, main)
        _warn_of_changes(model)
        write_provenance(out, model.provenance)
        write_index(out, files, sum(sizes.values()))
    if world > 1:
        dist.barrier()


def write_config(
    model: Any, out: Path, tensors: dict[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Write a model's config.json and, if it has one, generation_config.json.

    Args:
        model: model to describe.
        out: directory of the export.
        tensors: mapping from name to tensor of the model.
        dtype: dtype of the written float tensors (default: the dtype of the first one).
    """
    dtypes = (tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    written = str(dtype or next(dtypes, torch.float32)).removeprefix("torch.")
    config = {**model.config.to_hf(), "dtype": written}
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if generation := model.config.raw.get(GENERATION_KEY):
        text = json.dumps(generation, indent=2) + "\n"
        (out / GENERATION_FILE).write_text(text, encoding="utf-8")


def needs_bmforge(model: Any) -> bool:
    """Return True if the model has changes, so that only bmforge builds it from its config.

    An MLP that is split into experts does not count, because its saved tensors are those of the
    dense model, in a different order.
    """
    return bool(_changes_of(model))


def _changes_of(model: Any) -> list[Change]:
    return [change for change in model.config.changes if not change.options.get("split")]


def _warn_of_changes(model: Any) -> None:
    """Log warnings about a changed model, such as that other programs cannot load its weights.

    The messages do not name the directory, which may be a temporary one.
    """
    changes = _changes_of(model)
    if changes:
        kinds = ", ".join(dict.fromkeys(change.kind for change in changes))
        get_logger().warning(
            (
                "the saved model has changes (%s), so only bmforge can load it. Its weight files "
                "are named bmforge_model, so that transformers does not load them."
            ),
            kinds,
        )
    if any(change.kind == "prompt" for change in changes):
        get_logger().warning(
            "the saved model contains the embeddings of a soft prompt, but a loaded model does "
            "not prepend them. Save the adapter as well (Delta.save), and load it with load_delta."
        )


def _rank_and_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _dtype_of(
    tensor: Tensor, name: str, dtype: torch.dtype | Callable[[str], torch.dtype] | None
) -> torch.dtype:
    """Return the dtype in which a tensor is written; `name` is its name in the file."""
    if dtype is None or not tensor.is_floating_point():
        return tensor.dtype
    return dtype if isinstance(dtype, torch.dtype) else dtype(name)


class _Whole:
    """All-gathers parameters by name; caches the last one, which may be written in slices."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.parameters = parameters
        self.last: tuple[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        if self.last is None or self.last[0] != name:
            self.last = (name, whole_tensor(self.parameters[name]))
        return self.last[1]
