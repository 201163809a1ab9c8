"""Measures how much a block's output changes when the matrices of a fold are scaled and rounded.

The error of a single layer's output is a poor measure: it gives errors of queries and keys the same
weight as errors of values, although the softmax reduces them.

Source: Lin et al., "AWQ" (2023), whose published code searches for the scales with the smallest
error of the attention's or MLP's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor, nn

from bmforge.compress.calibrate import BlockRun
from bmforge.compress.quantize.fold import Fold, use_fp32_copies
from bmforge.compress.rounding import round_activations, round_matrix
from bmforge.nn.packing import QuantSpec

__all__ = ["block_errors"]

# The search compares many candidates; more tokens hardly change their order.
_SEARCH_TOKENS = 512


def block_errors(
    run: BlockRun, fold: Fold, specs: Mapping[str, QuantSpec], candidates: Iterable[Tensor]
) -> list[float]:
    """Return the squared error of the block's output for each candidate of a fold's scales.

    The columns of the matrices are multiplied by the scales and rounded; their inputs are divided
    by the scales and, if the scheme quantizes activations, rounded too. The block is unchanged
    afterwards.

    Args:
        run: block with its calibration inputs.
        fold: possible fold of the block, whose `targets` are matrices that share an input.
        specs: dict from module name to scheme.
        candidates: scales, (columns,) each.
    """
    tokens, count = 0, 0
    while tokens < _SEARCH_TOKENS and count < len(run.inputs):
        tokens += run.inputs[count].shape[:-1].numel()
        count += 1
    with use_fp32_copies(run.block):
        want = list(islice(run.run_wide(), count))
        errors: list[float] = []
        for scales in candidates:
            with _rounded(fold, specs, scales):
                outputs = islice(run.run_wide(), count)
                pairs = zip(outputs, want, strict=True)
                errors.append(sum(float((out - w).square().sum()) for out, w in pairs))
    return errors


@contextmanager
def _rounded(fold: Fold, specs: Mapping[str, QuantSpec], scales: Tensor) -> Iterator[None]:
    """Context manager: scale and fake-quantize the matrices of a `Fold` and their inputs."""
    originals = [matrix.read().clone() for matrix in fold.targets]
    handles = []
    try:
        for matrix, original in zip(fold.targets, originals, strict=True):
            spec = specs[matrix.owner]
            matrix.write_(round_matrix(original * scales.to(original.dtype), spec))
            hook = partial(_round_input, spec, scales)
            handles.append(matrix.module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for matrix, original in zip(fold.targets, originals, strict=True):
            matrix.write_(original)


def _round_input(
    spec: QuantSpec,
    scales: Tensor,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook that divides a layer's input by the scales and rounds it as in inference."""
    name = "" if args else next(iter(kwargs))
    x = (args[0] if args else kwargs[name]) / scales
    if spec.activations == "int8":
        x = round_activations(x, spec.group_of(x.shape[-1]))
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})
