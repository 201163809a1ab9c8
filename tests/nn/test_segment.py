"""Segments: rows of bias tables, relations, masks and sub ids, against plain loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bmforge.nn import AttentionSpec, Block, BlockSpec, MLPSpec, NormSpec
from bmforge.nn.relative import find_buckets
from bmforge.nn.segment import (
    BucketBias,
    context_mask,
    find_distances,
    find_relations,
    relation_rows,
    rotate_by_sub_id,
    segment_rows,
)
from bmforge.testing.tolerance import assert_close


def buckets(distance: list[int], count: int) -> list[int]:
    return find_buckets(torch.tensor(distance), True, count, 2048).tolist()


def test_published_buckets() -> None:
    """What the original code gives for CPM-Ant's 512 and CPM-Bee's 256 buckets."""
    assert buckets([1, -1, 127, 128, -200, 2047], 512) == [257, 1, 383, 384, 148, 511]
    assert buckets([1, -1, 63, 64, -64, 100, 2047], 256) == [129, 1, 191, 192, 64, 200, 255]


def test_distances() -> None:
    """Keys count from the first, queries are the last; positions may be given."""
    want = [[k - q for k in range(5)] for q in (3, 4)]
    assert find_distances(2, torch.device("cpu"), 3).tolist() == [want]
    position = torch.tensor([[0, 1, 2, 0, 1]])
    got = find_distances(2, torch.device("cpu"), 3, position)
    assert got.tolist() == [[[0, 1, 2, 0, 1], [-1, 0, 1, -1, 0]]]


def test_segment_rows() -> None:
    """Within a kind the bucket of the distance, else a row for the pair."""
    segment = torch.tensor([[0, 0, 2, 2, 1], [1, 1, 1, 0, 2]], dtype=torch.int32)
    distance = find_distances(3, segment.device, 2)
    rows = segment_rows(segment, distance, 3, 16, 32)
    for b in range(2):
        for t, query in enumerate((2, 3, 4)):
            for key in range(5):
                mine, other = int(segment[b, query]), int(segment[b, key])
                near = int(find_buckets(torch.tensor(key - query), True, 16, 32))
                assert rows[b, t, key] == (near if mine == other else 16 + 3 * mine + other)


def test_relations() -> None:
    """Each sample has its own table; what lies in another sample has relation 1."""
    segment = torch.tensor([[0, 1, 0, 1, 2]])
    counts, offset = torch.tensor([[2, 2, 3, 3, 3]]), torch.tensor([[0, 0, 4, 4, 4]])
    tables = torch.tensor([[0, 2, 3, 0, 0, 4, 5, 6, 0, 7, 8, 9, 0]])
    sample = torch.tensor([[0, 0, 1, 1, 1]])
    together = sample[:, None, :] == sample[:, 1:, None]
    found = find_relations(segment, counts, offset, tables, together)[0]
    small, large = [[0, 2], [3, 0]], [[0, 4, 5], [6, 0, 7], [8, 9, 0]]
    want = [
        [*small[1], 1, 1, 1],
        [1, 1, *large[0]],
        [1, 1, *large[1]],
        [1, 1, *large[2]],
    ]
    assert found.tolist() == want
    rows = relation_rows(found[None], find_distances(4, segment.device, 1), 8, 16)[0]
    for t, query in enumerate((1, 2, 3, 4)):
        for key in range(5):
            near = int(find_buckets(torch.tensor(key - query), True, 8, 16))
            assert rows[t, key] == (near if want[t][key] == 0 else 8 + want[t][key] - 1)


def test_who_sees_whom() -> None:
    """Context is seen by all and sees only context; what is written sees up to itself."""
    context = torch.tensor([[True, True, False, False], [True, False, True, False]])
    real = torch.tensor([[True] * 4, [False, True, True, True]])
    allowed = torch.ones(2, 3, 4, dtype=torch.bool)
    allowed[0, 2, 0] = False
    mask = context_mask(context, find_distances(3, context.device, 1), allowed, real)[:, 0]
    assert mask.int().tolist() == [
        [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]],
        [[0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 1]],
    ]
    alone = context_mask(context, find_distances(4, context.device), None, ~real & real)
    assert alone[:, 0].int().tolist() == [torch.eye(4, dtype=torch.int).tolist()] * 2


def test_bias_and_its_gradient() -> None:
    """The table's rows, heads first; a row's gradient is the sum over where it stands."""
    bias = BucketBias(3, 5)
    torch.nn.init.normal_(bias.weight)
    rows = torch.randint(5, (2, 4, 6))
    out = bias(rows)
    assert out.shape == (2, 3, 4, 6)
    assert out.is_contiguous()
    assert torch.equal(out.permute(0, 2, 3, 1), bias.weight[rows])
    grad = torch.randn_like(out)
    out.backward(grad)
    want = torch.stack([(grad * (rows == r)[:, None]).sum((0, 2, 3)) for r in range(5)])
    assert_close(bias.weight.grad, want)


def test_sub_ids_turn() -> None:
    """Pairs (i, i + D/2) turn by 16 x sub / 10000^(2 i / D); sub 0 stays bit for bit."""
    x, sub = torch.randn(2, 3, 8), torch.tensor([[0, 1, 2], [5, 0, 0]])
    out = rotate_by_sub_id(x, sub)
    for b in range(2):
        for t in range(3):
            for i in range(4):
                angle = 16 * int(sub[b, t]) / 10000 ** (2 * i / 8)
                first, second = x[b, t, i].item(), x[b, t, i + 4].item()
                want = first * math.cos(angle) - second * math.sin(angle)
                assert abs(out[b, t, i].item() - want) < 1e-4
                want = second * math.cos(angle) + first * math.sin(angle)
                assert abs(out[b, t, i + 4].item() - want) < 1e-4
    assert torch.equal(out[sub == 0], x[sub == 0])


def scaled_block(place: str, scaled: bool) -> Block:
    """A block with scales, or with the same numbers in its weights."""
    torch.manual_seed(0)
    into, out, down = (0.5, 0.25, 0.125) if scaled else (1.0, 1.0, 1.0)
    attn = AttentionSpec(2, 2, 4, qkv_bias=False, out_bias=False, in_scale=into, out_scale=out)
    mlp = MLPSpec(12, gated=True, bias=False, in_scale=into, out_scale=down)
    block = Block(BlockSpec(8, attn, mlp, norm=NormSpec("rms"), norm_place=place), 0)  # type: ignore[arg-type]
    if not scaled:
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.mul_(0.25 if "o_proj" in name else 0.125)
                elif "proj" in name:
                    parameter.mul_(0.5)
    return block


def test_scales_are_scaled_weights() -> None:
    """Factors on what goes into projections are factors on their weights, wherever the norm is."""
    x = torch.randn(2, 5, 8)
    for place in ("pre", "post", "parallel"):
        outs: list[Tensor] = [scaled_block(place, scaled)(x) for scaled in (True, False)]
        assert_close(*outs)


def test_parts_that_are_missing() -> None:
    """A block without a part is the other part alone; without both it is nothing."""
    x = torch.randn(2, 5, 8)
    attn, mlp = AttentionSpec(2, 2, 4), MLPSpec(12)
    whole = Block(BlockSpec(8, attn, mlp, sum_scale=0.5), 0)
    first, second = (Block(BlockSpec(8, *p, sum_scale=0.5), 0) for p in ((attn, None), (None, mlp)))
    for part in (first, second):
        own = part.state_dict()
        part.load_state_dict({n: t for n, t in whole.state_dict().items() if n in own})
    assert set(first.state_dict()) | set(second.state_dict()) == set(whole.state_dict())
    assert_close(second(first(x)), whole(x))
    plain = Block(BlockSpec(8, None, None), 0)
    assert plain(x) is x
    assert not list(plain.parameters())
