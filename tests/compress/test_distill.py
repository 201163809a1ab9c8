"""What a student learns from a teacher, against the formulas written out on whole tensors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distill_models import make_bert, make_inputs, make_llama, make_t5, task_loss
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from bmforge.compress import DistillConfig, Distiller, DistillLoss
from bmforge.compress.distill import losses
from bmforge.compress.distill.maps import find_pairs, pair_layers
from bmforge.errors import ConfigError
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close

ITEMS = 11.0


def distil(student: Any, teacher: Any, batch: Any, *wanted: DistillLoss, **config: Any) -> Any:
    """Return the loss and the distiller after one call."""
    distiller = Distiller(student, teacher, DistillConfig(losses=wanted, **config))
    return distiller.objective(task_loss)(student, batch, ITEMS), distiller


def grads_of(loss: Tensor, model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def plain_logits(student: Any, teacher: Any, batch: Any, temperature: float) -> Tensor:
    """KL of all tokens that predict a label."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    kept = F.pad(batch["labels"][:, 1:], (0, 1), value=-100) != -100
    mine, theirs = (model(**given).logits[kept] / temperature for model in (student, teacher))
    found = F.kl_div(
        F.log_softmax(mine, -1), F.log_softmax(theirs, -1), log_target=True, reduction="sum"
    )
    return found * temperature**2 / ITEMS


def counted(batch: Any) -> Tensor:
    """1 where a token predicts a label."""
    return (F.pad(batch["labels"][:, 1:], (0, 1), value=-100) != -100).double()


def test_logits_and_all_gradients() -> None:
    """The task's loss and the teacher's, of a deeper teacher."""
    student, teacher = make_llama(0), make_llama(1, layers=3)
    batch = make_inputs(student)
    loss, distiller = distil(student, teacher, batch, DistillLoss(weight=0.7, temperature=2.0))
    got = grads_of(loss, student) | {"loss": loss.detach()}
    distiller.leave_()
    taught = plain_logits(student, teacher.eval(), batch, 2.0)
    want_loss = task_loss(student, batch, ITEMS) + 0.7 * taught
    assert_close(got, grads_of(want_loss, student) | {"loss": want_loss.detach()})
    assert_close(distiller.parts["logits"], taught.detach())
    assert not any(p.requires_grad for p in teacher.parameters())


def plain_states(model: Any, batch: Any) -> list[Tensor]:
    """What comes out of the blocks."""
    found: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda m, a, out: found.append(out))
        for block in model.layers.values()
    ]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return found


def compare_plain(mine: Tensor, theirs: Tensor, form: str, weights: Tensor) -> Tensor:
    """Written out row by row."""
    total = torch.zeros((), dtype=mine.dtype)
    for x, y, w in zip(mine, theirs, weights, strict=True):
        if form == "mean_norm":
            x, y = (s / torch.linalg.norm(s[w > 0], dim=-1).mean() for s in (x, y))
        for t in range(len(w)):
            if form == "cosine":
                apart = 1 - x[t] @ y[t] / (x[t].norm() * y[t].norm())
            else:
                apart = ((x[t] - y[t]) ** 2).mean()
            total = total + w[t] * apart
    return total / ITEMS


@pytest.mark.parametrize("form", ["plain", "mean_norm", "cosine"])
def test_hidden_states(form: str) -> None:
    """Every layer of a student with half the teacher's layers."""
    student, teacher = make_llama(0), make_llama(1, layers=4)
    batch = make_inputs(student)
    one = DistillLoss(kind="hidden", form=form, layers="uniform", weight=3.0)
    loss, distiller = distil(student, teacher, batch, one)
    got = grads_of(loss, student)
    distiller.leave_()
    mine, theirs = plain_states(student, batch), plain_states(teacher.eval(), batch)
    parts = [compare_plain(mine[i], theirs[j], form, counted(batch)) for i, j in ((0, 1), (1, 3))]
    want = task_loss(student, batch, ITEMS) + 3.0 * (parts[0] + parts[1]) / 2
    assert_close(loss.detach(), want.detach())
    assert_close(got, grads_of(want, student))


