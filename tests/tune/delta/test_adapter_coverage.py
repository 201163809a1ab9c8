"""The default targets of every adapter type on transformers' classes are all modules of the kind.

The expected modules are written by hand for each class, as regular expressions of full names; norms
are found by their class.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
import transformers as tf

from bmforge.tune.delta import (
    IA3,
    Adapter,
    BitFit,
    Compacter,
    LayerNormTuning,
    Lora,
    LowRankAdapter,
    ParallelAdapter,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_OLD = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_BERT = {
    "q": r".*\.attention\.self\.query",
    "k": r".*\.attention\.self\.key",
    "v": r".*\.attention\.self\.value",
    "o": r".*\.attention\.output\.dense",
    "up": r".*\.intermediate\.dense",
    "down": r".*layer\.\d+\.output\.dense",
    "attn": r".*layer\.\d+\.attention",
    "mlp": r".*layer\.\d+\.output\.dense",
}
_LLAMA = {
    **{key: rf"model\.layers\.\d+\.self_attn\.{key}_proj" for key in "qkvo"},
    **{key: rf"model\.layers\.\d+\.mlp\.{key}_proj" for key in ("gate", "up", "down")},
    "attn": r"model\.layers\.\d+\.self_attn",
    "mlp": r"model\.layers\.\d+\.mlp",
    "head": "lm_head",
}
_FUSED = {
    **dict.fromkeys("qkv", r".*\.(attention|self_attention)\.query_key_value"),
    "o": r".*\.(attention|self_attention)\.dense",
    "up": r".*\.mlp\.dense_h_to_4h",
    "down": r".*\.mlp\.dense_4h_to_h",
    "attn": r".*\.\d+\.(attention|self_attention)",
    "mlp": r".*\.\d+\.mlp",
}
_T5 = {
    **{key: rf".*\.SelfAttention\.{key}" for key in "qkvo"},
    **{f"cross {key}": rf".*\.EncDecAttention\.{key}" for key in "qkvo"},
    "attn": r".*\.SelfAttention",
    "mlp": r".*\.DenseReluDense",
    "up": r".*\.DenseReluDense\.(wi|wi_1)",
    "down": r".*\.DenseReluDense\.wo",
    "head": "lm_head",
}
# class -> (its config, expected modules by kind)
CLASSES: dict[str, tuple[Any, dict[str, str]]] = {
    "BertForMaskedLM": (tf.BertConfig(**_SIZES), {**_BERT, "head": r"cls\.predictions\.decoder"}),
    "BertForSequenceClassification": (tf.BertConfig(**_SIZES), _BERT),
    "RobertaForMaskedLM": (tf.RobertaConfig(**_SIZES), {**_BERT, "head": "lm_head"}),
    "ElectraForSequenceClassification": (tf.ElectraConfig(**_SIZES), _BERT),
    "DistilBertForSequenceClassification": (
        tf.DistilBertConfig(vocab_size=64, dim=64, hidden_dim=128, n_layers=2, n_heads=4),
        {
            **{key: rf".*\.attention\.{key}_lin" for key in "qkv"},
            "o": r".*\.attention\.out_lin",
            "up": r".*\.ffn\.lin1",
            "down": r".*\.ffn\.lin2",
            "attn": r".*layer\.\d+\.attention",
            "mlp": r".*layer\.\d+\.ffn",
        },
    ),
    "GPT2LMHeadModel": (
        tf.GPT2Config(**_OLD),
        {
            **dict.fromkeys("qkv", r".*\.attn\.c_attn"),
            "o": r".*\.attn\.c_proj",
            "up": r".*\.mlp\.c_fc",
            "down": r".*\.mlp\.c_proj",
            "attn": r".*h\.\d+\.attn",
            "mlp": r".*h\.\d+\.mlp",
            "head": "lm_head",
        },
    ),
    "GPTJForCausalLM": (
        tf.GPTJConfig(**_OLD, rotary_dim=4),
        {
            **{key: rf".*\.attn\.{key}_proj" for key in "qkv"},
            "o": r".*\.attn\.out_proj",
            "up": r".*\.mlp\.fc_in",
            "down": r".*\.mlp\.fc_out",
            "attn": r".*h\.\d+\.attn",
            "mlp": r".*h\.\d+\.mlp",
            "head": "lm_head",
        },
    ),
    "OPTForCausalLM": (
        tf.OPTConfig(
            vocab_size=64,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=64,
            max_position_embeddings=64,
        ),
        {
            **{key: rf".*\.self_attn\.{key}_proj" for key in "qkv"},
            "o": r".*\.self_attn\.out_proj",
            "up": r".*\.fc1",
            "down": r".*\.fc2",
            "attn": r".*\.self_attn",
            "mlp": r".*\.fc2",
            "head": "lm_head",
        },
    ),
    "BartForConditionalGeneration": (
        tf.BartConfig(
            vocab_size=64,
            d_model=64,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_position_embeddings=64,
            pad_token_id=0,
        ),
        {
            **{key: rf".*\.self_attn\.{key}_proj" for key in "qkv"},
            "o": r".*\.self_attn\.out_proj",
            **{f"cross {key}": rf".*\.encoder_attn\.{key}_proj" for key in "qkv"},
            "cross o": r".*\.encoder_attn\.out_proj",
            "up": r".*\.fc1",
            "down": r".*\.fc2",
            "attn": r".*\.self_attn",
            "mlp": r".*\.fc2",
            "head": "lm_head",
        },
    ),
    "T5ForConditionalGeneration": (
        tf.T5Config(vocab_size=64, d_model=64, d_kv=8, d_ff=128, num_layers=2, num_heads=4),
        _T5,
    ),
    "MT5ForConditionalGeneration": (
        tf.MT5Config(vocab_size=64, d_model=64, d_kv=8, d_ff=128, num_layers=2, num_heads=4),
        {**_T5, "gate": r".*\.DenseReluDense\.wi_0"},
    ),
    **{
        name: (config(**_SIZES), _LLAMA)
        for name, config in {
            "LlamaForCausalLM": tf.LlamaConfig,
            "MistralForCausalLM": tf.MistralConfig,
            "Qwen2ForCausalLM": tf.Qwen2Config,
            "Qwen3ForCausalLM": tf.Qwen3Config,
            "Gemma2ForCausalLM": tf.Gemma2Config,
            "Olmo2ForCausalLM": tf.Olmo2Config,
            "CohereForCausalLM": tf.CohereConfig,
            "StableLmForCausalLM": tf.StableLmConfig,
        }.items()
    },
    "Starcoder2ForCausalLM": (
        tf.Starcoder2Config(**_SIZES),
        {
            **{k: v for k, v in _LLAMA.items() if k not in ("gate", "up", "down")},
            "up": r".*\.mlp\.c_fc",
            "down": r".*\.mlp\.c_proj",
        },
    ),
    "PhiForCausalLM": (
        tf.PhiConfig(**_SIZES),
        {
            **{key: rf".*\.self_attn\.{key}_proj" for key in "qkv"},
            "o": r".*\.self_attn\.dense",
            "up": r".*\.mlp\.fc1",
            "down": r".*\.mlp\.fc2",
            "attn": r".*\.self_attn",
            "mlp": r".*\.mlp",
            "head": "lm_head",
        },
    ),
    "Phi3ForCausalLM": (
        tf.Phi3Config(**_SIZES),
        {
            **dict.fromkeys("qkv", r".*\.self_attn\.qkv_proj"),
            "o": r".*\.self_attn\.o_proj",
            "up": r".*\.mlp\.gate_up_proj",
            "down": r".*\.mlp\.down_proj",
            "attn": r".*\.self_attn",
            "mlp": r".*\.mlp",
            "head": "lm_head",
        },
    ),
    "GPTNeoXForCausalLM": (tf.GPTNeoXConfig(**_SIZES), {**_FUSED, "head": "(embed_out|lm_head)"}),
    "FalconForCausalLM": (tf.FalconConfig(**_SIZES), {**_FUSED, "head": "lm_head"}),
    "BloomForCausalLM": (
        tf.BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4, pad_token_id=0),
        {**_FUSED, "head": "lm_head"},
    ),
    "ViTForImageClassification": (
        tf.ViTConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
        ),
        {
            "q": r".*\.(attention\.attention\.query|attention\.q_proj)",
            "k": r".*\.(attention\.attention\.key|attention\.k_proj)",
            "v": r".*\.(attention\.attention\.value|attention\.v_proj)",
            "o": r".*\.attention\.(output\.dense|o_proj)",
            "up": r".*\.(intermediate\.dense|mlp\.fc1)",
            "down": r".*(layer\.\d+\.output\.dense|\.mlp\.fc2)",
            "attn": r".*layers?\.\d+\.attention",
            "mlp": r".*(layer\.\d+\.output\.dense|\.mlp)",
        },
    ),
}
# type -> kinds of modules
KINDS: dict[Any, tuple[str, ...]] = {
    Lora: ("q", "v"),
    Adapter: ("o", "down"),
    LowRankAdapter: ("o", "down"),
    Compacter: ("o", "down"),
    IA3: ("k", "v", "down"),
    ParallelAdapter: ("attn", "mlp"),
    LayerNormTuning: ("norm",),
    BitFit: (
        *("q", "k", "v", "o", "cross q", "cross k", "cross v", "cross o"),
        *("gate", "up", "down", "norm", "head"),
    ),
}


def modules_of(model: nn.Module, kind: str, expected: dict[str, str]) -> set[str]:
    """Return the names of the modules of a kind, by its expression; norms by their class."""
    named = {name: module for name, module in model.named_modules() if name}
    if kind == "norm":
        return {
            name
            for name, module in named.items()
            if "Norm" in type(module).__name__ and any(True for _ in module.parameters())
        }
    pattern = expected.get(kind)
    if pattern is None:
        return set()
    names = {name for name in named if re.fullmatch(pattern, name)}
    assert names, f"{type(model).__name__} has no {kind}: {pattern}"
    return names


CASES = [(name, kind) for name in CLASSES for kind in KINDS]
FEW = random.Random(2).sample(CASES, 48)


def check(name: str, kind: Any) -> None:
    config, expected = CLASSES[name]
    with torch.device("meta"):
        model = getattr(tf, name)(config)
    want = set().union(*(modules_of(model, each, expected) for each in KINDS[kind]))
    delta = kind(model)
    readers = {part.owner for part in delta.held if part.slot.endswith("_reader")}
    assert set(delta.places()) - readers == want


@pytest.mark.parametrize(("name", "kind"), FEW, ids=str)
def test_default_targets_are_all_modules_of_their_kind(name: str, kind: Any) -> None:
    check(name, kind)


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSES)
def test_all_default_targets_are_all_modules_of_their_kind(name: str) -> None:
    for kind in KINDS:
        check(name, kind)
