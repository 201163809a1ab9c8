"""Real training processes for the end-to-end tests and `benchmarks/training/kill_resume.py`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bmforge.train import read_metrics
from bmforge.train.checkpoint.checkpointer import find_checkpoints
from bmforge.train.checkpoint.format import read_manifest

TIMEOUT_S = 240.0

CONFIG = """
export = false
[model]
vocab_size = 300
hidden_size = 32
num_layers = 2
num_heads = 2
max_seq_len = 32
dropout = 0.1
attn_dropout = 0.1
[data]
paths = ["{data}"]
seq_len = 32
global_batch_size = 4
micro_batch_size = 2
[train]
steps = {steps}
save_every_steps = 3
eval_every_steps = 10
log_every_steps = 1
keep_last = 3
"""


def write_text(path: Path, documents: int = 120) -> Path:
    """A .jsonl of words drawn at random."""
    draw = random.Random(0)
    words = ["river", "stone", "light", "winter", "music", "garden", "engine", "window"]
    lines = [
        json.dumps({"text": f"{number} " + " ".join(draw.choices(words, k=40))})
        for number in range(documents)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_config(folder: Path, steps: int) -> Path:
    """Prepare a corpus in `folder` and write the config of a small run on it."""
    from bmforge.data import PrepareConfig, prepare

    text = write_text(folder / "text.jsonl")
    prepare(text, folder / "data", PrepareConfig(vocab_size=300, validation_fraction=0.1))
    file = folder / "run.toml"
    file.write_text(CONFIG.format(data=folder / "data", steps=steps), encoding="utf-8")
    return file


def environment() -> dict[str, str]:
    """This process's environment without a launcher's, one thread per process."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launcher}
    root = str(Path(__file__).resolve().parents[2])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}


def command(config: Path, run_dir: Path, launcher: Sequence[str] = ()) -> list[str]:
    """The command line of a run; `launcher` are torchrun's options."""
    torchrun = ["-m", "torch.distributed.run", *launcher] if launcher else []
    arguments = ["train", "gpt2-pretrain", "--config", str(config), "--run-dir", str(run_dir)]
    return [sys.executable, *torchrun, "-m", "bmforge", *arguments]


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process whose standard error can be read line by line."""
    # A shell ignores SIGINT for programs in the background, and a process inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            arguments,
            env=environment(),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; return the exit status and the rest of standard error."""
    try:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


def wait_for_step(process: subprocess.Popen[str], steps: int) -> bool:
    """Read the log until `steps` steps were logged; False when the process ended before."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            steps -= 1
            if steps <= 0:
                return True
    return False


def workers_of(agent: int) -> list[int]:
    """Process ids of torchrun's workers, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == agent and b"bmforge" in line:
                found.append(int(entry.name))
    return sorted(found)


def kill_in_start_up(process: subprocess.Popen[str], delay_s: float) -> bool:
    """SIGKILL the process `delay_s` from now, or at its first step where that comes before."""
    assert process.stderr is not None
    begun = threading.Event()

    def watch(lines: Iterable[str]) -> None:
        for line in lines:
            if line.startswith("step "):
                begun.set()
                return

    threading.Thread(target=watch, args=(process.stderr,), daemon=True).start()
    begun.wait(delay_s)
    return kill_later(process, 0.0)


def kill_later(process: subprocess.Popen[str], delay_s: float) -> bool:
    """SIGKILL the process `delay_s` from now; False when it had ended before."""
    try:
        process.wait(delay_s)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def kill_in_chain(arguments: Sequence[str], kills: int, steps: int, seed: int) -> list[str]:
    """Start the same command again and again and kill it, `kills` times; return where each hit.

    One kill in five hits the start-up, anywhere in it. The others come when a random number of
    steps (1 to twice the even pace) has been logged, and a random part of a few steps later, so
    that they also hit the writing of a checkpoint. A start that reaches the end is not a kill.
    """
    draw = random.Random(seed)
    pace = max(1, steps // max(1, kills))
    hits: list[str] = []
    while len(hits) < kills:
        process = start(arguments)
        if draw.random() < 0.2:
            where, killed = "start-up", kill_in_start_up(process, draw.uniform(0.0, 6.0))
        else:
            where = "training"
            reached = wait_for_step(process, draw.randint(1, 2 * pace))
            killed = reached and kill_later(process, draw.uniform(0.0, 0.08))
        if not killed:
            process.wait(TIMEOUT_S)
            hits.append("none: the run was complete")
            return hits
        hits.append(where)
    return hits


def losses(run_dir: Path) -> list[tuple[Any, ...]]:
    """What metrics.jsonl says that does not depend on the clock."""
    names = ("step", "loss", "lr", "grad_norm", "val_loss")
    return [tuple(row.get(n) for n in names) for row in read_metrics(run_dir / "metrics.jsonl")]


def final_hashes(run_dir: Path) -> tuple[int, dict[str, str]]:
    """Step of the newest checkpoint, and the sha256 of each of its shards.

    A shard holds parameters, optimizer state and random generators, so equal hashes say that all
    of them are bit-identical.
    """
    newest = find_checkpoints(run_dir / "checkpoints")[0]
    manifest = read_manifest(newest)
    return int(manifest["step"]), {n: f["sha256"] for n, f in manifest["files"].items()}
