"""Converts ModelCenter's `config.json`: detects the family and maps its fields.

The file does not name the family and omits defaults. The family is detected from the tensor names;
the defaults are in tables, taken from ModelCenter's config classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmforge.errors import ConfigError

__all__ = [
    "OLD_FAMILIES",
    "OLD_FIELDS",
    "PADDED_GPT2",
    "is_padded",
    "read_old_config",
    "tell_family",
]

# GPT-2's 50257 tokens and one unused id that makes the size even.
PADDED_GPT2 = 50258
# ModelCenter's field names -> bmforge's.
OLD_FIELDS: Mapping[str, str] = {
    "dim_model": "hidden_size",
    "num_heads": "num_heads",
    "num_heads_kv": "num_kv_heads",
    "dim_head": "head_dim",
    "dim_ff": "intermediate_size",
    "num_layers": "num_layers",
    "num_encoder_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "vocab_size": "vocab_size",
    "position_size": "max_seq_len",
    "type_size": "num_segments",
    "norm_eps": "norm_eps",
    "dropout_p": "dropout",
    "pad_token_id": "pad_token_id",
    "sep_tok_id": "sep_token_id",
    "sop_tok_id": "sop_token_id",
    "mask_tok_id": "mask_token_id",
    "pos_rotary_dim": "rotary_dim",
    "position_bias_num_buckets": "num_buckets",
    "position_bias_max_distance": "max_distance",
    "attention_window": "windows",
    "img_size": "image_size",
    "channels_in": "num_channels",
    "num_classes": "num_labels",
    "mlp_size": "intermediate_size",
    "drop": "dropout",
}
# Fields that occur only in checkpoints are added.
_FIELDS = {
    **OLD_FIELDS,
    "eop_tok_id": "eop_token_id",
    "patch_size": "patch_size",
    "hidden_size": "hidden_size",
}
# Fields of initialization, precision and mask values, and fields that are handled elsewhere.
_IGNORED_FIELDS = """
    emb_init_mean emb_init_std pos_init_mean pos_init_std norm_init_var att_init_mean att_init_std
    ffn_init_mean ffn_init_std proj_init_mean proj_init_std proj_bias att_mask_value half dtype
    use_cache tied cls_head ffn_activate_fn scale
