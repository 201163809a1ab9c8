"""The CPU's attention kernel against plain softmax in float64, on every instruction set here."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.native import processor_features
from bmforge.nn import host_attention as module
from bmforge.nn.attention import compute_attention
from bmforge.nn.host_attention import can_use_host_attention, host_attention

pytestmark = pytest.mark.skipif(
    module._kernel() is None, reason="no C++ compiler: torch's kernel is used"
)
# Instruction set of the variant, and what a processor must have to run it.
VARIANTS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}
Three = tuple[Tensor, Tensor, Tensor]
# rows, heads, shared heads, queries, keys, width, causal, mask
CASES = {
    "causal": (2, 4, 4, 130, 130, 64, True, ""),
    "grouped": (2, 6, 2, 100, 100, 32, True, ""),
    "to-a-memory": (2, 4, 4, 70, 141, 48, False, ""),
    "padded": (3, 2, 1, 65, 65, 80, False, "keys"),
    "masked": (2, 2, 2, 150, 150, 16, False, "pairs"),
    "one-tile": (1, 1, 1, 16, 64, 128, False, ""),
}


def draw(
    case: str, dtype: torch.dtype = torch.float32
) -> tuple[Three, Tensor | None, bool, Tensor]:
    rows, heads, shared, queries, keys, width, causal, kind = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def normal(count: int, tokens: int) -> Tensor:
        flat = torch.randn(rows, tokens, count * width, generator=generator).to(dtype)
        return flat.unflatten(-1, (count, width)).transpose(1, 2)

    given = normal(heads, queries), normal(shared, keys), normal(shared, keys)
    mask = None
    if kind:
        mask = (
            torch.rand(rows, 1, queries if kind == "pairs" else 1, keys, generator=generator) > 0.5
        )
        mask[..., 0] = True
    for x in given:
        x.requires_grad_()
    return given, mask, causal, normal(heads, queries)


def plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, kept: Tensor
) -> Tensor:
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) * kept) @ value


def compare(case: str, dtype: torch.dtype, kept: Tensor, dropout: float = 0.0) -> float:
    """Return the largest error of output and gradients, as a share of their largest value."""
    given, mask, causal, grad = draw(case, dtype)
    torch.manual_seed(7)
    got = host_attention(*given, mask, causal, None, dropout)
    got_grads = torch.autograd.grad(got, given, grad)
    wide = tuple(x.detach().double().requires_grad_() for x in given)
    want = plain(wide[0], wide[1], wide[2], mask, causal, kept)
    want_grads = torch.autograd.grad(want, wide, grad.double())
    pairs = zip((got, *got_grads), (want, *want_grads), strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if VARIANTS[request.param] not in processor_features():
        pytest.skip(f"this processor has no {VARIANTS[request.param]}")
    library = module._compile(f"-march={request.param} -ffp-contract=fast")
    assert isinstance(library, ctypes.CDLL)
    monkeypatch.setattr(module, "_load", lambda: library)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("variant")
def test_equals_plain_softmax(case: str) -> None:
    assert compare(case, torch.float32, torch.ones(())) < 2e-6


@pytest.mark.parametrize("case", ["grouped", "padded"])
def test_half_precision_is_summed_wide(case: str) -> None:
    """Only what goes in and comes out is rounded: 2^-9, and again where outputs meet gradients."""
    assert compare(case, torch.bfloat16, torch.ones(())) < 2 * 2**-8


@pytest.mark.parametrize("case", ["grouped", "masked"])
@pytest.mark.usefixtures("variant")
def test_dropout(case: str) -> None:
    """Which weights are kept is read off by values that are unit vectors; backward keeps them."""
    dropout, (query, key, _) = 0.25, draw(case)[0]
    keys, room = key.shape[2], -key.shape[2] % 16
    units = F.pad(torch.eye(keys), (0, room)).expand(*key.shape[:2], keys, keys + room)
    asking, asked = (x.new_zeros(*x.shape[:3], keys + room) for x in (query, key))
    torch.manual_seed(7)
    kept = host_attention(asking, asked, units, dropout=dropout)[..., :keys] * keys
    values = set(kept.unique().mul(1 - dropout).round(decimals=4).tolist())
    assert values == {0.0, 1.0}
    share = float((kept > 0).float().mean())
    assert abs(share - (1 - dropout)) < 4 * (dropout * (1 - dropout) / kept.numel()) ** 0.5
    assert len({tuple(line.tolist()) for line in kept.flatten(0, 2)}) == kept[..., 0].numel()
    assert compare(case, torch.float32, kept.double(), dropout) < 2e-6


def test_what_sees_nothing_is_zero() -> None:
    given, _, _, grad = draw("masked")
    mask = torch.ones(2, 1, 150, 150, dtype=torch.bool)
    mask[1, :, 3] = False
    out = host_attention(*given, mask)
    assert out[1, :, 3].abs().max() == 0
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, given, grad))


def test_threads_do_not_matter() -> None:
    given, mask, causal, grad = draw("grouped")
    threads, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        out = host_attention(*given, mask, causal)
        found.append([out, *torch.autograd.grad(out, given, grad)])
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_as_one_graph(dropout: float) -> None:
    given, mask, _, grad = draw("padded")

    def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return compute_attention(query, key, value, mask, None, False, None, dropout)

    compiled = torch.compile(mix, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    got = compiled(*given)
    got_grads = torch.autograd.grad(got, given, grad)
    torch.manual_seed(1)
    want = mix(*given)
    want_grads = torch.autograd.grad(want, given, grad)
    assert all(
        torch.equal(a, b) for a, b in zip((got, *got_grads), (want, *want_grads), strict=True)
    )


def test_what_it_does_not_take() -> None:
    query = torch.randn(1, 2, 16, 32)
    assert can_use_host_attention(query)
    assert not can_use_host_attention(query[:, :, :15])
    assert not can_use_host_attention(query[..., :24])
    assert not can_use_host_attention(query.double())
    assert not can_use_host_attention(query.to("meta"))
    assert not can_use_host_attention(query, torch.ones(1, 2, 16, 16, dtype=torch.bool))
