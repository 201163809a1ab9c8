"""MLPs as experts: all of them are the MLP, groups are even, routers find what is active."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from masked_models import mostly_long, stir
from tiny_models import TINY, build, make_inputs
from torch import Tensor, nn

from bmforge.compress.moefy import MoEfyConfig, moefy
from bmforge.compress.moefy.activity import collect_inputs, each_activity
from bmforge.compress.moefy.cluster import group_at_random, group_rows
from bmforge.compress.moefy.coactivation import count_together, group_together
from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.models import AutoModel
from bmforge.models.changes import Change
from bmforge.nn import MLP, Block, MoE
from bmforge.testing import assert_close, assert_equal_trees
from bmforge.testing.batches import make_labels

DENSE = [name for name in TINY if name != "mixtral"]


def run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    out = model(**inputs)
    found: Tensor = out.logits if out.logits is not None else out.last_hidden_state
    return found.detach()


QUICK: dict[str, Any] = {"num_experts": 4, "epochs": 1}


@pytest.mark.parametrize("name", DENSE)
def test_all_experts_are_the_mlp(name: str) -> None:
    """Of every family, with and without features that always work, per token and per call."""
    model, inputs = stir(name), make_inputs(name)
    want = run(model, inputs)
    options: dict[str, Any] = {"router": "linear", "choice": "per_call"} if name == "gpt2" else {}
    if name in ("llama", "bert", "cpm_ant"):
        options["always"] = 8
    report = moefy(model, MoEfyConfig(**QUICK, share=1.0, **options), [inputs])
    assert not any(type(b.mlp) is MLP for b in model.modules() if isinstance(b, Block))
    assert_close(run(model, inputs), want, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        assert_close(run(model, inputs), want, rtol=1e-9, atol=1e-9)
    assert all(layer.captured == pytest.approx(1.0) for layer in report.layers.values())


@pytest.mark.parametrize("name", mostly_long(DENSE, ["gpt2", "t5"]))
def test_files_have_the_dense_model(name: str, tmp_path: Path) -> None:
    """What was split is saved as the MLP, opens as experts with the same bits, and trains."""
    model, inputs = stir(name, torch.float32), make_inputs(name)
    inputs = {k: t.float() if t.is_floating_point() else t for k, t in inputs.items()}
    dense = copy.deepcopy(model)
    always = 8 if name in ("gpt2", "t5") else 0
    moefy(model, MoEfyConfig(**QUICK, share=0.5, always=always), [inputs])
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert_equal_trees(again.state_dict(), model.state_dict())
    assert torch.equal(run(again, inputs), run(model, inputs))
    config = dense.config
    plain = type(model).from_config(config.replace(changes=()))
    shapes = {n: p.shape for n, p in plain.named_parameters()}
    assert {n: p.shape for n, p in dense.named_parameters()} == shapes
    out = model(**inputs, **make_labels(model, inputs))
    out.loss.backward()
    layer = next(m for m in model.modules() if isinstance(m, MoE))
    assert layer.experts.down_proj.grad.abs().sum() > 0


@pytest.mark.parametrize("name", mostly_long(["gpt2", "llama", "bert", "opt", "t5"], ["gpt2"]))
def test_transformers_opens_the_dense_model(name: str, tmp_path: Path) -> None:
    """The features lie in another order, which changes nothing."""
    model, inputs = stir(name, torch.float32), make_inputs(name)
    want = run(model, inputs)
    moefy(model, MoEfyConfig(**QUICK, share=0.25), [inputs])
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        got = theirs(**inputs).logits
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_groups_are_even_and_find_what_belongs_together() -> None:
    """Rows of few directions, and features that are active together, come out as they were made."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(8, 24, generator=generator)
    truth = torch.randperm(96, generator=generator) % 8
    rows = centers[truth] * (0.5 + torch.rand(96, 1, generator=generator))
    rows += 0.05 * torch.randn(96, 24, generator=generator)
    active = torch.nn.functional.one_hot(torch.randint(8, (512,), generator=generator), 8).float()
    together = count_together([(active[:, truth] * torch.rand(512, 96))], 12 / 96)
    for found in (group_rows(rows, 8), group_together(together, 8)):
        assert torch.bincount(found).tolist() == [12] * 8
        pairs = {(int(a), int(b)) for a, b in zip(found, truth, strict=True)}
        assert len(pairs) == 8
    assert torch.bincount(group_at_random(96, 8, 1)).tolist() == [12] * 8
    uneven = torch.randn(40, 6, generator=generator)
    assert torch.bincount(group_rows(uneven, 10)).tolist() == [4] * 10