"""
_IGNORED = frozenset(_IGNORED_FIELDS.split())


@dataclass(frozen=True)
class OldFamily:
    """ModelCenter's defaults for a family.

    Args:
        defaults: values of absent fields.
        needed: mapping from field to its only supported value, which is also the default.
        activations: mapping from the value of ffn_activate_fn ("" if absent) to bmforge's
            activation.
    """

    defaults: Mapping[str, Any]
    needed: Mapping[str, Any]
    activations: Mapping[str, str]


def _needs(bias: bool, **others: Any) -> dict[str, Any]:
    biases = dict.fromkeys(("norm_bias", "att_bias", "ffn_bias"), bias)
    common = {"length_scale": False, "int8": False, "attn_scale": True, "post_layer_norm": False}
    return {**common, "pos_bias_type": "none", **biases, **others}


def _size(width: int, heads: int, ff: int, layers: int) -> dict[str, Any]:
    names = ("dim_model", "num_heads", "dim_head", "dim_ff", "num_layers")
    return dict(zip(names, (width, heads, width // heads, ff, layers), strict=True))


_BASE = {**_size(768, 12, 3072, 12), "dropout_p": 0.0, "tied": True}
_BERT = {**_BASE, "vocab_size": 119547, "type_size": 2, "position_size": 512, "norm_eps": 1e-12}
_ROBERTA = {
    **{**_BASE, **_size(1024, 16, 4096, 24), "vocab_size": 50265, "type_size": 1},
    **{"position_size": 514, "norm_eps": 1e-5, "pad_token_id": 1},
}
_T5 = {
    **{"vocab_size": 32128, "dim_model": 768, "num_heads": 12, "dim_head": 64, "dim_ff": 3072},
    **{"num_encoder_layers": 12, "num_decoder_layers": 12, "norm_eps": 1e-6, "tied": True},
}
_POST_NORM = _needs(True, post_layer_norm=True)
_GELU = {"": "gelu", "gelu": "gelu", "gelu_new": "gelu_new", "relu": "relu"}
_T5_ACTIVATIONS = {
    # In transformers, "gated-gelu" means the tanh form, and "gelu_python" the exact GELU.
    **{"": "relu", "relu": "relu", "gated_gelu": "gated-gelu_python"},
    "gated_gelu_new": "gated-gelu",
    **{"gated_silu": "gated-silu", "gated_relu": "gated-relu"},
}
OLD_FAMILIES: dict[str, OldFamily] = {
    "Bert": OldFamily(_BERT, _POST_NORM, _GELU),
    "Roberta": OldFamily(_ROBERTA, _POST_NORM, _GELU),
    "Longformer": OldFamily({**_BERT, "pad_token_id": 1, "dropout_p": 0.1}, _POST_NORM, _GELU),
    "GPT2": OldFamily(
        {**_BASE, "vocab_size": PADDED_GPT2, "position_size": 1024}, _needs(True), _GELU
    ),
    "GPTJ": OldFamily(
        {**_size(4096, 16, 16384, 28), "vocab_size": 50400, "pos_rotary_dim": 64, "tied": False},
        _needs(True, att_bias=False, pos_bias_type="rotary"),
        _GELU,
    ),
    "OPT": OldFamily(
        {**_BASE, "vocab_size": 50272, "position_size": 2048, "prefix": "</s>", "dropout_p": 0.1},
        _needs(True),
        {**_GELU, "": "relu"},
    ),
    "Llama": OldFamily(
        {**_size(4096, 32, 11008, 32), "vocab_size": 32000, "norm_eps": 1e-6, "tied": False},
        _needs(False, pos_bias_type="rotary"),
        {"": "silu", "gated_silu": "silu", "gated_gelu": "gelu", "gated_relu": "relu"},
    ),
    "T5": OldFamily(
        _T5, _needs(False, attn_scale=False, pos_bias_type="relative"), _T5_ACTIVATIONS
    ),
    "CPM2": OldFamily(
        {**_T5, "vocab_size": 26240, "dim_ff": 1920, "tied": False},
        _needs(False, attn_scale=False, pos_bias_type="relative", position_bias_max_distance=128),
        {"": "gelu", "gated_gelu": "gelu", "gated_gelu_new": "gelu_new"},
    ),
    "GLM": OldFamily(
        {
            **{**_BASE, **_size(1024, 16, 4096, 24), "vocab_size": 50048, "position_size": 1025},
            "dropout_p": 0.1,
            **{"sop_tok_id": 50006, "eop_tok_id": 50007, "mask_tok_id": 50008},
        },
        _needs(True),
        _GELU,
    ),
    "ViT": OldFamily(
        # ModelCenter's ViT ignored the config: it used this epsilon, and scaled attention scores.
        {"num_classes": 1000, "norm_eps": 1e-5, "attn_scale": None},
        {"attn_bias": True, "norm_bias": True, "ffn_bias": True, "representation_size": None},
        {"": "gelu"},
    ),
}


_WAYS = {
    "CPM1": "Load it with bmforge.compat.model_center.model.CPM1.from_pretrained(directory).",
    "CPM3": "Load it with bmforge.compat.model_center.model.CPM3.from_pretrained(directory).",
}
# Published vocabulary size, padded or not, of all T5 versions, mengzi, mT5 and CPM-2 -> family.
_VOCABULARIES = {
    **dict.fromkeys((32000, 32100, 32128, 250100, 250112), "T5"),
    **dict.fromkeys((26240, 51968), "CPM2"),
}


def tell_family(tensors: Mapping[str, Tensor], raw: Mapping[str, Any]) -> str:
    """Identify the family of a checkpoint by its tensor names.

    Raises:
        ConfigError: the tensor names match no supported family.
    """

    def has(ending: str) -> bool:
        return any(name.endswith(ending) for name in tensors)

    if "token_type_embedding.weight" in tensors:
        if has("project_q_global.weight"):
            return "Longformer"
        return "Roberta" if tensors["token_type_embedding.weight"].shape[0] == 1 else "Bert"
    if "position_bias_dec.relative_attention_bias" in tensors:
        return _tell_seq2seq(tensors, raw)
    if "position_bias.relative_attention_bias" in tensors:
        is_prompted = "prompt_embedding.weight" in tensors
        name = "CPM3" if is_prompted else "CPM1"
        raise ConfigError(
            f"the weights are those of ModelCenter's {name} with relative positions, which neither "
            f"the Hugging Face format nor the model families of bmforge support. {_WAYS[name]}"
        )
    signs = {
        "block_position_embedding.weight": "GLM",
        "patch_embed.cls_token": "ViT",
        "position_embedding.weight": "OPT" if raw.get("ffn_activate_fn") == "relu" else "GPT2",
        "w_in.w_0.weight": "Llama",
        "output_projection.bias": "GPTJ",
    }
    family_name = next((family for ending, family in signs.items() if has(ending)), None)
    if family_name is None:
        raise ConfigError(
            f"the tensor names ({', '.join(list(tensors)[:3])}, ...) do not identify a family. "
            "Pass the family (--family of bmforge convert): one of "
            f"{', '.join(sorted(OLD_FAMILIES))}."
        )
    return family_name


def _tell_seq2seq(tensors: Mapping[str, Tensor], raw: Mapping[str, Any]) -> str:
    """Identify an encoder-decoder family; T5's and CPM-2's tensors have the same names.

    Raises:
        ConfigError: the family is ambiguous, because the model has a gated GELU, a separate head,
            and an unknown vocabulary size.
    """
    is_gated = any(name.endswith("w_in.w_0.weight") for name in tensors)
    own_head = "output_projection.weight" in tensors
    kinds = ("", "gated_gelu")  # CPM-2's; T5 also has others
    if not is_gated or not own_head or raw.get("scale") or raw.get("tied"):
        return "T5"
    if raw.get("ffn_activate_fn", "") not in kinds:
        return "T5"
    vocab_size = tensors["input_embedding.weight"].shape[0]
    if vocab_size in _VOCABULARIES:
        return _VOCABULARIES[vocab_size]
    raise ConfigError(
        "the tensor names match both T5 1.1 and CPM-2, and neither has the vocabulary size "
        f"{vocab_size}. Pass the family, T5 or CPM2 (--family of bmforge convert)."
    )


def read_old_config(
    family: str,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    allow_unknown: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the config fields with bmforge's names; the family may not have all of them.

    Args:
        family: a name in `OLD_FAMILIES`.
        raw: contents of config.json.
        tensors: tensors of the checkpoint, from which head, ties and padding are inferred.
        allow_unknown: names of unknown config fields to ignore.

    Raises:
        ConfigError: fields are unknown or have unsupported values; all are listed.
    """
    old = OLD_FAMILIES[family]
    old_config = {**old.needed, **old.defaults, **raw}
    if family == "ViT":
        old_config["norm_eps"] = old.defaults["norm_eps"]
    activation = old_config.get("ffn_activate_fn", "")
    problems = [
        f"{name}={old_config[name]!r} (supported: {value!r})"
        for name, value in old.needed.items()
        if old_config[name] != value and name not in allow_unknown
    ]
    if activation not in old.activations:
        problems.append(f"ffn_activate_fn={activation!r} (supported: {[*old.activations][1:]})")
    understood = {*_FIELDS, *_IGNORED, *old.needed, *old.defaults, *allow_unknown}
    problems += [
        f"{name}={value!r} (unknown)"
        for name, value in raw.items()
        if name not in understood and value not in (None, False, "", [], {})
    ]
    if family == "CPM2" and old_config["num_encoder_layers"] != old_config["num_decoder_layers"]:
        problems.append("num_encoder_layers and num_decoder_layers (supported: equal values)")
    if problems:
        raise ConfigError(
            "these fields of ModelCenter's config are not supported and could change results: "
            f"{', '.join(problems)}. If they do not matter for this model, add them to "
            "allow_unknown."
        )
    values = {_FIELDS[name]: value for name, value in old_config.items() if name in _FIELDS}
    values["activation"] = values["feed_forward"] = old.activations[activation]
    values["attn_dropout"] = values["embed_dropout"] = values.get("dropout", 0.0)
    values["num_kv_heads"] = max(0, values.get("num_kv_heads", 0))
    if isinstance(values.get("windows"), int):
        values["windows"] = (values["windows"],)
    return {**values, **_read_sizes(family, old_config), **_read_head(family, old_config, tensors)}


