"""MiniCPM against the original code's vectors and against transformers' Granite.

transformers has no MiniCPM. Granite computes the same with four multipliers and the same weight
names (the README beside the vectors); `MiniCPMReference` is Granite with MiniCPM's config fields.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer import KVCache
from bmforge.models.minicpm import MiniCPM, MiniCPMConfig
from bmforge.testing.decoder_suite import DecoderSuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.presets import check_preset_shapes, count_preset
from bmforge.testing.reference_pair import to_reference_names
from bmforge.testing.tolerance import assert_close

GOLDEN = Path(__file__).parents[1] / "golden"
MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "attention_multiplier",
    "mlp_bias",
)


class ReferenceConfig(transformers.GraniteConfig):
    """Granite's config under MiniCPM's names."""

    model_type = "minicpm"
    scale_emb: float = 12.0
    scale_depth: float = 1.4
    dim_model_base: int = 16

    def __post_init__(self, **kwargs: Any) -> None:
        """Derive the four multipliers."""
        self.embedding_multiplier = float(self.scale_emb)
        self.residual_multiplier = self.scale_depth / math.sqrt(self.num_hidden_layers)
        self.logits_scaling = self.hidden_size / self.dim_model_base
        self.attention_multiplier = (self.hidden_size // self.num_attention_heads) ** -0.5
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Leave out what follows from MiniCPM's fields."""
        return {n: v for n, v in super().to_dict().items() if n not in MULTIPLIERS}

    def to_diff_dict(self) -> dict[str, Any]:
        """Likewise, as this is what is saved."""
        return {n: v for n, v in super().to_diff_dict().items() if n not in MULTIPLIERS}


class MiniCPMModel(transformers.GraniteModel):
    """Granite's body with that config."""

    config_class = ReferenceConfig


class MiniCPMForCausalLM(transformers.GraniteForCausalLM):
    """Granite with that config, under the published class name."""

    config_class = ReferenceConfig


TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "scale_emb": 12.0,
    "scale_depth": 1.4,
    "dim_model_base": 16,
    "initializer_range": 0.1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


class TestMiniCPM(DecoderSuite, FileSuite):
    """MiniCPM."""

    model_class = MiniCPM
    hf_class = MiniCPMForCausalLM
    hf_heads = {"none": MiniCPMModel}  # noqa: RUF012
    cases = {  # noqa: RUF012
        "gqa": TINY,
        "tied_mha": {**TINY, "num_key_value_heads": 4, "tie_word_embeddings": True},
        "scales": {**TINY, "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 8},
        "biases": {**TINY, "attention_bias": True, "pad_token_id": 3, "rms_norm_eps": 1e-3},
        "longrope": {
            **TINY,
            "max_position_embeddings": 64,
            "rope_parameters": LONGROPE,
            "num_hidden_layers": 3,
        },
    }


def open_golden(name: str, directory: Path) -> tuple[MiniCPM, dict[str, Tensor]]:
    """Return our model with the recorded weights, and the recorded arrays."""
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as arrays:
        config = json.loads(str(arrays["config"]))
        recorded = {n: torch.from_numpy(arrays[n]) for n in arrays.files if n != "config"}
    fields = {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], **config}
    (directory / "config.json").write_text(json.dumps(fields))
    prefix = "weight:"
    weights = {
        n.removeprefix(prefix): t.clone() for n, t in recorded.items() if n.startswith(prefix)
    }
    save_file(weights, directory / "model.safetensors")
    return MiniCPM.from_pretrained(directory), recorded


@pytest.mark.parametrize("name", ["minicpm", "minicpm_tied_mha"])
class TestGolden:
    """The vectors that the original code produced; see ../golden/README.md."""

    def test_logits_loss_and_hidden(self, name: str, tmp_path: Path) -> None:
        """With the mask, without it, and with positions that start anew."""
        model, golden = open_golden(name, tmp_path)
        ids, mask = golden["input:input_ids"], golden["input:attention_mask"]
        out = model(ids, attention_mask=mask)
        real = mask.bool()
        self.check(out.logits[real], golden["output:logits"][real])
        self.check(out.last_hidden_state[real], golden["output:final_hidden"][real])
        loss = model(ids, attention_mask=mask, labels=golden["input:labels"]).loss
        self.check(loss, golden["output:loss"])
        self.check(model(ids).logits, golden["output:logits_nomask"])
        restarted = model(ids, position_ids=golden["input:position_ids_restarted"])
        self.check(restarted.logits, golden["output:logits_restarted_positions"])

    def test_gradients(self, name: str, tmp_path: Path) -> None:
        """Every recorded gradient, to 1e-5 of its largest element."""
        model, golden = open_golden(name, tmp_path)
        model(
            golden["input:input_ids"],
            attention_mask=golden["input:attention_mask"],
            labels=golden["input:labels"],
        ).loss.backward()
        ours = to_reference_names(model, {n: p.grad for n, p in model.named_parameters()})
        theirs = {n.removeprefix("grad:"): t for n, t in golden.items() if n.startswith("grad:")}
        assert len(theirs) >= 4
        for weight, gradient in theirs.items():
            limit = 1e-5 * gradient.abs().max() + 1e-7
            assert (ours[weight] - gradient).abs().max() <= limit, weight

    def test_cached_step_and_past_keys(self, name: str, tmp_path: Path) -> None:
        """The last token after thirteen cached ones, and the first layer's keys."""
        model, golden = open_golden(name, tmp_path)
        ids = golden["input:input_ids"]
        cache = KVCache(model.config.num_layers, ids.shape[1])
        model(ids[:, :13], cache=cache)
        nothing = golden["output:past_key_layer0"][:, :, :0]
        keys, _ = cache.append(0, nothing, nothing)
        self.check(keys, golden["output:past_key_layer0"])
        step = model(ids[:, 13:], cache=cache).logits
        self.check(step, golden["output:cached_step_logits"])

    def check(self, ours: Tensor, theirs: Tensor) -> None:
        """Compare at the tolerance that the README gives."""
        assert_close(ours, theirs, rtol=0.0, atol=1e-5)


