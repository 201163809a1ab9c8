"""Held-out accuracy of a small model on sums: supervised tuning, then GRPO, for several seeds.

    python -m benchmarks.alignment.arithmetic runs/sums [--seeds 0 1 2] [--hidden-size 96]
        [--layers 3] [--portion 50] [--rl-batch-size 256] [--schedule cosine]

The problems and the model are those of `examples/arithmetic.py`; the training commands are those of
`docs/tutorials/post_training.md`, with a constant learning rate. Supervised tuning stops when the
model solves a third of the held-out problems, and GRPO continues with the reward `exact:answer`
on other problems. Both stages run in portions, and the accuracy of greedy answers after each one is
appended to `curve.jsonl`. With `--schedule cosine`, supervised tuning is one portion of
`--sft-steps` steps instead. If the program is stopped, the same command resumes it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import table
from bmforge.cli import main as bmforge
from examples import arithmetic


class Curve:
    """Accuracy after each portion of training, kept in `curve.jsonl`.

    Args:
        folder: directory of the model and the problems of one seed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "curve.jsonl"
        lines = self._file.read_text("utf-8").splitlines() if self._file.exists() else []
        self.points: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def train(self, stage: str, steps: int, arguments: Sequence[str]) -> float:
        """Train up to a step, and return the share of held-out problems that are solved.

        Args:
            stage: "sft" or "rl", the name of the run's directory.
            steps: optimizer steps of this stage in all.
            arguments: arguments of `bmforge train`, without steps and directory.

        Raises:
            SystemExit: the training command failed.
        """
        for point in self.points:
            if (point["stage"], point["step"]) == (stage, steps):
                return float(point["accuracy"])
        run_dir = self._folder / stage
        start = time.process_time()
        status = bmforge(["train", *arguments, "--steps", str(steps), "--run-dir", str(run_dir)])
        if status:
            raise SystemExit(status)
        cpu_s = time.process_time() - start
        accuracy = arithmetic.check(run_dir / "export", self._folder)
        point = {"stage": stage, "step": steps, "accuracy": accuracy, "cpu_s": round(cpu_s, 1)}
        self.points.append(point)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
        return accuracy


def run_seed(folder: Path, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with one seed in both stages; return the points of its curve."""
    if not (folder / "held_out.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        arithmetic.write_model(folder / "start", seed, options.hidden_size, options.layers)
        arithmetic.write_problems(folder, seed)
    batch = str(options.rl_batch_size)
    common = ["--seed", str(seed), "--precision", options.precision, "--seq-len", "10"]
    sft = ["conversations", "--model", f"{folder}/start", "--data", f"{folder}/solved.jsonl"]
    rows = str(options.sft_batch_size)
    sft += ["--batch-size", rows, "--micro-batch-size", rows, "--lr", str(options.lr), *common]
    sft += ["--train.schedule.kind", options.schedule]
    rl = ["rl", "--model", f"{folder}/sft/export", "--data", f"{folder}/problems.jsonl"]
    rl += ["--reward", "exact:answer", "--num-generations", "8", "--max-completion-length", "4"]
    rl += ["--batch-size", batch, "--micro-batch-size", batch, "--rollout.max-num-seqs", batch]
    rl += ["--lr", str(options.rl_lr), "--train.schedule.kind", "constant", *common]
    curve = Curve(folder)
    portion = options.sft_steps if options.schedule == "cosine" else options.portion
    for steps in range(portion, options.sft_steps + 1, portion):
        if curve.train("sft", steps, sft) >= options.start_accuracy:
            break
    for steps in range(options.portion, options.rl_steps + 1, options.portion):
        curve.train("rl", steps, rl)
    return curve.points


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the program's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="directory of models, problems and curves")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--hidden-size", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--lr", type=float, default=2e-3, help="of supervised tuning")
    parser.add_argument("--schedule", choices=["constant", "cosine"], default="constant")
    parser.add_argument("--sft-batch-size", type=int, default=64, help="rows per step")
    parser.add_argument("--rl-lr", type=float, default=3e-4)
    parser.add_argument("--rl-batch-size", type=int, default=256, help="answers per step")
    parser.add_argument("--start-accuracy", type=float, default=1 / 3)
    parser.add_argument("--sft-steps", type=int, default=1000, help="at most")
    parser.add_argument("--rl-steps", type=int, default=200)
    parser.add_argument("--portion", type=int, default=50, help="steps between two tests")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each seed, and print the accuracy and the CPU time of every portion."""
    options = make_parser().parse_args(argv)
    rows = []
    for seed in options.seeds:
        for point in run_seed(options.directory / f"seed{seed}", seed, options):
            accuracy = f"{point['accuracy']:.1%}"
            rows.append([f"{seed}", point["stage"], f"{point['step']}", accuracy, point["cpu_s"]])
    print(table(["seed", "stage", "step", "held-out accuracy", "CPU s"], rows))


if __name__ == "__main__":
    main()