@pytest.mark.parametrize("few", [True, False])
def test_attention_maps(few: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """KL of what tokens look at, against transformers' own attention weights."""
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", 1 if few else 1 << 22)
    student, teacher = make_llama(0), make_llama(1)
    batch = make_inputs(student)
    _, distiller = distil(student, teacher, batch, DistillLoss(kind="attention"))
    distiller.leave_()
    given = {name: value for name, value in batch.items() if name != "labels"}
    maps = []
    for number, model in enumerate((student, teacher)):
        model.save_pretrained(tmp_path / str(number))
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / str(number), attn_implementation="eager", dtype=torch.float64
        )
        maps.append(theirs(**given, output_attentions=True).attentions)
    want = torch.zeros((), dtype=torch.float64)
    for mine, other in zip(*maps, strict=True):
        each = (other * (other.clamp(min=1e-300).log() - mine.clamp(min=1e-300).log())).sum(-1)
        want = want + (each.mean(1) * counted(batch)).sum() / ITEMS / 2
    # transformers turns its tables in fp32.
    assert_close(distiller.parts["attention"], want.detach(), rtol=2e-5)


@pytest.mark.parametrize(("of", "heads"), [("query", 0), ("key", 4), ("value", 0)])
def test_relations(of: str, heads: int) -> None:
    """How alike tokens are, of a teacher with more heads of another width, by layers' outputs."""
    student, teacher = make_llama(0), make_llama(1, width=32, head_dim=16, num_kv_heads=4)
    batch = make_inputs(student)
    one = DistillLoss(kind="relation", of=of, relation_heads=heads, layers="last")
    loss, distiller = distil(student, teacher, batch, one)
    got = grads_of(loss, student)
    distiller.leave_()
    sides = []
    for model in (student, teacher.eval()):
        found = capture_mix(model, batch)
        sides.append(
            [relation_of(given, of, heads or (4 if of == "query" else 2)) for given in found]
        )
    want = torch.zeros((), dtype=torch.float64)
    for mine, theirs in zip(*sides, strict=True):
        each = (theirs.exp() * (theirs - mine)).masked_fill(theirs.exp() == 0, 0).sum(-1).mean(1)
        want = want + (each * counted(batch)).sum() / ITEMS / 2
    total = task_loss(student, batch, ITEMS) + want
    assert_close(loss.detach(), total.detach())
    assert_close(got, grads_of(total, student))


def capture_mix(model: Any, batch: Any) -> list[Any]:
    """What every attention was given."""
    found = []
    for block in model.layers.values():
        own = block.attn.attention_fn

        def note(*given: Any, own: Any = own) -> Tensor:
            found.append(given)
            return own(*given)

        block.attn.attention_fn = note
    model(**batch)
    for block in model.layers.values():
        del block.attn.attention_fn
        block.attn.attention_fn = own
    return found


def relation_of(given: Any, of: str, heads: int) -> Tensor:
    """Log-softmax of the products of all tokens' channels, (B, A, T, T)."""
    x = given[("query", "key", "value").index(of)]
    rows, _, length, _ = x.shape
    x = x.permute(0, 2, 1, 3).reshape(rows, length, heads, -1).permute(0, 2, 1, 3)
    scores = torch.einsum("bhtc,bhsc->bhts", x, x) / math.sqrt(x.shape[-1])
    return F.log_softmax(scores.masked_fill(~given[3], -torch.inf).clamp(min=-1e300), -1)


def test_values() -> None:
    """The mean square over all channels."""
    student, teacher = make_llama(0), make_llama(1)
    batch = make_inputs(student)
    _, distiller = distil(student, teacher, batch, DistillLoss(kind="value"))
    distiller.leave_()
    pairs = zip(capture_mix(student, batch), capture_mix(teacher.eval(), batch), strict=True)
    want = sum(
        (((a[2] - b[2]) ** 2).mean((1, 3)) * counted(batch)).sum() / ITEMS / 2 for a, b in pairs
    )
    assert_close(distiller.parts["value"], torch.as_tensor(want).detach())


ALL = (
    DistillLoss(kind="logits", temperature=2.0),
    DistillLoss(kind="hidden"),
    DistillLoss(kind="hidden", form="mean_norm"),
    DistillLoss(kind="attention"),
    DistillLoss(kind="relation", of="value"),
    DistillLoss(kind="value"),
)


