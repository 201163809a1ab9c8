"""The chunked linear cross-entropy against torch's cross-entropy on whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bmforge.errors import ShapeError
from bmforge.nn import (
    HeadInput,
    LMHead,
    linear_cross_entropy,
    linear_distillation,
    linear_logprobs,
    losses,
    tiled_logits,
)
from bmforge.testing import assert_close

V, D = 11, 6


def make_inputs(rows: int, dtype: torch.dtype, bias: bool) -> dict[str, torch.Tensor | None]:
    """Random hidden states, head and bias that want gradients."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    return {"hidden": draw(rows, D), "weight": draw(V, D), "bias": draw(V) if bias else None}


def make_labels(rows: int, ignored: str) -> torch.Tensor:
    """Random labels, none, some or all of them -100."""
    labels = torch.randint(V, (rows,), generator=torch.Generator().manual_seed(rows + 1))
    if ignored == "some":
        labels[::3] = -100
    return labels if ignored != "all" else torch.full_like(labels, -100)


def compute_plain(
    inputs: dict[str, torch.Tensor | None], labels: torch.Tensor, num_items: float | None
) -> torch.Tensor:
    """The sum of torch's token losses over the count, 0 where there is no label."""
    logits = F.linear(inputs["hidden"], inputs["weight"], inputs["bias"])
    count = max(1, int((labels != -100).sum())) if num_items is None else num_items
    return F.cross_entropy(logits, labels, reduction="sum") / count


def set_tiles(monkeypatch: pytest.MonkeyPatch, tokens: int, columns: int, keeps: bool) -> None:
    """So many tokens at a time, and columns; logits are kept, or made twice."""
    few, most = (1, tokens * V) if keeps else (1 << 40, 0)
    monkeypatch.setattr(losses, "_FEW_TOKENS", few)
    monkeypatch.setattr(losses, "_HOST_CHUNK_ELEMENTS", most)
    monkeypatch.setattr(losses, "_MANY_TOKENS", tokens)
    monkeypatch.setattr(losses, "_HOST_TILE_ELEMENTS", min(tokens, 8) * columns)


@pytest.mark.parametrize("tokens", [1, 3, 8, 1000])
@pytest.mark.parametrize("columns", [1, 4, 1000])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("ignored", "bias", "num_items"),
    [("none", False, None), ("some", True, None), ("all", True, None), ("some", True, 5.5)],
)
def test_equals_torch(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    columns: int,
    keeps: bool,
    dtype: torch.dtype,
    ignored: str,
    bias: bool,
    num_items: float | None,
) -> None:
    """Loss and all gradients of 8 tokens and 11 columns, whatever the tiles."""
    set_tiles(monkeypatch, tokens, columns, keeps)
    labels = make_labels(8, ignored)
    results = []
    for compute in (compute_plain, None):
        inputs = make_inputs(8, dtype, bias)
        if compute is None:
            loss = linear_cross_entropy(
                inputs["hidden"], inputs["weight"], labels, inputs["bias"], num_items
            )
        else:
            loss = compute(inputs, labels, num_items)
        (loss * 1.7).backward()
        results.append({n: t.grad for n, t in inputs.items() if t is not None} | {"loss": loss})
    assert_close(results[1], results[0])


@pytest.mark.parametrize("kind", ["cross_entropy", "logprobs", "distillation"])
def test_tokens_without_labels_cost_no_products(kind: str) -> None:
    """A quarter of the tokens has labels: a quarter of the operations, the same gradients."""
    labels = make_labels(16, "none")
    labels[torch.arange(16) % 4 != 1] = -100
    flops, results = [], []
    for rows in (slice(None), slice(1, None, 4)):
        inputs = make_inputs(16, torch.float64, True)
        head = HeadInput(inputs["hidden"][rows], inputs["weight"], inputs["bias"])
        with FlopCounterMode(display=False) as counter:
            if kind == "cross_entropy":
                loss = linear_cross_entropy(*head[:2], labels[rows], head.bias)
            elif kind == "logprobs":
                loss = linear_logprobs(head, labels[rows])[0].sum()
            else:
                teacher = head.detach()._replace(bias=None)
                loss = linear_distillation(head, teacher, labels[rows])
            loss.backward()
        flops.append(counter.get_total_flops())
        results.append({name: tensor.grad for name, tensor in inputs.items()} | {"loss": loss})
    assert flops[0] == flops[1]
    assert_close(results[0], results[1])


