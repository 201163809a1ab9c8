"""Caches the log-probabilities of a reference model in a file of the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from bmforge.align.reference import score_start
from bmforge.batch import Batch
from bmforge.files import replace_file
from bmforge.logging import ProgressBar, get_logger
from bmforge.parallel import (
    ROW_AXES,
    data_parallel_rank,
    data_parallel_size,
    mesh_of,
    run_on_first,
    sum_over_axes,
)

__all__ = ["keep_reference_"]

_FILE = "reference_logprobs.safetensors"


class _Source(Protocol):
    """Interface of example sources with two answers per example, which store log-probabilities."""

    fingerprint: str
    reference: Tensor | None

    def __len__(self) -> int: ...

    def make(self, index: int, seed: tuple[int | str, ...]) -> Any: ...

    def collate(self, rows: Sequence[Any]) -> Batch: ...


def keep_reference_(
    sources: Sequence[_Source], run_dir: Path, batch_size: int, model: nn.Module
) -> None:
    """Compute the reference log-probabilities of every source, and store them in the sources.

    The reference is the model with its new adapters disabled. The values are read from the run
    directory if the same examples were scored before, so a resumed run uses the same values.

    Args:
        sources: examples of the run.
        run_dir: directory of the run.
        batch_size: examples per forward pass.
        model: initial model; all ranks call this function together.

    Comm: the collectives of the forward passes, and one all-reduce of two numbers per example.
    """
    path = Path(run_dir) / _FILE
    names = [source.fingerprint for source in sources]
    logprobs = _read(path, names)
    if logprobs is None:
        logprobs = [_score(source, batch_size, model) for source in sources]
        tensors = dict(zip(names, logprobs, strict=True))
        run_on_first(lambda: replace_file(path, save(tensors)))
    for source, values in zip(sources, logprobs, strict=True):
        source.reference = values


def _read(path: Path, names: Sequence[str]) -> list[Tensor] | None:
    """Load the cached values for these sources; None if the file is missing or does not match."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            return [file.get_tensor(name) for name in names]
    except SafetensorError:
        get_logger().warning(
            "%s does not contain the reference log-probabilities of this data set. They are "
            "computed again.",
            path,
        )
        return None


def _score(source: _Source, batch_size: int, model: nn.Module) -> Tensor:
    """Return the summed log-probability of each example's answers, (N, 2) in fp64 on the CPU."""
    mesh, total = mesh_of(model), len(source)
    rank, size = data_parallel_rank(mesh), data_parallel_size(mesh)
    device = next(model.parameters()).device
    values = torch.zeros(total, 2, dtype=torch.float64, device=device)
    with ProgressBar("reference", total) as bar:
        for start in range(0, total, batch_size * size):
            first = start + rank * batch_size
            numbers = [n for n in range(first, first + batch_size) if n < total]
            # All ranks must run each forward pass; a rank that has no rows left scores the first
            # row again.
            batch = source.collate([source.make(n, ("kept", n)) for n in numbers or [0]])
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            scores = score_start(model, moved).double().view(-1, 2)
            if numbers:
                values[numbers] = scores
            bar.advance(min(batch_size * size, total - start))
    return sum_over_axes(values, mesh, *ROW_AXES).cpu()
