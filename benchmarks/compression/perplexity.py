"""Perplexity of a trained model on held-out text with quantized weights and with a quantized cache.

    bmforge prepare TEXTS --out corpus --vocab-size 4096
    bmforge train pretrain --model llama --config benchmarks/compression/perplexity.toml
    python -m benchmarks.compression.perplexity runs/perplexity/export corpus

The arguments are the export of a run and its corpus, which `bmforge prepare` wrote. The held-out
tokens are read in rows without overlap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import header, make_parser, table
from bmforge.data import TokenStore
from bmforge.errors import ConfigError
from bmforge.infer.engine.packed_step import PackedStep, can_pack
from bmforge.infer.engine.paged_cache import PAGE_TOKENS, StepRow
from bmforge.models import AutoModel
from bmforge.nn.packing import PRESETS, QuantSpec
from bmforge.surgery import persistent_tensors

MIB = 1 << 20
ROWS = 8
# Scheme -> largest increase of the perplexity in per cent; the other schemes have no target.
TARGETS = {"int8": 0.5, "int8-dynamic": 0.7, "int4": 4.0, "int4, outliers 5 %": 3.0}
OUTLIERS = {"int4, outliers 5 %": QuantSpec(4, 32, outlier_ratio=0.05)}


def read_rows(prepared: Path, length: int) -> torch.Tensor:
    """Return held-out tokens as rows: (rows, length)."""
    store = TokenStore(prepared / "validation" / "tokens")
    ids = torch.cat([torch.from_numpy(store[i].astype("int64")) for i in range(len(store))])
    count = len(ids) // length
    return ids[: count * length].view(count, length)


def measure_loss(model: Any, rows: torch.Tensor) -> float:
    """Return the mean loss in nats per token."""
    with torch.no_grad():
        losses = [
            float(model(input_ids=part, labels=part).loss) * len(part) for part in rows.split(ROWS)
        ]
    return sum(losses) / len(rows)


def measure_cached_loss(model: Any, rows: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the mean loss if every token reads keys and values from a paged cache of a dtype."""
    length, losses = rows.shape[1], []
    pages = -(-length // PAGE_TOKENS)
    step = PackedStep(model, ROWS * pages, dtype)
    step.cut()
    for part in rows.split(ROWS):
        for first in range(0, length, PAGE_TOKENS):
            last = min(first + PAGE_TOKENS, length)
            places = [
                StepRow(range(n * pages, (n + 1) * pages), first, last) for n in range(len(part))
            ]
            given = part[:, first:last].tolist()
            scores = step.run(places, given, [last - first] * len(part))
            for row, table_rows in zip(part, scores, strict=True):
                targets = row[first + 1 : last + 1]
                losses.append(F.cross_entropy(table_rows[: len(targets)], targets, reduction="sum"))
    return float(torch.stack(losses).double().sum()) / (len(rows) * (length - 1))


def bytes_of(model: torch.nn.Module) -> int:
    """Return the bytes of a model."""
    return sum(t.numel() * t.element_size() for t in persistent_tensors(model).values())


def main() -> None:
    """Print a row for every scheme and cache."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prepared", type=Path)
    given = parser.parse_args()
    plain = AutoModel.from_pretrained(given.model).eval()
    rows = read_rows(given.prepared, min(256, plain.config.max_seq_len))
    count = sum(p.numel() for p in plain.parameters())
    print(header(1, ("torch",)))
    print(
        f"{type(plain).__name__}, {count / 1e6:.1f}M parameters; {rows.numel()} held-out tokens\n"
    )
    want = measure_loss(plain, rows)
    print(f"float32: {math.exp(want):.4f}", flush=True)
    table_rows = [["float32", f"{bytes_of(plain) / MIB:.1f}", f"{math.exp(want):.3f}", "", "", ""]]

    def add_row(name: str, model: Any, target: float | None, measure: Callable[..., float]) -> None:
        begin = time.perf_counter()
        loss = measure(model, rows)
        seconds = time.perf_counter() - begin
        change = f"{100 * (math.exp(loss - want) - 1):+.3f} %"
        print(f"{name}: {math.exp(loss):.4f}", flush=True)
        cells = [name, f"{bytes_of(model) / MIB:.1f}", f"{math.exp(loss):.3f}", change]
        table_rows.append([*cells, "" if target is None else f"+{target} %", f"{seconds:.0f}"])

    schemes: dict[str, Any] = {name: name for name in PRESETS}
    for name, scheme in {**schemes, **OUTLIERS}.items():
        try:
            model = AutoModel.from_pretrained(given.model, quantize=scheme).eval()
        except ConfigError as error:  # the group size does not divide a width
            print(f"{name}: {str(error)[:120]}")
            continue
        add_row(name, model, TARGETS.get(name), measure_loss)
    caches = ((torch.float32, None), (torch.int8, 0.5)) if can_pack(plain) else ()
    for dtype, target in caches:
        kind = str(dtype).removeprefix("torch.")
        add_row(f"{kind} cache", plain, target, partial(measure_cached_loss, dtype=dtype))
    print(table(["scheme", "MiB", "perplexity", "change", "target", "seconds"], table_rows))


if __name__ == "__main__":
    main()
