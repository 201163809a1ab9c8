"""Decoding with deltas against the base: eight Loras in one batch, and a prefix.

    python benchmarks/delta_decode.py [--rows 16] [--deltas 8] [--prefix 32] [--rounds 15]

One model of a Llama's shape, drawn at random, in one process. Every round writes the same number of
tokens with the base and with its deltas, in turns; the ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import header, paired_ratio, table  # noqa: E402

from bmforge.infer.decoder import Decoder  # noqa: E402
from bmforge.models import Llama, LlamaConfig  # noqa: E402
from bmforge.tune.delta import Lora, Prefix  # noqa: E402


def make_base(options: argparse.Namespace) -> Any:
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.heads,
        max_seq_len=2048,
    )
    return Llama.from_config(config).eval()


def add_loras_(model: Any, count: int, rank: int) -> list[str | None]:
    """Put Loras beside queries and values, and let them do something."""
    names: list[str | None] = [f"user{number}" for number in range(count)]
    for number, name in enumerate(names):
        delta = Lora(model, rank=rank, name=str(name), seed=number)
        with torch.no_grad():
            for _, _, part in delta.held:
                part.up.normal_(std=0.02)
    return names


class Writer:
    """Writes tokens after a prompt, again and again.

    Args:
        model: writes.
        options: how much.
        rows: which row has which delta.
    """

    def __init__(
        self, model: Any, options: argparse.Namespace, rows: list[str | None] | None = None
    ) -> None:
        self.model, self.options, self.rows = model, options, rows
        generator = torch.Generator().manual_seed(1)
        shape = options.rows, options.prompt
        self.ids = torch.randint(0, options.vocab, shape, generator=generator)

    @torch.no_grad()
    def seconds(self) -> float:
        """Return the seconds of the tokens after the first one."""
        count, length = self.options.tokens, self.options.prompt
        decoder = Decoder(self.model, None, length + count + 1, self.rows)
        scores = decoder.run(self.ids)
        scores = decoder.run(scores.argmax(-1, keepdim=True))
        start = time.perf_counter()
        for _ in range(count - 1):
            scores = decoder.run(scores.argmax(-1, keepdim=True))
        return time.perf_counter() - start


def compare(
    base: Callable[[], float], other: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of both, in turns."""
    base(), other()
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            found[which].append((base, other)[which]())
    return found


def main() -> None:
    """Print tokens a second and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--deltas", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    print(header("python benchmarks/delta_decode.py " + " ".join(sys.argv[1:]), threads, ["torch"]))
    base = make_base(options)
    users, fronted = copy.deepcopy(base), copy.deepcopy(base)
    names = add_loras_(users, options.deltas, options.rank)
    rows = [names[row % len(names)] for row in range(options.rows)]
    Prefix(fronted, length=options.prefix)
    cases = {
        f"{options.deltas} Loras in {options.rows} rows": Writer(users, options, rows),
        f"a prefix of {options.prefix}": Writer(fronted, options),
    }
    plain = Writer(base, options)
    lines = []
    for name, case in cases.items():
        before, after = compare(plain.seconds, case.seconds, options.rounds)
        written = options.rows * (options.tokens - 1)
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*paired_ratio(after, before))
        speeds = [f"{written / statistics.median(part):.0f}" for part in (before, after)]
        lines.append([name, *speeds, ratio])
    print("\n" + table(["", "base, tokens/s", "with it", "its speed / the base's"], lines))


if __name__ == "__main__":
    main()
