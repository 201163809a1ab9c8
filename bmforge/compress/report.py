"""Compression report with sizes, quality and method results of every phase, as JSON and HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.config import config_from_dict
from bmforge.errors import DataError
from bmforge.files import read_json, replace_file
from bmforge.html_page import write_page
from bmforge.nn.part import Derived, tensor_notes
from bmforge.surgery import persistent_tensors

__all__ = ["CompressReport", "ModelSizes", "PhaseResults", "measure_sizes", "measure_zeros"]

_JSON, _PAGE = "compression.json", "report.html"
# Maximum number of bars per result; maximum length of a list shown in full; smallest number shown
# without decimals.
_MOST_SHOWN, _FEW, _LARGE = 64, 8, 1_000


@dataclass(frozen=True)
class ModelSizes:
    """Size of a model.

    Args:
        parameters: number of weights in any storage format.
        size_bytes: bytes in memory, roughly the size of the checkpoint.
        zeros: number of zeros in the floating-point matrices.
    """

    parameters: int
    size_bytes: int
    zeros: int = 0


@dataclass(frozen=True)
class PhaseResults:
    """Results of one phase.

    Args:
        name: name of the phase.
        sizes: size of the model after the phase.
        facts: dict from method name to the results that the method reports.
        quality: dict from metric to its value on held-out data.
        speed: dict from operation to its measured speed.
        steps: number of training steps.
        directory: directory of the resulting model.
    """

    name: str
    sizes: ModelSizes
    facts: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, float] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    directory: str = ""


@dataclass(frozen=True)
class CompressReport:
    """Results of a compression run, phase by phase.

    Args:
        model: model family or class name.
        before: size before compression.
        phases: results of the phases, in order.
        quality: dict from metric to its value before compression.
        speed: dict from operation to its speed before compression.
    """

    model: str
    before: ModelSizes
    phases: tuple[PhaseResults, ...]
    quality: dict[str, float] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)

    @property
    def after(self) -> ModelSizes:
        """Size of the compressed model."""
        return self.phases[-1].sizes if self.phases else self.before

    @property
    def facts(self) -> dict[str, Any]:
        """Dict from method name to the results that the method reported."""
        return {name: facts for phase in self.phases for name, facts in phase.facts.items()}

    def format(self) -> str:
        """Format the report as text, one line per phase."""
        rows = [("before", self.before, self.quality, self.speed)]
        rows += [(p.name, p.sizes, p.quality, p.speed) for p in self.phases]
        lines = [f"{self.model}: {_times(self.before.size_bytes, self.after.size_bytes)} smaller"]
        for name, sizes, *figures in rows:
            line = "".join(f"  {k} {v:.4g}" for figure in figures for k, v in figure.items())
            zeros = f", {sizes.zeros / max(1, sizes.parameters):.0%} zeros" if sizes.zeros else ""
            lines.append(
                f"  {name:<24}{sizes.parameters:>14,} parameters "
                f"{sizes.size_bytes / 1e6:>10,.1f} MB{zeros}{line}"
            )
        return "\n".join(lines)

    def save(self, directory: str | Path) -> Path:
        """Write ``compression.json`` and ``report.html``; return the page's path."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / _JSON, json.dumps(asdict(self), indent=2) + "\n")
        sections = [
            _tiles(self),
            _bars("Size in MB", self._sizes("size_bytes", 1e-6)),
            _bars("Parameters", self._sizes("parameters", 1)),
            *(_bars(name, values) for name, values in self._figures("speed").items()),
            *(_bars(name, values) for name, values in self._figures("quality").items()),
            *(_facts_section(phase) for phase in self.phases),
        ]
        return write_page(folder / _PAGE, self.model, "compression report", sections)

    def _sizes(self, key: str, scale: float) -> list[tuple[str, float]]:
        phases = [("before", self.before), *((p.name, p.sizes) for p in self.phases)]
        return [(name, getattr(sizes, key) * scale) for name, sizes in phases]

    def _figures(self, kind: str) -> dict[str, list[tuple[str, float]]]:
        """Return a dict from metric to (phase, value) pairs; `kind` is "quality" or "speed"."""
        by_metric: dict[str, list[tuple[str, float]]] = {}
        for name, values in [
            ("before", getattr(self, kind)),
            *((phase.name, getattr(phase, kind)) for phase in self.phases),
        ]:
            for figure, value in values.items():
                by_metric.setdefault(figure, []).append((name, value))
        return by_metric

    @classmethod
    def load(cls, directory: str | Path) -> CompressReport:
        """Read a report written by `save`.

        Raises:
            DataError: the report is missing or damaged.
        """
        file = Path(directory) / _JSON
        if not file.is_file():
            raise DataError(
                f"{str(directory)!r} contains no {_JSON}, so it is not a compressed model. Pass "
                "the output directory of a compression."
            )
        return config_from_dict(cls, read_json(file))


