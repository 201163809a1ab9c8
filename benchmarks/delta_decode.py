"""Decoding with deltas against the base: eight Loras in one batch, and a prefix.

    python benchmarks/delta_decode.py [--rows 16] [--deltas 8] [--prefix 32] [--rounds 15]

One model of a Llama's shape, drawn at random, in one process; all share its weights. A prompt is
read once, then every round writes the same number of tokens behind what there is, with the base and
with its deltas, in turns; ratios are medians over rounds. --profile shows what the time goes to.
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

    @torch.no_grad()
    def __init__(
        self, model: Any, options: argparse.Namespace, rows: list[str | None] | None = None
    ) -> None:
        self.count = options.tokens
        generator = torch.Generator().manual_seed(1)
        shape = options.rows, options.prompt
        ids = torch.randint(0, options.vocab, shape, generator=generator)
        # One round more than are timed, and a few steps for a profile.
        longest = options.prompt + (options.rounds + 2) * options.tokens
        self.decoder = Decoder(model, None, longest, rows)
        self.scores = self.decoder.run(ids)

    @torch.no_grad()
    def seconds(self) -> float:
        """Write the tokens of a round; return the seconds that they took."""
        start = time.perf_counter()
        for _ in range(self.count):
            self.scores = self.decoder.run(self.scores.argmax(-1, keepdim=True))
        return time.perf_counter() - start


def share_weights(base: Any) -> Any:
    """Return a model of its own over the same weights."""
    return copy.deepcopy(base, {id(weight): weight for weight in base.parameters()})


def show_profile(writers: dict[str, Writer]) -> None:
    for name, writer in writers.items():
        with torch.profiler.profile() as found:
            writer.seconds()
        step = writer.decoder.cache.step
        print(f"{name}: {step.native_blocks} blocks natively, {step.torch_blocks} through torch")
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))


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
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    print(header("python benchmarks/delta_decode.py " + " ".join(sys.argv[1:]), threads, ["torch"]))
    base = make_base(options)
    users, fronted = share_weights(base), share_weights(base)
    names = add_loras_(users, options.deltas, options.rank)
    rows = [names[row % len(names)] for row in range(options.rows)]
    Prefix(fronted, length=options.prefix)
    cases = {
        f"{options.deltas} Loras in {options.rows} rows": Writer(users, options, rows),
        f"a prefix of {options.prefix}": Writer(fronted, options),
    }
    lines = []
    for name, case in cases.items():
        plain = Writer(base, options)  # its rows are as long as the other's in every round
        before, after = compare(plain.seconds, case.seconds, options.rounds)
        if options.profile:
            show_profile({"base": plain, name: case})
        written = options.rows * options.tokens
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*paired_ratio(after, before))
        speeds = [f"{written / statistics.median(part):.0f}" for part in (before, after)]
        lines.append([name, *speeds, ratio])
    print("\n" + table(["", "base, tokens/s", "with it", "its speed / the base's"], lines))


if __name__ == "__main__":
    main()
