"""Generalized Jensen-Shannon divergence against torch's KL divergence, from hidden states."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bmforge.errors import ShapeError
from bmforge.nn import HeadInput, jensen_shannon
from bmforge.nn.jensen_shannon import linear_jsd


def _head(seed: int, width: int, tokens: int = 7, vocab: int = 11) -> HeadInput:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.requires_grad_(True)

    low = (draw(tokens, 2), draw(vocab, 2))
    return HeadInput(draw(tokens, width), draw(vocab, width), draw(vocab), (low,))


def _logits(head: HeadInput) -> torch.Tensor:
    low, up = head.added[0]
    return head.hidden @ head.weight.T + head.bias + low @ up.T


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_divergence_and_gradient_are_torchs(
    beta: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jensen_shannon, "_CHUNK_ELEMENTS", chunk * 11)
    student, teacher = _head(0, 4), _head(1, 6)
    tensors = [student.hidden, student.weight, student.bias, *student.added[0]]
    weights = torch.linspace(1, 2, 7, dtype=torch.float64)
    found, reverse = linear_jsd(student, teacher, beta, temperature=0.7)
    logs = [(_logits(head) / 0.7).log_softmax(-1) for head in (student, teacher)]
    logs[1] = logs[1].detach()

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)

    if beta in (0.0, 1.0):
        wanted = kl(logs[1], logs[0]) if beta == 0 else kl(logs[0], logs[1])
    else:
        mixture = (beta * logs[1].exp() + (1 - beta) * logs[0].exp()).log()
        wanted = beta * kl(logs[1], mixture) + (1 - beta) * kl(logs[0], mixture)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(reverse, kl(logs[0], logs[1]).detach(), rtol=1e-10, atol=1e-12)
    grads = torch.autograd.grad((found * weights).sum(), tensors)
    expected = torch.autograd.grad((wanted * weights).sum(), tensors)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-11)
    assert teacher.weight.grad is None


def _plain_divergence(student: list, teacher: list, beta: float) -> torch.Tensor:
    """The divergence of two lists of logits, whose None entries are excluded outcomes."""

    def probabilities(logits: list) -> list:
        total = sum(z.exp() for z in logits if z is not None)
        return [None if z is None else z.exp() / total for z in logits]

    def kl(p: list, q: list) -> torch.Tensor:
        pairs = [(a, b) for a, b in zip(p, q, strict=True) if a is not None]
        return sum(a * (a.log() - b.log()) for a, b in pairs)

    p, q = probabilities(student), probabilities(teacher)
    if beta in (0, 1):
        return kl(q, p) if beta == 0 else kl(p, q)
    zero = torch.zeros((), dtype=torch.float64)
    mixture = [
        beta * (zero if b is None else b) + (1 - beta) * (zero if a is None else a)
        for a, b in zip(p, q, strict=True)
    ]
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


@pytest.mark.parametrize(
    ("beta", "of_student", "of_teacher"),
    [
        (0.0, (2, 5), (2, 5)),
        (0.0, (2,), (2, 5)),
        (0.3, (2, 5), (2, 5)),
        (0.3, (2,), (5,)),
        (0.5, (), (2, 5)),
        (1.0, (2, 5), (2, 5)),
        (1.0, (2, 5), (5,)),
    ],
)
def test_excluded_tokens(
    beta: float, of_student: tuple[int, ...], of_teacher: tuple[int, ...]
) -> None:
    """Logits of -inf in one or both models: values and gradients of a plain loop over tokens."""
    student, teacher = _head(0, 4), _head(1, 6)
    for head, excluded in ((student, of_student), (teacher, of_teacher)):
        with torch.no_grad():
            head.bias[list(excluded)] = -torch.inf
    tensors = [student.hidden, student.weight, student.bias, *student.added[0]]
    found = linear_jsd(student, teacher, beta)[0]
    wanted = torch.stack(
        [
            _plain_divergence(
                [None if n in of_student else z for n, z in enumerate(own)],
                [None if n in of_teacher else z for n, z in enumerate(other)],
                beta,
            )
            for own, other in zip(_logits(student), _logits(teacher).detach(), strict=True)
        ]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    grads = torch.autograd.grad(found.sum(), tensors)
    expected = torch.autograd.grad(wanted.sum(), tensors)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-11)


def test_a_token_that_only_the_teacher_excludes_has_an_infinite_reverse_divergence() -> None:
    student, teacher = _head(0, 4), _head(1, 6)
    with torch.no_grad():
        teacher.bias[3] = -torch.inf
    assert (linear_jsd(student, teacher, 1.0)[0] == torch.inf).all()


def test_vocabularies_of_other_sizes_are_refused() -> None:
    with pytest.raises(ShapeError, match="vocab_size=11 and 12"):
        linear_jsd(_head(0, 4), _head(1, 4, vocab=12), 1.0)


def test_no_token_has_no_divergence() -> None:
    assert linear_jsd(_head(0, 4, tokens=0), _head(1, 4, tokens=0), 0.5).shape == (2, 0)
