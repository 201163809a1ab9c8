"""Measures how much quantizing each module increases the loss, and allocates bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.compress.batches import prepare_batches
from bmforge.compress.matrices import Matrix, find_matrices
from bmforge.compress.rounding import round_matrix
from bmforge.errors import ConfigError
from bmforge.logging import track
from bmforge.nn.packing import PRESETS, QuantSpec
from bmforge.surgery import eval_mode

__all__ = ["Sensitivity", "choose_specs", "measure_sensitivity"]

_AUTO_SCHEMES = ("int4", "int8")
Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Sensitivity:
    """Increase of the loss when a single module is quantized.

    Args:
        name: module name.
        scheme: quantization scheme.
        loss: increase of the loss.
        weights: number of weights in the module.
        bits: bits per weight, including scales.
    """

    name: str
    scheme: str
    loss: float
    weights: int
    bits: float


@torch.no_grad()
def measure_sensitivity(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    schemes: Sequence[str] = _AUTO_SCHEMES,
    where: Sequence[str] = (),
    loss: Loss | None = None,
) -> list[Sensitivity]:
    """Measure the loss increase when a single module is quantized, for each module.

    Args:
        model: complete model in memory; unchanged afterwards.
        batches: keyword arguments of the model's forward, or only token ids. With `labels`,
            the task's loss is measured; otherwise the change of the outputs (KL divergence of
            logits, or squared change of hidden states).
        schemes: names in `nn.packing.PRESETS`; schemes that do not fit a module's width are
            skipped.
        where: name globs of modules; if empty, the blocks' linear layers and experts.
        loss: custom loss function (model, batch) -> loss.

    Raises:
        ConfigError: batches are missing or empty, a scheme is unknown, or no scheme fits a matrix.

    Memory: a copy of one module's weights; without labels, also the outputs of one batch. Compute:
    a forward pass per batch, module and scheme.
    """
    prepared = prepare_batches(model, batches)
    groups: dict[str, list[Matrix]] = {}
    for matrix in find_matrices(model, where):
        groups.setdefault(matrix.owner, []).append(matrix)
    trials = {name: _fitting(members, schemes) for name, members in groups.items()}
    added = {
        (name, scheme): 0.0 for name, trials_of_name in trials.items() for scheme in trials_of_name
    }
    tokens = [_count_tokens(batch) for batch in prepared]
    with eval_mode(model):
        for number, batch in enumerate(track(prepared, "sensitivity")):
            weight = tokens[number] / sum(tokens)
            measure = _make_loss_function(model, batch, loss)
            base = measure()
            for name, scheme in added:
                originals = [matrix.read().clone() for matrix in groups[name]]
                for matrix in groups[name]:
                    matrix.write_(round_matrix(matrix.read(), PRESETS[scheme]))
                added[name, scheme] += (measure() - base) * weight
                for matrix, old in zip(groups[name], originals, strict=True):
                    matrix.write_(old)
    return [
        Sensitivity(name, scheme, trials_of_name, *_size(groups[name], PRESETS[scheme]))
        for (name, scheme), trials_of_name in added.items()
    ]


def _count_tokens(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens that contribute to a batch's mean loss."""
    labels = batch.get("labels")
    if labels is not None:
        return int((labels != -100).sum())
    return next(int(t.shape[:2].numel()) for t in batch.values() if isinstance(t, Tensor))


def _fitting(members: Sequence[Matrix], schemes: Sequence[str]) -> list[str]:
    fitting = []
    for scheme in schemes:
        if scheme not in PRESETS:
            raise ConfigError(f"unknown scheme: {scheme!r} (supported: {', '.join(PRESETS)}).")
        if all(PRESETS[scheme].fits(m.read().shape[1]) for m in members):
            fitting.append(scheme)
    if not fitting:
        columns = members[0].read().shape[1]
        raise ConfigError(
            f"{members[0].owner}: {PRESETS[schemes[-1]].problem(columns)}. Exclude it from `where`."
        )
    return fitting


