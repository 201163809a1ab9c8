"""EVA against vectors that the original code made, and against T5 1.1 where the two are one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import KVCache, generate
from bmforge.models import Model
from bmforge.models.eva import EVA, EVAConfig
from bmforge.testing.batches import Batch, make_batch
from bmforge.testing.capability import capability
from bmforge.testing.family_suite import FamilySuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.golden import Golden
from bmforge.testing.presets import count_preset
from bmforge.testing.tolerance import assert_close

GOLDEN = Path(__file__).parents[1] / "golden"
VECTORS = ("eva_attn_scale", "eva_no_scale")


def open_original(name: str, directory: Path) -> tuple[EVA, Golden]:
    """Open the original weights and config."""
    golden = Golden(GOLDEN / f"{name}.npz", atol=1e-5)
    golden.write(directory)
    return EVA.from_pretrained(directory), golden


class TestEVA(FamilySuite, FileSuite):
    """EVA."""

    model_class = EVA

    def tiny_config(self) -> EVAConfig:
        """Return a tiny config."""
        return EVAConfig(
            vocab_size=61, hidden_size=32, intermediate_size=40, num_layers=2, num_heads=4,
            head_dim=6, num_buckets=16, attn_scale=True, decoder_start_token_id=2, init_std=0.5,
        )  # fmt: skip

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return padded sources and targets, with roles."""
        ids = make_batch(model, batch, seed=seed)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        targets = make_batch(model, batch, 7, seed + 1)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": targets,
            "role_ids": ids % 2,
            "decoder_role_ids": targets % 2,
        }

    @capability("logits")
    @pytest.mark.parametrize("name", VECTORS)
    def test_original_outputs(self, name: str, tmp_path: Path) -> None:
        """Logits with every mask, hidden states, and roles."""
        model, golden = open_original(name, tmp_path)
        given = golden.inputs
        ids, mask, targets = (
            given[n] for n in ("input_ids", "attention_mask", "decoder_input_ids")
        )
        out = model(ids, mask, targets)
        golden.check("logits", out.logits)
        golden.check("encoder_last_hidden_state", out.encoder_last_hidden_state)
        source = model.encode(ids, mask)
        open_cross = model(encoder_outputs=source, decoder_input_ids=targets)
        golden.check("logits_cross_unmasked", open_cross.logits)
        padded = model(ids, mask, targets, given["decoder_attention_mask"]).logits
        golden.check("logits_with_decoder_mask", padded, (0,))
        golden.check("logits_with_decoder_mask", padded, (1, slice(8)))
        roles = model.encode(ids, mask, role_ids=given["role_ids"])
        golden.check("encoder_with_roles", roles.last_hidden_state)
        assert torch.equal(model(ids, mask, targets, role_ids=given["role_ids"]).
                           encoder_last_hidden_state, roles.last_hidden_state)  # fmt: skip

    @capability("gradients")
    @pytest.mark.parametrize("name", VECTORS)
    def test_original_gradients(self, name: str, tmp_path: Path) -> None:
        """The loss, with and without the decoder's input, and the gradients the vectors have."""
        model, golden = open_original(name, tmp_path)
        given = {n: golden.inputs[n] for n in ("input_ids", "attention_mask", "labels")}
        golden.check("loss", model(**given).loss)
        loss = model(**given, decoder_input_ids=golden.inputs["decoder_input_ids"]).loss
        golden.check("loss", loss)
        loss.backward()
        golden.check_gradients(model)

    @pytest.mark.parametrize("name", VECTORS)
    def test_original_cached_step(self, name: str, tmp_path: Path) -> None:
        """The last token alone, with a cache of those before it."""
        model, golden = open_original(name, tmp_path)
        given, cache = golden.inputs, KVCache(2, 10)
        source, targets = (given["input_ids"], given["attention_mask"]), given["decoder_input_ids"]
        model(*source, targets[:, :9], cache=cache)
        golden.check("cached_step_logits", model(*source, targets[:, 9:], cache=cache).logits)

    @capability("conversion")
    @pytest.mark.parametrize("name", VECTORS)
    def test_original_weights_come_back(self, name: str, tmp_path: Path) -> None:
        """What we save is bit for bit what the original saved, and the config means the same."""
        model, golden = open_original(name, tmp_path / "theirs")
        model.save_pretrained(tmp_path / "ours")
        saved = load_file(tmp_path / "ours" / "model.safetensors")
        # The stacks' own names are the same tensors in the original.
        copies = set(golden.weights) - set(saved)
        assert copies <= set(model.tied_copies())
        assert set(saved) <= set(golden.weights)
        assert all(torch.equal(saved[n], golden.weights[n]) for n in saved)
        again = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert {n: again[n] for n in golden.config} == golden.config
        assert EVA.from_pretrained(tmp_path / "ours").config == model.config

    @capability("generate")
    @pytest.mark.parametrize("beams", [1, 3])
    def test_generates_what_t5_does(self, beams: int) -> None:
        """Greedy and beam search give the ids of transformers' T5 1.1 with the same weights.

        That is EVA 1.0 without roles, but for the GELU, whose form is a field here.
        """
        ours, theirs = make_t5_twin()
        ids = make_batch(ours, seed=3)
        mask = torch.ones_like(ids)
        mask[0, -4:] = 0
        want = theirs(ids, attention_mask=mask, decoder_input_ids=ids[:, :6]).logits
        assert_close(ours(ids, mask, ids[:, :6]).logits, want, atol=1e-5)
        options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 8, "do_sample": False}
        want = theirs.generate(ids, attention_mask=mask, **options)
        got = generate(ours, ids, mask, **options)
        assert torch.equal(got, want)
        assert len(got.unique()) > 3