@pytest.mark.parametrize("make", [make_llama, make_bert, make_t5])
def test_a_student_that_is_its_teacher(make: Any) -> None:
    """Every loss is 0, and gradients are the task's alone."""
    student = make(0)
    batch = make_inputs(student)
    loss, distiller = distil(student, copy.deepcopy(student), batch, *ALL)
    # T5 adds its mask to its bias where no gradient is wanted, so rounding differs.
    most = 1e-15 if make is make_t5 else 0.0
    assert {name for name, part in distiller.parts.items() if abs(float(part)) <= most} == {
        *("logits", "hidden", "attention", "relation", "value")
    }
    got = grads_of(loss, student)
    distiller.leave_()
    want = grads_of(task_loss(student, batch, ITEMS), student)
    assert_close(got, want, atol=1e-9)


def test_another_width_is_turned() -> None:
    """The turn is trained and in what a checkpoint holds, and gone when the student leaves."""
    student, teacher = make_llama(0), make_llama(1, width=24, head_dim=4)
    batch, names = make_inputs(student), set(persistent_tensors(student))
    one = DistillLoss(kind="hidden", layers="last")
    loss, distiller = distil(student, teacher, batch, one)
    turns = {n for n in persistent_tensors(student) if n not in names}
    assert turns == {f"layers.{i}.teacher_view.weight" for i in range(2)}
    assert set(grads_of(loss, student)) >= turns
    turn = student.get_parameter("layers.1.teacher_view.weight").detach().clone()
    distiller.leave_()
    assert set(persistent_tensors(student)) == names
    mine, theirs = plain_states(student, batch)[1], plain_states(teacher.eval(), batch)[1]
    found = compare_plain(mine @ turn.T, theirs, "plain", counted(batch))
    again = Distiller(student, teacher, DistillConfig(losses=(one,)))
    assert torch.equal(student.get_parameter("layers.1.teacher_view.weight"), turn)
    again.objective(task_loss)(student, batch, ITEMS)
    assert float(found.detach()) < 2 * float(
        again.parts["hidden"]
    )  # one of two layers, the mean of both


def test_tokens_count_as_labels_do() -> None:
    """Of an encoder's classes each row's tokens share its label; padding has none of it."""
    student, teacher = (
        make_bert(0, head="sequence_classification"),
        make_bert(1, head="sequence_classification"),
    )
    batch = make_inputs(student)
    _, distiller = distil(
        student, teacher, batch, DistillLoss(temperature=2.0), DistillLoss(kind="hidden")
    )
    distiller.leave_()
    real = batch["attention_mask"].double()
    weights = real / real.sum(1, keepdim=True)
    mine, theirs = plain_states(student, batch), plain_states(teacher.eval(), batch)
    parts = [compare_plain(a, b, "plain", weights) for a, b in zip(mine, theirs, strict=True)]
    assert_close(distiller.parts["hidden"], (sum(parts) / 2).detach())
    given = {name: value for name, value in batch.items() if name != "labels"}
    both = [F.log_softmax(m(**given).logits / 2, -1) for m in (student, teacher)]
    want = F.kl_div(*both, log_target=True, reduction="sum") * 4 / ITEMS
    assert_close(distiller.parts["logits"], want.detach())


def test_evaluation_reports_the_task_alone() -> None:
    """Of a model in evaluation the objective is the task's, and the teacher does not run."""
    student, teacher = make_llama(0), make_llama(1)
    batch = make_inputs(student)
    distiller = Distiller(student, teacher)
    teacher.register_forward_hook(lambda *given: pytest.fail("the teacher ran"))
    student.eval()
    got = distiller.objective(task_loss)(student, batch, ITEMS)
    distiller.leave_()
    assert torch.equal(got, task_loss(student, batch, ITEMS))


def test_weights_rise_and_fall() -> None:
    """By optimizer steps; a weight of 0 adds nothing."""
    rise = DistillLoss(weight=2.0, schedule="rise", steps=4)
    fall = DistillLoss(weight=2.0, schedule="fall", steps=4)
    assert [rise.weight_at(step) for step in (0, 1, 4, 9)] == [0.0, 0.5, 2.0, 2.0]
    assert [fall.weight_at(step) for step in (0, 1, 4, 9)] == [2.0, 1.5, 0.0, 0.0]
    student = make_llama(0)
    batch = make_inputs(student)
    distiller = Distiller(student, make_llama(1), DistillConfig(losses=(rise,), task_weight=0.5))
    objective = distiller.objective(task_loss)
    values = []
    for step in (0, 4):
        distiller.load_state_dict({"step": step})
        values.append(objective(student, batch, ITEMS).detach())
    task, taught = distiller.task, distiller.parts["logits"]
    assert_close(values[0], 0.5 * task)
    assert_close(values[1], 0.5 * task + 2.0 * taught)