def _read_sizes(family: str, old_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"max_seq_len": number of usable positions} if the table has more rows, else {}."""
    if family in ("Roberta", "Longformer"):
        return {"max_seq_len": old_config["position_size"] - old_config["pad_token_id"] - 1}
    return {"max_seq_len": old_config["position_size"] - 1} if family == "GLM" else {}


def _read_head(
    family: str, old_config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the config fields for head, vocabulary size and weight tying, based on the tensors."""
    out: dict[str, Any] = {}
    embed = tensors.get("input_embedding.weight")
    if old_config.get("cls_head"):
        out |= {"head": "token_classification", "num_labels": old_config["cls_head"]}
    elif "type_size" in old_config and "lm_head.dense.weight" not in tensors:
        out["head"] = "none"
    if family == "GPT2" and embed is not None and is_padded(embed):
        out["vocab_size"] = embed.shape[0] - 1
    if "lm_head.decoder.weight" in tensors and old_config.get("tied", True):
        # If tied, ModelCenter's encoders save this tensor, but neither use nor train it.
        return {**out, "tie_word_embeddings": True}
    heads = [tensors.get(f"{name}.weight") for name in ("output_projection", "lm_head.decoder")]
    own = next((tensor for tensor in heads if tensor is not None), None)
    if own is None or embed is None:
        out["tie_word_embeddings"] = bool(old_config.get("tied", True))
    else:
        out["tie_word_embeddings"] = own.shape == embed.shape and torch.equal(own, embed)
    return out


def is_padded(embed: Tensor) -> bool:
    """Return True if the last row of the embedding is padding."""
    return embed.shape[0] == PADDED_GPT2 or not bool(embed[-1].any())
