"""Stored teacher outputs, compared with the closed form and with the teacher itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_models import VOCAB, make_bert, make_inputs, make_llama, make_t5, task_loss
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from bmforge.compress import CompressConfig, DistillConfig, Distiller, DistillLoss, compress
from bmforge.compress.distill import TeacherAnswers, write_answers
from bmforge.errors import CheckpointError, ConfigError, DataError
from bmforge.nn import HeadInput, linear_distillation
from bmforge.nn import top_k_distillation as top_k
from bmforge.testing import assert_close

ITEMS = 11.0
Make = Callable[..., Any]


def learn(student: Any, teacher: Any, batch: Any, temperature: float) -> dict[str, Tensor]:
    """Return the loss and all gradients."""
    said = DistillConfig(losses=(DistillLoss(temperature=temperature),), task_weight=0.0)
    distiller = Distiller(student, teacher, said)
    student.zero_grad()
    loss = distiller.objective(task_loss)(student, batch, ITEMS)
    loss.backward()
    distiller.leave_()
    grads = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("make", [make_llama, make_bert])
def test_the_whole_vocabulary_is_the_teacher(make: Make, tmp_path: Path) -> None:
    """With k its size nothing is left over, and the loss and all gradients are those of KL."""
    student, teacher = make(0), make(1, layers=3)
    batch = make_inputs(student)
    kept = write_answers(teacher, [batch], tmp_path / "kept", count=VOCAB, temperature=2.0)
    got = learn(student, TeacherAnswers(kept), batch, 2.0)
    want = learn(student, teacher, batch, 2.0)
    assert want["loss"] > 0.1
    assert_close(got, want, rtol=1e-5, atol=1e-7)  # in files they are fp32


@pytest.mark.parametrize("count", [1, 5, VOCAB - 1])
def test_the_rest_is_one_outcome(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the formula on whole logits, chunk by chunk, with the gradient of every input."""
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = (
        draw(*shape).requires_grad_() for shape in ((9, 4), (VOCAB, 4), (VOCAB,))
    )
    low, rows = (draw(*shape).requires_grad_() for shape in ((9, 2), (VOCAB, 2)))
    theirs, labels = 2 * draw(9, VOCAB), torch.arange(9)
    labels[4] = -100
    kept = top_k.pick_answers(theirs, count, 1.5)
    inputs = (hidden, weight, bias, low, rows)
    monkeypatch.setattr(top_k, "_CHUNK_ELEMENTS", 2 * VOCAB)
    student = HeadInput(hidden, weight, bias, ((low, rows),))
    loss = top_k.linear_answers(student, kept, labels, temperature=1.5, num_items=7.0)
    got = gather(loss, inputs)

    mine = ((hidden @ weight.t() + bias + low @ rows.t()) / 1.5).softmax(-1)
    share = (theirs / 1.5).softmax(-1)
    best = torch.zeros_like(share).scatter(-1, share.topk(count).indices, 1.0).bool()
    parts = [(share * torch.log(share / mine)).where(best, 0.0).sum(-1)]
    rest = [x.where(~best, 0.0).sum(-1) for x in (share, mine)]
    parts.append(rest[0] * torch.log(rest[0] / rest[1]))
    plain = (sum(parts) * (labels >= 0)).sum() * 1.5**2 / 7.0  # type: ignore[attr-defined]
    assert_close(got, gather(plain, inputs), rtol=1e-9, atol=1e-12)


