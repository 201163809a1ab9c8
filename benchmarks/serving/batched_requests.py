"""Concurrent requests of an engine compared with llama.cpp, with one request and without caches.

    python -m benchmarks.inference.decode prepare FOLDER
    python -m benchmarks.serving.batched_requests FOLDER [--peer PYTHON] [--threads 2]
        [--only q8_0] [--budget-s 100] [--count 16] [--prompt 32] [--new 32]

Prints for each file the throughput of concurrent requests, its ratio to one request and to
llama.cpp, the times to the first and between tokens, the effect of a cached prefix, and the effect
of speculative decoding. PYTHON is an interpreter with llama-cpp-python. Speculative decoding is
also measured on text that repeats itself, with a model that is changed to repeat twelve tokens at
its usual cost.

Each file takes about the budget. A part runs as many rounds as its share of the budget allows, at
least one; every row is printed as soon as it is measured, with the number of its rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Ratio, header, make_parser, paired_ratio, table, table_row
from benchmarks.inference.decode import CASES, BmforgeModel
from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request, RequestsConfig

PEER = Path(__file__).with_name("batched_requests_peer.py")
PREFIX = 1024


def draw_prompt(number: int, length: int) -> list[int]:
    """Return random ids; prompts of different numbers share no prefix."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(10, 30000, (length,), generator=generator).tolist()


@torch.no_grad()
def make_copy_(model: Any, circle: Sequence[int]) -> None:
    """Change a model so that it repeats a circle of tokens, at its usual cost."""
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
    """An engine that receives concurrent requests.

    Args:
        model: model to serve.
        count: maximum number of concurrent requests.
        longest: maximum number of tokens of a request.
        options: further fields of `RequestsConfig`.

    Attributes:
        first: seconds to the first token of every request.
        next: seconds between consecutive tokens of every request.
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
        """Send `count` requests at once; return the seconds from all first tokens to the end."""
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
        """Return the seconds to the first token after a prompt."""
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
    """llama.cpp in another interpreter.

    Args:
        python: the interpreter.
        path: GGUF file.
        threads: number of threads.
        count: maximum number of sequences.
    """

    def __init__(self, python: str, path: Path, threads: int, count: int) -> None:
        command = [python, str(PEER), str(path), str(threads), str(count)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, count: int, prompt: int, new: int) -> float:
        """Return the seconds of `new` tokens of `count` sequences after their prompts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(count, prompt, new, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """Stop the peer."""
        self._process.terminate()
        self._process.wait()


def percentile(values: list[float], share: float) -> float:
    """Return the quantile of a share."""
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
    """Print the rows of concurrent requests."""
    count, prompt, new = arguments.count, arguments.prompt, arguments.new
    served = Served(model, count, prompt + new)
    peer = Peer(arguments.peer, path, arguments.threads, count) if arguments.peer else None

    def run(prompt: int = prompt, new: int = new) -> list[float]:
        times = [served.ask(count, prompt, new) / count, served.ask(1, prompt, new)]
        return times if peer is None else [*times, peer.ask(count, prompt, new) / count]

    run(8, 2)  # warm-up
    served.first.clear()
    served.next.clear()
    rounds = run_rounds(run, arguments.rounds, budget_s)
    sides = (f"{count} requests", "one request", "llama.cpp")
    times = {side: list(part) for side, part in zip(sides, zip(*rounds, strict=True), strict=False)}
    number = len(rounds)
    rate = (new - 1) / statistics.median(times[sides[0]])
    show(f"{path.name}: {count} requests", f"{rate:.1f} tokens/s", number)
    for other in list(times)[1:]:
        show_ratio(paired_ratio(times, sides[0], other), number)
    for name, values in (("first token", served.first), ("next token", served.next)):
        p50_p99 = [f"{1000 * percentile(values, share):.1f} ms" for share in (0.5, 0.99)]
        show(f"{name}, p50 and p99", " and ".join(p50_p99), number)
    served.engine.close()
    if peer is not None:
        peer.close()


def measure_prefix(model: Any, most: int, budget_s: float) -> None:
    """Print the effect of a cached prefix on the time to the first token."""
    served, numbers = Served(model, 1, PREFIX + 64), itertools.count(1000)

    def run() -> list[float]:
        ids = draw_prompt(next(numbers), PREFIX)
        return [served.first_token([*ids, token]) for token in (5, 6)]

    uncached, cached = zip(*run_rounds(run, most, budget_s), strict=True)
    served.engine.close()
    sides = f"cached prefix of {PREFIX:,} tokens", "no cache"
    ratio = paired_ratio(dict(zip(sides, (cached, uncached), strict=True)), *sides)
    show_ratio(ratio, len(cached), "speed to the first token")


def measure_speculation(model: Any, most: int, budget_s: float) -> None:
    """Print the effect of speculative decoding on random text and on repeated text.

    The model is changed for repeated text, and must not be used afterwards.
    """
    circle = draw_prompt(1, 12)
    for name, ids in (("random", draw_prompt(2, 36)), ("repeated", circle * 3)):
        if name == "repeated":
            make_copy_(model, circle)
        pair = tuple(
            Served(model, 1, 512, use_speculation=use_speculation)
            for use_speculation in (True, False)
        )

        def run(
            new: int = 96, ids: list[int] = ids, pair: tuple[Served, ...] = pair
        ) -> list[float]:
            return [served.write(ids, new) for served in pair]

        run(2)
        speculative, plain = zip(*run_rounds(run, most, budget_s / 2), strict=True)
        sides = "speculative", "plain"
        ratio = paired_ratio(dict(zip(sides, (speculative, plain), strict=True)), *sides)
        show_ratio(ratio, len(plain), f"speed on {name} text")
        for served in pair:
            served.engine.close()


def show(quantity: str, value: str, rounds: int) -> None:
    """Print a row of the table."""
    print(table_row([quantity, value, rounds]), flush=True)


def show_ratio(ratio: Ratio, rounds: int, quantity: str = "speed") -> None:
    """Print the row of a ratio."""
    show(f"{quantity}, {ratio.sides}", f"{ratio:.2f}", rounds)


def main() -> None:
    """Measure the files."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="maximum number of rounds of a part")
    parser.add_argument("--budget-s", type=float, default=100, help="time of a file, s")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--only", nargs="*", default=("q4_0", "q8_0", "f16"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(header(arguments.threads, ("torch",)))
    print("\n" + table(["quantity", "value", "rounds"], []))
    for name in arguments.only:
        begin, path = time.perf_counter(), arguments.folder / CASES[name]
        model = BmforgeModel(path).model
        budget = max(0.0, arguments.budget_s - (time.perf_counter() - begin))
        measure(path, model, arguments, 0.5 * budget)
        measure_prefix(model, arguments.rounds, 0.15 * budget)
        measure_speculation(model, arguments.rounds, 0.2 * budget)


if __name__ == "__main__":
    main()