def test_models_of_transformers() -> None:
    """A GPT-2 of theirs learns from one of theirs: logits and named hidden states."""
    sizes = {"vocab_size": 29, "n_embd": 16, "n_head": 2, "n_positions": 16}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    student, teacher = (
        GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, n_layer=n)).double() for n in (2, 4)
    )
    student.train()
    batch = make_inputs_for_gpt2()
    wanted = DistillLoss(temperature=2.0), DistillLoss(kind="hidden", layers="uniform")
    _, distiller = distil(student, teacher, batch, *wanted)
    distiller.leave_()
    assert_close(distiller.parts["logits"], plain_logits(student, teacher, batch, 2.0).detach())
    states = [m(**batch, output_hidden_states=True).hidden_states for m in (student, teacher)]
    # The last of transformers' states is behind the norm, so only the first pair is there as such.
    named = DistillLoss(kind="hidden", pairs=(("transformer.h.0", "transformer.h.1"),))
    _, distiller = distil(student, teacher, batch, named)
    want = compare_plain(states[0][1], states[1][2], "plain", counted(batch))
    assert_close(distiller.parts["hidden"], want.detach())


def make_inputs_for_gpt2() -> dict[str, Tensor]:
    ids = torch.randint(1, 28, (3, 7), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("student", "teacher", "layers", "want"),
    [
        (3, 3, "same", [(0, 0), (1, 1), (2, 2)]),
        (6, 12, "uniform", [(0, 1), (1, 3), (2, 5), (3, 7), (4, 9), (5, 11)]),
        (6, 12, "skip", [(0, 1), (1, 3), (2, 5), (3, 7), (4, 9)]),
        (6, 12, "last", [(i, i + 6) for i in range(6)]),
        (2, 3, "uniform", [(0, 1), (1, 2)]),
        (3, 2, "uniform", [(1, 0), (2, 1)]),
        (3, 2, "last", [(1, 0), (2, 1)]),
    ],
)
def test_layer_maps(student: int, teacher: int, layers: str, want: Any) -> None:
    """TinyBERT's and PKD's maps."""
    assert pair_layers(student, teacher, layers) == want


def test_both_stacks_of_an_encoder_decoder() -> None:
    """Or one of them."""
    student, teacher = make_t5(0, layers=1), make_t5(1)
    both = find_pairs(student, teacher, DistillLoss(kind="hidden", layers="last"))
    assert both == [
        ("encoder.layers.0", "encoder.layers.1"),
        ("decoder.layers.0", "decoder.layers.1"),
    ]
    one = DistillLoss(kind="hidden", layers="last", stack="decoder")
    assert find_pairs(student, teacher, one) == both[1:]


@pytest.mark.parametrize(
    ("teacher", "losses", "said"),
    [
        ({"vocab_size": 31}, ALL[:1], "vocab_size=29, but the teacher has 31"),
        ({"layers": 3}, ALL[1:2], "2 layers and the teacher has 3"),
        ({"num_heads": 2}, ALL[3:4], "has 4 heads, but the teacher's layers.0 has 2"),
        ({"num_kv_heads": 4}, ALL[5:], "values of 8 channels"),
        ({}, (DistillLoss(kind="hidden", pairs=(("layers.7", "layers.0"),)),), "no module"),
        ({}, (DistillLoss(kind="relation", relation_heads=3),), "relation_heads=3 does not divide"),
    ],
)
def test_teachers_that_cannot_teach(teacher: Any, losses: Any, said: str) -> None:
    """What does not fit is said before anything runs."""
    student, names = make_llama(0), set(persistent_tensors(make_llama(0)))
    with pytest.raises(ConfigError, match=said):
        Distiller(student, make_llama(1, **teacher), DistillConfig(losses=losses))
    assert set(persistent_tensors(student)) == names
    assert not student._forward_hooks


def test_settings_without_effect() -> None:
    """Raise."""
    for fields in (
        {"kind": "hidden", "temperature": 2.0},
        {"kind": "logits", "layers": "last"},
        {"kind": "logits", "schedule": "rise"},
        {"kind": "logits", "weight": 0.0},
        {"kind": "value", "of": "key"},
    ):
        with pytest.raises(ConfigError, match=r"distill\.losses"):
            DistillLoss(**fields)
    model = make_llama(0)
    with pytest.raises(ConfigError, match="the same object"):
        Distiller(model, model)