def gather(loss: Tensor, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The loss and the gradient of every input."""
    grads = torch.autograd.grad(loss, inputs)
    return {"loss": loss.detach(), **{str(n): grad for n, grad in enumerate(grads)}}


def test_fewer_outcomes_are_less_apart() -> None:
    """Putting outcomes together can only lose: KL grows with k, to that of all."""
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (torch.randn(6, VOCAB, generator=generator).double() for _ in range(2))
    found = [
        top_k.compare_answers(mine, top_k.pick_answers(theirs, count)).sum()
        for count in range(1, VOCAB + 1)
    ]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(found))
    eye = torch.eye(VOCAB, dtype=torch.float64)
    whole = linear_distillation(
        HeadInput(mine, eye), HeadInput(theirs, eye), torch.zeros(6).long(), num_items=1.0
    )
    assert found[-1] == pytest.approx(float(whole), rel=1e-12)


def test_rows_are_found_in_any_order(tmp_path: Path) -> None:
    """Batches come mixed and in other sizes, several to a file; a strange row is noticed."""
    student, teacher = make_llama(0), make_llama(1)
    batch = make_inputs(student)
    singles = [{n: t[row : row + 1] for n, t in batch.items()} for row in range(3)]
    kept = write_answers(teacher, singles + singles[:1], tmp_path / "kept", count=4, shard_bytes=1)
    assert len(list(kept.glob("*.safetensors"))) == 3
    opened = TeacherAnswers(kept)
    turned = {name: tensor.flip(0) for name, tensor in batch.items()}
    got, want = (learn(student, opened, one, 1.0) for one in (turned, batch))
    assert_close(got, want, rtol=1e-9, atol=1e-12)
    strange = batch["input_ids"][:1] + 1
    with pytest.raises(DataError, match="no stored predictions for sequence 1"):
        opened.look_up({"input_ids": torch.cat((batch["input_ids"][:1], strange))})
    with pytest.raises(CheckpointError, match="already exists"):
        write_answers(teacher, singles, kept)
    (kept / "answers-00002.safetensors").write_bytes(b"0")
    with pytest.raises(CheckpointError, match="damaged or missing"):
        TeacherAnswers(kept)


def test_a_job_learns_from_answers(tmp_path: Path) -> None:
    """As from the teacher; the loss falls, and evaluation does not look anything up."""
    student, teacher = make_llama(0), make_llama(1)
    batch = make_inputs(student)
    opened = TeacherAnswers(write_answers(teacher, [batch], tmp_path / "kept", count=8))
    config = CompressConfig(distill=DistillConfig(task_weight=0.0))
    job = compress(student, config, teacher=opened)
    objective, optimizer = job.objective(task_loss), torch.optim.AdamW(student.parameters(), 0.01)
    losses = []
    for _ in range(8):
        loss = objective(student, batch, ITEMS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.after_step_()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    other = {**batch, "input_ids": batch["input_ids"].flip(1)}
    assert objective(student.eval(), other, ITEMS) > 0
    job.finish_()


def test_what_answers_cannot_teach_is_said(tmp_path: Path) -> None:
    """Another vocabulary, temperature or kind of loss, and models whose answers are elsewhere."""
    teacher = make_llama(1)
    batch = make_inputs(teacher)
    kept = TeacherAnswers(write_answers(teacher, [batch], tmp_path / "kept", count=4))
    hidden = DistillLoss(kind="hidden")
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2))
    for student, losses, said in (
        (make_llama(0, vocab_size=VOCAB + 1), (DistillLoss(),), "vocab_size=30"),
        (make_llama(0), (DistillLoss(temperature=2.0),), "stored at temperature=1.0"),
        (make_llama(0), (DistillLoss(), hidden), "only logits"),
        (theirs, (DistillLoss(),), "without a language-model head of bmforge"),
    ):
        with pytest.raises(ConfigError, match=said):
            Distiller(student, kept, DistillConfig(losses=losses))
    with pytest.raises(ConfigError, match="only one of them"):
        DistillConfig(teacher="a", answers="b")
    for model, options, said in (
        (teacher, {"count": VOCAB + 1}, f"must be from 1 to the vocabulary size {VOCAB}"),
        (make_t5(0), {"count": 2}, "not encoder-decoders"),
    ):
        with pytest.raises(ConfigError, match=said):
            write_answers(model, [{"input_ids": batch["input_ids"]}], tmp_path / "no", **options)
    with pytest.raises(ConfigError, match="no batches"):
        write_answers(teacher, [], tmp_path / "no", count=2)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
