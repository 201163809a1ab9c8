"""Packed layers against plain ones that hold the dequantised weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn import LMHead, MoESpec, packed_store
from bmforge.nn.mlp import MLP, MLPSpec
from bmforge.nn.moe import Experts
from bmforge.nn.packing import PRESETS, QuantSpec
from bmforge.nn.quantized import plain_weights, store_packed
from bmforge.testing.tolerance import assert_close

EXACT = QuantSpec(4, 32, activations="float")
OUTLIERS = QuantSpec(4, 32, activations="float", outlier_ratio=0.05)
SPECS = {**PRESETS, "exact": EXACT, "outliers": OUTLIERS, "minima": QuantSpec(4, 64, False)}


def pack(plain: Any, spec: QuantSpec) -> Any:
    new: Any = store_packed(plain, spec)
    for key, weight in plain_weights(plain):
        new.fill_(*([key] if isinstance(plain, Experts) else []), weight)
    return new


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_linear_layer(spec: QuantSpec, tokens: int, dtype: torch.dtype) -> None:
    """The twin's result; the gradient of what went in and of the bias are exactly its own."""
    plain = nn.Linear(256, 50).to(dtype)
    packed = pack(plain, spec)
    with torch.no_grad():
        plain.weight.copy_(packed.dense(dtype))
    x = draw(2, tokens, 256).to(dtype).requires_grad_()
    got, want = packed(x), plain(x)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    wide = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    if spec.activations == "int8":
        wide = 0.02
    off = (got - want).abs().max() / want.abs().max()
    assert off <= (1e-5 if spec.outlier_ratio and wide < 1e-5 else wide)
    grad = draw(2, tokens, 50).to(dtype)
    bias = packed.bias
    mine = torch.autograd.grad(got, (x, bias), grad)
    theirs = torch.autograd.grad(want, (x, plain.bias), grad)
    close = 1e-5 if dtype != torch.bfloat16 else 0.02
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max() <= close * b.abs().max()


def test_no_gradient_is_kept_for_what_is_packed() -> None:
    packed = pack(nn.Linear(64, 16), EXACT)
    assert {n for n, p in packed.named_parameters() if p.requires_grad} == {"bias"}
    assert not any(p.is_floating_point() for n, p in packed.named_parameters() if n != "bias")
    with torch.no_grad():
        assert not packed(draw(3, 64)).requires_grad


def test_casts_leave_what_is_packed() -> None:
    packed = pack(nn.Linear(64, 16), PRESETS["int4"])
    x, before = draw(3, 64), packed(draw(3, 64))
    packed.to(torch.bfloat16)
    assert packed.bias.dtype == packed.like.dtype == torch.bfloat16
    packed.to(torch.float32)
    assert_close(packed(x) - packed.bias, before - packed.bias, rtol=1e-2, atol=1e-2)
    assert torch.equal(packed.dense(torch.float32), copy.deepcopy(packed).dense(torch.float32))


def test_a_head() -> None:
    """Logits, and the loss that never has them, with rows that fill no panel."""
    plain = LMHead(64, 83, bias=False)
    packed = pack(plain, EXACT)
    with torch.no_grad():
        plain.weight.copy_(packed.dense(torch.float32))
    x, labels = draw(2, 7, 64).requires_grad_(), torch.arange(14).view(2, 7)
    assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)
    got, want = packed(x, labels, shift=True), plain(x, labels, shift=True)
    assert torch.equal(got, want)
    (mine,), (theirs,) = torch.autograd.grad(got, x), torch.autograd.grad(want, x)
    assert torch.equal(mine, theirs)
    more = draw(3, 64)
    assert packed(x, more_rows=more).shape == (2, 7, 86)


