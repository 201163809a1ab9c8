"""Loads checkpoints into a model on any layout; each rank reads only its shards.

Tensors are read directly into the parameter if dtype and layout match, otherwise through a small
buffer (see `formats.safe_file`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmforge.logging import get_logger
from bmforge.models.formats.gguf_blocks import QuantizedGroups
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.formats.safe_file import Read, run_reads
from bmforge.models.init import init_tensor_, materialize_
from bmforge.models.tensor_matching import match_sources
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
    """Load a Hugging Face checkpoint into a model; each rank reads only its shards.

    Args:
        model: `Model`, on a device, on the meta device, or parallelized.
        source: directory of the weights, or their `WeightFiles`.
        device: device for a model on the meta device; None for the layout's device, or the CPU
            without one.
        new_head: initialize the head's weights (seed 0) if the checkpoint has none of this shape.
        threads: number of reading threads (default: torch's number of threads, at most 8).
        elsewhere: mapping from the name of a module on another device to that device.

    Raises:
        CheckpointError: weights are missing, unexpected or have the wrong shape; all are
            listed, and the model is unchanged.
    """
    files = source if isinstance(source, WeightFiles) else WeightFiles(source)
    pairs, new_names, adapter_names = match_sources(model, files, new_head)
    unallocated = {name for name, tensor in persistent_tensors(model).items() if tensor.is_meta}
    materialize_(model, device, elsewhere)
    tensors = persistent_tensors(model)
    reads = []
    for rule, name in pairs:
        tensor = tensors[rule.parameter]
        # Weights are read, not memory-mapped: if another process truncates a mapped file, the next
        # access ends this process with SIGBUS.
        if not is_streamed(tensor):
            reads += _plan_reads(tensor, rule, name, files)
    run_reads(reads, "load weights", threads)
    for name in new_names + adapter_names:
        if name in new_names or name in unallocated:
            init_tensor_(model, tensors[name], name, seed=0)
    if new_names:
        get_logger().info("new head, randomly initialized: %s", ", ".join(new_names))
    return model


class WeightReader:
    """Reads single tensors of a model from a checkpoint on demand.

    Args:
        model: model with the tensors.
        files: weight files of the checkpoint.
        pairs: pairs (`WeightRule`, stored name) of the tensors.
        fresh: names of tensors to initialize instead of reading.
        threads: number of reading threads (default: torch's number of threads, at most 8).
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
            self._rules.setdefault(rule.parameter, []).append((rule, name))

    def __call__(self, tensor_name: str, target: Tensor) -> None:
        """Read a tensor into `target`, a contiguous CPU tensor."""
        self.read_all({tensor_name: target})

    def read_all(self, targets: Mapping[str, Tensor]) -> None:
        """Read several tensors in parallel, each into its target."""
        for tensor_name in self._fresh & targets.keys():
            init_tensor_(self._model, targets[tensor_name], tensor_name, seed=0)
        reads = [
            read
            for tensor_name, target in targets.items()
            for rule, name in self._rules.get(tensor_name, ())
            for read in _plan_reads(target, rule, name, self._files)
        ]
        run_reads(reads, threads=self._threads)

    def is_stored(self, tensor_name: str) -> bool:
        """Return True if the files contain a tensor as floats, not as quantized integers."""
        rules = self._rules.get(tensor_name, ())
        stored = [self._files.stored_spec(name) is None for _, name in rules]
        return tensor_name not in self._fresh and bool(stored) and all(stored)

    def read_elements(self, tensor_name: str, rows: Sequence[list[int]], target: Tensor) -> None:
        """Read single elements of a tensor.

        Args:
            tensor_name: name of the tensor.
            rows: index of each element, with one integer per dim.
            target: 1-D CPU tensor for the values.
        """
        reads = []
        for number, index in enumerate(rows):
            box = Box(tuple(index), (1,) * len(index))
            local = target[number].reshape(box.lengths)
            for rule, name in self._rules[tensor_name]:
                slices = rule.source_slices(box)
                if slices is not None:
                    view = rule.source_view(rule.target(local, box))
                    reads.append(self._files.plan_read(name, slices, view))
        run_reads(reads, threads=self._threads)

    def stored_spec(self, tensor_name: str) -> QuantSpec | None:
        """Return the QuantSpec of a tensor stored as integers; None if stored in a different
        way.
        """
        rules = self._rules.get(tensor_name, ())
        if any(rule.transpose or rule.rows is not None for rule, _ in rules):
            return None
        specs = {self._files.stored_spec(name) for _, name in rules}
        return next(iter(specs)) if len(specs) == 1 else None

    def read_groups(self, tensor_name: str, box: Box) -> QuantizedGroups:
        """Read complete rows of a quantized tensor (with a `stored_spec`) without dequantizing.

        Args:
            tensor_name: name of the tensor.
            box: region of the tensor, which must consist of complete rows; for a stack of experts,
                rows of one expert.
        """
        for rule, name in self._rules[tensor_name]:
            slices = rule.source_slices(box)
            if slices is not None:
                return self._files.read_groups(name, slices)
        raise AssertionError(f"the weight rules of {tensor_name} do not cover the region {box}.")

    def read_expert(self, tensor_name: str, expert: int, target: Tensor) -> None:
        """Read one expert of a stacked tensor into a contiguous CPU tensor.

        Shape:
            target: shape of the stacked tensor without its first dim
        """
        box = Box((expert,) + (0,) * target.dim(), (1, *target.shape))
        reads = []
        for rule, name in self._rules[tensor_name]:
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
    """Return a reader that reads a model's tensors from a checkpoint.

    Args:
        model: model, possibly on the meta device; names and shapes are compared with the files
            immediately.
        source: directory of the weights, or their `WeightFiles`.
        threads: number of reading threads (default: torch's number of threads, at most 8).
        new_head: initialize the head's weights (seed 0) if the checkpoint has none of this shape.

    Raises:
        CheckpointError: see `load_weights_`.
    """
    files = source if isinstance(source, WeightFiles) else WeightFiles(source)
    pairs, new_names, adapter_names = match_sources(model, files, new_head)
    if new_names:
        get_logger().info("new head, randomly initialized: %s", ", ".join(new_names))
    return WeightReader(model, files, pairs, {*new_names, *adapter_names}, threads)


def _plan_reads(tensor: Tensor, rule: WeightRule, name: str, files: WeightFiles) -> list[Read]:
    """Return the `Read`s that fill this rank's shard of a tensor; [] if the shard is empty."""
    box = local_box(tensor)
    slices = rule.source_slices(box) if box.numel else None
    if slices is None:
        return []
    target = rule.target(local_tensor(tensor.detach()), box)
    return [files.plan_read(name, slices, rule.source_view(target))]