def test_no_gradients_wanted() -> None:
    """The loss is the same without autograd, and for a frozen head."""
    inputs, labels = make_inputs(8, torch.float32, True), make_labels(8, "some")
    plain = compute_plain(inputs, labels, None)
    with torch.no_grad():
        loss = linear_cross_entropy(inputs["hidden"], inputs["weight"], labels, inputs["bias"])
    assert_close(loss, plain.detach())
    frozen = [inputs["weight"].detach(), labels, inputs["bias"].detach()]
    linear_cross_entropy(inputs["hidden"], *frozen).backward()
    (expected,) = torch.autograd.grad(plain, inputs["hidden"])
    assert_close(inputs["hidden"].grad, expected)


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_added_and_hidden_columns_in_tiles(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """A low-rank part's products and gradients; columns of which all of a tile are -inf."""
    set_tiles(monkeypatch, 3, 4, keeps)
    labels = torch.randint(5, V, (8,), generator=torch.Generator().manual_seed(3))
    results = []
    for is_plain in (True, False):
        inputs = make_inputs(8, torch.float64, True)
        with torch.no_grad():
            inputs["bias"][:5] = -torch.inf
        low, rows = torch.linspace(-1, 1, 16).view(8, 2), torch.linspace(-2, 1, 2 * V).view(V, 2)
        low, rows = low.double().requires_grad_(), rows.double().requires_grad_()
        hidden, weight, bias = inputs["hidden"], inputs["weight"], inputs["bias"]
        if is_plain:
            loss = F.cross_entropy(F.linear(hidden, weight, bias) + low @ rows.t(), labels)
        else:
            loss = linear_cross_entropy(hidden, weight, labels, bias, added=[(low, rows)])
        loss.backward()
        tensors = {"hidden": hidden, "weight": weight, "bias": bias, "low": low, "rows": rows}
        results.append({name: tensor.grad for name, tensor in tensors.items()} | {"loss": loss})
    assert_close(results[1], results[0])


@pytest.mark.parametrize("keeps", [True, False])
def test_bf16_gradients_are_summed_over_tiles_in_fp32(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """As near the exact ones as with one tile, where every tile's part is rounded alone."""
    labels, results = make_labels(64, "none"), []
    half = {n: t.detach().bfloat16() for n, t in make_inputs(64, torch.float32, True).items()}
    for dtype, columns in ((torch.float64, V), (torch.bfloat16, V), (torch.bfloat16, 2)):
        set_tiles(monkeypatch, 8, columns, keeps)
        inputs = {name: tensor.to(dtype).requires_grad_() for name, tensor in half.items()}
        linear_cross_entropy(inputs["hidden"], inputs["weight"], labels, inputs["bias"]).backward()
        results.append(inputs)
    for name in half:
        exact, whole, tiled = (result[name].grad.double() for result in results)
        assert (tiled - exact).norm() < 2 * (whole - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kept_16_bit_logits_give_the_gradients_of_logits_computed_again(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    labels, results = make_labels(64, "some"), []
    for keeps in (True, False):
        set_tiles(monkeypatch, 8, 2, keeps)
        inputs = make_inputs(64, dtype, True)
        loss = linear_cross_entropy(inputs["hidden"], inputs["weight"], labels, inputs["bias"])
        loss.backward()
        results.append([loss.detach(), *(tensor.grad for tensor in inputs.values())])
    for kept, again in zip(*results, strict=True):
        assert torch.equal(kept, again)


def test_kept_logits_have_the_bytes_of_their_own_dtype() -> None:
    tiling = losses.Tiling(tokens=4, columns=2, keeps=True)
    for dtype, number_bytes in ((torch.float32, 4), (torch.bfloat16, 2)):
        inputs = make_inputs(8, dtype, False)
        given = inputs["hidden"], inputs["weight"], None, (), (False,) * 6
        logits = losses.TiledLogits(losses.TiledHead(*given, torch.float32), tiling)
        buffers = [t for t in vars(logits).values() if isinstance(t, torch.Tensor)]
        spare = 0 if dtype == torch.float32 else 4 * 2 * 4  # one tile in fp32
        assert sum(t.nbytes for t in buffers) == 4 * 12 * number_bytes + spare


def test_num_items_as_tensor() -> None:
    """A count that is a tensor divides as a number does."""
    inputs, labels = make_inputs(8, torch.float32, False), make_labels(8, "some")
    arguments = (inputs["hidden"], inputs["weight"], labels, None)
    one = linear_cross_entropy(*arguments, 12)
    assert torch.equal(linear_cross_entropy(*arguments, torch.tensor(12)), one)


def test_bf16_is_summed_in_fp32() -> None:
    """Half-precision inputs give an fp32 loss near the exact one."""
    inputs, labels = make_inputs(64, torch.float32, False), make_labels(64, "none")
    half = {n: None if t is None else t.detach().bfloat16() for n, t in inputs.items()}
    loss = linear_cross_entropy(half["hidden"], half["weight"], labels)
    assert loss.dtype == torch.float32
    exact = {n: None if t is None else t.double() for n, t in half.items()}
    assert_close(loss.double(), compute_plain(exact, labels, None), rtol=1e-2)


def test_causal_loss_shifts() -> None:
    """Position t predicts label t + 1; the last position predicts nothing."""
    hidden, weight = torch.randn(2, 5, D), torch.randn(V, D)
    labels = make_labels(10, "some").view(2, 5)
    logits = hidden @ weight.T
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    head = LMHead(D, V, bias=False)
    head.weight.data = weight
    assert_close(head(hidden, labels, shift=True), expected)


def test_extreme_logits_stay_finite() -> None:
    """Logits of thousands do not overflow."""
    hidden = torch.eye(2, requires_grad=True)
    weight = torch.tensor([[5e3, 0.0], [0.0, 5e3], [-5e3, -5e3]])
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 0]))
    loss.backward()
    assert_close(loss, torch.tensor(2.5e3))
    assert hidden.grad.isfinite().all()


def test_a_loss_scale_reaches_fp16_gradients_that_would_vanish_without():
    """One sure token: the other classes' probabilities lie far below fp16's smallest number."""
    hidden = torch.eye(2, 4, dtype=torch.float16).requires_grad_()
    weight = torch.zeros(3, 4, dtype=torch.float16)
    weight[0, 0], weight[0, 1] = 18.0, 18.0
    weight.requires_grad_()
    labels, loss_scale = torch.tensor([0, 0]), 2.0**20
    linear_cross_entropy(hidden, weight, labels, num_items=2 / loss_scale).backward()
    twin = weight.detach().double().requires_grad_()
    F.cross_entropy(F.linear(hidden.detach().double(), twin), labels).backward()
    assert weight.grad[1, 0] != 0
    others = slice(1, None)  # the sure class itself is 1 - 3e-8, which fp32 rounds to 1
    got, want = weight.grad.double() / loss_scale, twin.grad
    assert_close(got[others], want[others], rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("wrong", [-1, -99, V])
def test_labels_outside_of_the_classes(wrong: int) -> None:
    """Neither learned as another token nor left to an index error."""
    inputs, labels = make_inputs(8, torch.float32, False), make_labels(8, "some")
    labels[1] = wrong
    with pytest.raises(ShapeError, match=rf"labels are out of range.*{V} classes.*Use -100"):
        linear_cross_entropy(inputs["hidden"], inputs["weight"], labels)


def test_a_cut_head_counts_all_rows() -> None:
    """With a part of the rows here, the classes are those of all processes."""

    class Whole:
        """All rows in one process, told as a part of twice as many."""

        rows, first, width, is_last = 2 * V, 0, V, False

        def sum_backward(self, x: torch.Tensor) -> torch.Tensor:
            return x

        max_ = sum_ = sum_backward

    head = LMHead(D, V, bias=False)
    head.vocab = Whole()
    hidden, labels = torch.randn(3, D), torch.tensor([0, V, -100])
    assert head(hidden, labels).isfinite()
    for wrong in (-1, 2 * V):
        with pytest.raises(ShapeError, match=f"{2 * V} classes"):
            head(hidden, torch.tensor([0, wrong, -100]))


def test_no_gradient_is_made_where_none_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `no_grad` a head that is trained costs what a frozen one does."""
    inputs, labels = make_inputs(8, torch.float32, True), make_labels(8, "some")
    added = []
    monkeypatch.setattr(tiled_logits, "_add_product_", lambda *given, **_: added.append(given))
    with torch.no_grad():
        linear_cross_entropy(inputs["hidden"], inputs["weight"], labels, inputs["bias"])
    assert not added