@pytest.mark.parametrize("spec", [EXACT, OUTLIERS, PRESETS["int4"]])
@pytest.mark.parametrize("at_once", [64 * 16, 64 * 48])
def test_a_head_is_numbers_some_rows_at_a_time(spec, at_once, monkeypatch) -> None:
    """The loss and its gradient are those of the whole matrix, of which no more than so much is."""
    plain = LMHead(64, 83, bias=False)
    packed = pack(plain, spec)
    x, labels = draw(2, 7, 64).requires_grad_(), torch.arange(14).view(2, 7) * 6 % 83
    with torch.no_grad():
        plain.weight.copy_(packed.dense(torch.float32))
    want = plain(x, labels)
    (theirs,) = torch.autograd.grad(want, x)
    made = []
    whole = type(packed).dense_rows
    monkeypatch.setattr(packed_store, "_NUMBERS_AT_ONCE", at_once)
    monkeypatch.setattr(
        type(packed),
        "dense_rows",
        lambda self, *given: made.append(rows := whole(self, *given)) or rows,
    )
    got = packed(x, labels)
    (mine,) = torch.autograd.grad(got, x)
    assert max(rows.numel() for rows in made) == at_once
    assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_an_embedding_and_its_tied_head() -> None:
    plain, head = nn.Embedding(83, 64), LMHead(64, 83, bias=False)
    head.weight = plain.weight
    for spec in (PRESETS["int8"], OUTLIERS):
        packed, tied = pack(plain, spec), store_packed(head, spec)
        tied.share_(packed)
        ids = torch.tensor([[0, 5], [82, 16]])
        assert torch.equal(packed(ids), packed.dense(torch.float32)[ids])
        assert tied.packed is packed.packed
        assert torch.equal(tied.dense(torch.float32), packed.dense(torch.float32))


@pytest.mark.parametrize("spec", [EXACT, PRESETS["int8"], PRESETS["int8-dynamic"]])
def test_experts(spec: QuantSpec) -> None:
    """Some have no rows; widths that fill no panel."""
    plain = Experts(64, MoESpec(4, 2, 96))
    packed, twin = pack(plain, spec), copy.deepcopy(plain)
    with torch.no_grad():
        for key in plain.stack_sizes():
            getattr(twin, key).copy_(packed.dense(key, torch.float32))
    x, ends = draw(11, 64).requires_grad_(), torch.tensor([4, 4, 9, 11])
    got, want = packed(x, ends), twin(x, ends)
    off = 1e-5 if spec.activations == "float" else 0.03
    assert (got - want).abs().max() <= off * want.abs().max()
    if spec.activations == "float":
        (mine,), (theirs,) = torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x)
        assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_last_layer_of_t5() -> None:
    """It computes in fp32 where the rest is fp16."""
    mlp = MLP(64, MLPSpec(128, "gelu", gated=True, bias=False, widens_half=True)).half()
    twin = copy.deepcopy(mlp)
    mlp.down_proj = pack(mlp.down_proj, EXACT)
    with torch.no_grad():
        twin.down_proj.weight.copy_(mlp.down_proj.dense(torch.float16))
    x = draw(3, 64).half()
    got, want = mlp(x), twin(x)
    assert got.dtype == want.dtype == torch.float32
    assert_close(got, want, rtol=5e-3, atol=1e-3)


def test_outliers_take_the_worst_columns() -> None:
    """A column a hundred times larger spoils its group; kept apart it does not."""
    plain = nn.Linear(256, 64, bias=False)
    with torch.no_grad():
        plain.weight[:, [3, 77, 200]] *= 100
    kept = pack(plain, QuantSpec(4, 32, outlier_ratio=3 / 256))
    assert kept.outlier_columns.tolist() == [3, 77, 200]
    usual = pack(plain, QuantSpec(4, 32))
    errors = [(m.dense(torch.float32) - plain.weight).norm() for m in (kept, usual)]
    assert errors[0] < 0.2 * errors[1]
    x = draw(5, 256)
    want = F.linear(x, plain.weight)
    offs = [(m(x) - want).norm() for m in (kept, usual)]
    assert offs[0] < 0.2 * offs[1]


def test_a_compiled_layer_is_one_graph() -> None:
    packed = nn.Sequential(pack(nn.Linear(64, 32), PRESETS["int8"]), nn.GELU())
    x = draw(3, 64).requires_grad_()
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    got, want = compiled(x), packed(x)
    assert_close(got, want)
    (mine,), (theirs,) = torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x)
    assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("module", "spec", "said"),
    [
        (nn.LayerNorm(32), PRESETS["int8"], "a LayerNorm cannot be quantized"),
        (nn.Linear(40, 8), PRESETS["int8"], r"not a multiple of 32 \(nearest: 32 or 64\)"),
        (nn.Linear(96, 8), PRESETS["int4-128"], "not a multiple of 128"),
        (Experts(64, MoESpec(2, 1, 48)), PRESETS["int4"], "input size 48"),
        (Experts(64, MoESpec(2, 1, 64)), OUTLIERS, "not supported for experts"),
        (store_packed(nn.Linear(32, 8), EXACT), EXACT, "already quantized"),
    ],
)
def test_what_cannot_be_packed(module: nn.Module, spec: QuantSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        store_packed(module, spec)
