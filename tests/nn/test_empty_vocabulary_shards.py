"""Losses over a sharded vocabulary in which some ranks have no row, against one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from bmforge.nn import HeadInput, linear_cross_entropy, linear_distillation, linear_logprobs
from bmforge.nn.subset_logprobs import linear_subset_logprobs, linear_top_k
from bmforge.testing import assert_close

TOKENS, WIDTH = 6, 5


class Ranks:
    """Ranks that are threads; values are reduced in a list that all of them see."""

    def __init__(self, size: int) -> None:
        self.size, self.values = size, [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def reduce(self, rank: int, values: torch.Tensor, is_max: bool) -> torch.Tensor:
        self.values[rank] = values.clone()
        self.barrier.wait()
        stack = torch.stack(self.values)
        values.copy_(stack.amax(0) if is_max else stack.sum(0))
        self.barrier.wait()
        return values


class Shard:
    """Shard of the vocabulary on one rank; a `VocabCut`."""

    def __init__(self, ranks: Ranks, rank: int, rows: int) -> None:
        self.ranks, self.rank, self.rows = ranks, rank, rows
        self.width = -(-rows // ranks.size)
        self.first, self.is_last = rank * self.width, rank == ranks.size - 1

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        return self.ranks.reduce(self.rank, values, is_max=False)

    def max_(self, values: torch.Tensor) -> torch.Tensor:
        return self.ranks.reduce(self.rank, values, is_max=True)


def cross_entropy(student: HeadInput, _: HeadInput, labels: Any, vocab: Any) -> torch.Tensor:
    return linear_cross_entropy(student.hidden, student.weight, labels, student.bias, vocab=vocab)


def distillation(student: HeadInput, teacher: HeadInput, labels: Any, vocab: Any) -> torch.Tensor:
    return linear_distillation(student, teacher, labels, vocab=vocab)


def logprobs(student: HeadInput, _: HeadInput, labels: Any, vocab: Any) -> torch.Tensor:
    return linear_logprobs(student, labels, temperature=0.7, vocab=vocab, with_entropy=True)


def top_tokens(student: HeadInput, teacher: HeadInput, _: Any, vocab: Any) -> torch.Tensor:
    best = linear_top_k(teacher, 2, vocab=vocab)
    own = linear_subset_logprobs(student, best.ids, vocab=vocab)
    return torch.cat((own, best.log_probs, best.rest[:, None]), 1)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    f.__name__: f for f in (cross_entropy, distillation, logprobs, top_tokens)
}


def run(name: str, tensors: list[torch.Tensor], vocab: Shard | None) -> list[torch.Tensor]:
    """Return values and the gradients of hidden states, weight and bias of the student."""
    labels = torch.tensor([0, 1, 2, 3, -100, 3])
    rows = slice(None) if vocab is None else slice(vocab.first, vocab.first + vocab.width)
    hidden, weight, bias = (t.clone() for t in (tensors[0], tensors[1][rows], tensors[2][rows]))
    inputs = [t.requires_grad_() for t in (hidden, weight, bias)]
    teacher = HeadInput(tensors[3], tensors[4][rows])
    values = LOSSES[name](HeadInput(*inputs), teacher, labels, vocab)
    factors = torch.linspace(1, 2, values.numel()).double().view_as(values)
    return [values.detach(), *torch.autograd.grad((values * factors).sum(), inputs)]


@pytest.mark.parametrize(("rows", "size"), [(4, 3), (5, 4), (4, 6)])
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_without_rows(name: str, rows: int, size: int) -> None:
    """Values on every rank, the summed gradient of the hidden states, and those of the rows."""
    draw = torch.Generator().manual_seed(rows)
    shapes = [(TOKENS, WIDTH), (rows, WIDTH), (rows,), (TOKENS, WIDTH), (rows, WIDTH)]
    tensors = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    wanted, ranks = run(name, tensors, None), Ranks(size)
    shards = [Shard(ranks, rank, rows) for rank in range(size)]
    assert shards[-1].first >= rows
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(lambda shard: run(name, tensors, shard), shards))
    for values, *_ in results:
        assert_close(values, wanted[0])
    assert_close(sum(result[1] for result in results), wanted[1])
    for position in (2, 3):
        assert_close(torch.cat([result[position] for result in results]), wanted[position])
