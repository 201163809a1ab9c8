"""Time a GPT-2 training step against transformers at its best, and against the floor.

Run: python benchmarks/train_step.py [--rounds 6] [--precision fp32 bf16] [--peer tuned]

Both sides take the same weights, tokens, labels and torch's fused AdamW, dropout 0. The peer is
`GPT2LMHeadModel`, eager and under `torch.compile`, with `torch.autocast` for bf16. Ours is `GPT2`
through `parallelize`, with what a run asks of its host; the peer as its users run it or, with
`--peer tuned`, with the same asked. bf16 needs a CPU with bf16 products (AVX512-BF16 or AMX):
without them torch's run at about 1 GFLOP/s and one step takes minutes, so it is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import MIB, Contender, Step, header, ratio_interval, run_in_turns, table  # noqa: E402

from bmforge.device import default_device  # noqa: E402
from bmforge.host_tuning import tuned_host  # noqa: E402
from bmforge.models import GPT2  # noqa: E402
from bmforge.parallel import parallelize  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGETS = {("fp32", "as-used"): 1.2, ("fp32", "tuned"): 1.1}
BF16_TARGET = 1.3
MEMORY_TARGET = 0.6
WIDTH, LAYERS, VOCAB = 768, 12, 50257


def save_peer(directory: str) -> None:
    """Save GPT-2 124M with random weights and without dropout."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)


def make_ids(rows: int, length: int) -> torch.Tensor:
    """Return the same random tokens in every process."""
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def build_ours(
    directory: str, shape: tuple[int, int], precision: str, compiled: bool
) -> Callable[[], float]:
    """Return one step of bmforge's GPT2."""
    model = GPT2.from_pretrained(directory).train()
    parallelize(model, precision=precision, compile=compiled)
    return _make_step(model, shape, contextlib.nullcontext())


def build_theirs(
    directory: str, shape: tuple[int, int], precision: str, compiled: bool
) -> Callable[[], float]:
    """Return one step of transformers' GPT2LMHeadModel."""
    model = transformers.GPT2LMHeadModel.from_pretrained(directory).train()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    return _make_step(torch.compile(model) if compiled else model, shape, autocast)


def _make_step(
    model: torch.nn.Module,
    shape: tuple[int, int],
    autocast: contextlib.AbstractContextManager[None],
) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = make_ids(*shape)

    def step() -> float:
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def products(tokens: int) -> list[tuple[int, int, int, int]]:
    """Return (count, tokens, inputs, outputs) of the forward products of one step."""
    chunk = 683  # the head's rows at a time: at most 9 * 2^22 logits, as many in every chunk
    return [
        (4 * LAYERS, tokens, WIDTH, WIDTH),
        (LAYERS, tokens, WIDTH, 4 * WIDTH),
        (LAYERS, tokens, 4 * WIDTH, WIDTH),
        (math.ceil(tokens / chunk), min(tokens, chunk), WIDTH, VOCAB),
    ]


def step_flops(rows: int, length: int) -> float:
    """Return the FLOPs of forward and backward: products, and the causal half of attention."""
    tokens = rows * length
    weights = LAYERS * 12 * WIDTH * WIDTH + VOCAB * WIDTH
    return 6.0 * weights * tokens + 6.0 * LAYERS * rows * length * length * WIDTH


class Floor:
    """Measures this machine's matrix-product rate for the step's shapes, forward and backward.

    As fast as it gets: into memory that is there.
    """

    def __init__(self, dtype: torch.dtype, tokens: int) -> None:
        self.rates: list[float] = []
        self._operands = [
            (
                count,
                torch.randn(m, k).to(dtype),
                torch.randn(n, k).to(dtype),
                torch.randn(m, n).to(dtype),
                (torch.empty(m, n, dtype=dtype), torch.empty(m, k, dtype=dtype)),
                torch.empty(n, k, dtype=dtype),
            )
            for count, m, k, n in products(tokens)
        ]

    def measure(self) -> None:
        """Time each product once and add the rate over all of a step's products."""
        seconds = flops = 0.0
        for count, x, weight, grad, (out, of_x), of_weight in self._operands:
            start = time.perf_counter()
            torch.mm(x, weight.t(), out=out)
            torch.mm(grad, weight, out=of_x)
            torch.mm(grad.t(), x, out=of_weight)
            seconds += count * (time.perf_counter() - start)
            flops += count * 6.0 * x.numel() * weight.shape[0]
        self.rates.append(flops / seconds)


