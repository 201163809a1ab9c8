"""The chunked divergence of two heads against torch's on whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.nn import HeadInput, linear_distillation, losses
from bmforge.testing import assert_close

V, D, WIDER, ROWS = 11, 6, 9, 8


def draw(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def make_head(seed: int, dtype: torch.dtype, width: int, extra: bool = True) -> HeadInput:
    """Hidden states, rows, and where asked a bias and a low-rank part."""
    hidden, weight = draw(seed, dtype, ROWS, width), draw(seed + 1, dtype, V, width)
    if not extra:
        return HeadInput(hidden, weight)
    added = ((draw(seed + 2, dtype, ROWS, 2), draw(seed + 3, dtype, V, 2)),)
    return HeadInput(hidden, weight, draw(seed + 4, dtype, V), added)


def logits_of(head: HeadInput) -> Tensor:
    """All of them."""
    found = F.linear(head.hidden, head.weight, head.bias)
    for low, rows in head.added:
        found = found + low @ rows.t()
    return found if head.softcap is None else head.softcap * (found / head.softcap).tanh()


def compute_plain(
    student: HeadInput, teacher: HeadInput, labels: Tensor, temperature: float
) -> Tensor:
    """The sum of torch's divergences times T^2 over the number of labels."""
    kept = labels != -100
    mine = F.log_softmax(logits_of(student)[kept] / temperature, -1)
    theirs = F.log_softmax(logits_of(teacher)[kept].detach() / temperature, -1)
    total = F.kl_div(mine, theirs, reduction="sum", log_target=True)
    return total * temperature**2 / max(1, int(kept.sum()))


def gradients(loss: Tensor, head: HeadInput) -> dict[str, Tensor]:
    wanted: dict[str, Any] = {"hidden": head.hidden, "weight": head.weight}
    if head.bias is not None:
        wanted |= {"bias": head.bias, "low": head.added[0][0], "rows": head.added[0][1]}
    found = torch.autograd.grad(loss, list(wanted.values()))
    return dict(zip(wanted, found, strict=True)) | {"loss": loss.detach()}


def make_labels(ignored: str = "some") -> Tensor:
    labels = torch.arange(ROWS) % V
    if ignored == "some":
        labels[::3] = -100
    return labels if ignored != "all" else torch.full_like(labels, -100)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (3, 4), (1000, 1000)])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize(("ignored", "temperature"), [("some", 1.0), ("none", 2.5), ("all", 2.0)])
@pytest.mark.parametrize("caps", [(None, None), (1.5, 2.0), (None, 1.0), (1.5, None)], ids=str)
def test_equals_torch(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    columns: int,
    keeps: bool,
    extra: bool,
    ignored: str,
    temperature: float,
    caps: tuple[float | None, float | None],
) -> None:
    """Loss and all gradients, whatever the tiles, of a teacher of another width."""
    monkeypatch.setattr(losses, "_FEW_TOKENS", 1 if keeps else 1 << 40)
    monkeypatch.setattr(losses, "_HOST_CHUNK_ELEMENTS", tokens * V if keeps else 0)
    monkeypatch.setattr(losses, "_MANY_TOKENS", tokens)
    monkeypatch.setattr(losses, "_HOST_TILE_ELEMENTS", min(tokens, ROWS) * columns)
    student = make_head(0, torch.float64, D, extra)._replace(softcap=caps[0])
    teacher = make_head(50, torch.float64, WIDER, extra)._replace(softcap=caps[1])
    labels = make_labels(ignored)
    want = gradients(compute_plain(student, teacher, labels, temperature), student)
    loss = linear_distillation(student, teacher, labels, temperature=temperature)
    assert_close(gradients(loss, student), want)


def test_single_precision() -> None:
    """To 1e-6 of what float64 gives."""
    student, teacher = make_head(0, torch.float32, D), make_head(50, torch.float32, WIDER)
    got = linear_distillation(student, teacher, make_labels(), temperature=2.0)
    wide = [HeadInput(*(_double(part) for part in head)) for head in (student, teacher)]
    want = compute_plain(*wide, make_labels(), 2.0)
    assert abs(got.item() - want.item()) <= 1e-6 * want.item()


