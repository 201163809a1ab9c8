"""Megatron's shards: any degree in, any degree out, bit for bit; and what is no checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bmforge.cli import main
from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import Change, Model
from bmforge.models.cpm1 import CPM1, CPM1Config
from bmforge.models.cpm2 import CPM2, CPM2Config
from bmforge.models.eva import EVA, EVAConfig
from bmforge.models.formats.convert import convert_checkpoint
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.formats.megatron import MegatronShards
from bmforge.models.formats.megatron_model import load_megatron, reshard_megatron, save_megatron
from bmforge.models.gpt2 import GPT2, GPT2Config
from bmforge.recipes.start import find_start
from bmforge.testing.tolerance import assert_equal_trees

SIZES: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 40, "head_dim": 6}
CONFIGS = {
    "cpm1": CPM1Config(**SIZES, max_seq_len=12),
    "cpm2": CPM2Config(**WIDE),
    "eva": EVAConfig(**WIDE, attn_scale=True, activation="gelu_new"),
}
FAMILIES: dict[str, type[Model]] = {"cpm1": CPM1, "cpm2": CPM2, "eva": EVA}


def build(kind: str) -> Model:
    """Return a tiny model whose every element is another number, in half precision."""
    model = FAMILIES[kind].from_config(CONFIGS[kind], dtype=torch.float16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def original_weights(kind: str, model: Model) -> dict[str, Tensor]:
    """Return the model's weights as a program on one device keeps them, written out by hand."""
    own = {name: p.detach() for name, p in model.named_parameters()}
    out: dict[str, Tensor] = {}
    if kind == "cpm1":
        out["word_embeddings.weight"] = own["embed.weight"]
        out["position_embeddings.weight"] = own["embed_positions.weight"]
        for kind_ in ("weight", "bias"):
            out[f"transformer.final_layernorm.{kind_}"] = own[f"norm.{kind_}"]
            for i in range(2):
                ours, theirs = f"layers.{i}", f"transformer.layers.{i}"
                out[f"{theirs}.input_layernorm.{kind_}"] = own[f"{ours}.attn_norm.{kind_}"]
                out[f"{theirs}.attention.query_key_value.{kind_}"] = torch.cat(
                    [own[f"{ours}.attn.{part}_proj.{kind_}"] for part in "qkv"]
                )
                out[f"{theirs}.attention.dense.{kind_}"] = own[f"{ours}.attn.o_proj.{kind_}"]
                out[f"{theirs}.post_attention_layernorm.{kind_}"] = own[f"{ours}.mlp_norm.{kind_}"]
                out[f"{theirs}.mlp.dense_h_to_4h.{kind_}"] = own[f"{ours}.mlp.up_proj.{kind_}"]
                out[f"{theirs}.mlp.dense_4h_to_h.{kind_}"] = own[f"{ours}.mlp.down_proj.{kind_}"]
        return out
    out["word_embeds.weight"], out["lm_head.weight"] = own["embed.weight"], own["lm_head.weight"]
    if kind == "eva":
        out["role_embeds.weight"] = own["embed_segments.weight"]
    for stack in ("encoder", "decoder"):
        out[f"{stack}.word_embeds.weight"] = out["word_embeds.weight"]
        if kind == "eva":
            out[f"{stack}.role_embeds.weight"] = out["role_embeds.weight"]
        out[f"{stack}.final_layernorm.weight"] = own[f"{stack}.norm.weight"]
        first = f"{stack}.blocks.0.self_attn.self_attn.relative_attention_bias.weight"
        out[first] = own[f"{stack}.rel_bias.weight"]
        for i in range(2):
            ours, theirs = f"{stack}.layers.{i}", f"{stack}.blocks.{i}"
            attn = f"{theirs}.self_attn.self_attn"
            out[f"{theirs}.self_attn.layer_norm.weight"] = own[f"{ours}.attn_norm.weight"]
            out[f"{attn}.project.weight"] = torch.cat(
                [own[f"{ours}.attn.{part}_proj.weight"] for part in "qkv"]
            )
            out[f"{attn}.dense.weight"] = own[f"{ours}.attn.o_proj.weight"]
            if stack == "decoder":
                cross = f"{theirs}.cross_attn.cross_attn"
                out[f"{theirs}.cross_attn.layer_norm.weight"] = own[
                    f"{ours}.cross_attn_norm.weight"
                ]
                out[f"{cross}.project_q.weight"] = own[f"{ours}.cross_attn.q_proj.weight"]
                out[f"{cross}.project_kv.weight"] = torch.cat(
                    [own[f"{ours}.cross_attn.{part}_proj.weight"] for part in "kv"]
                )
                out[f"{cross}.dense.weight"] = own[f"{ours}.cross_attn.o_proj.weight"]
            out[f"{theirs}.ff.layer_norm.weight"] = own[f"{ours}.mlp_norm.weight"]
            for part, name in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
                out[f"{theirs}.ff.dense_relu_dense.{name}.weight"] = own[
                    f"{ours}.mlp.{part}_proj.weight"
                ]
    return out