def measure_zeros(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Count the zeros of pruned matrices in their storage format, including quantized ones.

    Args:
        model: finished model.
        names: names of the pruned parameters before they were quantized.

    Returns:
        dict with the number of zeros, the number of weights, the fraction of zeros, and the
        fraction of groups of four weights (along the input dim) with at least two zeros
    """
    zeros = weights = groups = sparse_groups = 0
    for name in names:
        owner, _, key = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        dense = getattr(module, "dense", None)
        if dense is None:
            values = getattr(module, key).detach()
            values = values.t() if hasattr(module, "nf") else values
        else:
            values = dense(torch.float32) if key == "weight" else dense(key, torch.float32)
        is_zero = values == 0
        zeros, weights = zeros + int(is_zero.sum()), weights + is_zero.numel()
        if is_zero.shape[-1] % 4 == 0:
            fours = is_zero.unflatten(-1, (-1, 4)).sum(-1)
            groups, sparse_groups = groups + fours.numel(), sparse_groups + int((fours >= 2).sum())
    return {
        "zeros": zeros,
        "weights": weights,
        "share": zeros / max(weights, 1),
        "groups_2_of_4": sparse_groups / max(groups, 1),
    }


def measure_sizes(model: nn.Module) -> ModelSizes:
    """Measure the size of a model; packed weights count as the weights that they encode."""
    parameters = size_bytes = zeros = 0
    notes = {name: tensor_notes(module) for name, module in model.named_modules()}
    counted: set[tuple[str, str]] = set()
    for name, tensor in persistent_tensors(model).items():
        owner, _, key = name.rpartition(".")
        size_bytes += tensor.numel() * tensor.element_size()
        note = notes.get(owner, {}).get(key)
        if note is None or not isinstance(note.initial, Derived):
            parameters += tensor.numel()
            zeros += _count_zeros(tensor)
        elif (owner, note.initial.base) not in counted:
            counted.add((owner, note.initial.base))
            parameters += math.prod(note.initial.shape)
    return ModelSizes(parameters, size_bytes, zeros)


@torch.no_grad()
def _count_zeros(tensor: Tensor) -> int:
    if tensor.is_meta or tensor.dim() < 2 or not tensor.is_floating_point():
        return 0
    return int((tensor == 0).sum())


def _times(before: float, after: float) -> str:
    return f"{before / max(after, 1e-9):.2f}x"


def _tiles(report: CompressReport) -> str:
    before, after = report.before, report.after
    tiles = [
        ("smaller", _times(before.size_bytes, after.size_bytes)),
        ("parameters left", f"{after.parameters / max(1, before.parameters):.1%}"),
        ("MB", f"{after.size_bytes / 1e6:,.1f}"),
    ]
    for name, values in report._figures("speed").items():
        if len(values) > 1:
            tiles.append((f"{name}, times before", _times(values[-1][1], values[0][1])))
    for name, values in report._figures("quality").items():
        tiles.append((name, f"{values[0][1]:.4g} → {values[-1][1]:.4g}"))
    cells = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in tiles)
    return f'<section class="tiles">{cells}</section>'


def _bars(title: str, rows: Sequence[tuple[str, float]]) -> str:
    """Return an HTML table of numbers with bars; "" if there are no rows."""
    if not rows:
        return ""
    largest = max(abs(value) for _, value in rows) or 1.0
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td class='num'>{_format_value(value)}</td>"
        f'<td class="bar"><i style="width:{100 * abs(value) / largest:.1f}%"></i></td></tr>'
        for name, value in rows
    )
    return f"<section><h2>{escape(title)}</h2><table>{lines}</table></section>"


def _facts_section(phase: PhaseResults) -> str:
    """Return an HTML section with one table of results per method."""
    parts = []
    for method, facts in phase.facts.items():
        numbers = {k: v for k, v in facts.items() if _is_table(v)}
        others = {k: v for k, v in facts.items() if k not in numbers}
        lines = "".join(
            f"<tr><th>{escape(_name(k))}</th><td>{escape(_format_value(v))}</td></tr>"
            for k, v in others.items()
            if not _is_empty(v)
        )
        parts.append(f"<h3>{escape(method)}</h3>" + (f"<table>{lines}</table>" if lines else ""))
        for name, values in numbers.items():
            parts.append(_bars(_name(name), list(values.items())[:_MOST_SHOWN]))
    if not parts:
        return ""
    return f"<section><h2>{escape(phase.name)}</h2>{''.join(parts)}</section>"


def _is_table(value: Any) -> bool:
    """Return True for a mapping from names to numbers (such as sensitivities), shown as bars."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in value.values())
    )


def _name(key: object) -> str:
    return str(key).replace("_", " ")


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def _format_value(value: Any) -> str:
    """Format a value for the page; a long list is replaced by its length."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:.4g}" if abs(value) < _LARGE else f"{value:,.0f}"
    if isinstance(value, Mapping):
        items = [f"{_name(k)}: {_format_value(v)}" for k, v in value.items() if not _is_empty(v)]
        return "; ".join(items)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{len(value):,}" if len(value) > _FEW else ", ".join(map(_format_value, value))
    return str(value)