def small_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a small product with both operands plain, as backward has them."""
    left, right = torch.randn(128, 512).to(dtype), torch.randn(512, 512).to(dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - start)
    return 2 * 128 * 512 * 512 / statistics.median(times)


def compare(
    precision: str, shape: tuple[int, int], arguments: argparse.Namespace, budget_s: float
) -> str:
    """Run the four contenders in turns and return a page of results."""
    floor = Floor(DTYPES[precision], shape[0] * shape[1])
    floor.measure()
    floor.rates.clear()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        save_peer(directory)
        contenders = {}
        for side, build in (("bmforge", build_ours), ("transformers", build_theirs)):
            for kind in ("eager", "compiled"):
                options = (directory, shape, precision, kind == "compiled")
                tuned = side == "bmforge" or arguments.peer == "tuned"
                one = Contender(build, arguments.threads, *options, tuned=tuned)
                stack.callback(one.close)
                contenders[f"{side} {kind}"] = one
        first = {name: one.step() for name, one in contenders.items()}
        steps = run_in_turns(contenders, arguments.rounds, budget_s, floor.measure)
        last = {name: one.step(measure_memory=True) for name, one in contenders.items()}
    target = TARGETS.get((precision, arguments.peer), BF16_TARGET)
    return report(precision, shape, target, first, steps, last, floor)


def report(
    precision: str,
    shape: tuple[int, int],
    target: float,
    first: dict[str, Step],
    steps: dict[str, list[Step]],
    last: dict[str, Step],
    floor: Floor,
) -> str:
    """Return the tables and the three figures of one precision as markdown."""
    tokens = shape[0] * shape[1]
    seconds = {name: [s.seconds for s in run] for name, run in steps.items()}
    medians = {name: statistics.median(run) for name, run in seconds.items()}
    peaks = {name: step.peak_bytes for name, step in last.items()}
    rate = statistics.median(floor.rates)
    floor_s = step_flops(*shape) / rate
    rows = [
        (
            name,
            f"{tokens / medians[name]:.0f}",
            f"{medians[name]:.2f}",
            f"{floor_s / medians[name]:.0%}",
            f"{peaks[name] / MIB:.0f}",
            f"{first[name].loss:.4f}",
        )
        for name in steps
    ]
    ours, theirs = (
        min((n for n in medians if n.startswith(side)), key=medians.__getitem__)
        for side in ("bmforge", "transformers")
    )
    ratio, low, high = ratio_interval(seconds[ours], seconds[theirs])
    memory = peaks[ours] / peaks[theirs]
    columns = ("contender", "tokens/s", "s/step", "of the floor", "peak MiB", "first loss")
    return "\n".join(
        [
            f"## {precision}, batch {shape[0]} x {shape[1]}, {len(seconds[ours])} rounds\n",
            table(columns, rows),
            f"\n- speed, {ours} / {theirs}: **{ratio:.2f}x** [95 %: {low:.2f}, {high:.2f}], "
            f"target {target}x: {_verdict(ratio >= target)}",
            f"- peak memory of a step above the resident set after it: **{memory:.2f}x**, "
            f"target {MEMORY_TARGET}x: {_verdict(memory <= MEMORY_TARGET)}",
            f"- floor: {step_flops(*shape) / 1e12:.2f} TFLOP at {rate / 1e9:.0f} GFLOP/s (the "
            f"step's products, measured between the rounds) = {floor_s:.2f} s",
        ]
    )


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def main() -> None:
    """Read the options, run, print markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs=2, default=(4, 512), metavar=("B", "T"))
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--budget-s", type=float, default=280.0, help="of all rounds")
    parser.add_argument("--peer", choices=("as-used", "tuned"), default="as-used")
    parser.add_argument("--force", action="store_true", help="bf16 on a CPU without bf16 products")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tuned_host(default_device()):  # the floor, too, has the faster products
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Print the page."""
    print("# Training step, GPT-2 124M\n")
    print(header("python " + " ".join(sys.argv), arguments.threads), flush=True)
    plain = small_rate(torch.float32)
    rates = {precision: small_rate(DTYPES[precision]) for precision in arguments.precision}
    measured = [name for name, rate in rates.items() if rate > plain / 4 or arguments.force]
    for precision, rate in rates.items():
        if precision in measured:
            budget_s = arguments.budget_s / len(measured)
            print(
                "\n" + compare(precision, tuple(arguments.batch), arguments, budget_s), flush=True
            )
        else:
            print(
                f"\n## {precision}: not measured\n\nThis CPU has no {precision} products: a small "
                f"one runs at {rate / 1e9:.1f} GFLOP/s, in fp32 at {plain / 1e9:.0f}. "
                "`--force` runs it all the same."
            )


if __name__ == "__main__":
    main()
