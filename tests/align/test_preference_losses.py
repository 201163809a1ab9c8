"""Losses of preference optimization against plain implementations of their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bmforge.align.losses import (
    METHODS,
    MethodOptions,
    PairScores,
    kto_loss,
    log1mexp,
    preference_loss,
    reward_loss,
)
from bmforge.align.preferences import PairObjective, UnpairedObjective
from bmforge.align.reference import adapter_off, frozen_copy
from bmforge.align.reinforcement import open_reference
from bmforge.errors import ConfigError
from bmforge.models import Llama, LlamaConfig, init_weights_
from bmforge.testing import assert_close
from bmforge.train.objective import count_items, prepare_batches
from bmforge.tune.delta import Lora, SoftPrompt, init_deltas_, use_deltas

PAIRS = [name for name, method in METHODS.items() if method.loss is not None]
VOCAB, WIDTH = 29, 12


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def plain_loss(name: str, s: dict[str, float], o: MethodOptions) -> float:
    """The loss of one pair in plain Python numbers, from the papers' formulas."""
    h_w, h_l = s["w"] - s["rw"], s["l"] - s["rl"]
    d, beta, e = h_w - h_l, o.beta, o.label_smoothing
    a_w, a_l = s["w"] / s["nw"], s["l"] / s["nl"]
    if name == "dpo":
        return -(1 - e) * math.log(sigmoid(beta * d)) - e * math.log(sigmoid(-beta * d))
    if name == "robust":
        both = -(1 - e) * math.log(sigmoid(beta * d)) + e * math.log(sigmoid(-beta * d))
        return both / (1 - 2 * e)
    if name == "hinge":
        return max(0.0, 1 - beta * d)
    if name == "ipo":
        return (h_w / s["nw"] - h_l / s["nl"] - 1 / (2 * beta)) ** 2
    if name == "sigmoid_norm":
        m = beta * (h_w / s["nw"] - h_l / s["nl"])
        return -(1 - e) * math.log(sigmoid(m)) - e * math.log(sigmoid(-m))
    if name == "simpo":
        m = beta * (a_w - a_l) - o.simpo_gamma
        return -(1 - e) * math.log(sigmoid(m)) - e * math.log(sigmoid(-m))
    if name == "cpo":
        m = beta * (s["w"] - s["l"])
        return -(1 - e) * math.log(sigmoid(m)) - e * math.log(sigmoid(-m))
    assert name == "orpo"
    odds = [math.exp(a) / (1 - math.exp(a)) for a in (a_w, a_l)]
    return -beta * math.log(sigmoid(math.log(odds[0]) - math.log(odds[1])))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(PAIRS),
    sums=st.lists(st.floats(-20, -0.5), min_size=4, max_size=4),
    lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    smoothing=st.sampled_from([0.0, 0.1, 0.3]),
    beta=st.sampled_from([0.05, 0.1, 2.0]),
)
def test_formulas(
    name: str, sums: list[float], lengths: tuple[int, int], smoothing: float, beta: float
) -> None:
    """Every loss, and its derivative by both sums by central differences."""
    has_smoothing = "label_smoothing" in METHODS[name].options
    options = MethodOptions(beta=beta, label_smoothing=smoothing * has_smoothing)
    values = dict(zip(("w", "l", "rw", "rl"), sums, strict=True))
    values |= dict(zip(("nw", "nl"), map(float, lengths), strict=True))
    tensors = {n: torch.tensor([v], dtype=torch.float64) for n, v in values.items()}
    for n in ("w", "l"):
        tensors[n].requires_grad_()
    loss = preference_loss(name, PairScores(*tensors.values()), options)
    assert loss.item() == pytest.approx(plain_loss(name, values, options), rel=1e-9, abs=1e-12)
    if name == "hinge" and abs(loss.item()) < 1e-3:
        return  # not differentiable at the corner
    loss.sum().backward()
    for n in ("w", "l"):
        steps = [plain_loss(name, {**values, n: values[n] + h}, options) for h in (1e-6, -1e-6)]
        grad = tensors[n].grad
        assert grad is not None
        assert grad.item() == pytest.approx((steps[0] - steps[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_log1mexp_near_and_far() -> None:
    """log(1 - e^a) against double precision, where `1 - exp` gives -inf in fp32; gradients too."""
    a = torch.tensor([-1e-9, -1e-3, -0.6, -0.8, -30.0])
    assert torch.isinf((1 - a.exp()).log()[0])
    wide = [math.log(-math.expm1(x)) for x in a.tolist()]
    assert_close(log1mexp(a), torch.tensor(wide), rtol=1e-6, atol=1e-12)
    a.requires_grad_()
    log1mexp(a).sum().backward()
    want = [-math.exp(x) / -math.expm1(x) for x in a.tolist()]
    assert a.grad is not None
    assert_close(a.grad, torch.tensor(want), rtol=1e-5, atol=1e-12)


def test_reward_loss() -> None:
    """Bradley-Terry with margin and centering."""
    chosen, rejected, margin = torch.tensor([[1.5, -1.0], [0.5, 2.0], [0.25, 0.0]]).double()
    want = [
        -math.log(sigmoid(1.5 - 0.5 - 0.25)) + 0.01 * 2.0**2,
        -math.log(sigmoid(-1.0 - 2.0)) + 0.01 * 1.0**2,
    ]
    assert_close(
        reward_loss(chosen, rejected, margin, 0.01), torch.tensor(want, dtype=torch.float64)
    )


def make_model(seed: int = 1, dtype: torch.dtype = torch.float64) -> Llama:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=20,
        intermediate_size=27,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        max_seq_len=16,
    )
    model = Llama.from_config(config, dtype=dtype)
    init_weights_(model, seed=seed)
    return model.eval()


def make_batch(pairs: int = 8, **more: Tensor) -> dict[str, Tensor]:
    """Rows of unlike lengths: rows 2i and 2i + 1 share a prompt."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.zeros(2 * pairs, WIDTH, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row in range(2 * pairs):
        prompt, answer = 2 + (row // 2) % 3, 2 + (row * 5) % 7
        own = torch.randint(4, VOCAB, (prompt + answer,), generator=generator)
        if row % 2:
            own[:prompt] = ids[row - 1, :prompt]
        ids[row, : len(own)] = own
        labels[row, prompt : len(own)] = own[prompt:]
    return {"input_ids": ids, "labels": labels, **more}


def row_sums(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sums and counts of the labels' log-probabilities, from all logits."""
    labels = batch["labels"][:, 1:]
    logprobs = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)[:, :-1]
    picked = logprobs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return picked.where(labels != -100, 0).sum(1), (labels != -100).sum(1)


def options_of(name: str) -> MethodOptions:
    method = METHODS[name]
    return MethodOptions(beta=method.beta, nll_weight=method.nll_weight)


def run_objective(objective: Any, model: Any, batches: list[Any]) -> dict[str, Tensor]:
    """Loss and gradients of a step over some micro-batches."""
    model.zero_grad()
    items = sum(count_items(objective, batch, model) for batch in batches)
    total = torch.zeros((), dtype=torch.float64)
    for batch in prepare_batches(objective, model, batches):
        loss = objective(model, batch, items).loss
        loss.backward()
        total += loss.detach()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": total, **grads}


def cut(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    return [
        dict(zip(batch, values, strict=True))
        for values in zip(*(t.chunk(parts) for t in batch.values()), strict=True)
    ]


def objective_of(name: str, reference: Any) -> Any:
    if name == "kto":
        return UnpairedObjective(options_of(name), frozen_copy(reference))
    used = frozen_copy(reference) if METHODS[name].needs_reference else None
    return PairObjective(name, options_of(name), used)


@pytest.mark.parametrize("name", PAIRS)
def test_objective_equals_whole_logits(name: str) -> None:
    """Loss and gradients by a model equal those computed from all logits."""
    model, reference, batch = make_model(), make_model(2), make_batch()
    got = run_objective(objective_of(name, reference), model, [batch])
    model.zero_grad()
    sums, lengths = row_sums(model, batch)
    with torch.no_grad():
        ref = row_sums(reference, batch)[0]
    options = options_of(name)
    parts = [t for both in (sums, ref, lengths) for t in (both[::2], both[1::2])]
    loss = preference_loss(name, PairScores(*parts), options)
    loss = loss - options.nll_weight * sums[::2] / lengths[::2]
    loss.mean().backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_close(got, {"loss": loss.mean().detach(), **want})
    for number in range(len(loss)):  # and the formula itself, pair by pair
        values = [t[number].item() for t in parts]
        plain = dict(zip(("w", "l", "rw", "rl", "nw", "nl"), values, strict=True))
        want_loss = plain_loss(name, plain, options) - options.nll_weight * values[0] / values[4]
        assert loss[number].item() == pytest.approx(want_loss, rel=1e-9)


def test_soft_prompts_change_scores_and_not_their_positions() -> None:
    """Loss and gradients equal those with the prompt's rows put before the embeddings."""
    model, batch = make_model(), make_batch()
    prompt = SoftPrompt(model, length=3).init_(seed=5)
    got = run_objective(PairObjective("dpo", options_of("dpo"), adapter_off), model, [batch])
    weight = prompt.held[0].part.weight
    rows, count = weight.detach().clone().requires_grad_(), len(batch["labels"])
    prompt.detach()

    def sums_of(front: Tensor) -> Tensor:
        x = torch.cat((front.expand(count, -1, -1), model.embed(batch["input_ids"])), 1)
        logprobs = model(inputs_embeds=x).logits.log_softmax(-1)[:, len(front) : -1]
        labels = batch["labels"][:, 1:]
        picked = logprobs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
        return picked.where(labels != -100, 0).sum(1)

    ratios = sums_of(rows) - sums_of(rows[:0]).detach()
    loss = -torch.nn.functional.logsigmoid(0.1 * (ratios[::2] - ratios[1::2])).mean()
    loss.backward()
    (name,) = got.keys() - {"loss"}
    assert_close(got, {"loss": loss.detach(), name: rows.grad})


def test_kto_equals_whole_logits() -> None:
    """KTO with z from mismatched rows: loss and gradients from all logits."""
    model, reference = make_model(), make_model(2)
    batch = make_batch(is_good=torch.tensor([1, 0, 1, 1, 0, 0, 0, 1]))
    got = run_objective(objective_of("kto", reference), model, [batch])
    model.zero_grad()
    sums, _ = row_sums(model, batch)
    with torch.no_grad():
        ratio = sums - row_sums(reference, batch)[0]
    h = sums[::2] - (sums - ratio).detach()[::2]
    z = max(0.0, float(ratio[1::2].mean()))
    beta, good = 0.1, batch["is_good"].bool()
    loss = torch.where(
        good, 1 - torch.sigmoid(beta * (h - z)), 1 - torch.sigmoid(beta * (z - h))
    ).mean()
    loss.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_close(got, {"loss": loss.detach(), **want})


@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_change_nothing(name: str) -> None:
    """One step of 8 items: the same loss and gradient in 1, 2 or 8 micro-batches."""
    model, reference = make_model(), make_model(2)
    marks = {"is_good": torch.tensor([1, 1, 1, 0, 0, 1, 0, 0])} if name == "kto" else {}
    objective = objective_of(name, reference)
    want = run_objective(objective, model, [make_batch(**marks)])
    for parts in (2, 8):
        assert_close(run_objective(objective, model, cut(make_batch(**marks), parts)), want)


@pytest.mark.parametrize("name", METHODS)
def test_padding_items_change_nothing(name: str) -> None:
    """Items without labels, which fill up a step, count nothing and have finite gradients."""
    model, reference = make_model(), make_model(2)
    marks = {"is_good": torch.tensor([1, 0, 1])} if name == "kto" else {}
    objective = objective_of(name, reference)
    want = run_objective(objective, model, [make_batch(3, **marks)])
    batch = {
        n: torch.cat((t, t[:2] if n != "is_good" else t[:1]))
        for n, t in make_batch(3, **marks).items()
    }
    batch["labels"][-2:] = -100
    assert objective.count(batch) == 3
    assert_close(run_objective(objective, model, [batch]), want)


@pytest.mark.parametrize("kind", ["copy", "adapter"])
@pytest.mark.parametrize("name", [n for n in PAIRS if METHODS[n].needs_reference])
def test_step_0(name: str, kind: str) -> None:
    """Policy = reference: log-ratios are exactly 0, the loss is that of 0, a gradient exists."""
    model, batch = make_model(dtype=torch.float32), make_batch()
    reference: Any = frozen_copy(make_model(dtype=torch.float32))
    if kind == "adapter":
        delta = Lora(model, targets=["attn.q_proj", "mlp.up_proj"], rank=2)
        init_deltas_(delta, 3)
        reference = adapter_off
    objective = PairObjective(name, options_of(name), reference)
    (ready,) = prepare_batches(objective, model, [batch])
    result = objective(model, ready, 8)
    assert result is not None
    zero = {"hinge": 1.0, "ipo": 25.0}.get(name, math.log(2))
    assert result.loss.item() == pytest.approx(zero, rel=1e-6)
    total, count = result.metrics["rewards/margins"]
    assert (float(total), int(count)) == (0.0, 8)
    assert float(result.metrics["rewards/accuracies"][0]) == 0.0
    result.loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_adapter_off_is_off() -> None:
    """After training the adapter, the reference still is the base model, bit for bit."""
    model, batch = make_model(), make_batch()
    want = row_sums(model, batch)[0].detach()
    delta = Lora(model, targets=["attn.q_proj", "attn.v_proj"], rank=2)
    init_deltas_(delta, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "default" in name:
                parameter.add_(0.3)
    assert not torch.allclose(row_sums(model, batch)[0], want, rtol=1e-3)
    assert_close(adapter_off(model, batch), want)


def test_adapters_of_the_base_stay_in_the_reference() -> None:
    """A base that came with an enabled adapter and a disabled one; a third one is trained."""
    model, batch = make_model(), make_batch()
    names = ("enabled", "disabled", "default")
    for number, name in enumerate(names):
        delta = Lora(model, targets=["attn.q_proj", "attn.v_proj"], rank=2, name=name)
        init_deltas_(delta, number)
        with torch.no_grad():
            for parameter in delta.parameters():
                parameter.add_(0.1 * (number + 1))
                parameter.requires_grad_(name == "default")
        use_deltas(model, [n for n in names[: number + 1] if n != "disabled"])
        if name == "disabled":
            want = row_sums(model, batch)[0].detach()
    assert not torch.allclose(row_sums(model, batch)[0], want, rtol=1e-3)
    assert_close(adapter_off(model, batch), want)
    reference = open_reference(model, trains_base=False)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": None}
    assert_close(reference(inputs, batch["labels"], 1.0).sum(1), want)


def test_a_reference_of_a_trained_base_is_refused() -> None:
    """Disabling adapters would not give the initial policy."""
    model, batch = make_model(), make_batch()
    with pytest.raises(ConfigError, match="is trained too"):
        adapter_off(model, batch)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no adapter is trained"):
        adapter_off(model, batch)
    model = make_model()
    Lora(model, targets=["attn.q_proj"], rank=2, modules_to_save=["norm"])
    with pytest.raises(ConfigError, match=r"norm\.weight is trained too"):
        adapter_off(model, batch)


def test_reference_ignores_dropout() -> None:
    """The reference is scored in evaluation mode, and the policy's mode is restored."""
    model, batch = make_model(), make_batch()
    Lora(model, targets=["attn.q_proj"], rank=2)
    model.train()
    adapter_off(model, batch)
    assert all(module.training for module in model.modules())


def test_orpo_on_prompt_equals_whole_logits() -> None:
    """With `nll_on_prompt` the likelihood covers the prompt, as TRL computes it."""
    model, batch = make_model(), make_batch()
    objective = PairObjective("orpo", options_of("orpo"), None, nll_on_prompt=True)
    result = objective(model, batch, 8)
    assert result is not None
    ids = batch["input_ids"]
    width = torch.arange(WIDTH)
    last = ((batch["labels"] != -100) * width).amax(1, keepdim=True)
    whole = {"input_ids": ids, "labels": ids.masked_fill(width > last, -100)}
    sums, lengths = row_sums(model, whole)
    want = (-sums[::2] / lengths[::2]).mean()
    total, count = result.metrics["nll_loss"]
    assert float(total) / int(count) == pytest.approx(want.item(), rel=1e-9)
    plain = PairObjective("orpo", options_of("orpo"))(model, batch, 8)
    assert plain is not None
    before, after = ((r.metrics["nll_loss"][0] / 8).item() for r in (plain, result))
    assert (result.loss - plain.loss).item() == pytest.approx(after - before, rel=1e-9)


def test_kto_of_bad_rows_only() -> None:
    """A batch with answers of one kind has a finite loss and no metric of the other kind."""
    model = make_model()
    batch = make_batch(3, is_good=torch.zeros(3, dtype=torch.int64))
    objective = UnpairedObjective(options_of("kto"), frozen_copy(make_model(2)))
    (ready,) = prepare_batches(objective, model, [batch])
    result = objective(model, ready, 3)
    assert result is not None
    assert torch.isfinite(result.loss)
    assert int(result.metrics["rewards/chosen"][1]) == 0
    assert int(result.metrics["rewards/margins"][1]) == 0


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_margin_of_kto_is_the_difference_of_both_mean_rewards(size: int) -> None:
    """TRL's definition, with 6 good and 2 bad answers; micro-batches of one kind change nothing."""
    model, reference = make_model(), make_model(2)
    batch = make_batch(is_good=torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]))
    parts = [
        {name: t[i * len(t) // 8 : (i + size) * len(t) // 8] for name, t in batch.items()}
        for i in range(0, 8, size)
    ]
    objective = UnpairedObjective(options_of("kto"), frozen_copy(reference))
    total, count = 0.0, 0.0
    for part in prepare_batches(objective, model, parts):
        result = objective(model, part, 8)
        assert result is not None
        numerator, denominator = result.metrics["rewards/margins"]
        total, count = total + float(numerator), count + float(denominator)
    with torch.no_grad():
        ratio = (row_sums(model, batch)[0] - row_sums(reference, batch)[0])[::2]
    want = 0.1 * (ratio[:6].mean() - ratio[6:].mean())
    assert total / count == pytest.approx(float(want), rel=1e-6)


def test_kto_weights() -> None:
    """The factors of good and bad answers; z shifts both."""
    options = MethodOptions(beta=1.0, desirable_weight=2.0, undesirable_weight=3.0)
    ratio = torch.tensor([0.5, 0.5]).double()
    loss = kto_loss(ratio, torch.tensor([True, False]), torch.tensor(0.25).double(), options)
    want = [2 * (1 - sigmoid(0.25)), 3 * (1 - sigmoid(-0.25))]
    assert_close(loss, torch.tensor(want, dtype=torch.float64))


def test_methods_without_pairs_are_refused() -> None:
    """KTO has no loss of pairs; an unknown name is answered with the known ones."""
    scores = PairScores(*(torch.ones(1) for _ in range(6)))
    for name in ("kto", "dpp"):
        with pytest.raises(ConfigError, match=name):
            preference_loss(name, scores, MethodOptions(beta=0.1))
