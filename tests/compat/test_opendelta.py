"""OpenDelta's programs on transformers' models, on the zoo's and on ModelCenter's."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import opendelta_programs as programs
import pytest
import torch
from torch import Tensor, nn

import bmforge.compat.opendelta as od
from bmforge.compat.model_center.model import Bert, BertConfig
from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import GPT2, AutoModel, GPT2Config
from bmforge.testing import assert_close, run_distributed
from bmforge.testing.golden import Golden

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
IDS = torch.arange(12).view(2, 6)
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 32,
}


def stir_(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)


def look(model: Any) -> Tensor:
    out = model(IDS)
    found: Tensor = (out.logits if hasattr(out, "logits") else out[0]).detach()
    return found


def test_the_readme(tmp_path: Path) -> None:
    tuned = od.LowRankAdapterModel(programs.tiny_t5(), reduction_factor=4)
    stir_(tuned)
    tuned.save_finetuned(tmp_path / "published")
    folder = str(tmp_path / "saved")
    said = programs.must_try(programs.tiny_t5, str(tmp_path / "published"), folder)
    assert not torch.equal(said["with"], said["before"])
    assert torch.equal(said["again"], said["with"])
    assert torch.equal(said["detached"], said["before"])
    assert said["trained"]
    assert all(".low_rank_adapter." in name for name in said["trained"])
    assert "config.json" in said["files"]
    assert "pytorch_model.bin" in said["files"]
    kinds = {name.rpartition(".")[2] for name in said["wrapped"]}
    assert kinds == {"q", "v"}
    assert len(said["wrapped"]) == 2 * 8
    assert [n.removeprefix("inner.inner.") for n in said["last layers"]] == [
        f"decoder.block.{i}.layer.2.DenseReluDense.wi" for i in (2, 3)
    ]
    assert said["rank"] == {(5, 16)}


def test_the_overview_trains_and_saves_what_it_leaves_unfrozen(tmp_path: Path) -> None:
    bert = programs.tiny_bert()
    delta = programs.overview(bert)
    assert delta.delta.places() == [
        "bert.encoder.layer.2.attention.output.dense",
        "bert.encoder.layer.3.attention.self.value",
    ]
    trained = {name for name, p in bert.named_parameters() if p.requires_grad}
    leaves = {".lora.down": ".lora.lora_A", ".lora.up": ".lora.lora_B"}
    assert set(bert.state_dict()) == {
        name.removesuffix(own) + old
        for name in trained
        for own, old in {**leaves, "": ""}.items()
        if name.endswith(own) and (own or ".lora." not in name)
    }
    assert {n for n in trained if ".lora." not in n} == {"classifier.weight", "classifier.bias"}
    stir_(delta)
    nn.init.normal_(bert.classifier.weight)
    want = look(bert)
    delta.save_finetuned(tmp_path)
    again = programs.tiny_bert()
    opened = od.LoraModel.from_finetuned(tmp_path, again)
    assert_close(look(again), want, rtol=1e-6, atol=1e-6)
    assert opened.config == od.AutoDeltaConfig.from_finetuned(tmp_path)
    assert opened.config.lora_r == 2
    with pytest.raises(ConfigError, match="contains a Lora, which is not a AdapterModel"):
        od.AdapterModel.from_finetuned(tmp_path, programs.tiny_bert())


def test_basic_usage_and_light_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = programs.tiny_bert()
    total = sum(p.numel() for p in model.parameters())
    delta = programs.basic_usage(model)
    assert "layer.0-3" in capsys.readouterr().out
    assert delta.num_delta_parameters() == 8 * (2 * 16 * 12 + 16 + 12) - 0
    assert delta.num_total_parameters(model) == total + delta.num_delta_parameters()
    norms = {n for n, p in model.named_parameters() if p.requires_grad and ".adapter." not in n}
    assert norms == {n for n, _ in model.named_parameters() if "LayerNorm" in n}
    delta.freeze_module()  # again, and by itself
    assert not [n for n in model.state_dict() if "LayerNorm" in n]
    size = programs.save_light(programs.tiny_bert(), str(tmp_path / "delta.ckpt"))
    assert size < 0.2


def test_several_on_the_same_modules_and_one_at_a_time() -> None:
    model = programs.tiny_bert()
    deltas = programs.compose(model)
    assert [d.delta.name for d in deltas] == ["lora", "adapter", "adapter_1", "low_rank_adapter"]
    for delta in deltas[::2]:
        delta.detach()
    for delta in deltas[1::2]:
        delta.detach()
    assert_close(look(model), look(programs.tiny_bert()), rtol=0, atol=0)
    model = programs.tiny_bert()
    before, one, out, back, other, again = programs.plug_and_unplug(model, lambda: look(model))
    assert not torch.equal(one, before)
    assert torch.equal(out, before)
    assert torch.equal(back, one)
    assert not torch.equal(other, one)
    assert torch.equal(again, one)


def test_targets_without_a_module_are_ignored_if_others_have_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = programs.tiny_bert()
    delta = od.LoraModel(model, modified_modules=["query", "layernorm_before"], lora_r=2)
    layers = [n for n, _ in model.named_modules() if n.endswith("query")]
    assert delta.num_delta_parameters() == len(layers) * 2 * 2 * 16
    assert "'layernorm_before' of modified_modules is ignored" in caplog.text
    with pytest.raises(ConfigError, match="'layernorm_before' matches no module"):
        od.LoraModel(model, modified_modules=["layernorm_before"])


@pytest.mark.parametrize("name", sorted(od.delta_models.MODELS))
def test_every_type_on_the_zoo(name: str, tmp_path: Path) -> None:
    """Each starts, detaches, attaches, saves and opens."""
    model = GPT2.from_config(GPT2Config(**SIZES)).eval()
    before = model(IDS).logits
    small = {"adapter": {"bottleneck_dim": 4}, "compacter": {"reduction_factor": 2}}
    fields = {
        "prefix": {"embed_dim": 8, "mid_dim": 8},
        "soft_prompt": {"soft_token_num": 4},
        **small,
    }
    config = od.AutoDeltaConfig.from_dict({"delta_type": name, **fields.get(name, {})})
    delta = od.AutoDeltaModel.from_config(config, backbone_model=model)
    assert all(p.requires_grad for p in model.parameters())  # nothing is frozen yet
    if name not in ("prefix", "soft_prompt"):
        assert_close(model(IDS).logits, before)
    delta.freeze_module()
    assert {id(p) for p in model.parameters() if p.requires_grad} == {
        id(p) for p in delta.parameters()
    }
    stir_(delta)
    changed = model(IDS).logits
    assert changed.shape[1] == 6 + (4 if name == "soft_prompt" else 0)
    delta.detach()
    assert torch.equal(model(IDS).logits, before)
    assert len(model.state_dict()) == len(GPT2.from_config(GPT2Config(**SIZES)).state_dict())
    delta.attach()
    assert torch.equal(model(IDS).logits, changed)
    delta.save_finetuned(tmp_path)
    again = GPT2.from_config(GPT2Config(**SIZES)).eval()
    opened = od.AutoDeltaModel.from_finetuned(tmp_path, again)
    assert type(opened) is type(delta)
    assert_close(again(IDS).logits, changed, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "adapter", "parallel_adapter", "soft_prompt"])
def test_files_of_opendelta_open(kind: str, tmp_path: Path) -> None:
    """What its own code has written, with its own logits."""
    golden = Golden(GOLDEN / "delta_bert.npz", atol=2e-5)
    del golden.config["class"]
    golden.write(tmp_path / "base", architectures=["BertForMaskedLM"], model_type="bert")
    start = f"{kind}/weight:"
    with np.load(GOLDEN / "delta_bert.npz", allow_pickle=False) as arrays:
        weights = {
            n[len(start) :]: torch.from_numpy(arrays[n]) for n in arrays if n.startswith(start)
        }
        config, want = (
            str(arrays[f"{kind}/config"]),
            torch.from_numpy(arrays[f"{kind}/output:logits"]),
        )
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta" / "config.json").write_text(config)
    torch.save(weights, tmp_path / "delta" / "pytorch_model.bin")
    backbone = AutoModel.from_pretrained(tmp_path / "base")
    delta = od.AutoDeltaModel.from_finetuned(tmp_path / "delta", backbone)
    assert delta.delta_type == json.loads(config)["delta_type"]
    read = {n: t.long() for n, t in golden.inputs.items() if n != "labels"}
    logits, real = backbone(**read).logits, read["attention_mask"].bool()
    width = real.shape[1]
    assert_close(logits[:, -width:][real], want[:, -width:][real], rtol=0, atol=2e-5)


def small_bert() -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, dim_model=16, num_heads=4, dim_head=4, dim_ff=32, num_layers=2,
        position_size=32, dropout_p=0.0,
    )  # fmt: skip
    return Bert(config)


def run_tutorial(delta_type: str) -> dict[str, Any]:
    import bmforge.compat.bmtrain as bmt

    found = programs.train_with_bmtrain(small_bert, delta_type)
    delta = found.pop("places")
    state = {n: t.clone() for n, t in delta.backbone_model.state_dict().items()}
    return {**found, "places": delta.delta.places(), "state": state, "rank": bmt.rank()}


@pytest.mark.parametrize("delta_type", ["lora", "adapter", "bitfit"])
def test_the_tutorial_with_bmtrain(delta_type: str) -> None:
    """One process; the names are ModelCenter's."""
    (one,) = run_distributed(run_tutorial, 1, delta_type)
    assert one["losses"][-1] < one["losses"][0]
    attention = "bert.model.layers.0.attn"
    if delta_type == "lora":
        assert one["places"][:2] == [f"{attention}.q_proj", f"{attention}.k_proj"]
    else:
        assert one["places"][:2] == [attention, "bert.model.layers.0.mlp"]
    assert all(f".{delta_type}." in name for name in one["trained"])


