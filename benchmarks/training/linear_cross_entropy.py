"""Speed and peak memory of the LM head's loss and gradients compared with an earlier commit.

    git show 842c699:bmforge/nn/losses.py > /tmp/before.py
    python -m benchmarks.training.linear_cross_entropy --before /tmp/before.py [--tokens 8192]
        [--vocab 250000] [--width 1024] [--precision bf16] [--rounds 5]

Both versions run `linear_cross_entropy` alternately, each in its own process. The memory is the
peak resident memory of a step above the resident memory after it, which holds the hidden states,
the weight and their gradients.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable

import torch

from benchmarks.harness import (
    MIB,
    Contender,
    header,
    make_parser,
    paired_ratio,
    run_in_turns,
    table,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(path: str, tokens: int, width: int, vocab: int, precision: str) -> Callable[[], float]:
    """Return one pass of `linear_cross_entropy`.

    Args:
        path: file that defines it; "" for bmforge's.
        tokens, width, vocab: sizes of the hidden states and of the weight.
        precision: fp32 or bf16.
    """
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
        # The gradients of the previous step must be freed before the forward pass, which
        # allocates the new ones.
        hidden.grad = weight.grad = None
        loss = module.linear_cross_entropy(hidden, weight, labels)
        loss.backward()
        return float(loss.detach())

    return step


def main() -> None:
    """Print the times, the peaks and the ratio of the speeds."""
    parser = make_parser(__doc__)
    parser.add_argument("--before", required=True, help="losses.py of an earlier commit")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=250_000)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=300)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    sizes = options.tokens, options.width, options.vocab, options.precision
    print(header(threads, ["torch"]))
    contenders = {
        name: Contender(build, threads, path, *sizes, tuned=True)
        for name, path in (("now", ""), ("before", options.before))
    }
    for contender in contenders.values():
        contender.step()
    peaks = {
        name: contender.step(measure_memory=True).peak_bytes
        for name, contender in contenders.items()
    }
    steps = run_in_turns(contenders, options.rounds, options.budget_s)
    for contender in contenders.values():
        contender.close()
    seconds = {name: [step.seconds for step in timed] for name, timed in steps.items()}
    rows = [
        [name, f"{statistics.median(seconds[name]):.2f}", f"{peaks[name] / MIB:.0f}"]
        for name in contenders
    ]
    print(table(["version", "s", "peak, MiB"], rows))
    print(f"\n{paired_ratio(seconds, 'now', 'before')}")


if __name__ == "__main__":
    main()
