"""Training step in two checkouts of bmforge: the effect of a change on speed and memory.

    git worktree add ../before COMMIT
    python -m benchmarks.training.compare_checkouts ../before [--rounds 41] [--families GPT2 T5]

Each checkout runs in its own processes (`checkout_worker.py`), one process per model and then two
with ZeRO-3. A round is one step of each checkout, in alternating order. The models are small.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import header, make_parser, paired_ratio, table

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("checkout_worker.py")
FAMILIES = ("GPT2", "Llama", "T5", "Bert")


class Checkout:
    """Processes that run the steps of one checkout.

    Args:
        path: root of the checkout.
        family: name of the model class.
        world: number of processes.
    """

    def __init__(self, path: Path, family: str, world: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.ranks = []
        for rank in range(world):
            env = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": str(2 // world)}
            if world > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                env |= {"LOCAL_WORLD_SIZE": str(world)}
            # -P: the folder of the worker is not searched for modules.
            command = [sys.executable, "-P", str(WORKER), family, str(world)]
            pipe = subprocess.PIPE
            self.ranks.append(
                subprocess.Popen(command, env=env, cwd=path, stdin=pipe, stdout=pipe, text=True)
            )

    def step(self) -> tuple[float, float, float]:
        """Return the slowest rank's seconds, the largest peak in MiB, and the first rank's loss."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        answers = [self._answer(rank) for rank in self.ranks]
        return max(a[0] for a in answers), max(a[1] for a in answers) / 1024, answers[0][2]

    def _answer(self, rank: subprocess.Popen[str]) -> list[float]:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("answer "):
                return [float(word) for word in line.split()[1:]]
        raise RuntimeError("A process has ended. Its error is above.")

    def close(self) -> None:
        """Stop the processes."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


def compare(before: Path, family: str, world: int, rounds: int) -> list[str]:
    """Return a row of the table."""
    sides = {"before": Checkout(before, family, world), "now": Checkout(ROOT, family, world)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for _ in range(5):
            losses = [side.step()[2] for side in sides.values()]
        assert abs(losses[0] - losses[1]) < 1e-4, "the losses differ"
        for number in range(rounds):
            for name in list(sides) if number % 2 else list(sides)[::-1]:
                step_s, peak, _ = sides[name].step()
                seconds[name].append(step_s)
                peaks[name].append(peak)
    finally:
        for side in sides.values():
            side.close()
    memory = statistics.median(peaks["now"]) / statistics.median(peaks["before"])
    medians = [f"{1e3 * statistics.median(times):.1f}" for times in seconds.values()]
    ratio = paired_ratio(seconds, "now", "before")
    return [family, str(world), *medians, f"{ratio:.3f}", f"{memory:.3f}"]


def main() -> None:
    """Compare every family on one and on two processes."""
    parser = make_parser(__doc__)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    options = parser.parse_args()
    print(header(2, ("torch",)))
    worlds = (1, 2)
    rows = [
        compare(options.before.resolve(), family, world, options.rounds)
        for family in options.families
        for world in worlds
    ]
    columns = ["family", "processes", "before, ms", "now, ms", "speed, now / before"]
    print(table([*columns, "peak memory, now / before"], rows))


if __name__ == "__main__":
    main()
