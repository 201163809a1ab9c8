"""Decoding with LoRA adapters in one batch, and with a prefix, compared with the base model.

    python -m benchmarks.adapters.decode [--rows 16] [--deltas 8] [--rank 8] [--prefix 32]
        [--prompt 32] [--tokens 8] [--rounds 15] [--profile]

The models are a Llama with random weights in one process, which share the base weights. After a
prompt, every round decodes the same number of tokens with the base model and with the adapters.
`--profile` prints the operators that take the most time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch

from benchmarks.harness import header, make_parser, paired_ratio, table, time_in_turns
from bmforge.infer.decoder import Decoder
from bmforge.models import Llama, LlamaConfig
from bmforge.tune.delta import Lora, Prefix


def make_base(options: argparse.Namespace) -> Any:
    """Return the base model."""
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
    """Add LoRA adapters with random weights to the query and value projections."""
    names: list[str | None] = [f"user{number}" for number in range(count)]
    for number, name in enumerate(names):
        delta = Lora(model, rank=rank, name=str(name), seed=number)
        with torch.no_grad():
            for _, _, part in delta.held:
                part.up.normal_(std=0.02)
    return names


class Writer:
    """Decodes a batch after a prompt.

    Args:
        model: model that decodes.
        options: sizes of the batch.
        rows: name of the adapter of each row; None for no adapters.
    """

    @torch.no_grad()
    def __init__(
        self, model: Any, options: argparse.Namespace, rows: list[str | None] | None = None
    ) -> None:
        self.count = options.tokens
        generator = torch.Generator().manual_seed(1)
        shape = options.rows, options.prompt
        ids = torch.randint(0, options.vocab, shape, generator=generator)
        # One round of warm-up, and one for the profile.
        longest = options.prompt + (options.rounds + 2) * options.tokens
        self.decoder = Decoder(model, None, longest, rows)
        self.scores = self.decoder.run(ids)

    @torch.no_grad()
    def run(self) -> float:
        """Decode the tokens of a round; return the seconds."""
        start = time.perf_counter()
        for _ in range(self.count):
            self.scores = self.decoder.run(self.scores.argmax(-1, keepdim=True))
        return time.perf_counter() - start


def share_weights(base: Any) -> Any:
    """Return a copy of a model that shares its weights."""
    return copy.deepcopy(base, {id(weight): weight for weight in base.parameters()})


def show_profile(writers: dict[str, Writer]) -> None:
    """Print the profile of a round."""
    for name, writer in writers.items():
        with torch.profiler.profile() as profile:
            writer.run()
        step = writer.decoder.cache.step
        print(f"{name}: {step.native_blocks} native blocks, {step.torch_blocks} blocks in torch")
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))


def main() -> None:
    """Print tokens per second and the ratios of the speeds."""
    parser = make_parser(__doc__)
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
    print(header(threads, ["torch"]))
    base = make_base(options)
    users, fronted = share_weights(base), share_weights(base)
    names = add_loras_(users, options.deltas, options.rank)
    rows = [names[row % len(names)] for row in range(options.rows)]
    Prefix(fronted, length=options.prefix)
    cases = {
        f"{options.deltas} LoRAs in {options.rows} rows": Writer(users, options, rows),
        f"a prefix of {options.prefix}": Writer(fronted, options),
    }
    lines = []
    for name, case in cases.items():
        plain = Writer(base, options)  # new, so that both sequences have the same length
        seconds = time_in_turns({"base": plain.run, "adapters": case.run}, options.rounds)
        if options.profile:
            show_profile({"base": plain, name: case})
        written = options.rows * options.tokens
        speeds = [f"{written / statistics.median(part):.0f}" for part in seconds.values()]
        lines.append([name, *speeds, f"{paired_ratio(seconds, 'adapters', 'base'):.2f}"])
    columns = ["adapters", "base, tokens/s", "with adapters, tokens/s"]
    print("\n" + table([*columns, "speed, adapters / base"], lines))


if __name__ == "__main__":
    main()
