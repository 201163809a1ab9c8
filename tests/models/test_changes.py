"""Changes as data: JSON, replay, and everything that can be wrong with one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from bmforge.batch import IGNORE_INDEX
from bmforge.errors import CheckpointError, ConfigError
from bmforge.logging import get_logger
from bmforge.models import (
    GPT2,
    AutoModel,
    Change,
    GPT2Config,
    Llama,
    LlamaConfig,
    freeze_base_,
    init_weights_,
)
from bmforge.models.changes import CHANGES_KEY, apply_change_
from bmforge.nn.low_rank import ExpertsLowRank, LowRankOptions
from bmforge.nn.part import adapters_of, attach_part_, detach_part_
from bmforge.parallel import Layout, parallelize, shutdown_distributed
from bmforge.surgery import copy_to_meta, persistent_tensors
from bmforge.testing import assert_close, assert_equal_trees, run_distributed
from bmforge.testing.layouts import check_layout

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 16,
}
IDS = torch.arange(16).view(2, 8)


def small() -> GPT2:
    return GPT2.from_config(GPT2Config(**SIZES)).eval()


def low_rank(where: Any = "layers.*.attn.q_proj", **more: Any) -> Change:
    return Change("low_rank", where, {"rank": 2}, **more)


def test_json_and_back() -> None:
    change = Change("low_rank", ["a.*", "b"], {"rank": 2, "alpha": 4.0}, "mine")
    assert Change.from_json(json.loads(json.dumps(change.to_json()))) == change
    former = {"rank": 2, "root_scale": True, "magnitude": False}  # names in earlier files
    read = Change.from_json({"kind": "low_rank", "where": ["a"], "options": former})
    assert read.options == {"rank": 2, "use_rslora": True, "use_dora": False}
    assert Change("int8", "a").where == ("a",)
    assert "name" not in Change("int8", "a").to_json()


@pytest.mark.parametrize("where", [3, None, ["embed", 3]])
def test_places_that_are_no_names(where: Any) -> None:
    with pytest.raises(ConfigError, match="must be a module glob"):
        Change("int8", where)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"kind": "low_rank"}, "kind and where are"),
        (
            {"kind": "low_rank", "where": "a", "rank": 2},
            "unknown or missing fields: rank",
        ),
        (["low_rank"], "must be an object with the fields"),
        ({"kind": "lowrank", "where": "a"}, "Did you mean 'low_rank'"),
    ],
)
def test_json_that_is_no_change(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Change.from_json(value)


@pytest.mark.parametrize(
    "change",
    [
        low_rank(),
        Change("int8", "layers.*.mlp.*_proj"),
        Change("quantize", "layers.*.mlp.*_proj", {"bits": 4, "group_size": 32}),
        Change("resize", "layers.0", {"num_heads": 2}),
    ],
    ids=lambda change: change.kind,
)
@pytest.mark.parametrize("max_file_bytes", [4 << 30, 8000])
def test_transformers_refuses_a_changed_model(
    change: Change, max_file_bytes: int, tmp_path: Path
) -> None:
    """transformers would ignore the adapter, or initialize the changed weights randomly."""
    small().save_pretrained(tmp_path)
    changed = small().change_(change)
    changed.save_pretrained(tmp_path, overwrite=True, max_file_bytes=max_file_bytes)
    with pytest.raises(OSError, match="no file named"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path).eval()
    assert_close(again(IDS).logits, changed(IDS).logits)
    small().save_pretrained(tmp_path, overwrite=True)
    assert not list(tmp_path.glob("bmforge_model*"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(theirs(IDS).logits, AutoModel.from_pretrained(tmp_path).eval()(IDS).logits)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (low_rank("layers.*.attn.qproj"), "'low_rank' to GPT2.*matches nothing.*q_proj"),
        (Change("low_rank", "layers.*.attn.q_proj", {"rnk": 2}), "Did you mean 'rank'"),
        (
            Change("low_rank", "layers.*.attn.q_proj", {"rank": 33}),
            "rank=33 is out of range",
        ),
        (Change("low_rank", "layers.*.attn.q_proj", {}), "fields are missing: options.rank"),
        (low_rank("layers.0.attn"), "needs a linear layer, but the target is a Attention"),
        (low_rank(name="not a word"), "not a valid Python identifier"),
        (low_rank(name="weight"), "already has an attribute 'weight'"),
        (Change("int8", "embed"), "shares its weight with lm_head"),
        (Change("int8", "layers.0.attn_norm"), "a LayerNorm cannot be stored as int8"),
        (Change("int8", ("layers.0.mlp.up_proj",), {"bits": 4}), "unknown field options.bits"),
        (Change("resize", "layers.0", {"num_heads": 3, "num_kv_heads": 2}), "multiple of"),
        (Change("prefix", "layers.*.mlp", {"length": 2}), "does not support a prefix adapter"),
        (Change("prompt", "embed", {"length": 0}), "length=0 must be at least 1"),
        (Change("prompt", "embed", {"length": 2}, "mine"), "name='mine' has no effect"),
        (
            Change("prompt", ("embed", "embed_positions"), {"length": 2}),
            "token embedding named `embed`",
        ),
        (Change("prefix", "layers.*.attn", {"length": 2, "std": -1.0}), "std=-1.0 must be"),
        (Change("int8", "layers.0.mlp.up_proj", name="mine"), "name='mine' has no effect"),
        (Change("int8", ()), "selects no module"),
        (low_rank(()), "selects no module"),
        (Change("low_rank", "lm_head", {"rank": 2, "alpha": 0.0}), "alpha=0.0 must be"),
        (Change("low_rank", "lm_head", {"rank": 2, "alpha": float("nan")}), "alpha=nan must be"),
        (Change("low_rank", "lm_head", {"rank": 2, "dropout": 1.0}), "dropout=1.0 must be"),
        (Change("low_rankk", "layers.0"), "to GPT2.*unknown kind of change: 'low_rankk'"),
    ],
)
def test_a_change_that_does_not_fit_leaves_the_model(change: Change, said: str) -> None:
    """The message names the kind and the model, and nothing was changed."""
    model = small()
    before = {name: tensor.clone() for name, tensor in persistent_tensors(model).items()}
    config = copy.deepcopy(model.config)
    with pytest.raises(ConfigError, match=said) as error:
        model.change_(change)
    assert "GPT2" in str(error.value)
    assert change.kind in str(error.value)
    after = persistent_tensors(model)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.config == config


def test_twice_is_refused() -> None:
    model = small().change_(low_rank()).change_(Change("int8", "layers.0.mlp.*_proj"))
    for change in (low_rank(), Change("int8", "layers.*.mlp.*_proj")):
        with pytest.raises(ConfigError, match=r"already"):
            model.change_(change)
    assert len(model.config.changes) == 2
    model.change_(low_rank(name="second"))
    assert [name for name, _ in adapters_of(model.layers["0"].attn.q_proj)] == [
        "low_rank",
        "second",
    ]


def test_a_part_whose_name_int8_rows_need() -> None:
    model = small().change_(low_rank(name="scale"))
    before = persistent_tensors(model)
    with pytest.raises(
        ConfigError,
        match=r"adapter of layers\.0\.attn\.q_proj has the name 'scale', .* attribute of Int8",
    ):
        model.change_(Change("int8", "layers.*.attn.*_proj"))
    after = persistent_tensors(model)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_numbers_of_parts_beside_experts() -> None:
    """They are checked as beside a linear layer; dropout drops in training only."""
    model = small().change_(Change("resize", "layers.0", {"num_experts": 2}))
    for rank in (-1, 0, 33):
        with pytest.raises(ConfigError, match=f"rank={rank} is out of range"):
            model.change_(Change("low_rank", "layers.0.mlp.experts", {"rank": rank}))
    experts = model.layers["0"].mlp.experts
    part = ExpertsLowRank.for_module(experts, LowRankOptions(2, dropout=0.5))
    for side in part.parameters():
        nn.init.normal_(side)
    x, ends = torch.ones(4, 32), torch.tensor([2, 4])
    assert torch.equal(*(part.eval()("up_proj", x, ends) for _ in range(2)))
    assert not torch.equal(*(part.train()("up_proj", x, ends) for _ in range(2)))


def test_sizes_come_before_parts() -> None:
    model = small().change_(low_rank())
    with pytest.raises(ConfigError, match="Resize layers first"):
        model.change_(Change("resize", "layers.0", {"num_heads": 2}))


def test_a_laid_out_model_is_not_changed() -> None:
    model = small()
    try:
        parallelize(model, Layout(), precision="bf16")
        with pytest.raises(ConfigError, match="Apply the change before parallelize"):
            model.change_(low_rank())
    finally:
        shutdown_distributed()


def save_changed(folder: Path) -> dict[str, Any]:
    small().change_(low_rank()).save_pretrained(folder)
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


def test_a_newer_version_and_an_unknown_kind(tmp_path: Path) -> None:
    raw = save_changed(tmp_path)
    for change, said in (
        ({"version": 2}, "GPT2Config.*format version 2 .supported: 1"),
        (
            {"changes": [{"kind": "int3", "where": ["embed"]}]},
            "GPT2Config.*unknown kind of change: 'int3'",
        ),
        ({"changes": 5}, "must be an object with the fields"),
    ):
        text = json.dumps({**raw, CHANGES_KEY: {**raw[CHANGES_KEY], **change}})
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            AutoModel.from_pretrained(tmp_path)


def test_tensors_that_are_missing_or_too_many(tmp_path: Path) -> None:
    raw = save_changed(tmp_path / "changed")
    (tmp_path / "changed" / "config.json").write_text(
        json.dumps({name: value for name, value in raw.items() if name != CHANGES_KEY})
    )
    with pytest.raises(CheckpointError, match=r"unexpected: bmforge\.layers\.0.*low_rank\.down"):
        AutoModel.from_pretrained(tmp_path / "changed")
    small().save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"missing: bmforge\.layers\.0.*low_rank\.down"):
        AutoModel.from_pretrained(tmp_path / "plain")


def test_saving_says_what_transformers_cannot_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a plain model still opens there, with the same logits."""
    get_logger().addHandler(caplog.handler)
    try:
        small().change_(low_rank()).save_pretrained(tmp_path / "changed")
    finally:
        get_logger().removeHandler(caplog.handler)
    assert "low_rank" in caplog.text
    assert "transformers" in caplog.text
    small().save_pretrained(tmp_path / "plain")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert_close(theirs(IDS).logits, small()(IDS).logits)