def make_t5_twin() -> tuple[EVA, Any]:
    """Return an EVA without attention scale and a T5 1.1 with its weights."""
    config = EVAConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_layers=2, num_heads=4, head_dim=6,
        activation="gelu_new", decoder_start_token_id=2, eos_token_id=1,
    )  # fmt: skip
    ours = EVA.from_config(config).eval()
    fields = {
        "d_kv": 6, "d_model": 32, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 61,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "pad_token_id": 5,
        "decoder_start_token_id": 2, "eos_token_id": 1,
    }  # fmt: skip
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields)).eval()
    theirs.lm_head.weight = torch.nn.Parameter(torch.zeros(61, 32))
    weights = {
        rule.source: ours.get_parameter(rule.parameter).detach()
        for rule in ours.active_rules()
        if rule.source != "role_embeds.weight"
    }
    weights |= {
        f"{stack}.embed_tokens.weight": weights["shared.weight"] for stack in ("encoder", "decoder")
    }
    theirs.load_state_dict(weights)
    return ours, theirs


def test_roles_that_do_not_exist() -> None:
    """Roles beyond the two, and roles for a family without any, are refused."""
    model = EVA.from_config(TestEVA().tiny_config()).eval()
    ids = make_batch(model)
    with pytest.raises(ShapeError, match=r"role_ids.*num_roles=2"):
        model(ids, labels=ids, role_ids=torch.full_like(ids, 2))


def test_start_token() -> None:
    """The start token is bos_token_id; a contradiction is told."""
    config = EVAConfig.from_hf({"bos_token_id": 9, "decoder_start_token_id": 9})
    assert config.decoder_start_token_id == 9
    assert EVAConfig.from_hf({"decoder_start_token_id": 8}).decoder_start_token_id == 8
    with pytest.raises(ConfigError, match="must equal bos_token_id"):
        EVAConfig.from_hf({"bos_token_id": 9, "decoder_start_token_id": 7})
    assert EVAConfig.from_hf(config.to_hf()) == config


# Counted by hand from the published configs (src/configs/model/*.json of thu-coai/EVA), vocabulary
# 30000: see `count`. EVA 1.0 is published as 2.8 billion.
SIZES = {
    "eva1.0": (2048, 5120, 24, 32),
    "eva2.0-base": (768, 3072, 12, 12),
    "eva2.0-large": (1024, 4096, 24, 16),
    "eva2.0-xlarge": (2048, 5120, 24, 32),
}


@pytest.mark.parametrize("name", list(SIZES))
def test_preset_sizes(name: str) -> None:
    """Every preset has as many parameters as its matrices, norms and tables say."""
    hidden, inner, layers, heads = SIZES[name]
    attention, mlp = 4 * hidden * heads * 64, 3 * hidden * inner
    norms = (2 + 3) * layers * hidden + 2 * hidden
    tables = 2 * 30000 * hidden + 2 * hidden + 2 * 32 * heads
    assert set(EVAConfig.presets) == set(SIZES)
    assert count_preset(EVA, name) == layers * (3 * attention + 2 * mlp) + norms + tables


def test_published_size() -> None:
    """EVA 1.0 has 2.8 billion parameters."""
    assert round(count_preset(EVA, "eva1.0") / 1e9, 1) == 2.8


def test_costs() -> None:
    """FLOPs and cache bytes of a pair of tokens, counted by hand for EVA 2.0 base."""
    config = EVAConfig.preset("eva2.0-base")
    attention, mlp = 4 * 768 * 768, 3 * 768 * 3072
    weights = 12 * (attention + mlp) + 12 * (2 * attention + mlp) + 30000 * 768
    assert config.flops_per_token(128) == 6 * weights + 12 * (12 + 2 * 12) * 768 * 128
    assert config.kv_bytes_per_token() == 2 * 2 * 12 * 768 * 2
