"""MLPs as experts against the dense MLP: how fast, and how much of the activity routers find.

    python benchmarks/moefy.py                     # speed of one layer
    python benchmarks/moefy.py --model DIR --data TEXT   # routers on a real model

Speed: one MLP of D x F and the same as experts of which a share works, in turns, one thread, no
gradients, on the CPU; the ratio is that of medians of pairs. Beside it stands a dense MLP of the
share's width, which is the most that can be won. Routers: what they capture of the activity on text
that they were not trained on, against the oracle and against a random router.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bmforge.compress.moefy import MoEfyConfig, moefy
from bmforge.compress.moefy.activity import collect_inputs, each_activity, sum_groups
from bmforge.compress.moefy.router import captured_share
from bmforge.models import AutoModel
from bmforge.nn import MLP, MLPSpec, MoE, MoESpec
from bmforge.tokenizers import AutoTokenizer


def split_spec(width: int, experts: int, share: float, choice: str) -> MoESpec:
    """Return the spec of an MLP split into experts."""
    chosen: Any = choice
    return MoESpec(
        experts,
        max(1, round(share * experts)),
        width // experts,
        "relu",
        gated=False,
        shared_gate=False,
        choice=chosen,
        weighs=False,
        router="two_layer",
        split=True,
    )


def time_pairs(one: Callable[[], Any], other: Callable[[], Any], rounds: int) -> float:
    """Return the median of ``time(one) / time(other)``, the first one changing."""
    for _ in range(3):  # the first calls choose their kernels
        one(), other()
    ratios = []
    for number in range(rounds):
        spent = {}
        for call in (one, other) if number % 2 else (other, one):
            start = time.perf_counter()
            call()
            spent[call] = time.perf_counter() - start
        ratios.append(spent[one] / spent[other])
    return statistics.median(ratios)


@torch.no_grad()
def measure_speed(args: argparse.Namespace) -> None:
    """Print how many times faster the split MLP is than the dense one."""
    dense = MLP(args.hidden, MLPSpec(args.width, "relu", bias=False)).eval()
    narrow = MLP(args.hidden, MLPSpec(int(args.width * args.share), "relu", bias=False)).eval()
    rows: list[tuple[str, Any]] = [("dense MLP of that width", narrow)]
    for experts in args.experts:
        for choice in ("top_k", "per_call"):
            spec = split_spec(args.width, experts, args.share, choice)
            rows.append((f"{experts} experts, {choice}", MoE(args.hidden, spec).eval()))
    print(f"{args.hidden} x {args.width}, {args.share:.0%} of the features; times the dense MLP")
    print("| what | " + " | ".join(f"{n} tokens" for n in args.tokens) + " |")
    print("|---|" + "---|" * len(args.tokens))
    for title, module in rows:
        found = []
        for count in args.tokens:
            x = torch.randn(1, count, args.hidden)
            found.append(time_pairs(lambda: dense(x), lambda: module(x), args.rounds))  # noqa: B023
        print(f"| {title} | " + " | ".join(f"{ratio:.2f}x" for ratio in found) + " |")


def read_batches(tokenizer: Any, file: Path, rows: int, length: int) -> list[dict[str, Any]]:
    """Return rows of token ids from a text, four to a batch."""
    ids = tokenizer.encode(file.read_text(encoding="utf-8")[: 16 * rows * length])
    ids = list(ids)[: rows * length]
    table = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": part} for part in table.split(4)]


def measure_routers(args: argparse.Namespace) -> None:
    """Print what routers capture on held-out text."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    batches = read_batches(tokenizer, Path(args.data), args.rows, args.length)
    train, test = batches[: -len(batches) // 4], batches[-len(batches) // 4 :]
    print("| groups | router | captured | oracle | captured / oracle |")
    print("|---|---|---|---|---|")
    for group in ("weights", "coactivation", "random"):
        for router in ("two_layer", "linear", "similarity"):
            model: Any = AutoModel.from_pretrained(args.model)
            config = MoEfyConfig(args.experts[0], args.share, group=group, router=router)  # type: ignore[arg-type]
            dense = AutoModel.from_pretrained(args.model)
            moefy(model, config, train)
            shares = held_out(model, dense, test)
            captured, oracle = (sum(values) / len(values) for values in zip(*shares, strict=True))
            ratio = captured / oracle
            print(f"| {group} | {router} | {captured:.3f} | {oracle:.3f} | {ratio:.3f} |")


@torch.no_grad()
def held_out(model: Any, dense: Any, batches: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return (captured, oracle) of every layer, on the dense model's own inputs."""
    names = [name for name, module in model.named_modules() if isinstance(module, MoE)]
    inputs = collect_inputs(dense, names, batches, 4096)
    found = []
    for name in names:
        experts: MoE = model.get_submodule(name)
        count, size, width = experts.experts.up_proj.shape
        flat = MLP(width, MLPSpec(count * size, gated=experts.experts.has_gate(), bias=False))
        flat.activation = experts.experts.activation
        old = dense.get_submodule(name)
        flat.up_proj.weight.copy_(experts.experts.up_proj.flatten(0, 1))
        flat.down_proj.weight.copy_(experts.experts.down_proj.permute(1, 0, 2).flatten(1))
        if experts.experts.gate_proj is not None:
            flat.gate_proj.weight.copy_(experts.experts.gate_proj.flatten(0, 1))  # type: ignore[union-attr]
        if experts.experts.up_bias is not None:
            flat.up_proj.bias = torch.nn.Parameter(experts.experts.up_bias.flatten())
        assert old.up_proj.weight.shape == flat.up_proj.weight.shape
        groups = torch.arange(count).repeat_interleave(size)
        parts = [sum_groups(p, groups, count) for p in each_activity(flat, inputs[name])]
        activity, scores = torch.cat(parts), experts.router(inputs[name])
        k = experts.experts_per_token
        found.append((captured_share(scores, activity, k), captured_share(activity, activity, k)))
    return found


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=8000)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--experts", type=int, nargs="+", default=[10, 40, 160])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--model", help="directory of a model: measures routers instead")
    parser.add_argument("--data", help="a text file for them")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.model:
        measure_routers(args)
    else:
        measure_speed(args)


if __name__ == "__main__":
    main()