@pytest.mark.long
@pytest.mark.parametrize("delta_type", ["lora", "adapter", "bitfit"])
def test_the_tutorial_on_two_processes(delta_type: str) -> None:
    """The backbone is shared out, so is the delta: the losses and weights are one process's."""
    (one,) = run_distributed(run_tutorial, 1, delta_type)
    first, _ = run_distributed(run_tutorial, 2, delta_type)
    assert_close(torch.tensor(first["losses"]), torch.tensor(one["losses"]), rtol=1e-4, atol=1e-5)
    assert_close(first["state"], one["state"], rtol=1e-3, atol=1e-4)


def test_modelcenter_models_take_prefixes_and_prompts() -> None:
    bert = small_bert().eval()
    before = bert(IDS).last_hidden_state
    prefix = od.PrefixModel(bert, prefix_token_num=3, reparameterize=False)
    assert not torch.equal(bert(IDS).last_hidden_state, before)
    prefix.detach()
    assert torch.equal(bert(IDS).last_hidden_state, before)
    prompt = od.SoftPromptModel(bert, soft_token_num=2)
    prompt.freeze_module()
    assert bert(IDS).last_hidden_state.shape[1] == 8
    assert [n for n, p in bert.named_parameters() if p.requires_grad] == [
        "model.embed.prompt.weight"
    ]
    rows = prompt.delta.held[0].part.weight
    assert torch.equal(rows, bert.input_embedding.weight[:2])