def _size(members: Sequence[Matrix], spec: QuantSpec) -> tuple[int, float]:
    columns = members[0].read().shape[1]
    each = spec.scale_type.itemsize * 8 * (1 if spec.symmetric else 2)
    return sum(m.read().numel() for m in members), spec.bits + each / spec.group_of(columns)


def _make_loss_function(
    model: nn.Module, batch: Mapping[str, Any], loss: Loss | None
) -> Callable[[], float]:
    """Return a function that computes a batch's loss, or without labels the output change."""
    if loss is not None:
        return lambda: float(loss(model, batch))
    if "labels" in batch:
        return lambda: float(model(**batch).loss)
    before = model(**batch)
    key = next((k for k in ("logits", "last_hidden_state") if _take(before, k) is not None), "")
    reference = _take(before, key)
    if reference is None:
        raise ConfigError(
            f"{type(model).__name__} returns neither logits nor hidden states. Pass `loss`, or "
            "batches with labels."
        )

    def moved() -> float:
        now = _take(model(**batch), key)
        assert now is not None
        if key != "logits":
            return float((now - reference).square().mean())
        pair = F.log_softmax(now, -1).flatten(0, -2), F.log_softmax(reference, -1).flatten(0, -2)
        return float(F.kl_div(*pair, reduction="batchmean", log_target=True))

    return moved


def _take(out: Any, key: str) -> Tensor | None:
    return out if isinstance(out, Tensor) else getattr(out, key, None)


def choose_specs(
    model: nn.Module,
    batches: Sequence[Any],
    average_bits: float,
    *,
    where: Sequence[str] = (),
    loss: Loss | None = None,
) -> dict[str, QuantSpec]:
    """Choose "int4" or "int8" for each module; "int8" where it reduces the loss most.

    Args:
        model: complete model in memory.
        batches: calibration batches; see `measure_sensitivity`.
        average_bits: mean bits per weight over all modules, including scales.
        where: name globs of modules; see `measure_sensitivity`.
        loss: custom loss; see `measure_sensitivity`.

    Raises:
        ConfigError: the budget is below the smallest possible or above the largest useful number of
            bits.
    """
    sensitivities = measure_sensitivity(model, batches, where=where, loss=loss)
    return {
        name: PRESETS[scheme] for name, scheme in allocate_bits(sensitivities, average_bits).items()
    }


def allocate_bits(sensitivities: Sequence[Sensitivity], average_bits: float) -> dict[str, str]:
    """Choose a scheme per module within a bit budget, by greedy upgrades (best gain per bit).

    Raises:
        ConfigError: the budget is below the smallest or above the largest possible number of bits.
    """
    by_name: dict[str, list[Sensitivity]] = {}
    for trial in sensitivities:
        by_name.setdefault(trial.name, []).append(trial)
    options = {name: sorted(each, key=lambda trial: trial.bits) for name, each in by_name.items()}
    weights = sum(each[0].weights for each in options.values())
    least = sum(each[0].bits * each[0].weights for each in options.values())
    most = sum(each[-1].bits * each[-1].weights for each in options.values())
    budget = average_bits * weights
    if not least <= budget * (1 + 1e-9):
        raise ConfigError(
            f"average_bits={average_bits} cannot be reached for this model (allowed: at least "
            f"{least / weights:.3f}). Increase average_bits."
        )
    if budget > most * (1 + 1e-9):
        raise ConfigError(
            f"average_bits={average_bits} is more than all layers can use (allowed: at most "
            f'{most / weights:.3f}). Use the scheme "int8" instead.'
        )
    chosen = {name: each[0] for name, each in options.items()}
    steps = [(name, each[0], each[-1]) for name, each in options.items() if len(each) > 1]
    steps.sort(key=lambda step: _gain(step[1], step[2]), reverse=True)
    spent = least
    for name, low, high in steps:
        more = (high.bits - low.bits) * low.weights
        if spent + more <= budget * (1 + 1e-9) and high.loss < low.loss:
            chosen[name], spent = high, spent + more
    return {name: trial.scheme for name, trial in chosen.items()}


def _gain(low: Sensitivity, high: Sensitivity) -> float:
    return (low.loss - high.loss) / ((high.bits - low.bits) * low.weights)