def test_only_parts_are_trained() -> None:
    model = small().change_(Change("int8", ("embed", "lm_head"))).change_(low_rank())
    freeze_base_(model)
    model(IDS, labels=IDS).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {
        f"layers.{i}.attn.q_proj.low_rank.{side}" for i in range(2) for side in ("down", "up")
    }


def test_a_drawn_head_is_trained_with_the_parts() -> None:
    config = GPT2Config(**SIZES, head="sequence_classification", changes=(low_rank(),))
    model = GPT2.from_config(config)
    freeze_base_(model, config.heads[config.head].names)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[0] for name in trained} == {
        "layers.0.attn.q_proj.low_rank",
        "layers.1.attn.q_proj.low_rank",
        "classifier",
    }


def test_a_part_goes_away_again() -> None:
    model, plain = small().change_(low_rank()), small()
    names = set(persistent_tensors(plain))
    for block in model.layers.values():
        part = detach_part_(block.attn.q_proj, "low_rank")
        assert not block.attn.q_proj._forward_hooks
        attach_part_(block.attn.q_proj, "again", part)
        detach_part_(block.attn.q_proj, "again")
    assert set(persistent_tensors(model)) == names
    assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_hooks_get_a_layers_output_with_its_adapters() -> None:
    """A hook that is older than the adapter, too."""
    model, seen = small(), list[Tensor]()
    layer: Any = model.layers["0"].attn.q_proj
    layer.register_forward_hook(lambda own, args, out: seen.extend((args[0], out)))
    model.change_(low_rank())
    nn.init.normal_(layer.low_rank.up)
    model(IDS)
    part = layer.low_rank
    weight = layer.weight + part.scale * part.up @ part.down
    assert_close(seen[1], nn.functional.linear(seen[0], weight, layer.bias))


