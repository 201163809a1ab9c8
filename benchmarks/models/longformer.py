"""Speed of Longformer by sequence length compared with transformers.

    python -m benchmarks.models.longformer [--rounds 3] [--threads 2] [--layers 2]
        [--modes forward] [--budget-s 600]

A base-sized Longformer with two layers and one global token runs forward, and forward and backward,
on one sequence of 4,096 and of 16,384 tokens. Twelve layers of transformers do not fit into 24 GB
at 16,384 tokens. Both libraries load the same weights. The four combinations alternate, so that the
ratios between the libraries and between the lengths are ratios of one run.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import (
    Contender,
    Step,
    header,
    make_parser,
    paired_ratio,
    run_in_turns,
    table,
)
from bmforge.models.longformer import Longformer, LongformerConfig

LENGTHS = (4096, 16384)
SPEED_TARGET, GROWTH_TARGET = 2.0, 4.4
MODES = {"forward": False, "forward and backward": True}


def make_step(model: nn.Module, length: int, backward: bool) -> Callable[[], float]:
    """Return a function that runs one step and returns a function of all hidden states."""
    ids = torch.randint(5, 50000, (1, length), generator=torch.Generator().manual_seed(0))
    chosen = torch.zeros_like(ids)
    chosen[0, 0] = 1

    def step() -> float:
        with torch.set_grad_enabled(backward):
            states: Tensor = model(ids, global_attention_mask=chosen).last_hidden_state
            loss = states.pow(4).mean()
        if backward:
            loss.backward()
            model.zero_grad()
        return loss.item()

    step()
    return step


def build_bmforge(directory: str, length: int, backward: bool) -> Callable[[], float]:
    """Return a step of bmforge."""
    return make_step(Longformer.from_pretrained(directory).train(), length, backward)


def build_transformers(directory: str, length: int, backward: bool) -> Callable[[], float]:
    """Return a step of transformers."""
    import transformers

    model = transformers.LongformerModel.from_pretrained(directory, attn_implementation="eager")
    return make_step(model.train(), length, backward)


def compare(mode: str, directory: str, rounds: int, threads: int, budget_s: float) -> str:
    """Run both libraries at both lengths alternately; return the results as Markdown."""
    with ExitStack() as stack:
        contenders = {}
        for length in LENGTHS:
            for side, build in (("bmforge", build_bmforge), ("transformers", build_transformers)):
                contender = Contender(build, threads, directory, length, MODES[mode])
                stack.callback(contender.close)
                contenders[f"{side}, {length:,}"] = contender
        steps = run_in_turns(contenders, rounds, budget_s)
    return report(mode, steps)


def report(mode: str, steps: dict[str, list[Step]]) -> str:
    """Return the table and the ratios as Markdown."""
    seconds = {name: [s.seconds for s in run] for name, run in steps.items()}
    rows = []
    for name, run in seconds.items():
        median = statistics.median(run)
        length = int(name.rpartition(" ")[2].replace(",", ""))
        rows.append(
            (name, f"{median:.2f}", f"{length / median:,.0f}", f"{steps[name][0].loss:.4f}")
        )
    lines = [f"## {mode}, {len(seconds[f'bmforge, {LENGTHS[0]:,}'])} rounds\n"]
    lines.append(table(("contender, tokens", "s/step", "tokens/s", "loss"), rows) + "\n")
    for length in LENGTHS:
        ratio = paired_ratio(seconds, f"bmforge, {length:,}", f"transformers, {length:,}")
        reached = _verdict(ratio.median >= SPEED_TARGET)
        lines.append(f"- {ratio}, target {SPEED_TARGET}: {reached}")
    growth = paired_ratio(seconds, *(f"bmforge, {length:,}" for length in LENGTHS))
    reached = _verdict(growth.median <= GROWTH_TARGET)
    lines.append(f"- {growth}, target at most {GROWTH_TARGET}: {reached}")
    return "\n".join(lines)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def main() -> None:
    """Print the results as Markdown."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--budget-s", type=float, default=600.0, help="time of a mode, s")
    arguments = parser.parse_args()
    print(f"# Longformer-base with {arguments.layers} layers, fp32, one row\n")
    print(header(arguments.threads), flush=True)
    config = LongformerConfig.preset(
        "longformer-base-4096", num_layers=arguments.layers, max_seq_len=max(LENGTHS), head="none"
    )
    with tempfile.TemporaryDirectory() as directory:
        Longformer.from_config(config).save_pretrained(Path(directory))
        for mode in arguments.modes:
            options = arguments.rounds, arguments.threads, arguments.budget_s
            print("\n" + compare(mode, directory, *options), flush=True)


if __name__ == "__main__":
    main()
