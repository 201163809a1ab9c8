"""Speed of MoEfied MLPs compared with the dense MLP, and quality of the routers.

    python -m benchmarks.compression.moefy [--experts 10 40 160] [--tokens 1 64 512] [--rounds 31]
        [--hidden 2048] [--width 8000] [--share 0.2]
    python -m benchmarks.compression.moefy --model DIR --data TEXT [--rows 64] [--length 128]

The first form times one MLP, without gradients, on one thread. In the MoE, the share of the experts
computes. A dense MLP with the width of the share is the upper bound of the speed. The second form
measures which part of the activations routers select on held-out text, compared with an oracle.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import make_parser, paired_ratio, table, table_row, time_in_turns
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


@torch.no_grad()
def measure_speed(args: argparse.Namespace) -> None:
    """Print the speed of the split MLPs compared with the dense MLP."""
    dense = MLP(args.hidden, MLPSpec(args.width, "relu", bias=False)).eval()
    narrow = MLP(args.hidden, MLPSpec(int(args.width * args.share), "relu", bias=False)).eval()
    modules: list[tuple[str, Any]] = [("dense MLP of the share", narrow)]
    for experts in args.experts:
        for choice in ("top_k", "per_call"):
            spec = split_spec(args.width, experts, args.share, choice)
            modules.append((f"{experts} experts, {choice}", MoE(args.hidden, spec).eval()))
    print(
        f"{args.hidden} x {args.width}, {args.share:.0%} of the features: speed, MLP / dense MLP\n"
    )
    rows = []
    for title, module in modules:
        ratios = []
        for count in args.tokens:
            x = torch.randn(1, count, args.hidden)
            seconds = time_in_turns(
                {title: partial(module, x), "dense": partial(dense, x)}, args.rounds
            )
            ratios.append(f"{paired_ratio(seconds, title, 'dense'):.2f}")
        rows.append([title, *ratios])
    print(table(["MLP", *(f"{count} tokens" for count in args.tokens)], rows))


def read_batches(tokenizer: Any, file: Path, rows: int, length: int) -> list[dict[str, Any]]:
    """Return batches of four rows of token ids from a text."""
    ids = tokenizer.encode(file.read_text(encoding="utf-8")[: 16 * rows * length])
    ids = list(ids)[: rows * length]
    matrix = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return [{"input_ids": part} for part in matrix.split(4)]


def measure_routers(args: argparse.Namespace) -> None:
    """Print the share of the activations that routers select on held-out text."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    batches = read_batches(tokenizer, Path(args.data), args.rows, args.length)
    train, test = batches[: -len(batches) // 4], batches[-len(batches) // 4 :]
    print(table(["groups", "router", "captured", "oracle", "captured / oracle"], []))
    for group in ("weights", "coactivation", "random"):
        for router in ("two_layer", "linear", "similarity"):
            model: Any = AutoModel.from_pretrained(args.model)
            config = MoEfyConfig(args.experts[0], args.share, group=group, router=router)  # type: ignore[arg-type]
            dense = AutoModel.from_pretrained(args.model)
            moefy(model, config, train)
            shares = held_out(model, dense, test)
            captured, oracle = (sum(values) / len(values) for values in zip(*shares, strict=True))
            cells = [f"{x:.3f}" for x in (captured, oracle, captured / oracle)]
            print(table_row([group, router, *cells]))


@torch.no_grad()
def held_out(model: Any, dense: Any, batches: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return (captured, oracle) of every layer, on the inputs of the dense model."""
    names = [name for name, module in model.named_modules() if isinstance(module, MoE)]
    inputs = collect_inputs(dense, names, batches, 4096)
    shares = []
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
        shares.append((captured_share(scores, activity, k), captured_share(activity, activity, k)))
    return shares


def main() -> None:
    """Measure the speed, or the routers with `--model`."""
    parser = make_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=8000)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--experts", type=int, nargs="+", default=[10, 40, 160])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--model", help="model directory; measures routers")
    parser.add_argument("--data", help="text file")
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