def test_a_hugging_face_model() -> None:
    """Conv1D holds its matrix the other way round; packed rows and parts follow it."""
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    twin = copy.deepcopy(model)
    apply_change_(model, Change("int8", "transformer.h.*.*.c_*"))
    apply_change_(model, low_rank("transformer.h.*.attn.c_attn"))
    with torch.no_grad():
        for name, module in model.named_modules():
            if not hasattr(module, "scale") or not hasattr(module, "weight"):
                continue
            plain = twin.get_submodule(name).weight
            rows = module.weight.double() * module.scale[:, None]
            assert (rows.t() - plain).abs().max() <= plain.abs().max() / 127
            plain.copy_(rows.t())
            if hasattr(module, "low_rank"):
                part = module.low_rank
                nn.init.normal_(part.up, std=0.1)
                plain += (part.up @ part.down).t()
    assert_close(model(IDS).logits, twin(IDS).logits)
    with pytest.raises(ConfigError, match="supported: model families of bmforge"):
        apply_change_(model, Change("resize", "transformer.h.0", {"num_heads": 2}))


def say_what_cannot_be_cut() -> str:
    model = Llama.from_config(LlamaConfig(**SIZES, intermediate_size=64))
    model.change_(low_rank("layers.0.attn.q_proj"))
    model.layers["0"].attn.q_proj.low_rank.__class__ = type(
        "Stubborn",
        (type(model.layers["0"].attn.q_proj.low_rank),),
        {"sharding_styles": frozenset({""})},
    )
    try:
        parallelize(model, Layout(tp=2, pp=3))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_part_that_a_layout_cannot_cut_is_said_with_all_else() -> None:
    """On every process, before the first collective."""
    said = run_distributed(say_what_cannot_be_cut, 2)
    assert said[0] == said[1]
    assert "layers.0.attn.q_proj.low_rank (Stubborn) is attached to" in said[0]
    assert "pp=3" in said[0]


