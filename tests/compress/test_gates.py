"""Gates: closed forms, the same draws everywhere, gradients, targets, what is left at the end."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from masked_models import has_kind, mostly_long, run, stir
from tiny_models import TINY, make_inputs
from torch import Tensor

from bmforge.compress.prune.binarize import binarize
from bmforge.compress.prune.costs import count_costs
from bmforge.compress.prune.gates import (
    Gates,
    attach_gates_,
    detach_gates_,
    find_gates,
    gate_probabilities,
)
from bmforge.compress.prune.importance import measure_importance
from bmforge.compress.prune.plan import blocks_of
from bmforge.compress.prune.shrink import shrink_
from bmforge.compress.prune.structure import StructureMethod
from bmforge.compress.prune.structure_config import GATE_KINDS, StructureConfig
from bmforge.errors import ConfigError
from bmforge.infer.decoder import Decoder
from bmforge.nn.gates import HardConcrete, log_alpha_of
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close
from bmforge.testing.batches import make_labels
from bmforge.tune.delta import Lora


@pytest.mark.parametrize(("sparsity", "want"), [(0.1, 0.59863), (0.5, -1.5986), (0.9, -3.79582)])
def test_closed_forms(sparsity: float, want: float) -> None:
    """BMCook's recorded values; a gate begun there is open so often, as drawing shows."""
    assert log_alpha_of(sparsity) == pytest.approx(want, abs=1e-5)
    gate = HardConcrete("layers.0.heads", 20_000, start=sparsity).train()
    assert gate.density().mean().item() == pytest.approx(1 - sparsity, abs=1e-9)
    gate.draw_(0, 1)
    closed = (gate.values() == 0).double().mean().item()
    assert closed == pytest.approx(sparsity, abs=4 * math.sqrt(sparsity * (1 - sparsity) / 20_000))


def test_draws_follow_seed_step_and_name() -> None:
    """And nothing else; their logits are a logistic distribution's."""
    gates = [HardConcrete(name, 50_000).train() for name in ("a", "a", "b")]
    for gate in gates:
        gate.draw_(3, 7)
    assert torch.equal(gates[0].values(), gates[1].values())
    assert not torch.equal(gates[0].values(), gates[2].values())
    before = gates[0].values()
    gates[0].draw_(3, 8)
    assert not torch.equal(gates[0].values(), before)
    noise: Any = gates[2].noise
    assert noise.mean().item() == pytest.approx(0.0, abs=0.05)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize("name", mostly_long(["llama", "gptj", "bert", "t5"], ["t5"]))
def test_the_loss_reaches_gates(name: str) -> None:
    """Its gradient by every kind of gate is that of differences."""
    model = stir(name).train()
    gates = attach_gates_(model, GATE_KINDS, seed=1)
    for gate in gates.values():
        gate.draw_(0, 5)
    inputs = make_inputs(name)
    inputs |= make_labels(model, inputs)
    model(**inputs).loss.backward()
    checked = 0
    for (block, _), gate in gates.items():
        if block and not block.endswith(".1"):
            continue
        inside = ((gate.values() > 0) & (gate.values() < 1)).nonzero().flatten().tolist()
        for unit in inside[:2]:
            assert_slope(model, inputs, gate, unit)
            checked += 1
    assert checked >= 3


WIDTHS = [name for name in TINY if has_kind(name, "dims")]
COUNTED = ["llama", "gpt2", "t5", "bert", "gptj", "longformer", "qwen"]


def assert_slope(model: Any, inputs: dict[str, Tensor], gate: HardConcrete, unit: int) -> None:
    losses = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            gate.delta[unit] += step
            losses.append(model(**inputs).loss.item())
            gate.delta[unit] -= step
    slope = (losses[0] - losses[1]) / 2e-5
    assert gate.delta.grad is not None
    assert gate.delta.grad[unit].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_open_gates_are_no_gates_and_they_go_again() -> None:
    """All of 1 is the model, and detached it is as it was."""
    for name in ("llama", "gptj", "longformer", "t5"):
        model = stir(name)
        want, names = run(model, name), list(model.state_dict())
        gates = attach_gates_(model, GATE_KINDS)
        for gate in gates.values():
            gate.mask = torch.ones(gate.units)
        assert_close(run(model, name), want)
        detach_gates_(model)
        assert torch.equal(run(model, name), want)
        assert list(model.state_dict()) == names


def close_some(gates: Gates) -> None:
    generator = torch.Generator().manual_seed(4)
    for gate in gates.values():
        gate.mask = (torch.rand(gate.units, generator=generator) > 0.4).double()