# openbmb/MiniCPM-1B-sft-bf16's fields. It has no model_type.
PUBLISHED_1B: dict[str, Any] = {
    "_name_or_path": "openbmb/CPM-1B",
    "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_minicpm.MiniCPMConfig",
        "AutoModel": "modeling_minicpm.MiniCPMModel",
        "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM",
        "AutoModelForSeq2SeqLM": "modeling_minicpm.MiniCPMForCausalLM",
        "AutoModelForSequenceClassification": "modeling_minicpm.MiniCPMForSequenceClassification",
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.1,
    "intermediate_size": 3840,
    "max_position_embeddings": 4096,
    "num_attention_heads": 24,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0",
    "use_cache": True,
    "vocab_size": 73440,
    "scale_emb": 12,
    "dim_model_base": 256,
    "scale_depth": 1.4,
}


def test_published_config() -> None:
    """The published fields are the preset, and what we write says the same."""
    config = MiniCPMConfig.from_hf(PUBLISHED_1B)
    assert config == MiniCPMConfig.preset("minicpm-1b")
    written = config.to_hf()
    assert PUBLISHED_1B.items() <= written.items()
    assert written["model_type"] == "minicpm"
    assert MiniCPMConfig.from_hf(written) == config
    assert MiniCPMConfig.opens(PUBLISHED_1B)
    assert MiniCPMConfig.opens(written)
    assert not MiniCPMConfig.opens({**PUBLISHED_1B, "model_type": "minicpm3"})
    assert not MiniCPMConfig.opens({"architectures": ["LlamaForCausalLM"]})


def test_first_name_of_longrope() -> None:
    """ "su" is what the first checkpoints call longrope."""
    scaling = {n: v for n, v in LONGROPE.items() if not n.startswith("rope_")}
    fields = {**TINY, "max_position_embeddings": 64}
    old = MiniCPMConfig.from_hf({**fields, "rope_scaling": {"type": "su", **scaling}})
    new = MiniCPMConfig.from_hf({**fields, "rope_scaling": {"rope_type": "longrope", **scaling}})
    assert old == new
    assert old.rope_scaling["kind"] == "longrope"
    assert MiniCPMConfig.from_hf(old.to_hf()) == old


def test_absent_fields_and_sparse_attention() -> None:
    """Absent scales are 1, as in the published code; sparse attention is refused."""
    bare = MiniCPMConfig.from_hf({"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4})
    assert (bare.embed_scale, bare.depth_scale, bare.base_hidden_size) == (1.0, 1.0, 1)
    assert bare.tie_word_embeddings
    with pytest.raises(ConfigError, match="sparse_config"):
        MiniCPMConfig.from_hf({**TINY, "sparse_config": {"kernel_size": 32}})
    with pytest.raises(ConfigError, match="head_dim"):
        MiniCPMConfig(hidden_size=32, num_heads=4, head_dim=6)


def test_sequence_classification_is_not_scaled() -> None:
    """The published classifier reads the hidden states as they are."""
    config = MiniCPMConfig.from_hf({**TINY, "pad_token_id": 0}).replace(
        head="sequence_classification", num_labels=3
    )
    model = MiniCPM.from_config(config).eval()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    out = model(ids)
    picked = torch.stack([out.last_hidden_state[0, 3], out.last_hidden_state[1, 1]])
    assert_close(out.logits, picked @ model.classifier.weight.t())


COUNTS = {
    "minicpm-1b": 1_360_246_272,
    "minicpm-2b": 2_724_880_896,
    "minicpm4-0.5b": 433_873_920,
    "minicpm4-8b": 8_185_253_888,
}


@pytest.mark.parametrize("name", list(MiniCPMConfig.presets))
def test_preset_sizes(name: str) -> None:
    """Sums of the published shapes, of the configs of openbmb/MiniCPM* and openbmb/MiniCPM4-*.

    The papers' 1.2B and 2.4B are these without the embedding. That MiniCPM4's rotary factors are
    one per pair is checked by the config.
    """
    assert count_preset(MiniCPM, name) == COUNTS[name]


@pytest.mark.long
@pytest.mark.parametrize("name", list(MiniCPMConfig.presets))
def test_every_preset_shapes(name: str) -> None:
    """Every preset's shapes are Granite's."""
    check_preset_shapes(MiniCPM, MiniCPMForCausalLM, name)
