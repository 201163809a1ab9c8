"""Checkpoints of ModelCenter and of Hugging Face, converted: logits are transformers'."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import GPT2, AutoModel, Change, GPT2Config
from bmforge.models.formats.convert import convert_checkpoint
from bmforge.models.hub import FAMILIES
from bmforge.testing.reference_pair import build_reference
from bmforge.testing.tolerance import assert_close, assert_equal_trees

sys.path.insert(0, str(Path(__file__).parent))

import modelcenter_checkpoints as old

DIMS = {"dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 48, "num_layers": 3}
WIDTHS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
ENCODER = {**WIDTHS, "intermediate_size": 48, "vocab_size": 50}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "num_layers": 2}
OLD_T5 = {
    **{"vocab_size": 50, "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 48},
    **{"num_encoder_layers": 2, "num_decoder_layers": 2},
}
GATED = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
OLD_GATED = {**OLD_T5, "ffn_activate_fn": "gated_gelu_new", "tied": False}
IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": 5, "layer_norm_eps": 1e-5}

# name -> (family, transformers' class, its fields, ModelCenter's fields, how its tensors are made)
Case = tuple[str, Any, dict[str, Any], dict[str, Any], Callable[[dict[str, Tensor]], Any]]
CASES: dict[str, Case] = {
    "gpt2": (
        "GPT2",
        transformers.GPT2LMHeadModel,
        {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_inner": 48, "vocab_size": 49},
        {**DIMS, "vocab_size": 50, "ffn_activate_fn": "gelu_new", "att_mask_value": "-1e4"},
        old.gpt2,
    ),
    "gpt2, early": (
        "GPT2",
        transformers.GPT2LMHeadModel,
        {
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 3,
            "n_inner": 48,
            "vocab_size": 49,
            "activation_function": "gelu",
        },
        {**DIMS, "vocab_size": 50, "position_size": 1024, "tied": True},
        lambda source: old.gpt2(source, "decoder"),
    ),
    "gptj": (
        "GPTJ",
        transformers.GPTJForCausalLM,
        {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_inner": 48, "rotary_dim": 4, "vocab_size": 50},
        {**DIMS, "vocab_size": 50, "pos_rotary_dim": 4, "ffn_activate_fn": "gelu_new"},
        old.gptj,
    ),
    "opt": (
        "OPT",
        transformers.OPTForCausalLM,
        {**WIDTHS, "ffn_dim": 48, "vocab_size": 50, "word_embed_proj_dim": 32},
        {**DIMS, "vocab_size": 50, "position_size": 2048, "ffn_activate_fn": "relu"},
        old.opt,
    ),
    "llama": (
        "Llama",
        transformers.LlamaForCausalLM,
        {**ENCODER, "rms_norm_eps": 1e-6, "num_key_value_heads": 4},
        {**DIMS, "vocab_size": 50, "num_heads_kv": -1},
        old.llama,
    ),
    "llama, grouped": (
        "Llama",
        transformers.LlamaForCausalLM,
        {**ENCODER, "rms_norm_eps": 1e-5, "num_key_value_heads": 2},
        {**DIMS, "vocab_size": 50, "num_heads_kv": 2, "norm_eps": 1e-5},
        old.llama,
    ),
    "bert": (
        "Bert",
        transformers.BertForMaskedLM,
        ENCODER,
        {**DIMS, "vocab_size": 50},
        lambda source: old.encoder(source, "bert"),
    ),
    "roberta": (
        "Roberta",
        transformers.RobertaForMaskedLM,
        {
            **{**ENCODER, "type_vocab_size": 1, "pad_token_id": 1},
            **{"layer_norm_eps": 1e-5, "max_position_embeddings": 66},
        },
        {**DIMS, "vocab_size": 50, "position_size": 66},
        lambda source: old.encoder(source, "roberta", "roberta."),
    ),
    "longformer": (
        "Longformer",
        transformers.LongformerForMaskedLM,
        {**ENCODER, "attention_window": 4, "pad_token_id": 1, "max_position_embeddings": 66},
        {**DIMS, "vocab_size": 50, "position_size": 66, "attention_window": 4},
        lambda source: old.encoder(source, "longformer"),
    ),
    "t5": ("T5", transformers.T5ForConditionalGeneration, T5, OLD_T5, old.t5),
    "t5, scale": (
        "T5",
        transformers.T5ForConditionalGeneration,
        T5,
        {**OLD_T5, "scale": True, "tied": True},
        lambda source: old.t5(source, head="embedding"),
    ),
    "t5 1.1": ("T5", transformers.T5ForConditionalGeneration, GATED, OLD_GATED, old.t5),
    "t5 1.1, own head": (
        "T5",
        transformers.T5ForConditionalGeneration,
        GATED,
        OLD_GATED,
        old.t5,
    ),
    "flan-t5, own head": (
        "T5",
        transformers.T5ForConditionalGeneration,
        GATED,
        OLD_GATED,
        lambda source: old.t5(source, 1),
    ),
    "vit": (
        "ViT",
        transformers.ViTForImageClassification,
        {**WIDTHS, "intermediate_size": 48, **IMAGES},
        {
            **{"img_size": 16, "patch_size": 4, "hidden_size": 32, "num_layers": 3, "num_heads": 4},
            **{"mlp_size": 48, "num_classes": 5, "attn_bias": True},
        },
        old.vit,
    ),
}


def make_inputs(hf_class: Any) -> dict[str, Tensor]:
    """Return inputs for a tiny model of a case."""
    generator = torch.Generator().manual_seed(1)
    if hf_class is transformers.ViTForImageClassification:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(2, 48, (2, 12), generator=generator)
    if hf_class is transformers.T5ForConditionalGeneration:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :5].flip(1)}
    return {"input_ids": ids}


def make_case(name: str, tmp_path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
    """Return a transformers model and the ModelCenter checkpoint made of it."""
    _, hf_class, fields, config, rename = CASES[name]
    theirs = build_reference(hf_class, fields)
    if name.endswith("own head"):  # transformers 5 ties every T5 that it makes anew
        head = torch.randn(theirs.lm_head.weight.shape, generator=torch.Generator().manual_seed(2))
        theirs.lm_head.weight = torch.nn.Parameter(head)
    source = old.read_disk(theirs, tmp_path / "theirs")
    old.save_model_center(tmp_path / "old", config, rename(source), dtype)
    return theirs, tmp_path / "old"


@pytest.mark.parametrize("name", CASES)
def test_model_center(name: str, tmp_path: Path) -> None:
    """Ours and transformers' models of the converted directory have the original's logits."""
    family, hf_class = CASES[name][:2]
    if family not in FAMILIES:
        pytest.skip(f"{family} is not registered")
    theirs, directory = make_case(name, tmp_path)
    out = convert_checkpoint(directory, tmp_path / "new")
    inputs = make_inputs(hf_class)
    want = theirs(**inputs).logits
    # What fp32 leaves of sums of this size; dividing and multiplying again rounds twice more.
    noise = (3e-6 if family == "T5" else 1e-6) * max(1.0, want.abs().max().item())
    assert_close(AutoModel.from_pretrained(out)(**inputs).logits, want, atol=noise)
    assert_close(hf_class.from_pretrained(out).eval()(**inputs).logits, want, atol=noise)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "vit"])
def test_model_center_is_exact(name: str, tmp_path: Path) -> None:
    """Where nothing was scaled, weights come back bit for bit."""
    _, directory = make_case(name, tmp_path)
    out = convert_checkpoint(directory, tmp_path / "new", max_file_bytes=30_000)
    got = {k: v for file in out.glob("*.safetensors") for k, v in load_file(file).items()}
    want = load_file(tmp_path / "theirs" / "model.safetensors")
    assert_equal_trees(got, {name: want[name] for name in want if name in got})
    assert set(want) - set(got) <= {"lm_head.weight"}


def test_t5_in_half(tmp_path: Path) -> None:
    """A divided T5 in fp16 comes back in fp32, as near to the original as fp16 was."""
    theirs, directory = make_case("t5", tmp_path, torch.float16)
    out = convert_checkpoint(directory, tmp_path / "new")
    model = AutoModel.from_pretrained(out)
    assert model.config.tie_word_embeddings
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.float32}
    for name, want in old.read_disk(theirs, tmp_path / "again").items():
        got = load_file(out / "model.safetensors")[name]
        assert_close(got, want, rtol=2e-3, atol=1e-4)
    stored = convert_checkpoint(directory, tmp_path / "bf16", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(stored / "model.safetensors").values()} == {torch.bfloat16}


def test_t5_positions_the_other_way_round(tmp_path: Path) -> None:
    """Early checkpoints hold relative positions as (heads, buckets)."""
    theirs, directory = make_case("t5", tmp_path)
    tensors = torch.load(directory / "pytorch_model.pt", weights_only=True)
    for name in list(tensors):
        if "relative_attention_bias" in name:
            tensors[name] = tensors[name].t().contiguous()
    torch.save(tensors, directory / "pytorch_model.pt")
    out = convert_checkpoint(directory, tmp_path / "new")
    inputs = make_inputs(transformers.T5ForConditionalGeneration)
    assert_close(AutoModel.from_pretrained(out)(**inputs).logits, theirs(**inputs).logits)


def make_cpm2(folder: Path, vocab_size: int) -> Any:
    """ModelCenter's CPM-2: a T5 1.1 by its tensors' names, whose vocabulary alone tells it."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        **{**GATED, "feed_forward_proj": "gated-gelu_python", "vocab_size": vocab_size}
    )
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn(vocab_size, 32) / 8)
    tensors = old.t5(dict(theirs.state_dict()), 1)
    fields = {**OLD_T5, "vocab_size": vocab_size}
    old.save_model_center(folder, fields, tensors, torch.float32)
    return theirs


