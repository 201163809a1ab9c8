"""The pieces of context parallelism: shares, kernels, traffic, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from context_cases import BATCH, COMMON, METHODS, labels, llama, text
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bmforge.errors import DistributedError
from bmforge.models import Llama, LlamaConfig
from bmforge.parallel import Layout, build_mesh, init_distributed, parallelize
from bmforge.parallel.context.divide import apply_context_parallel_
from bmforge.parallel.context.ring import attend_causally, attend_to_ends
from bmforge.parallel.context.token_share import TokenShare
from bmforge.testing import assert_close, run_distributed


class Traffic(TorchDispatchMode):
    """Writes down collectives: name and bytes that go in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[1]]
            self.seen.append((name, sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))


def run_traffic(layers: int, method: str) -> list[list[tuple[str, int]]]:
    """The collectives of forward and of backward, without ZeRO's."""
    world = init_distributed()
    config = LlamaConfig(
        **COMMON | {"num_layers": layers}, intermediate_size=24, num_kv_heads=2, head_dim=6
    )
    model = Llama.from_config(config, dtype=torch.float64)
    mesh = build_mesh(Layout(cp=world.size, zero=0))
    apply_context_parallel_(model, [model.layers], mesh["cp"], method=method)
    found = []
    with Traffic() as traffic:
        loss = model(**text(12), **labels(12)).loss
        found.append(list(traffic.seen))
        traffic.seen.clear()
        loss.backward()
        found.append(traffic.seen)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_traffic_is_what_the_formula_says(method: str) -> None:
    """Number and bytes of collectives of one and three layers on three processes."""
    size, layers, width = 3, 2, 8
    token = BATCH * 12 // size * width
    hidden, pair, all_heads = 32 * token, 2 * 2 * 6 * token, (4 + 2 * 2) * 6 * token
    if method == "ulysses":  # heads must divide: two processes
        size, token = 2, BATCH * 12 // 2 * width
        hidden, all_heads = 32 * token, (4 + 2 * 2) * 6 * token
        inside = [("alltoall_base", all_heads), ("alltoall_base", 4 * 6 * token)]
        want = [inside * layers, inside[::-1] * layers]
    elif method == "gather":
        want = [
            [("allgather_base", pair)] * layers,
            [("reduce_scatter_base", size * pair)] * layers,
        ]
    else:
        forward = [("send", pair), ("recv", pair)] * (size - 1)
        want = [forward * layers, (forward * 2 + forward[:2]) * layers]
    want[0].append(("allgather_base", hidden))
    want[1].append(("reduce_scatter_base", size * hidden))
    for got in run_distributed(run_traffic, size, layers, method):
        assert sorted(got[0]) == sorted(want[0])
        assert sorted(got[1]) == sorted(want[1])


class Group:
    """Stands for a process group where nothing is sent."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("unit", [1, 2])
def test_shares_cover_a_row_evenly(zigzag: bool, unit: int) -> None:
    """Every token has one owner, shares differ by one unit, and `order` undoes `spread`."""
    for size in (2, 3, 4):
        for length in range(size * unit, 40, unit):
            shares = [TokenShare(Group(size, r), length, zigzag, unit) for r in range(size)]
            row = torch.arange(length)[None]
            parts = [share.take(row) for share in shares]
            assert torch.cat(parts, 1).sort(1).values.equal(row)
            counts = shares[0].counts
            assert [part.shape[1] for part in parts] == counts
            assert max(counts) - min(counts) <= unit
            assert min(counts) > 0
            assert all(count % unit == 0 for count in counts)
            joined = torch.cat([s.pad(p, 1) for s, p in zip(shares, parts, strict=True)], 1)
            assert shares[0].spread(row, 1).equal(joined)
            assert shares[0].order(joined, 1).equal(row)


def test_causal_work_is_even() -> None:
    """Zigzag gives every process the same number of (query, key) pairs where chunks are equal."""
    for size in (2, 4):
        shares = [TokenShare(Group(size, r), 8 * size, True) for r in range(size)]
        work = {int((s.take(torch.arange(8 * size)[None]) + 1).sum()) for s in shares}
        assert len(work) == 1


def test_causal_chunks_are_rows_of_whole_attention() -> None:
    """Both ways to attend from chunks, with fewer heads of keys, against one plain softmax."""
    generator = torch.Generator().manual_seed(0)
    query, pair = (
        torch.randn(2, heads, 13, width, dtype=torch.float64, generator=generator)
        for heads, width in ((4, 6), (2, 12))
    )
    key, value = pair.repeat_interleave(2, 1).chunk(2, -1)
    scores = 0.7 * query @ key.transpose(-1, -2)
    scores = scores.masked_fill(torch.ones(13, 13).triu(1) > 0, -torch.inf)
    want = scores.softmax(-1) @ value
    for rank in range(3):
        share = TokenShare(Group(3, rank), 13, True)
        for attend in (attend_causally, attend_to_ends):
            got = attend(share.take(query, 2), pair, share, 0.7)
            assert_close(got, share.take(want, 2), rtol=1e-12, atol=1e-12)


def build(layout: Layout, kind: str) -> None:
    init_distributed()
    models = {
        "plain": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        "llama": lambda: Llama.from_config(llama()[1]),
        "odd": lambda: Llama.from_config(LlamaConfig(**COMMON | {"num_heads": 3, "head_dim": 6})),
    }
    model = parallelize(models[kind](), layout)
    model(**text(13), **labels(13)).loss.backward()


@pytest.mark.parametrize(
    ("world", "fields", "kind", "message"),
    [
        (1, {"cp_method": "ring"}, "llama", "no effect with cp=1"),
        (2, {"cp": 2, "cp_method": "star"}, "llama", "must be one of"),
        (2, {"cp": 2}, "plain", "no layout rules that list its stacks"),
        (2, {"cp": 2, "cp_method": "ulysses"}, "odd", "does not divide the 3 heads"),
        (2, {"cp": 3}, "llama", "does not divide the 2 processes"),
        (
            4,
            {"cp": 2, "tp": 2, "sequence_parallel": True},
            "llama",
            "divisible by tp=2, but a batch has 13",
        ),
    ],
)
def test_bad_input(world: int, fields: dict[str, Any], kind: str, message: str) -> None:
    """Each is refused on every process, before anything is sent."""
    with pytest.raises(DistributedError) as caught:
        run_distributed(build, world, Layout(**fields), kind)
    assert str(caught.value).count(message) == world