def _double(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.double()
    return tuple(_double(one) for one in part) if part is not None else None


def test_a_student_that_is_its_teacher() -> None:
    """Has nothing to learn: exactly 0, and so is the gradient."""
    student = make_head(0, torch.float32, D)
    loss = linear_distillation(student, student, make_labels(), temperature=3.0)
    found = gradients(loss, student)
    assert {name: value.abs().max().item() for name, value in found.items()} == dict.fromkeys(
        found, 0.0
    )


def test_what_both_rule_out_counts_nothing() -> None:
    """A column of -inf, as of rows that only fill up, changes nothing."""
    student, teacher = make_head(0, torch.float64, D), make_head(50, torch.float64, WIDER)
    shut = torch.zeros(V, dtype=torch.float64)
    shut[3] = -torch.inf
    heads = [head._replace(bias=head.bias.detach() + shut) for head in (student, teacher)]
    got = linear_distillation(*heads, make_labels("none"))
    left = [index for index in range(V) if index != 3]
    fewer = [
        HeadInput(
            head.hidden,
            head.weight[left],
            head.bias[left],
            tuple((low, rows[left]) for low, rows in head.added),
        )
        for head in (student, teacher)
    ]
    assert_close(got.detach(), compute_plain(*fewer, make_labels("none"), 1.0).detach())


class TwoParts:
    """A `VocabCut` over two threads of control: the second one's numbers are known."""

    def __init__(self, first: int, rows: int) -> None:
        self.first, self.rows, self.width, self.is_last = first, V, rows, first > 0
        self.tops: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.others: TwoParts | None = None

    def max_(self, values: Tensor) -> Tensor:
        self.tops.append(values.clone())
        return values if self.others is None else torch.maximum(values, self.others.tops[0])

    def sum_(self, values: Tensor) -> Tensor:
        self.sums.append(values.clone())
        return values


def test_divided_vocabulary() -> None:
    """The parts of two processes add up to the whole; gradients of rows are those of the whole."""
    student, teacher = make_head(0, torch.float64, D, False), make_head(50, torch.float64, D, False)
    labels = make_labels()
    want = compute_plain(student, teacher, labels, 2.0)
    half = 6

    def run(cut: slice, vocab: Any) -> Tensor:
        heads = [HeadInput(h.hidden, h.weight[cut]) for h in (student, teacher)]
        return linear_distillation(*heads, labels, temperature=2.0, vocab=vocab)

    tops, parts = [], []
    for cut in (slice(0, half), slice(half, V)):
        vocab = TwoParts(cut.start, half)
        run(cut, vocab)
        tops.append(vocab)
    for number, cut in enumerate((slice(0, half), slice(half, V))):
        vocab = TwoParts(cut.start, half)
        vocab.others = tops[1 - number]
        run(cut, vocab)
        parts.append(vocab.sums[0])
    (mine, theirs), cross = (parts[0] + parts[1])[:2], (parts[0] + parts[1])[2]
    top = torch.maximum(tops[0].tops[0], tops[1].tops[0])
    each = cross / theirs + (mine.log() + top[0]) - (theirs.log() + top[1])
    assert each.shape[0] == int((labels != -100).sum())
    assert_close((each.mean() * 4).detach(), want.detach())


def test_bad_input() -> None:
    """Other vocabularies, other tokens, a temperature of nothing."""
    student, teacher = make_head(0, torch.float32, D), make_head(50, torch.float32, D)
    fewer = HeadInput(teacher.hidden, teacher.weight[:5])
    with pytest.raises(
        ShapeError, match="student has 11 tokens, but the vocabulary of the teacher has 5"
    ):
        linear_distillation(student, fewer, make_labels())
    short = teacher._replace(hidden=teacher.hidden[:3])
    with pytest.raises(ShapeError, match="predicts 8 tokens, but the teacher predicts 3"):
        linear_distillation(student, short, make_labels())
    with pytest.raises(ConfigError, match="temperature=0"):
        linear_distillation(student, teacher, make_labels(), temperature=0)