def test_activity_is_what_features_add() -> None:
    """Feature by feature: the norm of what the result would lack without it."""
    for name in ("llama", "gpt2"):
        model, inputs = stir(name), make_inputs(name)
        mlp = model.layers["1"].mlp
        tokens = collect_inputs(model, ["layers.1.mlp"], [inputs], 12)["layers.1.mlp"]
        (found,) = each_activity(mlp, tokens)
        assert found.shape == (12, mlp.up_proj.weight.shape[0])
        whole = mlp(tokens)
        for feature in (0, 7):
            without = copy.deepcopy(mlp)
            with torch.no_grad():
                without.down_proj.weight[:, feature] = 0
            assert torch.allclose((whole - without(tokens)).norm(dim=1).float(), found[:, feature])


def train_router_model() -> tuple[Any, list[dict[str, Tensor]]]:
    """A ReLU MLP whose features are active in groups that tokens decide, as trained ones are."""
    generator = torch.Generator().manual_seed(0)
    model = build("opt", torch.float32)
    ids = torch.randint(4, 61, (64, 16), generator=generator)
    directions = torch.randn(16, 32, generator=generator)
    with torch.no_grad():
        for block in model.layers.values():
            truth = torch.randperm(40, generator=generator) % 8
            block.mlp.up_proj.weight.copy_(directions[truth] * 2)
            block.mlp.up_proj.weight.add_(0.2 * torch.randn(40, 32, generator=generator))
            block.mlp.up_proj.bias.fill_(-6.0)
    return model, [{"input_ids": part} for part in ids.split(16)]


@pytest.mark.parametrize("group", mostly_long(["weights", "coactivation"], ["coactivation"]))
@pytest.mark.parametrize(
    "router", mostly_long(["two_layer", "linear", "similarity"], ["two_layer"])
)
def test_routers_capture_what_is_active(group: str, router: str) -> None:
    """At a quarter of the experts: at least nine tenths of the oracle's; random ones do not."""
    model, batches = train_router_model()
    config = MoEfyConfig(num_experts=8, share=0.25, group=group, router=router)  # type: ignore[arg-type]
    report = moefy(model, config, batches)
    assert report.captured >= (0.9 if router != "similarity" else 0.7)
    control, batches = train_router_model()
    other = moefy(control, MoEfyConfig(num_experts=8, share=0.25, group="random"), batches)
    oracle, least = (sum(x.oracle for x in r.layers.values()) / 3 for r in (report, other))
    assert oracle > 1.3 * least


