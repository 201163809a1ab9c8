"""Time a head's loss and gradients against an earlier one, and measure the memory above weights.

    git show 842c699:bmforge/nn/losses.py > /tmp/before.py
    python benchmarks/head.py --before /tmp/before.py [--tokens 8192] [--vocab 250000]

Each in a process of its own that keeps freed memory, in turns. The memory is the largest resident
set of the step above what stands before and after it: hidden states, weight and their gradients.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import MIB, Contender, header, paired_ratio, run_in_turns, table  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(path: str, tokens: int, width: int, vocab: int, precision: str) -> Callable[[], float]:
    """Return one pass of the `linear_cross_entropy` in a file, or in bmforge where it is empty."""
    if path:
        spec = importlib.util.spec_from_file_location("before", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        import bmforge.nn.losses as module
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(DTYPES[precision])
    weight = torch.randn(vocab, width, generator=generator).mul_(0.02).to(DTYPES[precision])
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_()

    def step() -> float:
        # What stands after the step are the gradients; those of the last one are gone by now: the
        # loss makes them in its forward pass.
        hidden.grad = weight.grad = None
        loss = module.linear_cross_entropy(hidden, weight, labels)
        loss.backward()
        return float(loss.detach())

    return step


def main() -> None:
    """Print the ratio of seconds and both peaks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", required=True, help="losses.py of an earlier commit")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=250_000)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=300)
    given = parser.parse_args()
    threads = torch.get_num_threads()
    sizes = given.tokens, given.width, given.vocab, given.precision
    print(header("python benchmarks/head.py " + " ".join(sys.argv[1:]), threads, ["torch"]))
    contenders = {
        name: Contender(build, threads, path, *sizes, tuned=True)
        for name, path in (("now", ""), ("before", given.before))
    }
    for one in contenders.values():
        one.step()
    peaks = {name: one.step(measure_memory=True).peak_bytes for name, one in contenders.items()}
    steps = run_in_turns(contenders, given.rounds, given.budget_s)
    for one in contenders.values():
        one.close()
    seconds = {name: [step.seconds for step in found] for name, found in steps.items()}
    rows = [
        [name, f"{statistics.median(seconds[name]):.2f}", f"{peaks[name] / MIB:.0f}"]
        for name in contenders
    ]
    print(table(["head", "s", "peak MiB above"], rows))
    ratio, low, high = paired_ratio(seconds["now"], seconds["before"])
    print(f"\nspeed of now against before: {ratio:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
