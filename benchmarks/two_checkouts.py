"""The step of a model in two checkouts of bmforge, in turns: what a change of the house costs.

    git worktree add ../before COMMIT
    python benchmarks/two_checkouts.py ../before

Each checkout runs in processes of its own. A round is one step of each, the first one changing from
round to round; the ratio is that of the medians of pairs, with its 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
FAMILIES = ("GPT2", "Llama", "T5", "Bert")
ROWS, LENGTH, WIDTH, LAYERS = 4, 128, 256, 4


def build(family: str, world: int) -> Any:
    """Return what runs one step and returns its loss."""
    import torch

    import bmforge.models as zoo
    from bmforge.models import init_weights_
    from bmforge.parallel import Layout, init_distributed, parallelize

    torch.set_num_threads(2 // world)
    init_distributed()
    sizes: dict[str, Any] = {"vocab_size": 4096, "hidden_size": WIDTH, "num_heads": 4}
    layers = {"num_layers": LAYERS // 2} if family == "T5" else {"num_layers": LAYERS}
    if family in ("Llama", "Bert"):
        sizes["intermediate_size"] = 4 * WIDTH
    config = getattr(zoo, f"{family}Config")(**sizes, **layers)
    model = getattr(zoo, family).from_config(config, device="meta")
    parallelize(model, Layout(zero=3))
    init_weights_(model, seed=0)
    model.train()
    ids = torch.randint(
        0, 4096, (ROWS // world, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def serve(family: str, world: int) -> None:
    """Run a step for every line that comes in; answer with seconds, peak memory and loss."""
    run = build(family, world)
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        loss = run()
        seconds = time.perf_counter() - start
        status = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        print(f"answer {seconds} {peak} {loss}", flush=True)


class Checkout:
    """The processes that run one checkout's step."""

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
            command = [sys.executable, str(Path(__file__).resolve()), "--serve", family, str(world)]
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
        found = [self._answer(rank) for rank in self.ranks]
        return max(f[0] for f in found), max(f[1] for f in found) / 1024, found[0][2]

    def _answer(self, rank: subprocess.Popen[str]) -> list[float]:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("answer "):
                return [float(word) for word in line.split()[1:]]
        raise RuntimeError("a process ended; its error is above")

    def close(self) -> None:
        """End the processes."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


def compare(before: Path, family: str, world: int, rounds: int) -> list[str]:
    """Return a row of the table."""
    from harness import paired_ratio

    sides = [Checkout(before, family, world), Checkout(HERE, family, world)]
    try:
        warm = [[side.step() for side in sides] for _ in range(5)]
        assert abs(warm[-1][0][2] - warm[-1][1][2]) < 1e-4, "the two lose differently"
        seconds: list[list[float]] = [[], []]
        peaks: list[list[float]] = [[], []]
        for number in range(rounds):
            for place in (0, 1) if number % 2 else (1, 0):
                took, peak, _ = sides[place].step()
                seconds[place].append(took)
                peaks[place].append(peak)
    finally:
        for side in sides:
            side.close()
    ratio, low, high = paired_ratio(seconds[1], seconds[0])
    memory = sorted(peaks[1])[rounds // 2] / sorted(peaks[0])[rounds // 2]
    middle = [f"{1e3 * sorted(times)[rounds // 2]:.1f}" for times in seconds]
    return [family, str(world), *middle, f"{ratio:.3f} ({low:.3f} to {high:.3f})", f"{memory:.3f}"]


def main() -> None:
    """Compare every family on one and on two processes."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
        return
    from harness import header, table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    given = parser.parse_args()
    command = f"python benchmarks/two_checkouts.py {given.before} --rounds {given.rounds}"
    print(header(command, 2, ("torch",)))
    worlds = (1, 2)
    rows = [
        compare(given.before.resolve(), family, world, given.rounds)
        for family in given.families
        for world in worlds
    ]
    columns = ["family", "processes", "before, ms", "now, ms", "before / now", "peak, now / before"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
