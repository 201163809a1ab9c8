"""Training step of GPT-2 124M compared with transformers, and with the time of its matrix products.

    python -m benchmarks.training.train_step [--rounds 6] [--precision fp32 bf16] [--peer tuned]
        [--batch 4 512] [--budget-s 280]

Both sides use the same weights, tokens and labels, no dropout, and torch's fused AdamW, eager and
under `torch.compile`. The peer is `GPT2LMHeadModel`, with `torch.autocast` for bf16. bmforge is
`GPT2` through `parallelize`, with the host settings of a run; `--peer tuned` applies these settings
to the peer too. The lower bound of a step is the time of its matrix products at the rate that is
measured between the rounds. A CPU without bf16 products (AVX512-BF16 or AMX) needs minutes for a
step in bf16, so bf16 is skipped there unless `--force` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import transformers

from benchmarks.harness import (
    MIB,
    Contender,
    Step,
    header,
    make_parser,
    paired_ratio,
    run_in_turns,
    table,
)
from bmforge.device import default_device
from bmforge.host_tuning import tune_host
from bmforge.models import GPT2
from bmforge.parallel import parallelize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGETS = {("fp32", "as-used"): 1.2, ("fp32", "tuned"): 1.1}
BF16_TARGET = 1.3
MEMORY_TARGET = 0.6
WIDTH, LAYERS, VOCAB = 768, 12, 50257


def save_peer(directory: str) -> None:
    """Save a GPT-2 124M of transformers with random weights and without dropout."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)


def make_ids(rows: int, length: int) -> torch.Tensor:
    """Return the same random tokens in every process."""
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def build_bmforge(
    directory: str, shape: tuple[int, int], precision: str, compiled: bool
) -> Callable[[], float]:
    """Return one step of bmforge's GPT2."""
    model = GPT2.from_pretrained(directory).train()
    parallelize(model, precision=precision, compile=compiled)
    return _make_step(model, shape, contextlib.nullcontext())


def build_transformers(
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
    """Return (count, tokens, inputs, outputs) of the matrix products of a forward pass."""
    chunk = 683  # rows per chunk of the LM head: at most 9 * 2**22 logits, chunks of equal size
    return [
        (4 * LAYERS, tokens, WIDTH, WIDTH),
        (LAYERS, tokens, WIDTH, 4 * WIDTH),
        (LAYERS, tokens, 4 * WIDTH, WIDTH),
        (math.ceil(tokens / chunk), min(tokens, chunk), WIDTH, VOCAB),
    ]


def step_flops(rows: int, length: int) -> float:
    """Return the FLOPs of forward and backward: products and the causal half of attention."""
    tokens = rows * length
    weights = LAYERS * 12 * WIDTH * WIDTH + VOCAB * WIDTH
    return 6.0 * weights * tokens + 6.0 * LAYERS * rows * length * length * WIDTH


class Floor:
    """Measures the rate of a step's matrix products, forward and backward, on this machine.

    The products write into allocated memory, so the rate is an upper bound.

    Attributes:
        rates: measured rates in FLOP/s.
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
        """Time each product once, and append the rate over all products of a step."""
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
    """Return the FLOP/s of a small matrix product without a transposed operand."""
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
    """Run the four contenders alternately; return the results as Markdown."""
    floor = Floor(DTYPES[precision], shape[0] * shape[1])
    floor.measure()
    floor.rates.clear()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        save_peer(directory)
        contenders = {}
        for side, build in (("bmforge", build_bmforge), ("transformers", build_transformers)):
            for kind in ("eager", "compiled"):
                options = (directory, shape, precision, kind == "compiled")
                tuned = side == "bmforge" or arguments.peer == "tuned"
                contender = Contender(build, arguments.threads, *options, tuned=tuned)
                stack.callback(contender.close)
                contenders[f"{side} {kind}"] = contender
        first = {name: contender.step() for name, contender in contenders.items()}
        steps = run_in_turns(contenders, arguments.rounds, budget_s, floor.measure)
        last = {name: contender.step(measure_memory=True) for name, contender in contenders.items()}
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
    """Return the table, the ratios and the targets of one precision as Markdown."""
    tokens = shape[0] * shape[1]
    seconds = {name: [s.seconds for s in run] for name, run in steps.items()}
    medians = {name: statistics.median(run) for name, run in seconds.items()}
    peaks = {name: step.peak_bytes for name, step in last.items()}
    rate = statistics.median(floor.rates)
    bound_s = step_flops(*shape) / rate
    rows = [
        (
            name,
            f"{tokens / medians[name]:.0f}",
            f"{medians[name]:.2f}",
            f"{bound_s / medians[name]:.0%}",
            f"{peaks[name] / MIB:.0f}",
            f"{first[name].loss:.4f}",
        )
        for name in steps
    ]
    first_side, second_side = (
        min((n for n in medians if n.startswith(side)), key=medians.__getitem__)
        for side in ("bmforge", "transformers")
    )
    ratio = paired_ratio(seconds, first_side, second_side)
    memory = peaks[first_side] / peaks[second_side]
    columns = ("contender", "tokens/s", "s/step", "lower bound / time", "peak, MiB", "first loss")
    return "\n".join(
        [
            f"## {precision}, batch {shape[0]} x {shape[1]}, {len(seconds[first_side])} rounds\n",
            table(columns, rows),
            f"\n- {ratio}, target {target}: {_verdict(ratio.median >= target)}",
            f"- peak memory of a step above the resident memory after it, {ratio.sides}: "
            f"{memory:.2f}, target {MEMORY_TARGET}: {_verdict(memory <= MEMORY_TARGET)}",
            f"- lower bound of a step: {step_flops(*shape) / 1e12:.2f} TFLOP at {rate / 1e9:.0f} "
            f"GFLOP/s (its products, measured between the rounds) = {bound_s:.2f} s",
        ]
    )


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def main() -> None:
    """Parse the options and measure with the host settings of a run."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs=2, default=(4, 512), metavar=("B", "T"))
    parser.add_argument("--precision", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--budget-s", type=float, default=280.0, help="time of all rounds, s")
    parser.add_argument("--peer", choices=("as-used", "tuned"), default="as-used")
    parser.add_argument("--force", action="store_true", help="bf16 on a CPU without bf16 products")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tune_host(default_device()):  # the bound also uses the faster products
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Print the results as Markdown."""
    print("# Training step, GPT-2 124M\n")
    print(header(arguments.threads), flush=True)
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
                f"product runs at {rate / 1e9:.1f} GFLOP/s, in fp32 at {plain / 1e9:.0f}. "
                "`--force` measures it anyway."
            )


if __name__ == "__main__":
    main()