def split_cpm1(name: str, whole: Tensor, rank: int, degree: int) -> Tensor:
    """One rank's part as `change_mp.py` of CPM-1-Generate cuts it out of degree 1."""
    if whole.dim() == 2 and "position" not in name:
        if "query" in name:
            third, size = whole.shape[0] // 3, whole.shape[0] // 3 // degree
            starts = [part * third + rank * size for part in range(3)]
            return torch.cat([whole[start : start + size] for start in starts])
        if "word" in name or "h_to_4h" in name:
            size = whole.shape[0] // degree
            return whole[rank * size : (rank + 1) * size]
        size = whole.shape[1] // degree
        return whole[:, rank * size : (rank + 1) * size]
    if whole.dim() == 1 and "dense_h_to_4h" in name:
        size = whole.shape[0] // degree
        return whole[rank * size : (rank + 1) * size]
    if whole.dim() == 1 and "query_key_value" in name:
        return torch.cat([part.chunk(degree)[rank] for part in whole.chunk(3)])
    return whole


def split_eva(name: str, whole: Tensor, rank: int, degree: int) -> Tensor:
    """The same of EVA's `change_mp.py`, which CPM-2's `init_ckpt.py` agrees with."""
    if whole.dim() != 2 or "role_embeds.weight" in name:
        return whole
    if "project.weight" in name:
        part = whole.shape[0] // degree // 3
        return torch.cat([whole[(rank + k * degree) * part :][:part] for k in range(3)])
    if "project_kv.weight" in name:
        part = whole.shape[0] // degree // 2
        return torch.cat([whole[(rank + k * degree) * part :][:part] for k in range(2)])
    rows = (
        "project_q.weight",
        "word_embeds.weight",
        "wi_1.weight",
        "wi_0.weight",
        "lm_head.weight",
    )
    if any(row in name for row in rows):
        part = whole.shape[0] // degree
        return whole[rank * part : (rank + 1) * part]
    part = whole.shape[1] // degree
    return whole[:, rank * part : (rank + 1) * part]


def make_shards(kind: str, model: Model, degree: int) -> list[dict[str, Tensor]]:
    """Divide a model by the published rules."""
    split = split_cpm1 if kind == "cpm1" else split_eva
    weights = original_weights(kind, model)
    return [
        {name: split(name, whole, rank, degree).clone() for name, whole in weights.items()}
        for rank in range(degree)
    ]


