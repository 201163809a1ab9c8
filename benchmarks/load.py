"""Time and peak memory of opening a 4 GB checkpoint, against transformers.

Run: python benchmarks/load.py [--rounds 9] [--layers 20] [--cases fp32 bf16 bf16-to-fp32]

A Llama-shaped model of about 1.2e9 parameters with random weights is written into a temporary
directory, in several files. Both sides open it with `from_pretrained` in turns, files in the page
cache. Both may map files, so two times are taken: of the call, and until every page of every weight
has been looked at. Peak memory is that of a fresh process, every weight looked at, above the
weights. `--cold` drops the page cache before every step (needs root) and so measures the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import Contender, header, paired_ratio, run_in_turns, table  # noqa: E402

from bmforge.models import Llama  # noqa: E402

WIDTH, INTERMEDIATE, HEADS, VOCAB = 2048, 5632, 16, 32000
# case -> dtype in the file, dtype asked for
CASES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16-to-fp32": (torch.bfloat16, torch.float32),
}
PAGE_BYTES = 4096
TARGET_RATIO, TARGET_MB = 1.0, 200


def save_model(directory: str, dtype: torch.dtype, layers: int) -> int:
    """Write the checkpoint in files of 1 GB with transformers; return its parameters."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(dtype)
    model.to_empty(device="cpu")
    # Drawing 1e9 numbers takes longer than all the rest; the same 1e6 over and over do as well.
    numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            for piece in parameter.view(-1).split(len(numbers)):
                piece.copy_(numbers[: len(piece)])
    model.save_pretrained(directory, max_shard_size="1GB")
    return sum(p.numel() for p in model.parameters())


def build(side: str, directory: str, dtype: torch.dtype, touch: bool) -> Callable[[], float]:
    """Return a step that opens the model and, when asked to, looks at every page of it."""
    transformers.utils.logging.disable_progress_bar()
    opener = Llama if side == "bmforge" else transformers.LlamaForCausalLM

    def step() -> float:
        model = opener.from_pretrained(directory, dtype=dtype)
        if not touch:
            return 0.0
        stride = PAGE_BYTES // dtype.itemsize
        return sum(p.detach().view(-1)[::stride].float().sum().item() for p in model.parameters())

    return step


def drop_page_cache() -> None:
    """Forget cached files, so that they come from the disk again (Linux, as root)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def time_both(
    contenders: dict[str, Contender], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Return each side's seconds, round by round."""
    if not arguments.cold:
        steps = run_in_turns(contenders, arguments.rounds, arguments.budget_s)
        return {name: [step.seconds for step in run] for name, run in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, one in contenders.items():
            drop_page_cache()
            seconds[name].append(one.step().seconds)
    return seconds


def compare(case: str, directory: str, arguments: argparse.Namespace) -> list[tuple[object, ...]]:
    """Return the rows of one case: the call, and until every page was looked at."""
    dtype, rows = CASES[case][1], []
    for title, touch in (("the call", False), ("until looked at", True)):
        with contextlib.ExitStack() as stack:
            contenders = {}
            for side in ("bmforge", "transformers"):
                one = Contender(build, arguments.threads, side, directory, dtype, touch)
                stack.callback(one.close)
                contenders[side] = one
            sums = {name: one.step().loss for name, one in contenders.items()}
            if abs(sums["bmforge"] - sums["transformers"]) > 1e-3 * abs(sums["bmforge"]) + 1e-3:
                raise RuntimeError(f"the two loaded different weights: {sums}")
            seconds = time_both(contenders, arguments)
        ratio, low, high = paired_ratio(seconds["bmforge"], seconds["transformers"])
        medians = [f"{statistics.median(seconds[side]):.2f}" for side in seconds]
        verdict = "reached" if ratio >= TARGET_RATIO else "not reached"
        rows.append((case, title, *medians, f"**{ratio:.2f}x** [{low:.2f}, {high:.2f}]", verdict))
    return rows


def peak_above_weights(
    side: str, directory: str, dtype: torch.dtype, weight_bytes: int, threads: int
) -> float:
    """Return MB of peak memory above the weights when a fresh process opens the model."""
    one = Contender(build, threads, side, directory, dtype, True)
    try:
        return (one.step(measure_memory=True).peak_bytes - weight_bytes) / 1e6
    finally:
        one.close()


def run_case(case: str, arguments: argparse.Namespace) -> tuple[list, list]:
    """Write the checkpoint of one case and measure it; return the rows of both tables."""
    stored, asked = CASES[case]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        count = save_model(folder, stored, arguments.layers)
        times = compare(case, folder, arguments)
        measure = partial(
            peak_above_weights,
            directory=folder,
            dtype=asked,
            weight_bytes=count * asked.itemsize,
            threads=arguments.threads,
        )
        ours, theirs = measure("bmforge"), measure("transformers")
    size = f"{count * stored.itemsize / 1e9:.2f} GB"
    verdict = "reached" if ours <= TARGET_MB else "not reached"
    return times, [(case, f"{count:,}", size, f"{ours:.0f}", f"{theirs:.0f}", verdict)]


def main() -> None:
    """Read the options, run, print markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--budget-s", type=float, default=120.0, help="of one row's rounds")
    parser.add_argument("--directory", default=None, help="where the checkpoint is written")
    parser.add_argument("--cold", action="store_true", help="from the disk: needs root")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("# Opening a checkpoint\n")
    packages = ("torch", "transformers", "safetensors")
    print(header("python " + " ".join(sys.argv), arguments.threads, packages), flush=True)
    print("- page cache:", "dropped before every step" if arguments.cold else "warm")
    times, memory = [], []
    for case in arguments.cases:
        found = run_case(case, arguments)
        times += found[0]
        memory += found[1]
    columns = ("case", "time of", "bmforge s", "transformers s", "ratio", f">= {TARGET_RATIO}x")
    print("\n" + table(columns, times))
    columns = (
        "case",
        "parameters",
        "on disk",
        "bmforge MB above the weights",
        "transformers MB",
        f"<= {TARGET_MB} MB",
    )
    print("\n" + table(columns, memory))


if __name__ == "__main__":
    main()
