"""What quantising does to a trained model's perplexity on held-out text.

    python benchmarks/quantized_perplexity.py MODEL PREPARED

MODEL is the export of a run, PREPARED the corpus it was trained on, as `bmforge prepare` wrote it:
what was held out there is read in rows without overlap. Such a model is trained by:

    bmforge prepare TEXTS --out corpus --vocab-size 4096
    bmforge train pretrain --model llama --config benchmarks/quantized_perplexity.toml
    python benchmarks/quantized_perplexity.py runs/perplexity/export corpus
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import header, table  # noqa: E402

from bmforge.data import TokenStore  # noqa: E402
from bmforge.errors import ConfigError  # noqa: E402
from bmforge.infer.engine.packed_step import PackedStep, can_pack  # noqa: E402
from bmforge.infer.engine.paged_cache import PAGE_TOKENS, StepRow  # noqa: E402
from bmforge.models import AutoModel  # noqa: E402
from bmforge.nn.packing import PRESETS, QuantSpec  # noqa: E402
from bmforge.surgery import persistent_tensors  # noqa: E402

MIB = 1 << 20
ROWS = 8
# Scheme -> the most that its perplexity may rise, in per cent; None: not asked for.
TARGETS = {"int8": 0.5, "int8-dynamic": 0.7, "int4": 4.0, "int4-128": None}
OUTLIERS = QuantSpec(4, 32, outlier_ratio=0.05)


def read_rows(prepared: Path, length: int) -> torch.Tensor:
    """Return held-out tokens as rows: (rows, length)."""
    store = TokenStore(prepared / "validation" / "tokens")
    ids = torch.cat([torch.from_numpy(store[i].astype("int64")) for i in range(len(store))])
    count = len(ids) // length
    return ids[: count * length].view(count, length)


def measure_loss(model: Any, rows: torch.Tensor) -> float:
    """Return the mean loss of a token, in nats."""
    with torch.no_grad():
        losses = [
            float(model(input_ids=part, labels=part).loss) * len(part) for part in rows.split(ROWS)
        ]
    return sum(losses) / len(rows)


def measure_cached_loss(model: Any, rows: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the same where every token reads keys and values from pages of a dtype."""
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
            for row, found in zip(part, scores, strict=True):
                targets = row[first + 1 : last + 1]
                losses.append(F.cross_entropy(found[: len(targets)], targets, reduction="sum"))
    return float(torch.stack(losses).double().sum()) / (len(rows) * (length - 1))


def bytes_of(model: torch.nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in persistent_tensors(model).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prepared", type=Path)
    given = parser.parse_args()
    plain = AutoModel.from_pretrained(given.model).eval()
    rows = read_rows(given.prepared, min(256, plain.config.max_seq_len))
    count = sum(p.numel() for p in plain.parameters())
    print(header("python benchmarks/quantized_perplexity.py MODEL PREPARED", 1, ("torch",)))
    print(
        f"{type(plain).__name__}, {count / 1e6:.1f}M parameters; {rows.numel()} held-out tokens\n"
    )
    want = measure_loss(plain, rows)
    print(f"float32: {math.exp(want):.4f}", flush=True)
    found = [["float32", f"{bytes_of(plain) / MIB:.1f}", f"{math.exp(want):.3f}", "", "", ""]]

    def add_row(name: str, model: Any, target: float | None, measure: Callable[..., float]) -> None:
        begin = time.perf_counter()
        loss = measure(model, rows)
        seconds = time.perf_counter() - begin
        change = f"{100 * (math.exp(loss - want) - 1):+.3f} %"
        print(f"{name}: {math.exp(loss):.4f}", flush=True)
        cells = [name, f"{bytes_of(model) / MIB:.1f}", f"{math.exp(loss):.3f}", change]
        found.append([*cells, "" if target is None else f"+{target} %", f"{seconds:.0f}"])

    schemes: dict[str, Any] = {name: name for name in TARGETS}
    for name, scheme in {**schemes, "int4, outliers 5 %": OUTLIERS}.items():
        try:
            model = AutoModel.from_pretrained(given.model, quantize=scheme).eval()
        except ConfigError as error:  # its widths do not fit
            print(f"{name}: {str(error)[:120]}")
            continue
        add_row(name, model, TARGETS.get(name, 3.0), measure_loss)
    caches = ((torch.float32, None), (torch.int8, 0.5)) if can_pack(plain) else ()
    for dtype, target in caches:
        kind = str(dtype).removeprefix("torch.")
        add_row(f"{kind} cache", plain, target, partial(measure_cached_loss, dtype=dtype))
    print(table(["scheme", "MiB", "perplexity", "change", "target", "seconds"], found))


if __name__ == "__main__":
    assert set(TARGETS) == set(PRESETS)
    main()