def write(directory: Path, shards: list[dict[str, Tensor]], **extra: Any) -> Path:
    """Write shards as DeepSpeed does, in a directory named after an iteration."""
    inner = directory / "80000"
    inner.mkdir(parents=True)
    for rank, shard in enumerate(shards):
        content = {"module": shard, "mp_world_size": len(shards), "optimizer": None, **extra}
        torch.save(content, inner / f"mp_rank_{rank:02d}_model_states.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("80000\n")
    return inner


def write_config(directory: Path, kind: str) -> None:
    """Put the model's config beside its shards."""
    (directory / "config.json").write_text(json.dumps(CONFIGS[kind].to_hf()))


def read(directory: Path) -> list[dict[str, Tensor]]:
    """Return the shards in a directory that we wrote."""
    tag = (directory / "latest_checkpointed_iteration.txt").read_text().strip()
    files = sorted((directory / tag).glob("*.pt"))
    loaded = [torch.load(file, weights_only=True) for file in files]
    assert [content["mp_world_size"] for content in loaded] == [len(files)] * len(files)
    return [content["module"] for content in loaded]


def check_equal(got: list[dict[str, Tensor]], want: list[dict[str, Tensor]]) -> None:
    """Compare shards bit for bit, dtypes included."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert_equal_trees(one, other)
        assert {n: t.dtype for n, t in one.items()} == {n: t.dtype for n, t in other.items()}


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_any_degree_to_ours_to_two(kind: str, degree: int, tmp_path: Path) -> None:
    """Shards -> model -> our files -> two shards: the two that the published rules make."""
    model = build(kind)
    write(tmp_path / "shards", make_shards(kind, model, degree))
    write_config(tmp_path / "shards", kind)
    opened = load_megatron(tmp_path / "shards")
    assert opened.config == model.config
    assert_equal_trees(opened.state_dict(), model.state_dict())
    opened.save_pretrained(tmp_path / "ours")
    again = FAMILIES[kind].from_pretrained(tmp_path / "ours", dtype=torch.float16)
    save_megatron(again, tmp_path / "two", 2)
    check_equal(read(tmp_path / "two"), make_shards(kind, model, 2))
    back = load_megatron(tmp_path / "two")
    assert_equal_trees(back.state_dict(), model.state_dict())
    assert back.config == model.config


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_shards_to_shards(kind: str, tmp_path: Path) -> None:
    """Divided anew without a model: 4 -> 2 -> 4 -> 1."""
    model = build(kind)
    write(tmp_path / "a", make_shards(kind, model, 4))
    for source, target, degree in (("a", "b", 2), ("b", "c", 4), ("c", "d", 1)):
        reshard_megatron(tmp_path / source, tmp_path / target, degree)
        check_equal(read(tmp_path / target), make_shards(kind, model, degree))


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_from_pretrained_opens_shards(kind: str, tmp_path: Path) -> None:
    """A directory of shards with a config.json opens like any other, in another dtype too."""
    model = build(kind)
    inner = write(tmp_path, make_shards(kind, model, 2))
    for place in (tmp_path, inner):
        write_config(place, kind)
        opened = FAMILIES[kind].from_pretrained(place)
        assert_equal_trees(opened.state_dict(), model.float().state_dict())


def test_any_slice_of_any_tensor(tmp_path: Path) -> None:
    """Slices across the borders of shards and of fused parts are those of the whole tensor."""
    rng = random.Random(0)
    for kind in CONFIGS:
        model = build(kind)
        write(tmp_path / kind, make_shards(kind, model, 4))
        files, whole = WeightFiles(tmp_path / kind), original_weights(kind, model)
        assert files.shapes == {name: tuple(t.shape) for name, t in whole.items()}
        for name, tensor in whole.items():
            for _ in range(4):
                slices = []
                for size in tensor.shape:
                    start = rng.randrange(size)
                    slices.append(slice(start, rng.randint(start + 1, size)))
                assert torch.equal(files.read(name, tuple(slices)), tensor[tuple(slices)]), name


def test_published_training_state_is_let_through(tmp_path: Path) -> None:
    """What DeepSpeed and the programs put beside the weights does not keep them from opening."""
    np.random.seed(1)
    extra = {
        "np_rng_state": np.random.get_state(),
        "random_rng_state": random.getstate(),
        "torch_rng_state": torch.get_rng_state(),
        "lr_scheduler": {"start_lr": np.float64(0.1), "decay_style": "noam", "num_iters": 5},
        "csr_tensor_module_names": set(),
        "args": argparse.Namespace(num_layers=2),
    }
    model = build("cpm1")
    write(tmp_path, make_shards("cpm1", model, 2), **extra)
    write_config(tmp_path, "cpm1")
    assert_equal_trees(load_megatron(tmp_path).state_dict(), model.state_dict())


def test_shards_of_old_torch(tmp_path: Path) -> None:
    """Files that torch wrote before 1.6 open, and names may begin with "module."."""
    model = build("eva")
    for rank, shard in enumerate(make_shards("eva", model, 2)):
        content = {"module": {f"module.{name}": tensor for name, tensor in shard.items()}}
        file = tmp_path / f"mp_rank_{rank:02d}_model_states.pt"
        torch.save(content, file, _use_new_zipfile_serialization=False)
    write_config(tmp_path, "eva")
    assert_equal_trees(load_megatron(tmp_path).state_dict(), model.state_dict())


def test_which_preset_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes tell the preset; where several fit, or none, one must be named."""
    model = build("eva")
    write(tmp_path, make_shards("eva", model, 2))
    with pytest.raises(ConfigError, match=r"EVA.*fit no preset.*preset="):
        load_megatron(tmp_path)
    fields = dict(WIDE)
    monkeypatch.setitem(EVAConfig.presets, "tiny", {**fields, "attn_scale": True})
    opened = load_megatron(tmp_path)
    assert opened.config == CONFIGS["eva"]  # with the GELU it was trained with
    monkeypatch.setitem(EVAConfig.presets, "other", fields)
    with pytest.raises(ConfigError, match="fit the presets tiny, other"):
        load_megatron(tmp_path)
    assert not load_megatron(tmp_path, preset="other").config.attn_scale
    with pytest.raises(CheckpointError, match="wrong shape"):
        load_megatron(tmp_path, preset="eva2.0-base")


def test_original_config_of_eva(tmp_path: Path) -> None:
    """The original program's config has no vocabulary: its size is the embedding's."""
    model = build("eva")
    write(tmp_path, make_shards("eva", model, 2))
    fields = {
        "d_model": 32, "d_ff": 40, "d_kv": 6, "num_heads": 4, "num_layers": 2,
        "num_decoder_layers": 2, "dropout_rate": 0.0, "feed_forward_proj": "relu",
        "init_method_std": 0.001, "initializer_factor": 1.0, "layer_norm_epsilon": 1e-06,
        "max_position_embeddings": 512, "use_cache": True,
        "use_scaled_init_for_output_weights": True, "do_dim_trick": False, "attn_scale": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_megatron(tmp_path).config == model.config


def test_a_missing_shard(tmp_path: Path) -> None:
    """A gap is named; so are shards fewer than a file says, and more."""
    shards = make_shards("cpm1", build("cpm1"), 4)
    inner = write(tmp_path, shards)
    (inner / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"not the shards \[1\].*mp_rank_01_model_states\.pt"):
        load_megatron(tmp_path)
    torch.save({"module": shards[1]}, inner / "mp_rank_01_model_states.pt")
    (inner / "mp_rank_03_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="one of 4 shards, but 3 are present"):
        load_megatron(tmp_path)
    for file in inner.glob("*.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states"):
        load_megatron(tmp_path)


def test_shards_of_different_degrees(tmp_path: Path) -> None:
    """A shard of another degree is refused, with or without a word about it in the file."""
    model = build("cpm2")
    two, four = make_shards("cpm2", model, 2), make_shards("cpm2", model, 4)
    write(tmp_path / "said", [two[0], four[1]])
    with pytest.raises(
        CheckpointError, match=r"mp_rank_01.* and mp_rank_00.* come from different models"
    ):
        load_megatron(tmp_path / "said")
    inner = write(tmp_path / "half", four[:2], mp_world_size=4)
    with pytest.raises(CheckpointError, match="one of 4 shards, but 2 are present"):
        load_megatron(tmp_path / "half")
    for rank in range(2):  # nothing in the files tells, but the model's sizes do
        file = inner / f"mp_rank_{rank:02d}_model_states.pt"
        torch.save({"module": four[rank]}, file)
    write_config(tmp_path / "half", "cpm2")
    with pytest.raises(CheckpointError, match="wrong shape"):
        load_megatron(tmp_path / "half")


def test_other_models_shards(tmp_path: Path) -> None:
    """Shards of two models, of experts, of unknown models, or without weights."""
    one, other = make_shards("cpm2", build("cpm2"), 2), make_shards("eva", build("eva"), 2)
    write(tmp_path / "mixed", [one[0], other[1]])
    with pytest.raises(CheckpointError, match=r"differ.*role_embeds"):
        load_megatron(tmp_path / "mixed")
    (tmp_path / "moe").mkdir()
    torch.save({"model": one[0]}, tmp_path / "moe" / "mp_rank_00_00_model_states.pt")
    with pytest.raises(CheckpointError, match="one expert per rank"):
        load_megatron(tmp_path / "moe")
    write(tmp_path / "unknown", [{"weight": torch.ones(2)}])
    with pytest.raises(CheckpointError, match="CPM-1"):
        load_megatron(tmp_path / "unknown")
    write(tmp_path / "empty", [{}], module=None)
    with pytest.raises(CheckpointError, match="'module'"):
        load_megatron(tmp_path / "empty")


def test_code_in_a_shard_does_not_run(tmp_path: Path) -> None:
    """A pickle that calls something, and a damaged file, are refused."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    inner = write(tmp_path / "evil", [{"x": torch.ones(1)}], args=Evil())
    with pytest.raises(CheckpointError, match="damaged or not a shard"):
        load_megatron(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()
    file = inner / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="mp_rank_00"):
        MegatronShards(tmp_path / "evil")


def test_degrees_that_do_not_divide(tmp_path: Path) -> None:
    """A degree that does not divide the heads is refused before anything is written."""
    model = build("cpm1")
    with pytest.raises(CheckpointError, match=r"3 shards"):
        save_megatron(model, tmp_path / "a", 3)
    with pytest.raises(CheckpointError, match="degree=0"):
        save_megatron(model, tmp_path / "a", 0)
    assert not (tmp_path / "a").exists()
    save_megatron(model, tmp_path / "a", 2)
    with pytest.raises(CheckpointError, match="already contains Megatron shards"):
        save_megatron(model, tmp_path / "a", 1)


def test_families_without_shards(tmp_path: Path) -> None:
    """Other families, and CPM-2's experts, have no such form."""
    small = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
    experts = CPM2.from_config(CPM2Config(**WIDE, num_experts=2))
    for model in (GPT2.from_config(GPT2Config(**small)), experts):
        with pytest.raises(ConfigError, match="cannot be saved as Megatron shards"):
            save_megatron(model, tmp_path, 2)


def test_changed_models_have_no_shards(tmp_path: Path) -> None:
    for change in (
        Change("resize", "layers.1", {"num_heads": 2}),
        Change("low_rank", "layers.0.attn.q_proj", {"rank": 2}),
    ):
        model = build("cpm1").change_(change)
        with pytest.raises(
            ConfigError, match=f"CPM1 has changes .*: {change.kind}.*save_pretrained"
        ):
            save_megatron(model, tmp_path / "new", 2)
        assert not (tmp_path / "new").exists()


def test_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command: shards to ours, to other shards, and with a preset's name."""
    model = build("eva")
    source = tmp_path / "shards"
    write(source, make_shards("eva", model, 4))
    (source / "vocab.txt").write_text("a\n")
    assert main(["convert", str(source), str(tmp_path / "two"), "--megatron-degree", "2"]) == 0
    check_equal(read(tmp_path / "two"), make_shards("eva", model, 2))
    assert (tmp_path / "two" / "vocab.txt").read_text() == "a\n"
    fields = dict(WIDE)
    monkeypatch.setitem(EVAConfig.presets, "tiny", {**fields, "attn_scale": True})
    monkeypatch.setitem(EVAConfig.presets, "other", fields)
    assert main(["convert", str(source), str(tmp_path / "none")]) == 2
    assert main(["convert", str(source), str(tmp_path / "ours"), "--preset", "tiny"]) == 0
    opened = EVA.from_pretrained(tmp_path / "ours", dtype=torch.float16)
    assert_equal_trees(opened.state_dict(), model.state_dict())
    assert opened.config == model.config
    convert_checkpoint(source, tmp_path / "one", preset="tiny", megatron_degree=1)
    check_equal(read(tmp_path / "one"), make_shards("eva", model, 1))
    assert load_megatron(tmp_path / "one").config == model.config
    assert not list(tmp_path.glob(".*partial"))


def test_one_place_says_how_eva_was_trained(tmp_path: Path) -> None:
    """Opened or converted, shards get the GELU of their training; a config.json decides."""
    config = EVAConfig(**WIDE, attn_scale=True, activation="gelu_new")
    save_megatron(EVA.from_config(config), tmp_path, 2)
    raw = json.loads((tmp_path / "config.json").read_text())
    for fields, activation in (({}, "gelu_new"), ({"dense_act_fn": "gelu"}, "gelu")):
        told = {name: value for name, value in raw.items() if name != "dense_act_fn"}
        (tmp_path / "config.json").write_text(json.dumps({**told, **fields}))
        assert EVA.from_pretrained(tmp_path).config.activation == activation
        assert load_megatron(tmp_path).config.activation == activation
        assert find_start(str(tmp_path)).config.activation == activation
    assert EVAConfig().activation == "gelu"
