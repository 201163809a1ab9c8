"""Longformer's speed by length: bmforge against transformers, same weights, one global token.

A base-sized Longformer with few layers (transformers keeps so much of a layer for backward that
twelve at 16,384 tokens do not fit into 24 GB) runs forward, and forward and backward, over rows of
4,096 and 16,384 tokens. Everything takes turns, so that the ratio between the libraries and the one
between the lengths both come from pairs of one run.

    python benchmarks/longformer.py [--rounds 3] [--threads 2] [--layers 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from harness import Contender, Step, header, paired_ratio, run_in_turns, table
from torch import Tensor, nn

from bmforge.models.longformer import Longformer, LongformerConfig

LENGTHS = (4096, 16384)
SPEED_TARGET, GROWTH_TARGET = 2.0, 4.4
MODES = {"forward": False, "forward and backward": True}


def make_step(model: nn.Module, length: int, backward: bool) -> Callable[[], float]:
    """Return a function that runs one step and returns a number that depends on every state."""
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


def build_ours(directory: str, length: int, backward: bool) -> Callable[[], float]:
    return make_step(Longformer.from_pretrained(directory).train(), length, backward)


def build_theirs(directory: str, length: int, backward: bool) -> Callable[[], float]:
    import transformers

    model = transformers.LongformerModel.from_pretrained(directory, attn_implementation="eager")
    return make_step(model.train(), length, backward)


def compare(mode: str, directory: str, rounds: int, threads: int, budget_s: float) -> str:
    """Run both libraries at both lengths in turns; return the table and figures as markdown."""
    with ExitStack() as stack:
        contenders = {}
        for length in LENGTHS:
            for side, build in (("bmforge", build_ours), ("transformers", build_theirs)):
                one = Contender(build, threads, directory, length, MODES[mode])
                stack.callback(one.close)
                contenders[f"{side}, {length:,}"] = one
        steps = run_in_turns(contenders, rounds, budget_s)
    return report(mode, steps)


def report(mode: str, steps: dict[str, list[Step]]) -> str:
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
        ratio, low, high = paired_ratio(
            seconds[f"bmforge, {length:,}"], seconds[f"transformers, {length:,}"]
        )
        lines.append(
            f"- speed at {length:,} tokens, bmforge / transformers: **{ratio:.2f}x** [95 %: "
            f"{low:.2f}, {high:.2f}], target {SPEED_TARGET}x: {_verdict(ratio >= SPEED_TARGET)}"
        )
    short, long = (seconds[f"bmforge, {length:,}"] for length in LENGTHS)
    growth, low, high = paired_ratio(short, long)
    lines.append(
        f"- time for {LENGTHS[1] // LENGTHS[0]}x the length: **{growth:.2f}x** [95 %: {low:.2f}, "
        f"{high:.2f}], target <= {GROWTH_TARGET}x: {_verdict(growth <= GROWTH_TARGET)}"
    )
    return "\n".join(lines)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def main() -> None:
    """Read the options, run, print markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--budget-s", type=float, default=600.0, help="of all rounds of a mode")
    arguments = parser.parse_args()
    print(f"# Longformer-base with {arguments.layers} layers, fp32, one row\n")
    print(header("python " + " ".join(sys.argv), arguments.threads), flush=True)
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
