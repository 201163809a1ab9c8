"""Time and peak memory of `from_pretrained` on a 4 GB checkpoint compared with transformers.

    python -m benchmarks.models.load_checkpoint [--rounds 9] [--layers 20] [--threads 2]
        [--cases fp32 bf16 bf16-to-fp32] [--directory DIR] [--cold]

The checkpoint is a Llama with about 1.2e9 random parameters in several files. Both sides open it
alternately, with the files in the page cache. Both sides may map files, so two times are measured:
the call alone, and the call followed by a read of every page of every weight. The peak memory is
that of a new process which reads every weight, minus the size of the weights. `--cold` drops the
page cache before every step (needs root), so it measures the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks.harness import Contender, header, make_parser, paired_ratio, run_in_turns, table
from bmforge.models import Llama

WIDTH, INTERMEDIATE, HEADS, VOCAB = 2048, 5632, 16, 32000
# Case -> dtype in the file, dtype of the loaded model.
CASES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16-to-fp32": (torch.bfloat16, torch.float32),
}
PAGE_BYTES = 4096
TARGET_RATIO, TARGET_MB = 1.0, 200


def save_model(directory: str, dtype: torch.dtype, layers: int) -> int:
    """Write the checkpoint in files of 1 GB with transformers; return the number of parameters."""
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
    # Sampling 1e9 numbers takes longer than the measurement, so 1e6 numbers are repeated.
    numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            for piece in parameter.view(-1).split(len(numbers)):
                piece.copy_(numbers[: len(piece)])
    model.save_pretrained(directory, max_shard_size="1GB")
    return sum(p.numel() for p in model.parameters())


def build(side: str, directory: str, dtype: torch.dtype, touch: bool) -> Callable[[], float]:
    """Return a step that opens the model and, with `touch`, reads every page of its weights."""
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
    """Drop the page cache (Linux, as root)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def time_both(
    contenders: dict[str, Contender], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of each side in every round."""
    if not arguments.cold:
        steps = run_in_turns(contenders, arguments.rounds, arguments.budget_s)
        return {name: [step.seconds for step in run] for name, run in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, contender in contenders.items():
            drop_page_cache()
            seconds[name].append(contender.step().seconds)
    return seconds


def compare(case: str, directory: str, arguments: argparse.Namespace) -> list[tuple[object, ...]]:
    """Return the rows of one case: the call alone, and with a read of every page."""
    dtype, rows = CASES[case][1], []
    for title, touch in (("call", False), ("call and read", True)):
        with contextlib.ExitStack() as stack:
            contenders = {}
            for side in ("bmforge", "transformers"):
                contender = Contender(build, arguments.threads, side, directory, dtype, touch)
                stack.callback(contender.close)
                contenders[side] = contender
            sums = {name: contender.step().loss for name, contender in contenders.items()}
            if abs(sums["bmforge"] - sums["transformers"]) > 1e-3 * abs(sums["bmforge"]) + 1e-3:
                raise RuntimeError(f"The sides loaded different weights: sums={sums}.")
            seconds = time_both(contenders, arguments)
        ratio = paired_ratio(seconds, "bmforge", "transformers")
        medians = [f"{statistics.median(seconds[side]):.2f}" for side in seconds]
        verdict = "reached" if ratio.median >= TARGET_RATIO else "not reached"
        rows.append((case, title, *medians, f"{ratio:.2f}", verdict))
    return rows


def peak_above_weights(
    side: str, directory: str, dtype: torch.dtype, weight_bytes: int, threads: int
) -> float:
    """Return the peak memory of a new process that opens the model, minus the weights, in MB."""
    contender = Contender(build, threads, side, directory, dtype, True)
    try:
        return (contender.step(measure_memory=True).peak_bytes - weight_bytes) / 1e6
    finally:
        contender.close()


def run_case(case: str, arguments: argparse.Namespace) -> tuple[list, list]:
    """Write the checkpoint of one case and measure it; return the rows of both tables."""
    stored, loaded = CASES[case]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        count = save_model(folder, stored, arguments.layers)
        times = compare(case, folder, arguments)
        measure = partial(
            peak_above_weights,
            directory=folder,
            dtype=loaded,
            weight_bytes=count * loaded.itemsize,
            threads=arguments.threads,
        )
        peaks = [measure(side) for side in ("bmforge", "transformers")]
    size = f"{count * stored.itemsize / 1e9:.2f} GB"
    verdict = "reached" if peaks[0] <= TARGET_MB else "not reached"
    return times, [(case, f"{count:,}", size, *(f"{peak:.0f}" for peak in peaks), verdict)]


def main() -> None:
    """Print the tables of times and of memory."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--budget-s", type=float, default=120.0, help="time of a row, s")
    parser.add_argument("--directory", default=None, help="directory of the checkpoint")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before every step")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("# Opening a checkpoint\n")
    packages = ("torch", "transformers", "safetensors")
    print(header(arguments.threads, packages), flush=True)
    print("- page cache:", "dropped before every step" if arguments.cold else "warm")
    times, memory = [], []
    for case in arguments.cases:
        found = run_case(case, arguments)
        times += found[0]
        memory += found[1]
    columns = ("case", "time of", "bmforge, s", "transformers, s")
    columns += ("speed, bmforge / transformers", f">= {TARGET_RATIO}")
    print("\n" + table(columns, times))
    columns = (
        "case",
        "parameters",
        "on disk",
        "bmforge, MB above the weights",
        "transformers, MB above the weights",
        f"<= {TARGET_MB} MB",
    )
    print("\n" + table(columns, memory))


if __name__ == "__main__":
    main()