def test_relu_is_a_published_activation(tmp_path: Path) -> None:
    """The config says it, the model computes it, transformers opens it."""
    for name, key in (("gpt2", "activation_function"), ("llama", "hidden_act")):
        model, inputs = stir(name, torch.float32), make_inputs(name)
        relu = type(model).from_config(model.config.replace(activation="relu")).eval()
        relu.load_state_dict(model.state_dict())
        moefy(model, MoEfyConfig(**QUICK, share=1.0, relu=True), [inputs])
        assert torch.allclose(run(model, inputs), run(relu, inputs), atol=1e-5)
        model.save_pretrained(tmp_path / name)
        config = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert getattr(config, key) == "relu"
        theirs = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path / name)
        assert torch.allclose(theirs.eval()(**inputs).logits, run(model, inputs), atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_experts_generate_and_are_quantised(name: str) -> None:
    """Token by token as at once; int8 rows and 8-bit groups hold them, biases stay."""
    model = stir(name, torch.float32)
    ids = make_inputs(name)["input_ids"]
    moefy(model, MoEfyConfig(**QUICK, share=0.5, always=8), [{"input_ids": ids}])
    want = run(model, {"input_ids": ids})
    written = generate(model, ids, max_new_tokens=4, eos_token_id=None)
    assert torch.equal(written[:, ids.shape[1]], want[:, -1].argmax(-1))
    for change in (
        Change("int8", ("layers.*.mlp.experts",)),
        Change("quantize", ("layers.*.mlp.experts",), {"bits": 8, "group_size": 0}),
    ):
        packed = copy.deepcopy(model).change_(change)
        got = run(packed, {"input_ids": ids})
        # A token between two experts may go to the other one.
        assert (got - want).abs().median() < 0.01 * want.abs().max()


def test_packed_experts_are_saved(tmp_path: Path) -> None:
    """Quantised experts have no dense form: their tensors lie under our names."""
    model = stir("gpt2", torch.float32)
    inputs = make_inputs("gpt2")
    moefy(model, MoEfyConfig(**QUICK, share=0.5, always=8), [inputs])
    model.change_(Change("int8", ("layers.1.mlp.experts",)))
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(run(again, inputs), run(model, inputs))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"num_experts": 7}, "does not divide the 40 features.*nearest divisor: 8"),
        ("llama", {"num_experts": 8, "always": 1}, "does not divide the 39"),
        ("mixtral", {}, "already has experts"),
        ("llama", {"where": ("layers.7",)}, "matches nothing"),
        ("cpm_ant", {"num_experts": 8, "relu": True}, "whose activation is fixed"),
    ],
)
def test_what_cannot_be_is_said(name: str, options: dict[str, Any], message: str) -> None:
    """Before anything is touched."""
    model = build(name)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        moefy(model, MoEfyConfig(**options), [make_inputs(name)])
    assert_equal_trees(dict(model.state_dict()), before)


def test_a_refused_call_leaves_the_model_as_it_was() -> None:
    """Also its activation, where that was to become ReLU: of padding alone nothing is learned."""
    model, inputs = stir("gpt2"), make_inputs("gpt2")
    want, config, spec = run(model, inputs), model.config, model.spec
    blank = {**inputs, "attention_mask": torch.zeros_like(inputs["input_ids"])}
    with pytest.raises(ConfigError, match="contain only padding"):
        moefy(model, MoEfyConfig(**QUICK, relu=True), [blank])
    assert model.config is config
    assert model.spec is spec
    assert torch.equal(run(model, inputs), want)
    with pytest.raises(ConfigError, match="calibration batch 0 is empty"):
        moefy(model, MoEfyConfig(**QUICK, relu=True), [inputs["input_ids"][:0]])
    assert torch.equal(run(model, inputs), want)


def test_token_ids_alone_are_a_batch() -> None:
    """As for all that looks at what goes through a model."""
    one, two = stir("gpt2"), stir("gpt2")
    ids = make_inputs("gpt2")["input_ids"]
    moefy(one, MoEfyConfig(**QUICK, share=0.5), [ids])
    moefy(two, MoEfyConfig(**QUICK, share=0.5), [{"input_ids": ids, "labels": ids}])
    assert_equal_trees(one.state_dict(), two.state_dict())


def test_changed_mlps_and_missing_batches_are_refused() -> None:
    """Quantised MLPs, parts beside them, no text."""
    model = build("llama", torch.float32)
    with pytest.raises(ConfigError, match="needs batches"):
        moefy(model, MoEfyConfig(num_experts=8))
    model.change_(Change("int8", ("layers.0.mlp.up_proj",)))
    with pytest.raises(ConfigError, match="was already modified, not only resized"):
        moefy(model, MoEfyConfig(num_experts=8), [make_inputs("llama")])
    with pytest.raises(ConfigError, match=r"share=0\.0 must be above 0"):
        MoEfyConfig(share=0.0)
