"""Every adapter module declares its tensors; an incomplete declaration is detected."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from bmforge.nn import LMHead, MoESpec
from bmforge.nn.bottleneck import Bottleneck, BottleneckOptions
from bmforge.nn.channel import BiasAdapter, ScaleAdapter
from bmforge.nn.int8 import store_int8
from bmforge.nn.low_rank import EmbeddingLowRank, ExpertsLowRank, LowRank, LowRankOptions
from bmforge.nn.moe import Experts
from bmforge.nn.packing import PRESETS, QuantSpec
from bmforge.nn.part import AdapterModule, TensorNote, attach_part_
from bmforge.nn.prefix import KeyValuePrefix
from bmforge.nn.prompt import ExtraEmbeddings
from bmforge.nn.quantized import store_packed
from bmforge.testing.part_suite import check_part
from bmforge.testing.tolerance import assert_close

EXPERTS = Experts(16, MoESpec(4, 2, 24))
LIKE = torch.empty(0)
STACKS = {key: tuple(stack.shape) for key, stack in EXPERTS.named_parameters()}
PARTS = {
    "low rank": LowRank(16, 24, LowRankOptions(4), LIKE),
    "low rank of experts": ExpertsLowRank(STACKS, LowRankOptions(2), EXPERTS.up_proj),
    "low rank with lengths": LowRank(16, 24, LowRankOptions(4, use_dora=True), LIKE),
    "low rank of a table": EmbeddingLowRank(96, 16, LowRankOptions(4), LIKE),
    "bottleneck": Bottleneck(16, 24, BottleneckOptions(8), LIKE),
    "low-rank bottleneck": Bottleneck(16, 16, BottleneckOptions(8, "low_rank"), LIKE),
    "kronecker bottleneck": Bottleneck(16, 16, BottleneckOptions(8, "kronecker", 0), LIKE),
    "shift": BiasAdapter(16, LIKE),
    "gain into": ScaleAdapter(16, True, LIKE),
    "gain out of": ScaleAdapter(16, False, LIKE),
    "prefix": KeyValuePrefix(2, 3, 8),
    "prefix through layers": KeyValuePrefix(2, 3, 8, inner=5),
    "prompt": ExtraEmbeddings(3, 16),
    "int8 linear": store_int8(nn.Linear(16, 24), {}),
    "int8 head": store_int8(LMHead(16, 96), {}),
    "int8 embedding": store_int8(nn.Embedding(96, 16), {}),
    "int8 experts": store_int8(EXPERTS, {}),
    "packed linear": store_packed(nn.Linear(64, 24), PRESETS["int4"]),
    "packed with outliers": store_packed(nn.Linear(64, 40), QuantSpec(8, 32, outlier_ratio=0.1)),
    "packed head": store_packed(LMHead(64, 90), QuantSpec(4, 64, symmetric=False)),
    "packed embedding": store_packed(nn.Embedding(90, 64), PRESETS["int8-dynamic"]),
    "packed experts": store_packed(Experts(64, MoESpec(4, 2, 96)), PRESETS["int8"]),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_parts_say_what_they_are(part: nn.Module) -> None:
    check_part(part)


class Wrong(AdapterModule):
    """Says what it is told to say."""

    def __init__(self, notes: Mapping[str, TensorNote], styles: frozenset[str]) -> None:
        super().__init__()
        self.notes, self.weight = notes, nn.Parameter(torch.empty(4))
        type(self).sharding_styles = styles

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        return self.notes


@pytest.mark.parametrize(
    ("notes", "styles", "said"),
    [
        ({"weight": TensorNote("ones"), "bias": TensorNote("zeros")}, {""}, "missing tensors"),
        ({"weight": TensorNote("ones", {"column": 1})}, {""}, "lacks a sharded dim"),
        ({"weight": TensorNote("ones", {"diagonal": 0})}, {""}, "unknown sharding styles"),
        ({"weight": TensorNote("ones")}, {"diagonal"}, "unknown sharding styles"),
        ({"weight": TensorNote("ones", trains=False)}, {""}, "is frozen but requires a gradient"),
    ],
)
def test_a_part_that_says_what_cannot_be(
    notes: Mapping[str, TensorNote], styles: set[str], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        check_part(Wrong(notes, frozenset(styles)))


def test_a_part_that_says_nothing_of_a_tensor() -> None:
    part = Wrong({"weight": TensorNote("ones")}, frozenset({""}))
    part.register_buffer("seen", torch.zeros(2))
    with pytest.raises(AssertionError, match="tensors have no notes"):
        check_part(part)


def test_parts_in_fp32_beside_a_head_in_bf16() -> None:
    """Both in the loss and in the logits, as beside any other layer."""
    head, x = LMHead(16, 24, bias=False).bfloat16(), torch.randn(5, 16).bfloat16()
    part = LowRank(16, 24, LowRankOptions(2), LIKE)
    for side in part.parameters():
        nn.init.normal_(side)
    attach_part_(head, "low_rank", part)
    labels = torch.arange(5)
    with torch.no_grad():
        weight = head.weight.float() + part.up @ part.down
    want = nn.functional.cross_entropy(x.float() @ weight.t(), labels)
    loss = head(x, labels)
    loss.backward()
    assert_close(loss.double(), want.double(), rtol=0.02)
    assert_close(head(x).double(), (x.float() @ weight.t()).double(), rtol=0.05, atol=0.1)
    assert part.down.grad is not None
    assert part.down.grad.dtype == torch.float32