def test_cpm2_is_no_t5(tmp_path: Path) -> None:
    theirs = make_cpm2(tmp_path / "old", 26240)
    with pytest.raises(ConfigError, match="bmforge convert"):
        AutoModel.from_pretrained(tmp_path / "old")
    ids = torch.randint(8, 26240, (2, 7), generator=torch.Generator().manual_seed(0))
    wanted = theirs(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
    out = convert_checkpoint(tmp_path / "old", tmp_path / "new")
    model = AutoModel.from_pretrained(out)
    assert type(model).__name__ == "CPM2"
    found = model(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
    assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_could_be_t5_or_cpm2_is_asked_for(tmp_path: Path) -> None:
    make_cpm2(tmp_path / "old", 50)
    with pytest.raises(ConfigError, match=r"T5 or CPM2"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new")
    out = convert_checkpoint(tmp_path / "old", tmp_path / "new", family="CPM2")
    assert json.loads((out / "config.json").read_text())["model_type"] == "cpm2"
    fields = json.loads((tmp_path / "old" / "config.json").read_text())
    fields["num_decoder_layers"] = 1
    (tmp_path / "old" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="supported: equal values"):
        convert_checkpoint(tmp_path / "old", tmp_path / "newer", family="CPM2")


@pytest.mark.parametrize("extra", ["", "prompt_embedding.weight"])
def test_relative_decoders_are_told_by_name(extra: str, tmp_path: Path) -> None:
    """ModelCenter's own CPM1 and CPM3 were taken for a Llama before they were refused."""
    names = ["input_embedding.weight", "position_bias.relative_attention_bias", extra]
    names += [f"encoder.layers.0.ffn.ffn.w_in.{part}.weight" for part in ("w_0", "w_1")]
    tensors = {name: torch.ones(4, 4) for name in names if name}
    old.save_model_center(tmp_path / "old", DIMS, tensors, torch.float32)
    with pytest.raises(ConfigError, match="CPM3" if extra else r"CPM1.*from_pretrained"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new")


def test_head_on_every_token(tmp_path: Path) -> None:
    """`cls_head` is a linear layer on every token: transformers' token classification."""
    fields = {**CASES["gpt2"][2], "num_labels": 3}
    theirs = build_reference(transformers.GPT2ForTokenClassification, fields)
    source = old.read_disk(theirs, tmp_path / "theirs")
    tensors = old.gpt2({n: t for n, t in source.items() if n.startswith("transformer.")})
    tensors["cls_projection.weight"] = source["classifier.weight"]
    tensors["cls_projection.bias"] = source["classifier.bias"]
    old.save_model_center(
        tmp_path / "old", {**CASES["gpt2"][3], "cls_head": 3}, tensors, torch.float32
    )
    out = convert_checkpoint(tmp_path / "old", tmp_path / "new")
    ids = make_inputs(transformers.GPT2LMHeadModel)
    assert_close(AutoModel.from_pretrained(out)(**ids).logits, theirs(**ids).logits)


@pytest.mark.skipif("GLM" not in FAMILIES, reason="GLM is not registered")
def test_glm(tmp_path: Path) -> None:
    """GLM, which transformers lacks: the names of its tables of positions, and its config."""
    from bmforge.models.glm import GLM, GLMConfig

    sizes = {"vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    tokens = {"sop_token_id": 50, "mask_token_id": 52}
    ours = GLM.from_config(GLMConfig(**sizes, **tokens, max_seq_len=20, dropout=0.1))
    state = ours.state_dict()
    tensors = {
        "input_embedding.weight": state["embed.weight"],
        "position_embedding.weight": state["embed_positions.weight"],
        "block_position_embedding.weight": state["embed_blocks.weight"],
    }
    names = {
        "attn_norm": "self_att.layernorm_before_attention",
        "attn.q_proj": "self_att.self_attention.project_q",
        "attn.k_proj": "self_att.self_attention.project_k",
        "attn.v_proj": "self_att.self_attention.project_v",
        "attn.o_proj": "self_att.self_attention.attention_out",
        "mlp_norm": "ffn.layernorm_before_ffn",
        "mlp.up_proj": "ffn.ffn.w_in.w",
        "mlp.down_proj": "ffn.ffn.w_out",
    }
    for kind in ("weight", "bias"):
        tensors[f"encoder.output_layernorm.{kind}"] = state[f"norm.{kind}"]
        for i in range(2):
            for mine, theirs in names.items():
                tensors[f"encoder.layers.{i}.{theirs}.{kind}"] = state[f"layers.{i}.{mine}.{kind}"]
    config = {
        **{**DIMS, "num_layers": 2, "dim_ff": 128, "vocab_size": 60, "position_size": 21},
        **{"sop_tok_id": 50, "mask_tok_id": 52, "eop_tok_id": 51},
    }
    old.save_model_center(tmp_path / "old", config, tensors, torch.float32)
    model = AutoModel.from_pretrained(convert_checkpoint(tmp_path / "old", tmp_path / "new"))
    assert_equal_trees(model.state_dict(), state)
    assert model.config.sop_token_id == 50


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    _, directory = make_case("llama", tmp_path)
    tensors = torch.load(directory / "pytorch_model.pt", weights_only=True)
    tensors["surplus"] = torch.zeros(1)
    del tensors["output_projection.weight"]
    tensors["input_embedding.weight"] = torch.zeros(3, 32)
    torch.save(tensors, directory / "pytorch_model.pt")
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(directory, tmp_path / "new")
    for word in (
        "surplus",
        "output_projection.weight",
        r"input_embedding.weight has shape (3, 32)",
    ):
        assert word in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_config_that_cannot_be_computed(tmp_path: Path) -> None:
    """Fields that change numbers are refused, all of them; named ones are taken."""
    _, directory = make_case("llama", tmp_path)
    raw = json.loads((directory / "config.json").read_text())
    strange = {**raw, "length_scale": True, "att_bias": True, "frobnicate": 3}
    (directory / "config.json").write_text(json.dumps(strange))
    with pytest.raises(ConfigError, match=r"length_scale=True.*att_bias=True.*frobnicate=3"):
        convert_checkpoint(directory, tmp_path / "new")
    (directory / "config.json").write_text(json.dumps({**raw, "frobnicate": 3}))
    convert_checkpoint(directory, tmp_path / "new", allow_unknown=("frobnicate",))
    (directory / "config.json").write_text(json.dumps({**raw, "ffn_activate_fn": "softsign"}))
    with pytest.raises(ConfigError, match="softsign"):
        convert_checkpoint(directory, tmp_path / "newer")


def test_family_that_cannot_be_told(tmp_path: Path) -> None:
    old.save_model_center(tmp_path / "old", {}, {"w": torch.zeros(2)}, torch.float32)
    with pytest.raises(ConfigError, match=r"do not identify a family.*GPT2"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new")
    with pytest.raises(ConfigError, match="CPM9"):
        convert_checkpoint(tmp_path / "old", tmp_path / "new", family="CPM9")


def test_damaged_pickle(tmp_path: Path) -> None:
    """Nothing is unpickled that can run code, and a cut file is named."""
    _, directory = make_case("llama", tmp_path)
    file = directory / "pytorch_model.pt"
    file.write_bytes(file.read_bytes()[:-900])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.pt"):
        convert_checkpoint(directory, tmp_path / "new")
    torch.save({"w": Path("x")}, file)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.pt"):
        convert_checkpoint(directory, tmp_path / "new")
    torch.save({"w": 3}, file)
    with pytest.raises(CheckpointError, match="dictionary of tensors"):
        convert_checkpoint(directory, tmp_path / "new")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A GPT-2 in bf16 with a tokenizer's files beside it."""
    model = GPT2.from_config(
        GPT2Config(vocab_size=60, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=24),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(tmp_path / "source")
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "notes.txt"):
        (tmp_path / "source" / name).write_text(name)
    return tmp_path / "source"


def test_a_changed_model(tmp_path: Path) -> None:
    """Packed rows, most of what it holds, stay what they are; the rest has the file's dtype."""
    config = GPT2Config(vocab_size=60, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=24)
    model = GPT2.from_config(config, dtype=torch.bfloat16)
    model.change_(Change("int8", ("layers.*.*.*_proj", "embed", "lm_head")))
    model.save_pretrained(tmp_path / "source")
    out = convert_checkpoint(tmp_path / "source", tmp_path / "same")
    source = load_file(tmp_path / "source" / "bmforge_model.safetensors")
    assert_equal_trees(load_file(out / "bmforge_model.safetensors"), source)
    wide = convert_checkpoint(tmp_path / "source", tmp_path / "wide", dtype=torch.float32)
    kinds = {tensor.dtype for tensor in load_file(wide / "bmforge_model.safetensors").values()}
    assert kinds == {torch.int8, torch.float32}


def test_hugging_face_directory(small: Path, tmp_path: Path) -> None:
    """Weights keep their dtype unless another is asked for; the tokenizer comes along."""
    out = convert_checkpoint(small, tmp_path / "same")
    names = {"config.json", "model.safetensors", "tokenizer.json", "vocab.json", "merges.txt"}
    assert {p.name for p in out.iterdir()} == names
    source = load_file(small / "model.safetensors")
    assert_equal_trees(load_file(out / "model.safetensors"), source)
    wide = convert_checkpoint(small, tmp_path / "wide", dtype=torch.float32, max_file_bytes=9000)
    assert len(list(wide.glob("*.safetensors"))) > 2
    model = AutoModel.from_pretrained(wide)
    assert_equal_trees(model.state_dict(), GPT2.from_pretrained(small).state_dict())
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"


def test_pickled_hugging_face_directory(small: Path, tmp_path: Path) -> None:
    """`pytorch_model.bin`, also in the form from before torch 1.6, becomes safetensors."""
    tensors = load_file(small / "model.safetensors")
    (small / "model.safetensors").unlink()
    for number, zipped in enumerate((True, False)):
        torch.save(tensors, small / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        out = convert_checkpoint(small, tmp_path / str(number))
        assert_equal_trees(load_file(out / "model.safetensors"), tensors)


def test_nothing_is_overwritten(small: Path, tmp_path: Path) -> None:
    """A target that holds anything is refused; an empty directory will do."""
    before = {p: p.read_bytes() for p in small.iterdir()}
    with pytest.raises(CheckpointError, match="contains a model"):
        convert_checkpoint(small, small)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not an empty directory"):
        convert_checkpoint(small, tmp_path / "full")
    assert {p: p.read_bytes() for p in small.iterdir()} == before
    (tmp_path / "empty").mkdir()
    convert_checkpoint(small, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_failure_leaves_nothing(small: Path, tmp_path: Path) -> None:
    tensors = {n: t.clone() for n, t in load_file(small / "model.safetensors").items()}
    tensors["surplus"] = torch.zeros(1)
    (small / "model.safetensors").unlink()
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(CheckpointError, match="surplus"):
        convert_checkpoint(small, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