@pytest.mark.parametrize("name", ["llama", "longformer"])
def test_adapters_of_a_gated_model_are_gated(name: str) -> None:
    """An adapter that was attached after the gates counts as if merged into its layer."""
    gated, merged = stir(name), stir(name)
    close_some(attach_gates_(gated, GATE_KINDS))
    for model in (gated, merged):
        delta = Lora(model, targets=["attn.q_proj", "attn.o_proj", "mlp.down_proj"], rank=2)
        generator = torch.Generator().manual_seed(6)
        for _, parameter in delta.named_parameters():
            parameter.data.normal_(0, 0.3, generator=generator)
    delta.merge()
    close_some(attach_gates_(merged, GATE_KINDS))
    assert_close(run(gated, name), run(merged, name))


@pytest.mark.parametrize("kind", GATE_KINDS)
@torch.no_grad()
def test_decoding_with_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The kernel for an addition and a norm leaves out no gate: as without a KV cache."""
    monkeypatch.setattr("bmforge.nn.block.can_use_device_kernels", lambda *tensors: True)
    model, ids = stir("llama", torch.float32), make_inputs("llama")["input_ids"]
    for is_gated in (False, True):
        if is_gated:
            close_some(attach_gates_(model, (kind,)))
        decoder = Decoder(model, None, 16)
        decoder.cache.step = None
        decoder.run(ids[:, :5])
        want = model(ids[:, :6]).logits[:, -1]
        assert_close(decoder.run(ids[:, 5:6]), want, rtol=1e-4, atol=1e-4)


def test_what_a_gated_model_refuses() -> None:
    model = stir("llama")
    attach_gates_(model, ("heads",))
    with pytest.raises(ConfigError, match=r"has gates\. Call detach_gates_ first"):
        attach_gates_(model, ("features",))
    with pytest.raises(ConfigError, match=r"has gates\. Measure the importance"):
        measure_importance(model, [make_inputs("llama")], "activation")
    plain = stir("mixtral")
    with pytest.raises(ConfigError, match="no layer of this Mixtral has features"):
        attach_gates_(plain, ("hidden", "features"))
    assert_close(run(plain, "mixtral"), run(stir("mixtral"), "mixtral"), rtol=0, atol=0)
    assert not find_gates(plain)


@pytest.mark.parametrize("name", mostly_long(COUNTED, ["llama", "longformer"]))
def test_counts_are_exact(name: str) -> None:
    """What gates of 0 and 1 are said to leave is what the shrunk model has."""
    model = stir(name)
    costs = count_costs(model)
    of_blocks = sum(p.numel() for b in blocks_of(model).values() for p in b.parameters())
    norms = (
        sum(b.attn_norm.weight.numel() * 2 for b in blocks_of(model).values())
        if name == "gptj"
        else 0
    )
    assert costs.total == of_blocks - norms
    config = StructureConfig(
        target="parameters", keep_ratio=0.5, gates=("heads", "dims", "features", "mlp")
    )
    method = StructureMethod(config)
    method.attach_(model)
    method._fix_(model)
    masks = {key: gate.mask for key, gate in method.gates.items()}
    said = float(costs.expect(masks))  # type: ignore[arg-type]
    before = copy.deepcopy(model)
    facts = method.finish_(model)
    left = sum(p.numel() for b in blocks_of(model).values() for p in b.parameters()) - norms
    assert said == left
    assert facts["parameters_after"] == sum(t.numel() for t in persistent_tensors(model).values())
    assert_close(run(model, name), run(before, name))


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_least_likely_go_until_the_target_is_met(multiple: int) -> None:
    """Against a plain count of everything after each step; the last step was needed."""
    model = stir("llama")
    config = StructureConfig(
        target="flops", keep_ratio=0.6, gates=("features", "heads"), multiple_of=multiple
    )
    costs = count_costs(model, "flops")
    generator = torch.Generator().manual_seed(multiple)
    likely = {
        (name, kind): torch.rand(half.units, generator=generator)
        for name, halves in costs.blocks.items()
        for half, kind in ((halves["attn"], "heads"), (halves["mlp"], "features"))
    }
    masks = {key: torch.ones(len(value)) for key, value in likely.items()}
    steps = []
    for key, value in likely.items():
        size = multiple if key[1] == "features" else 1
        groups = value.argsort().view(-1, size)
        steps += [(float(value[group].double().mean()), key, group) for group in groups]
    for _, key, group in sorted(steps, key=lambda step: step[0]):
        if costs.expect(masks) <= 0.6 * costs.total:
            break
        if masks[key].sum() > len(group):
            masks[key][group] = 0
    want = {key: tuple(mask.nonzero().flatten().tolist()) for key, mask in masks.items()}
    assert binarize(model, config, costs, likely) == want
    assert any(len(numbers) < len(likely[key]) for key, numbers in want.items())


def fix_at_random(model: Any, config: StructureConfig) -> StructureMethod:
    """Gates that are decided by chance."""
    method = StructureMethod(config)
    method.attach_(model)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for gate in method.gates.values():
            gate.delta += torch.randn(gate.units, generator=generator).to(gate.delta)
    method._fix_(model)
    return method


HIDDEN = [name for name in TINY if has_kind(name, "hidden")]


@pytest.mark.parametrize("name", mostly_long(HIDDEN, ["llama", "bert", "t5", "mixtral"]))
def test_hidden_features(name: str) -> None:
    """Closed ones are gone for everything that reads or norms them; what is left is counted."""
    model = stir(name)
    gates = ("hidden",) if name == "mixtral" else ("hidden", "features")
    config = StructureConfig(target="parameters", keep_ratio=0.6, gates=gates, multiple_of=2)
    method = fix_at_random(model, config)
    masks = {key: gate.mask for key, gate in method.gates.items()}
    said, want = float(method.costs.expect(masks)), run(model, name)  # type: ignore[arg-type]
    before = model.config.hidden_size
    facts = method.finish_(model)
    assert model.config.hidden_size == len(facts["plan"]["hidden"]) < before
    assert_close(run(model, name), want)
    assert float(count_costs(model).total) == pytest.approx(said, rel=1e-9)


def test_hidden_features_of_a_size() -> None:
    model = stir("llama")
    config = StructureConfig(hidden_size=20, num_heads=2, gates=("hidden", "heads"))
    method = fix_at_random(model, config)
    want = run(model, "llama")
    again = StructureMethod(config)
    other = stir("llama")
    again.attach_(other)
    again.load_state_dict(method.state_dict())
    method.finish_(model)
    assert model.config.hidden_size == 20
    assert_close(run(model, "llama"), want)
    again.finish_(other)
    assert_close(run(other, "llama"), want)


@pytest.mark.parametrize("gates", [("dims",), ("heads", "dims")], ids="+".join)
@pytest.mark.parametrize("name", mostly_long(WIDTHS, ["llama", "gptj", "t5"]))
def test_heads_of_less_width(name: str, gates: tuple[str, ...]) -> None:
    """Units that are closed at random: of every head as many, no rotary pair torn; in fp32."""
    model = stir(name, torch.float32)
    share = 0.9 if name in ("mixtral", "qwen_moe") else 0.8
    config = StructureConfig(target="parameters", keep_ratio=share, gates=gates, seed=4)
    method = fix_at_random(model, config)
    masks = {key: gate.mask for key, gate in method.gates.items()}
    said = float(method.costs.expect(masks))  # type: ignore[arg-type]
    want = run(model, name)
    widths = {n: b.spec.attn.head_dim for n, b in blocks_of(model).items()}
    facts = method.finish_(model)
    assert torch.allclose(run(model, name), want, rtol=1e-5, atol=1e-5)
    assert float(count_costs(model).total) == said
    left = {n: b.spec.attn.head_dim for n, b in blocks_of(model).items()}
    assert any(left[n] < widths[n] for n in left)
    assert all(left[n] > 0 for n in left)
    assert facts["is_shrunk"]


TARGETS: list[dict[str, Any]] = [
    {"target": "parameters", "keep_ratio": 0.5, "gates": ("heads", "features")},
    {"target": "flops", "keep_ratio": 0.6, "gates": ("features", "attn", "mlp"), "seq_len": 9},
    {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16, "gates": ("heads", "features")},
    {"head_dim": 4, "intermediate_size": 16, "gates": ("dims", "features")},
]


def train(model: Any, method: StructureMethod, name: str, steps: int) -> None:
    inputs = make_inputs(name)
    inputs |= make_labels(model, inputs)
    gates = [p for n, p in model.named_parameters() if n.endswith("delta")]
    others = [p for n, p in model.named_parameters() if not n.endswith("delta")]
    groups = [{"params": gates, "lr": 0.1}, {"params": others, "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for step in range(steps):
        loss = model(**inputs).loss
        extra = method.extra_loss(model, step)
        (loss if extra is None else loss + extra).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.after_step_(model, step + 1)


@pytest.mark.parametrize(
    "options",
    mostly_long(TARGETS, TARGETS[:1]),
)
def test_gates_reach_their_target(options: dict[str, Any]) -> None:
    """The Lagrangian pulls them there, they are fixed, and the small model is the masked one."""
    model = stir("llama", torch.float32).train()
    config = StructureConfig(**options, gate_steps=120, warmup_steps=30, seed=2)
    method = StructureMethod(config)
    costs = count_costs(model, "flops" if config.target == "flops" else "parameters", 9)
    method.attach_(model)
    train(model, method, "llama", 121)
    assert method.missed < 5e-5
    likely = gate_probabilities(method.gates)
    if config.target == "sizes":
        for (_, kind), value in likely.items():
            want = {"features": 16, "heads": 1, "dims": 4}[kind]
            assert value.sum().item() == pytest.approx(want, abs=5e-5 * len(value))
    else:
        left = float(costs.expect(likely)) / costs.total
        assert left == pytest.approx(config.keep_ratio, abs=5e-5)
    assert method.plan is not None
    masked = copy.deepcopy(model).eval()
    facts = method.finish_(model.eval())
    assert torch.allclose(run(model, "llama"), run(masked, "llama"), rtol=1e-4, atol=1e-5)
    if config.target == "sizes":
        for block in blocks_of(model).values():
            assert block.spec.attn.num_heads == options.get("num_heads", 4)
            assert block.spec.attn.head_dim == options.get("head_dim", 8)
        assert model.config.intermediate_size == 16
        # Rotary pairs keep their speeds, of which published fields know nothing.
        assert facts["opens_elsewhere"] == ("head_dim" not in options)
    else:
        again = count_costs(model, "flops" if config.target == "flops" else "parameters", 9)
        assert again.total <= config.keep_ratio * costs.total
        assert again.total >= (config.keep_ratio - 0.12) * costs.total


def test_state_goes_on_elsewhere() -> None:
    """Multipliers, draws and what was decided come back."""
    config = StructureConfig(
        target="parameters",
        keep_ratio=0.5,
        gates=("heads", "features"),
        gate_steps=6,
        warmup_steps=2,
    )
    one, two = stir("llama").train(), stir("llama").train()
    first, second = StructureMethod(config), StructureMethod(config)
    first.attach_(one)
    train(one, first, "llama", 4)
    second.attach_(two)
    two.load_state_dict(one.state_dict())
    second.load_state_dict(first.state_dict())
    for a, b in zip(first.gates.values(), second.gates.values(), strict=True):
        assert torch.equal(a.values(), b.values())
    assert first.state_dict() == second.state_dict()
    inputs = make_inputs("llama")
    inputs |= make_labels(one, inputs)
    for step in (4, 5):
        for model, method in ((one, first), (two, second)):
            extra = method.extra_loss(model, step)
            assert extra is not None
            method.after_step_(model, step + 1)
    assert first.state_dict() == second.state_dict()
    assert first.plan is not None
    third = StructureMethod(config)
    other = stir("llama")
    third.attach_(other)
    third.load_state_dict(first.state_dict())
    other.load_state_dict(one.state_dict())
    third.finish_(other)
    detach_gates_(one)
    shrink_(one, first.plan)
    assert_close(run(other, "llama"), run(one.eval(), "llama"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "llama",
            {"target": "parameters", "keep_ratio": 0.02, "gates": ("features",)},
            "cannot be reached",
        ),
        ("llama", {"num_heads": 2, "gates": ("features",)}, "cannot determine heads"),
        (
            "llama",
            {"num_heads": 1, "num_kv_heads": 1, "gates": ("heads",)},
            "must be a multiple of",
        ),
        ("llama", {"hidden_size": 16, "gates": ("heads",)}, "cannot determine hidden_size"),
        ("llama", {"hidden_size": 999, "gates": ("hidden",)}, "hidden_size=999 is out of range"),
        ("cpm_bee", {"hidden_size": 16, "gates": ("hidden",)}, "cannot prune the hidden size"),
        ("mixtral", {"target": "parameters", "gates": ("features",)}, "no layer.*has features"),
    ],
)
def test_what_gates_cannot_do_is_said(name: str, options: dict[str, Any], message: str) -> None:
    """When they are put in, before hours of work; the model stays plain."""
    model = stir(name)
    with pytest.raises(ConfigError, match=message):
        StructureMethod(StructureConfig(**options)).attach_(model)
    with pytest.raises(ConfigError, match="unknown"):
        StructureConfig(num_heads=2, gates=("head",))
