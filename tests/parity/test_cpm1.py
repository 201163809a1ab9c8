"""CPM-1 against vectors that the original code made, and against transformers' GPT-2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.models.cpm1 import CPM1, CPM1Config
from bmforge.testing.batches import make_batch
from bmforge.testing.capability import capability
from bmforge.testing.decoder_suite import DecoderOwnSuite
from bmforge.testing.family_suite import FamilySuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.golden import Golden
from bmforge.testing.presets import count_preset
from bmforge.testing.tolerance import assert_close

GOLDEN = Path(__file__).parents[1] / "golden" / "cpm1_gpt2.npz"
# Parts of a block: CPM-1's name -> transformers' GPT-2's.
PARTS = {
    "input_layernorm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def open_original(directory: Path) -> tuple[CPM1, Golden]:
    """Open the original weights and config."""
    golden = Golden(GOLDEN, atol=2e-5)
    golden.write(directory)
    return CPM1.from_pretrained(directory), golden


class TestCPM1(DecoderOwnSuite, FamilySuite, FileSuite):
    """CPM-1."""

    model_class = CPM1

    def tiny_config(self) -> CPM1Config:
        """Return a tiny config."""
        return CPM1Config(
            vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, max_seq_len=32, init_std=0.1
        )

    @capability("logits")
    def test_original_logits(self, tmp_path: Path) -> None:
        """The original's logits, with its mask and positions left to us and with ours given."""
        model, golden = open_original(tmp_path)
        ids, positions = golden.inputs["input_ids"], golden.inputs["position_ids"]
        golden.check("logits", model(ids).logits)
        golden.check("logits", model(ids, torch.ones_like(ids), positions).logits)

    @capability("gradients")
    def test_original_gradients(self, tmp_path: Path) -> None:
        """The loss, and the gradients that the vectors have."""
        model, golden = open_original(tmp_path)
        # The original compares a label with the logits at its own place: one token more moves it.
        ids, labels = F.pad(golden.inputs["input_ids"], (0, 1)), golden.inputs["labels"]
        loss = model(ids, labels=F.pad(labels, (1, 0), value=-100)).loss
        golden.check("loss", loss)
        loss.backward()
        golden.check_gradients(model)

    @capability("conversion")
    def test_original_weights_come_back(self, tmp_path: Path) -> None:
        """What we save is bit for bit what the original saved, and the config means the same."""
        model, golden = open_original(tmp_path / "theirs")
        model.save_pretrained(tmp_path / "ours")
        saved = load_file(tmp_path / "ours" / "model.safetensors")
        assert set(saved) == set(golden.weights)
        assert all(torch.equal(saved[n], golden.weights[n]) for n in saved)
        again = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert {n: again[n] for n in golden.config} == golden.config
        assert CPM1.from_pretrained(tmp_path / "ours").config == model.config

    @capability("generate")
    @pytest.mark.parametrize("beams", [1, 3])
    def test_generates_the_same_ids(self, beams: int, tmp_path: Path) -> None:
        """Greedy and beam search give transformers' ids, padded prompts too."""
        model, golden = open_original(tmp_path)
        theirs = make_gpt2(golden.weights)
        ids = make_batch(model, length=6, seed=4)
        assert_close(model(ids).logits, theirs(ids).logits, atol=2e-5)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 8, "do_sample": False}
        want = theirs.generate(ids, attention_mask=mask, pad_token_id=5, **options)
        assert torch.equal(generate(model, ids, mask, **options), want)


def make_gpt2(weights: dict[str, Tensor]) -> GPT2LMHeadModel:
    """Return transformers' GPT-2 with the original weights."""
    config = GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=40,
        activation_function="gelu_new", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    mapped = {
        "transformer.wte.weight": weights["word_embeddings.weight"],
        "lm_head.weight": weights["word_embeddings.weight"],
        "transformer.wpe.weight": weights["position_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        mapped[f"transformer.ln_f.{kind}"] = weights[f"transformer.final_layernorm.{kind}"]
        for layer in range(2):
            for ours, theirs in PARTS.items():
                tensor = weights[f"transformer.layers.{layer}.{ours}.{kind}"]
                mapped[f"transformer.h.{layer}.{theirs}.{kind}"] = tensor.t()
    model = GPT2LMHeadModel(config).eval()
    model.load_state_dict(mapped)
    return model


def test_init_scales_what_adds_to_the_residual() -> None:
    """Its standard deviation is that of the rest divided by sqrt(2 L), as in Megatron."""
    model = CPM1.from_config(CPM1Config.preset("cpm1-small", num_layers=8), device="meta")
    assert model.init_std("layers.0.attn.o_proj.weight") == 0.02 / 4
    assert model.init_std("layers.0.mlp.down_proj.weight") == 0.02 / 4
    assert model.init_std("layers.0.attn.q_proj.weight") == 0.02


def test_fixed_fields() -> None:
    """What the original cannot vary is refused here, all of it at once."""
    with pytest.raises(ConfigError, match=r"intermediate_size=7.*tie_word_embeddings=False"):
        CPM1Config(intermediate_size=7, tie_word_embeddings=False)


# transformers' GPT2LMHeadModel of the same sizes, vocabulary 30000 and 1024 positions. Published:
# 109 million, and 2.6 billion for the large one.
SIZES = {"cpm1-small": (768, 12, 12), "cpm1-medium": (1024, 24, 16), "cpm1-large": (2560, 32, 32)}


@pytest.mark.parametrize("name", list(SIZES))
def test_preset_sizes(name: str) -> None:
    """Every preset has as many parameters as transformers' GPT-2 of its size."""
    hidden, layers, heads = SIZES[name]
    config = GPT2Config(
        vocab_size=30000, n_positions=1024, n_embd=hidden, n_layer=layers, n_head=heads
    )
    with torch.device("meta"):
        want = sum(p.numel() for p in GPT2LMHeadModel(config).parameters())
    assert set(CPM1Config.presets) == set(SIZES)
    assert count_preset(CPM1, name) == want


def test_published_sizes() -> None:
    """109 million and 2.6 billion parameters."""
    assert round(count_preset(CPM1, "cpm1-small") / 1e6) == 109
    assert round(count_preset(CPM1, "cpm1-large") / 1e9, 1) == 2.6