def test_what_a_copy_keeps() -> None:
    """A hook makes the state dict light, so a copy's is as light."""
    model = programs.tiny_bert()
    od.LoraModel(model).freeze_module()
    assert list(copy.deepcopy(model).state_dict()) == list(model.state_dict())


def test_targets_typed_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("query, value\n"))
    typed = od.LoraModel(model := programs.tiny_bert(), interactive_modify=8888)
    passed = od.LoraModel(other := programs.tiny_bert(), modified_modules=["query", "value"])
    assert typed.config == passed.config
    assert [*model.state_dict()] == [*other.state_dict()]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda m: od.LoraModel(m, lora_rank=3), "Did you mean 'lora_r"),
        (lambda m: od.LoraModel(m, interactive_modify=True), "bmforge tree MODEL --html"),
        (lambda m: od.CompacterModel(m, shared_phm_rule=True), "shared_phm_rule=True"),
        (lambda m: od.LoraModel(m, modified_modules=["quary"]), "matches no module"),
        (lambda m: od.LoraModel(m)(), "Call the backbone"),
        (lambda m: od.LoraModel(m).save_finetuned(push_to_dc=True), "DeltaCenter no longer exists"),
        (lambda m: od.PrefixModel(m), "does not support a prefix adapter"),
        (lambda m: od.SoftPromptModel(m), "no bmforge token embedding"),
        (lambda m: od.AutoDeltaConfig.from_dict({"delta_type": "lroa"}), "Did you mean 'lora'"),
        (lambda m: od.AutoDeltaConfig.from_finetuned("nowhere"), "DeltaCenter"),
        (lambda m: od.Visualization(m).structure_graph(common_structure=True), "were removed"),
    ],
)
def test_what_cannot_be(build: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(programs.tiny_bert())
    assert said in str(caught.value)


def test_nothing_there() -> None:
    with pytest.raises(CheckpointError, match="is not an adapter directory"):
        od.AutoDeltaModel.from_finetuned("nowhere", programs.tiny_bert())
