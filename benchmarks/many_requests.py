"""Many requests at once: tokens a second beside llama.cpp, one request, a seen prefix, guesses.

    python benchmarks/decode.py prepare FOLDER
    python benchmarks/many_requests.py FOLDER [--peer PYTHON] [--threads 2] [--only q8_0]
        [--budget-s 100]

PYTHON is an interpreter with llama-cpp-python. Every round times each of these in turn; ratios are
medians over rounds. A step's times, p50 and p99 of the first and of every next token, are of all
requests of all rounds. Guesses on text that copies are measured on a model that copies: its blocks
do all their work and add nothing, and its head knows what follows each of twelve tokens.

Each file takes about the budget: the first short round estimates how long a round takes, a part
runs as many rounds as its share of the budget allows, at least one, and every row is printed with
the number of its rounds as soon as it is measured.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from decode import CASES, Ours
from harness import header, paired_ratio

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

    Args:
        model: model to serve.
        count: most requests at once.
        longest: most tokens of a request.

    Attributes:
        first, next: seconds to the first token, and from one to the next, of all requests.
    """

    def __init__(self, model: Any, count: int, longest: int, **options: Any) -> None:
        requests = RequestsConfig(
            max_num_seqs=max(count, 1), total_tokens=(count + 1) * longest, **options
        )
        config = EngineConfig(max_tokens=longest, requests=requests)
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


def run_rounds(
    run: Callable[[], Sequence[float]], most: int, budget_s: float
) -> list[Sequence[float]]:
    """Return the results of up to `most` calls; no further call starts that exceeds the budget."""
    results: list[Sequence[float]] = []
    begin = time.perf_counter()
    while len(results) < most:
        results.append(run())
        spent = time.perf_counter() - begin
        if spent * (len(results) + 1) / len(results) > budget_s:
            break
    return results


def measure(path: Path, model: Any, arguments: argparse.Namespace, budget_s: float) -> None:
    """Print the rows of many requests at once."""
    count, prompt, new = arguments.count, arguments.prompt, arguments.new
    served = Served(model, count, prompt + new)
    peer = Peer(arguments.peer, path, arguments.threads, count) if arguments.peer else None

    def run(prompt: int = prompt, new: int = new) -> list[float]:
        times = [served.ask(count, prompt, new) / count, served.ask(1, prompt, new)]
        return times if peer is None else [*times, peer.ask(count, prompt, new) / count]

    run(8, 2)  # compiles, and brings the weights near
    served.first.clear()
    served.next.clear()
    rounds = run_rounds(run, arguments.rounds, budget_s)
    ours, alone, *theirs = (list(part) for part in zip(*rounds, strict=True))
    number = len(rounds)
    rate = (new - 1) / statistics.median(ours)
    show(f"{path.name}: {count} at once", f"{rate:.1f} tokens/s", number)
    show("of one request's", f"{statistics.median(alone) / statistics.median(ours):.2f}", number)
    if theirs:
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*paired_ratio(ours, theirs[0]))
        show("of llama.cpp's speed", ratio, number)
    for name, values in (("first token", served.first), ("next token", served.next)):
        both = [f"{1000 * percentile(values, share):.1f} ms" for share in (0.5, 0.99)]
        show(f"{name}, p50 and p99", " and ".join(both), number)
    served.engine.close()
    if peer is not None:
        peer.close()


def measure_prefix(model: Any, most: int, budget_s: float) -> None:
    """Print how long a prompt's first token takes, its prefix seen before, of cold."""
    served, numbers = Served(model, 1, PREFIX + 64), itertools.count(1000)

    def run() -> list[float]:
        ids = draw_prompt(next(numbers), PREFIX)
        cold = served.first_token([*ids, 5])
        return [served.first_token([*ids, 6]) / cold]

    ratios = [ratio for (ratio,) in run_rounds(run, most, budget_s)]
    served.engine.close()
    text = f"{statistics.median(ratios):.3f}"
    show(f"prefix of {PREFIX:,} tokens: first token, of cold", text, len(ratios))


def measure_guesses(model: Any, most: int, budget_s: float) -> None:
    """Print how much faster guesses make text that does not copy, and text that copies.

    The model is changed for the second: it must not be used afterwards.
    """
    circle = draw_prompt(1, 12)
    for name, ids in (("does not copy", draw_prompt(2, 36)), ("copies", circle * 3)):
        if name == "copies":
            make_copy_(model, circle)
        plain, guessing = (Served(model, 1, 512, speculates=guesses) for guesses in (False, True))

        def run(
            new: int = 96, ids: list[int] = ids, pair: tuple[Served, Served] = (plain, guessing)
        ) -> list[float]:
            return [served.write(ids, new) for served in pair]

        run(2)
        pairs = run_rounds(run, most, budget_s / 2)
        show(
            f"guesses, text that {name}",
            f"{statistics.median(a / b for a, b in pairs):.2f}",
            len(pairs),
        )
        plain.engine.close()
        guessing.engine.close()


def show(what: str, value: str, rounds: int) -> None:
    """Print a row of the table."""
    print(f"| {what} | {value} | {rounds} |", flush=True)


def main() -> None:
    """Measure every file that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="most rounds of a part")
    parser.add_argument("--budget-s", type=float, default=100, help="seconds of a file")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--only", nargs="*", default=("q4_0", "q8_0", "f16"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(header(" ".join(["python", *sys.argv]), arguments.threads, ("torch",)))
    print("\n| what | value | rounds |\n| --- | --- | --- |")
    for name in arguments.only:
        begin, path = time.perf_counter(), arguments.folder / CASES[name]
        model = Ours(path).model
        budget = max(0.0, arguments.budget_s - (time.perf_counter() - begin))
        measure(path, model, arguments, 0.5 * budget)
        measure_prefix(model, arguments.rounds, 0.15 * budget)
        measure_guesses(model, arguments.rounds, 0.2 * budget)


if __name__ == "__main__":
    main()
