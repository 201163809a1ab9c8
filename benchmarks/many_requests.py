"""Many requests at once: tokens a second beside llama.cpp, one request, a seen prefix, guesses.

    python benchmarks/decode.py prepare FOLDER
    python benchmarks/many_requests.py FOLDER [--peer PYTHON] [--threads 2] [--only q8_0]

PYTHON is an interpreter with llama-cpp-python. Every round times each of these in turn; ratios are
medians over rounds. A step's times, p50 and p99 of the first and of every next token, are of all
requests of all rounds. Guesses on text that copies are measured on a model that copies: its blocks
do all their work and add nothing, and its head knows what follows each of twelve tokens.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from decode import CASES, Ours
from harness import header, paired_ratio, table

from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request, RequestsConfig

PEER = Path(__file__).with_name("many_requests_peer.py")
PREFIX = 1024


def draw_prompt(number: int, length: int) -> list[int]:
    """Return ids that no other number's prompt begins with."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(10, 30000, (length,), generator=generator).tolist()


@torch.no_grad()
def make_copy_(model: Any, circle: Sequence[int]) -> None:
    """Let a model with random weights write these tokens round and round, at its usual cost."""
    for name, module in model.named_modules():
        if name.endswith((".o_proj", ".down_proj")):
            tensors = [module.scales] if hasattr(module, "scales") else [module.weight]
            for tensor in tensors:
                tensor.zero_()
    head, now = model.lm_head, torch.tensor(circle)
    rows = head.matrix(torch.float32).clone()
    seen = model.embed(now).float()
    rows[now.roll(-1)] = 4 * seen / seen.norm(dim=-1, keepdim=True)
    if hasattr(head, "fill_"):
        head.fill_(rows)
    else:
        head.weight.copy_(rows)


class Served:
    """An engine that is asked many things at once.

    Attributes:
        first, next: seconds to the first token, and from one to the next, of all requests.
    """

    def __init__(
        self, path: Path, count: int, longest: int, circle: Sequence[int] = (), **options: Any
    ) -> None:
        requests = RequestsConfig(
            max_num_seqs=max(count, 1), total_tokens=(count + 1) * longest, **options
        )
        config = EngineConfig(max_tokens=longest, requests=requests)
        model = Ours(path).model
        if circle:
            make_copy_(model, circle)
        self.engine = Engine(model, config=config)
        self.first: list[float] = []
        self.next: list[float] = []
        self._number = 0

    def ask(self, count: int, prompt: int, new: int) -> float:
        """Return the seconds from the first token of many requests to the last one."""
        config = GenerationConfig(max_new_tokens=new, eos_token_id=())
        prompts = []
        for _ in range(count):
            self._number += 1
            prompts.append(draw_prompt(self._number, prompt))
        times: list[list[float]] = [[] for _ in prompts]
        begin = time.perf_counter()
        handles = [self.engine.submit(Request(ids, config)) for ids in prompts]

        def read(number: int) -> None:
            for piece in handles[number]:
                times[number] += [time.perf_counter()] * len(piece.ids)

        threads = [threading.Thread(target=read, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.first += [row[0] - begin for row in times]
        self.next += [b - a for row in times for a, b in itertools.pairwise(row)]
        return max(row[-1] for row in times) - max(row[0] for row in times)

    def first_token(self, ids: list[int]) -> float:
        """Return the seconds to a prompt's first token."""
        config = GenerationConfig(max_new_tokens=1, eos_token_id=())
        begin = time.perf_counter()
        self.engine.submit(Request(ids, config)).wait()
        return time.perf_counter() - begin

    def write(self, ids: list[int], new: int) -> float:
        """Return the seconds of a greedy answer."""
        config = GenerationConfig(max_new_tokens=new, eos_token_id=())
        begin = time.perf_counter()
        self.engine.submit(Request(ids, config)).wait()
        return time.perf_counter() - begin


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, path: Path, threads: int, count: int) -> None:
        command = [python, str(PEER), str(path), str(threads), str(count)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, count: int, prompt: int, new: int) -> float:
        """Return the seconds of `new` tokens of each of so many sequences behind a prompt."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(count, prompt, new, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def percentile(values: list[float], share: float) -> float:
    """Return the value below which such a share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(path: Path, arguments: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table of one file."""
    count, prompt, new = arguments.count, arguments.prompt, arguments.new
    served = Served(path, count, prompt + new)
    single = Served(path, 1, prompt + new)
    peer = Peer(arguments.peer, path, arguments.threads, count) if arguments.peer else None
    ours: list[float] = []
    theirs: list[float] = []
    alone: list[float] = []
    for round_ in range(arguments.rounds + 1):
        seconds = served.ask(count, prompt, new), single.ask(1, prompt, new)
        other = peer.ask(count, prompt, new) if peer else None
        if round_ == 0:  # compiles, and brings the weights near
            served.first.clear()
            served.next.clear()
            continue
        ours.append(seconds[0] / count)
        alone.append(seconds[1])
        if other is not None:
            theirs.append(other / count)
    rate = (new - 1) / statistics.median(ours)
    rows = [[f"{path.name}: {count} at once", f"{rate:.1f} tokens/s", ""]]
    rows.append(
        ["of one request's", f"{statistics.median(alone) / statistics.median(ours):.2f}", ""]
    )
    if theirs:
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*paired_ratio(ours, theirs))
        rows.append(["of llama.cpp's speed", ratio, ""])
        assert peer is not None
        peer.close()
    for name, values in (("first token", served.first), ("next token", served.next)):
        both = [f"{1000 * percentile(values, share):.1f} ms" for share in (0.5, 0.99)]
        rows.append([f"{name}, p50 and p99", *both])
    served.engine.close()
    single.engine.close()
    return rows


def measure_prefix(path: Path, rounds: int) -> list[str]:
    """Return how long a prompt's first token takes, its prefix seen before, of cold."""
    served = Served(path, 1, PREFIX + 64)
    ratios = []
    for number in range(rounds):
        ids = draw_prompt(1000 + number, PREFIX)
        cold = served.first_token([*ids, 5])
        ratios.append(served.first_token([*ids, 6]) / cold)
    served.engine.close()
    return ["prefix of 1,024 tokens: first token, of cold", f"{statistics.median(ratios):.3f}", ""]


def measure_guesses(path: Path, rounds: int) -> list[list[str]]:
    """Return how much faster guesses make text that copies, and text that does not."""
    circle = draw_prompt(1, 12)
    rows = []
    for name, ids, taught in (
        ("copies", circle * 12, circle),
        ("does not copy", draw_prompt(2, 144), []),
    ):
        plain, guessing = (
            Served(path, 1, 512, taught, speculates=guesses) for guesses in (False, True)
        )
        pairs = [(plain.write(ids, 96), guessing.write(ids, 96)) for _ in range(rounds + 1)][1:]
        ratio = statistics.median(a / b for a, b in pairs)
        rows.append([f"guesses, text that {name}", f"{ratio:.2f}", ""])
        plain.engine.close()
        guessing.engine.close()
    return rows


def main() -> None:
    """Measure every file that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=("q4_0", "q8_0", "f16"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(header(" ".join(["python", *sys.argv]), arguments.threads, ("torch",)))
    rows = []
    for name in arguments.only:
        path = arguments.folder / CASES[name]
        rows += measure(path, arguments)
        rows.append(measure_prefix(path, arguments.rounds))
        rows += measure_guesses(path, arguments.rounds)
    print(table(["what", "", ""], rows))


if __name__ == "__main__":
    main()
