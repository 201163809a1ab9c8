"""State dicts of the old model classes have ModelCenter's names, and accept its files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from bmforge.compat.model_center import model as old
from bmforge.compat.opendelta import LoraModel

SIZES = {
    "vocab_size": 50, "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 128,
    "num_layers": 2, "dropout_p": 0.0,
}  # fmt: skip
THEIRS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.randint(3, 49, (2, 8), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(IDS)
# Class -> further fields.
SMALL: dict[str, dict[str, Any]] = {
    "Bert": {"position_size": 40},
    "Roberta": {"position_size": 42},
    "Longformer": {"position_size": 42, "attention_window": 4},
    "GPT2": {"position_size": 40},
    "GPTj": {"pos_rotary_dim": 4},
    "OPT": {"position_size": 40},
    "Llama": {"num_heads_kv": 2},
    "GLM": {"position_size": 41, "sop_tok_id": 47, "mask_tok_id": 48},
    "CPM1": {},
    "CPM2": {},
}


def writers() -> Any:
    """Return the module that writes ModelCenter's tensors, from transformers' side."""
    path = Path(__file__).parents[1] / "models" / "modelcenter_checkpoints.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(kind: str, seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    config = getattr(old, f"{kind}Config")(**{**SIZES, **SMALL.get(kind, {}), **fields})
    return getattr(old, kind)(config).eval()


def draw(model: Any) -> Any:
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", SMALL)
def test_a_model_loads_the_state_of_another(kind: str, tied: bool) -> None:
    """Every tensor arrives, and no name is one of bmforge's."""
    fields = {"tied": tied} if kind in ("Bert", "Roberta", "GPT2", "OPT") else {}
    first, second = build(kind, **fields), build(kind, seed=1, **fields)
    state = first.state_dict()
    assert any(name.startswith("encoder.layers.0.self_att.self_attention.") for name in state)
    assert not [name for name in state if name.startswith(("model.", "head."))]
    second.load_state_dict(state)
    for name, parameter in first.named_parameters():
        assert torch.equal(second.get_parameter(name), parameter), name


def bert(writer: Any, folder: Path) -> tuple[Any, dict[str, Tensor], Any]:
    config = hf.BertConfig(
        vocab_size=50, intermediate_size=128, max_position_embeddings=40, **THEIRS
    )
    theirs = draw(hf.BertForPreTraining(config))
    tensors = writer.encoder(theirs.state_dict(), "bert")
    pooler = theirs.bert.pooler.dense.state_dict()
    tensors |= {f"pooler.dense.{name}": value for name, value in pooler.items()}
    # ModelCenter ignores the decoder of a tied model.
    tensors["lm_head.decoder.weight"] = torch.randn(50, 32)
    return theirs, tensors, build("Bert")


def gpt2(writer: Any, folder: Path) -> tuple[Any, dict[str, Tensor], Any]:
    config = hf.GPT2Config(
        vocab_size=49,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=128,
        n_positions=40,
        activation_function="gelu",
    )
    theirs = draw(hf.GPT2LMHeadModel(config))
    return theirs, writer.gpt2(writer.read_disk(theirs, folder)), build("GPT2")


def t5(writer: Any, folder: Path) -> tuple[Any, dict[str, Tensor], Any]:
    """Its weights are scaled down for fp16."""
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    theirs = draw(hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=50, **shape)))
    tensors = writer.t5(writer.read_disk(theirs, folder), head="embedding")
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    fields = {name: value for name, value in SIZES.items() if name != "num_layers"}
    return theirs, tensors, old.T5(old.T5Config(**fields, **layers, scale=True)).eval()


@pytest.mark.parametrize("write", [bert, gpt2, t5])
def test_tensors_of_modelcenter_give_transformers_numbers(write: Any, tmp_path: Path) -> None:
    theirs, tensors, model = write(writers(), tmp_path / "theirs")
    model.load_state_dict(dict(tensors))
    inputs = {"input_ids": IDS, "attention_mask": ONES}
    if write is t5:
        inputs["decoder_input_ids"] = IDS.flip(1)
    with torch.no_grad():
        out = theirs(**inputs)
        want = out.prediction_logits if write is bert else out.logits
        got = model(**inputs, output_logits=True).logits[..., : want.shape[-1]]
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    if write is not t5:
        assert set(model.state_dict()) == set(tensors)


def test_tensors_of_modelcenters_vit(tmp_path: Path) -> None:
    config = hf.ViTConfig(image_size=16, patch_size=8, intermediate_size=64, num_labels=5, **THEIRS)
    theirs = draw(hf.ViTForImageClassification(config))
    tensors = writers().vit(writers().read_disk(theirs, tmp_path))
    sizes = {"img_size": 16, "patch_size": 8, "hidden_size": 32, "num_layers": 2}
    model = old.ViT(old.ViTConfig(**sizes, num_heads=4, mlp_size=64, num_classes=5)).eval()
    model.load_state_dict(dict(tensors))
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images).logits, rtol=1e-5, atol=1e-5)
    assert set(model.state_dict()) == set(tensors)


def test_adapters_have_the_names_of_both_projects() -> None:
    model = build("GPT2")
    delta = LoraModel(model, modified_modules=["project_q"], lora_r=2, backend="bmt")
    delta.freeze_module(exclude=["deltas"], set_state_dict=True)
    query = "encoder.layers.{}.self_att.self_attention.project_q.lora.lora_{}"
    state = model.state_dict()
    assert set(state) == {query.format(i, part) for i in (0, 1) for part in "AB"}
    changed = {name: torch.randn_like(value) for name, value in state.items()}
    assert not model.load_state_dict(dict(changed), strict=False).unexpected_keys
    again = model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in changed.items())
