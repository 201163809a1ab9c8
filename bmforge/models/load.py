"""Loading published weights into a model on any layout, reading only this process's slices.

A plain new model on the CPU takes tensors that lie in the file as it wants them from a map of the
file: nothing is copied, and pages come in when they are first used. All else is read into memory of
the parameters' own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.device import reads_are_free
from bmforge.logging import get_logger
from bmforge.models.formats.gguf_blocks import Groups
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.formats.safe_file import Read, run_reads
from bmforge.models.init import init_tensor_, materialize_
from bmforge.models.match import match_sources
from bmforge.models.weights import WeightRule
from bmforge.nn.packing import QuantSpec
from bmforge.shards import Box, is_streamed, local_box, local_tensor
from bmforge.surgery import persistent_tensors

__all__ = ["WeightReader", "load_weights_", "weight_reader"]


def load_weights_(
    model: Any,
    source: str | Path | WeightFiles,
    *,
    device: torch.device | str | None = None,
    new_head: bool = False,
    threads: int | None = None,
    elsewhere: Mapping[str, torch.device] | None = None,
) -> Any:
    """Load a Hugging Face checkpoint into a model, reading only this process's slices.

    Args:
        model: a `Model`: plain, on meta, or laid out by `parallelize`.
        source: the directory that holds the weights, or its opened files.
        device: where a model on meta comes to live; None takes its layout's, else the CPU.
        new_head: draw the head's weights (seed 0) where the checkpoint has none that fit.
        threads: that read at a time; None takes as many as torch has.
        elsewhere: modules that come to live on other devices, by name.

    Raises:
        CheckpointError: weights missing, unexpected or wrongly shaped, all of them listed; the
            model is not touched then.
    """
    files = source if isinstance(source, WeightFiles) else WeightFiles(source)
    pairs, fresh, beside = match_sources(model, files, new_head)
    unborn = {name for name, tensor in persistent_tensors(model).items() if tensor.is_meta}
    materialize_(model, device, elsewhere)
    tensors = persistent_tensors(model)
    if any(is_streamed(tensor) for tensor in tensors.values()):
        unborn.clear()  # who streams has little memory, and a map counts as all of the file
    uses = Counter(name for _, name in pairs)
    reads = []
    for rule, name in pairs:
        tensor = tensors[rule.ours]
        if is_streamed(tensor):
            continue
        may_map = rule.ours in unborn and rule.is_renaming and uses[name] == 1
        if not (may_map and _map_(tensor, name, files)):
            reads += _plan_reads(tensor, rule, name, files)
    run_reads(reads, "load weights", threads)
    for name in fresh + beside:
        if name in fresh or name in unborn:
            init_tensor_(model, tensors[name], name, seed=0)
    if fresh:
        get_logger().info("new head, drawn at random: %s", ", ".join(fresh))
    return model


class WeightReader:
    """Reads tensors of a model from a checkpoint, whole, when they are asked for.

    Args:
        model: whose tensors they are.
        files: the checkpoint.
        pairs: what each tensor is read by, and from which one in the files.
        fresh: names of tensors that are drawn instead.
        threads: that read at a time; None takes as many as torch has.
    """

    def __init__(
        self,
        model: Any,
        files: WeightFiles,
        pairs: Sequence[tuple[WeightRule, str]],
        fresh: Set[str],
        threads: int | None,
    ) -> None:
        self._model, self._files, self._fresh, self._threads = model, files, fresh, threads
        self._rules: dict[str, list[tuple[WeightRule, str]]] = {}
        for rule, name in pairs:
            self._rules.setdefault(rule.ours, []).append((rule, name))

    def __call__(self, ours: str, target: Tensor) -> None:
        """Fill a contiguous host tensor with the model's of that name."""
        self.read_all({ours: target})

    def read_all(self, targets: Mapping[str, Tensor]) -> None:
        """Fill several, which is quicker than one after the other."""
        for ours in self._fresh & targets.keys():
            init_tensor_(self._model, targets[ours], ours, seed=0)
        reads = [
            read
            for ours, target in targets.items()
            for rule, name in self._rules.get(ours, ())
            for read in _plan_reads(target, rule, name, self._files)
        ]
        run_reads(reads, threads=self._threads)

    def stored_spec(self, ours: str) -> QuantSpec | None:
        """Return how a tensor is stored as integers; None where it is not, or in another layout."""
        rules = self._rules.get(ours, ())
        if any(rule.transpose for rule, _ in rules):
            return None
        specs = {self._files.stored_spec(name) for _, name in rules}
        return next(iter(specs)) if len(specs) == 1 else None

    def read_groups(self, ours: str, box: Box) -> Groups:
        """Return the stored integers of some whole rows of a tensor that has a `stored_spec`.

        Args:
            ours: its name.
            box: where in it; of a stack, rows of one entry.
        """
        for rule, name in self._rules[ours]:
            slices = rule.source_slices(box)
            if slices is not None:
                return self._files.read_groups(name, slices)
        raise AssertionError(f"no rule of {ours} has {box}")

    def read_expert(self, ours: str, expert: int, target: Tensor) -> None:
        """Fill a contiguous host tensor with one entry of a stacked tensor of ours.

        Shape:
            target: that of ours without its first dim
        """
        box = Box((expert,) + (0,) * target.dim(), (1, *target.shape))
        reads = []
        for rule, name in self._rules[ours]:
            slices = rule.source_slices(box)
            if slices is not None:
                view = rule.source_view(rule.target(target[None], box))
                reads.append(self._files.plan_read(name, slices, view))
        run_reads(reads, threads=self._threads)


def weight_reader(
    model: Any,
    source: str | Path | WeightFiles,
    threads: int | None = None,
    new_head: bool = False,
) -> WeightReader:
    """Return what reads a tensor of `model` from a checkpoint, whole, when it is asked for.

    Args:
        model: plain or on meta; what does not fit is found now.
        source: the directory that holds the weights, or its opened files.
        threads: that read at a time; None takes as many as torch has.
        new_head: draw the head's weights (seed 0) where the checkpoint has none that fit.

    Raises:
        CheckpointError: as `load_weights_` does.
    """
    files = source if isinstance(source, WeightFiles) else WeightFiles(source)
    pairs, fresh, beside = match_sources(model, files, new_head)
    if fresh:
        get_logger().info("new head, drawn at random: %s", ", ".join(fresh))
    return WeightReader(model, files, pairs, {*fresh, *beside}, threads)


def _map_(tensor: Tensor, name: str, files: WeightFiles) -> bool:
    """Let a tensor of ours be the one in the file itself, where it can be; tell whether it is."""
    if not reads_are_free(tensor.data) or files.dtype(name) != tensor.dtype:
        return False
    mapped = files.map_tensor(name)
    if mapped is not None:
        tensor.data = mapped
    return mapped is not None


def _plan_reads(tensor: Tensor, rule: WeightRule, name: str, files: WeightFiles) -> list[Read]:
    """Return what fills this process's part of a tensor; nothing where it has none of it."""
    box = local_box(tensor)
    slices = rule.source_slices(box) if box.numel else None
    if slices is None:
        return []
    target = rule.target(local_tensor(tensor.detach()), box)
    return [files.plan_read(name, slices, rule.source_view(target))]