def test_a_copy_on_meta_has_the_same_names_and_ties() -> None:
    model = small().change_(low_rank())
    described = copy_to_meta(model)
    assert all(tensor.is_meta for tensor in persistent_tensors(described).values())
    shapes = {n: (t.shape, t.dtype) for n, t in persistent_tensors(model).items()}
    assert {n: (t.shape, t.dtype) for n, t in persistent_tensors(described).items()} == shapes
    assert described.lm_head.weight is described.embed.weight


def test_a_changed_head_of_another_size_is_drawn_anew(tmp_path: Path) -> None:
    """Its packed rows and what stands beside it as well, as a fresh model draws them."""
    config = GPT2Config(**SIZES, head="sequence_classification", num_labels=5)
    model = GPT2.from_config(config, seed=3)
    model.change_(Change("int8", "classifier"))
    model.change_(Change("low_rank", "classifier", {"rank": 2})).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"wrong shape: bmforge\.classifier\.weight"):
        GPT2.from_pretrained(tmp_path, num_labels=3)
    again = GPT2.from_pretrained(tmp_path, num_labels=3, new_head=True)
    found, before = persistent_tensors(again), persistent_tensors(model)
    fresh = persistent_tensors(GPT2.from_config(again.config))
    drawn = [f"classifier.{key}" for key in ("weight", "scale", "low_rank.up")]
    assert list(found) == list(before)
    for name, tensor in found.items():
        assert torch.equal(tensor, (fresh if name in drawn else before)[name]), name


class Counted(nn.Linear):
    """Has a persistent buffer that nothing describes."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.register_buffer("seen", torch.zeros(3))


def test_a_tensor_that_no_rule_names_is_an_error_everywhere(tmp_path: Path) -> None:
    model = small()
    model.layers["0"].attn.q_proj = Counted()
    assert "layers.0.attn.q_proj.seen" in persistent_tensors(model)
    with pytest.raises(TypeError, match=r"matches the tensor 'layers\.0\.attn\.q_proj\.seen"):
        model.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"layers\.0\.attn\.q_proj\.seen has no initialization"):
        init_weights_(model)


INPUTS = (
    Change("prefix", "layers.*.attn", {"length": 3, "std": 0.5}),
    Change("prompt", "embed", {"length": 4, "std": 0.5}),
    Change("int8", ("embed", "lm_head", "layers.*.attn.k_proj")),
)


def prompted(model: Any) -> Any:
    """Prompt rows in front of the ids."""
    rows = torch.arange(96, 100).expand(2, -1)
    return model(torch.cat((rows, IDS), 1)).logits


def test_prefixes_and_prompts_are_saved_and_opened(tmp_path: Path) -> None:
    """They are drawn as they say, trained alone, kept through packing, and opened again."""
    model = small()
    for change in INPUTS:
        model.change_(change)
    twin = GPT2.from_config(model.config).eval()
    assert_equal_trees(persistent_tensors(twin), persistent_tensors(model))
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(prompted(again), prompted(model))
    assert not torch.equal(model(IDS).logits, small()(IDS).logits)
    freeze_base_(model)
    prompted(model).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    sides = {f"layers.{i}.attn.prefix.{side}" for i in range(2) for side in ("key", "value")}
    assert trained == sides | {"embed.prompt.weight"}
    with pytest.raises(ConfigError, match="already has a prefix"):
        model.change_(INPUTS[0])


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(zero=3)], ids=str)
def test_prefixes_and_prompts_on_layouts(layout: Layout) -> None:
    config = GPT2Config(**SIZES, changes=INPUTS)
    rows = torch.arange(96, 100).expand(4, -1)
    ids = torch.cat((rows, torch.arange(32).view(4, 8)), 1)
    labels = ids.masked_fill(ids >= 96, IGNORE_INDEX)
    check_layout(
        GPT2,
        config,
        {"input_ids": ids},
        {"labels": labels},
        world=2,
        layout=layout,
        micro_batches=2,
        frozen=True,
    )
