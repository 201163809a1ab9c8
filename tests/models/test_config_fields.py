"""Every field of a published config.json gives transformers' logits, or is refused.

Each field of each family's config class is changed alone. The changed config builds a model of
transformers, whose directory is then opened here.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from bmforge.errors import BmforgeError, ConfigError
from bmforge.models import AutoModel
from bmforge.models.families import FAMILIES

_BODY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_BODY, "num_key_value_heads": 2}
_OLD = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_FEW_EXPERTS = {**_EXPERTS, "num_experts": 4}
_SHARED_EXPERTS = {
    **_EXPERTS,
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
_LATENT = {
    **_BODY,
    "num_key_value_heads": 4,
    **{"kv_lora_rank": 16, "q_lora_rank": 12, "v_head_dim": 10},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
# Class of the model -> class of its config, and sizes.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {**_OLD, "bos_token_id": 1, "eos_token_id": 2}),
    "GPTJForCausalLM": ("GPTJConfig", {**_OLD, "rotary_dim": 4, **_ENDS}),
    "OPTForCausalLM": (
        "OPTConfig",
        {**_BODY, "ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "BloomForCausalLM": (
        "BloomConfig",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_ENDS},
    ),
    "LlamaForCausalLM": ("LlamaConfig", _GROUPED),
    "MistralForCausalLM": ("MistralConfig", {**_GROUPED, "sliding_window": 5}),
    "Qwen2ForCausalLM": ("Qwen2Config", {**_GROUPED, "sliding_window": 5}),
    "Qwen3ForCausalLM": ("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "MixtralForCausalLM": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**_GROUPED, **_FEW_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**_GROUPED, **_FEW_EXPERTS, "head_dim": 8}),
    "GemmaForCausalLM": ("GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**_GROUPED, "head_dim": 8, "sliding_window": 5}),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        {**_GROUPED, "head_dim": 8, "sliding_window": 5},
    ),
    "Olmo2ForCausalLM": ("Olmo2Config", _GROUPED),
    "Olmo3ForCausalLM": ("Olmo3Config", {**_GROUPED, "sliding_window": 5}),
    "GraniteForCausalLM": ("GraniteConfig", _GROUPED),
    "CohereForCausalLM": ("CohereConfig", _GROUPED),
    "Cohere2ForCausalLM": ("Cohere2Config", {**_GROUPED, "sliding_window": 5}),
    "PhiForCausalLM": ("PhiConfig", _BODY),
    "Phi3ForCausalLM": ("Phi3Config", {**_GROUPED, "sliding_window": 5}),
    "StableLmForCausalLM": ("StableLmConfig", _GROUPED),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _BODY),
    "FalconForCausalLM": (
        "FalconConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "Starcoder2ForCausalLM": ("Starcoder2Config", _GROUPED),
    "SmolLM3ForCausalLM": ("SmolLM3Config", _GROUPED),
    "SeedOssForCausalLM": ("SeedOssConfig", {**_GROUPED, "head_dim": 8}),
    "Glm4ForCausalLM": ("Glm4Config", {**_GROUPED, "head_dim": 8}),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", {**_GROUPED, **_SHARED_EXPERTS, "head_dim": 8}),
    "DeepseekV2ForCausalLM": ("DeepseekV2Config", {**_LATENT, **_SHARED_EXPERTS}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", {**_LATENT, **_SHARED_EXPERTS}),
    "MiniCPM3ForCausalLM": ("MiniCPM3Config", _LATENT),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {**_GROUPED, "num_local_experts": 4, "head_dim": 8, "sliding_window": 5},
    ),
    "BertForMaskedLM": ("BertConfig", _BODY),
    "RobertaForMaskedLM": ("RobertaConfig", _BODY),
    "XLMRobertaForMaskedLM": ("XLMRobertaConfig", _BODY),
    "LongformerForMaskedLM": ("LongformerConfig", {**_BODY, "attention_window": 4}),
    "ModernBertForMaskedLM": (
        "ModernBertConfig",
        {**_BODY, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
    ),
    "T5ForConditionalGeneration": ("T5Config", {**_T5, "decoder_start_token_id": 0}),
    "ViTForImageClassification": ("ViTConfig", {**_IMAGE, "num_labels": 3}),
}
_SKIPPED = {
    *("architectures", "transformers_version", "dtype", "id2label", "label2id", "problem_type"),
    *("vocab_size", "is_encoder_decoder", "output_attentions", "output_hidden_states"),
    *("return_dict", "_name_or_path", "model_type", "_attn_implementation", "sub_configs"),
}
_ROPE: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
]


def values_of(name: str, value: Any) -> list[Any]:
    """Return other values of a field; transformers rejects those that do not fit."""
    if name == "rope_parameters":
        part = (value or {}).get("partial_rotary_factor")
        more = {} if part is None else {"partial_rotary_factor": part}
        return [{**rope, **more} for rope in _ROPE]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 3, 1]
    if isinstance(value, float):
        return [0.25] if value < 0.2 else [2 * value]
    if isinstance(value, str):
        return ["relu", "gelu"]
    if isinstance(value, list):
        return [value[::-1]] if value != value[::-1] else []
    return [] if isinstance(value, dict) else [True, 3, 0.5]


def find_cases() -> list[tuple[str, str, Any]]:
    """Return all (class, field, value)."""
    cases = []
    for name, (kind, sizes) in KINDS.items():
        config = getattr(tf, kind)(**sizes)
        fields = {f.name for f in dataclasses.fields(config)} - _SKIPPED
        for field in sorted(fields):
            cases += [(name, field, v) for v in values_of(field, getattr(config, field))]
    return cases


CASES = find_cases()
FEW = random.Random(5).sample(CASES, 40)


def inputs_of(config: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if hasattr(config, "image_size"):
        size = (2, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(size, generator=generator)}
    ids = torch.randint(3, 64, (2, 12), generator=generator)
    more = {"decoder_input_ids": ids[:, :5]} if config.is_encoder_decoder else {}
    return {"input_ids": ids, **more}


def write_changed(name: str, field: str, value: Any, folder: Path) -> torch.Tensor | None:
    """Write a model with one changed field; return its logits, or None if it does not run."""
    kind, sizes = KINDS[name]
    torch.manual_seed(3)
    try:
        config = getattr(tf, kind)(**{**sizes, field: value})
        model = getattr(tf, name)._from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            logits = model(**inputs_of(model.config)).logits
        model.save_pretrained(folder)
    except Exception:  # transformers refuses the value in many ways
        return None
    return logits if bool(logits.isfinite().all()) else None


def check(name: str, field: str, value: Any, folder: Path) -> str:
    """Return "held", "refused" or "no model"; raise if the logits differ."""
    want = write_changed(name, field, value, folder)
    if want is None:
        return "no model"
    config = tf.AutoConfig.from_pretrained(folder)
    try:
        model = AutoModel.from_pretrained(folder).eval()
        with torch.no_grad():
            got = model(**inputs_of(config)).logits
    except BmforgeError:
        return "refused"
    assert got.shape == want.shape
    off = float((got - want).abs().max() / want.abs().max().clamp(min=1.0))
    assert off <= 1e-4, f"{name}: {field}={value!r} differs by {off}"
    return "held"


@pytest.mark.parametrize("case", FEW, ids=lambda case: f"{case[0]}-{case[1]}={case[2]}"[:60])
def test_changed_field(case: tuple[str, str, Any], tmp_path: Path) -> None:
    check(*case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_all_changed_fields(name: str, tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    wrong = []
    for number, case in enumerate(case for case in CASES if case[0] == name):
        try:
            result = check(*case, tmp_path / str(number))
        except AssertionError as error:
            wrong.append(str(error))
            continue
        counts[result] = counts.get(result, 0) + 1
    print(f"{name}: {counts}, wrong: {wrong}")
    assert not wrong


NATIVE = sorted(
    name for name, (kind, _) in KINDS.items() if getattr(tf, kind).model_type not in ("vit",)
)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NATIVE),
    suffix=st.from_regex(r"[a-z]{1,6}", fullmatch=True),
    number=st.integers(0, 40),
    in_front=st.booleans(),
)
def test_fields_that_only_resemble_known_ones_are_refused(
    name: str, suffix: str, number: int, in_front: bool
) -> None:
    kind, sizes = KINDS[name]
    raw = {**getattr(tf, kind)(**sizes).to_dict(), "architectures": [name]}
    family = AutoModel.family_of(raw, "native")
    names = sorted(family.config_class.hf_names.values())
    known = names[number % len(names)]
    field = f"{suffix}_{known}" if in_front else f"{known}_{suffix}"
    if field in raw:
        return
    with pytest.raises(ConfigError, match=field):
        family.config_class.from_hf({**raw, field: 3})


def test_every_family_of_transformers_is_tried() -> None:
    """A new native family whose class transformers has is added to `KINDS`."""
    tried = {AutoModel.family_of(getattr(tf, kind)(**s).to_dict()) for kind, s in KINDS.values()}
    others = {"CPM1", "CPM2", "CPMAnt", "CPMBee", "EVA", "GLM", "InternLM3", "MiniCPM"}
    assert {family.__name__ for family in FAMILIES.values()} - others == {
        family.__name__ for family in tried
    }


# ViT has no head to tie; folded weights of CPM-Ant have a head of their own, as in transformers.
_IMPLIED = {("ViT", "tie_word_embeddings"), ("CPMAnt", "folded")}


def _other_values(field: str, value: Any) -> list[Any]:
    """Values to try in the place of a config field's default."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 2, max(1, value // 2), value + 1]
    if isinstance(value, float):
        return [value / 2 or 0.5]
    if value is None:
        return [2, 0.5]
    return ["relu", "gelu", "silu"] if isinstance(value, str) and "activation" in field else []


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_field_is_stored_or_refused(family: str) -> None:
    """A field that config.json cannot express would be lost when a trained model is saved."""
    config_class = FAMILIES[family].config_class
    fields = [field for field in dataclasses.fields(config_class) if field.name != "raw"]
    kept = 0
    for field in fields:
        if (family, field.name) in _IMPLIED:
            continue
        for value in _other_values(field.name, getattr(config_class(), field.name)):
            try:
                config = config_class(**{field.name: value})
            except (ConfigError, TypeError):
                continue
            again = config_class.from_hf(json.loads(json.dumps(config.to_hf())))
            assert again == config, field.name
            kept += 1
    assert kept > 5
