"""PEFT configurations x transformers architectures, for the tests that compare with PEFT."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import peft
import transformers as tf

__all__ = ["BASES", "CASES", "PeftCase", "inputs_of", "make_base", "make_theirs", "open_base"]

_SMALL: dict[str, Any] = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
_BODY: dict[str, Any] = {
    **_SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_BODY, num_key_value_heads=2)),
    "tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_BODY, tie_word_embeddings=True)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_BODY, num_key_value_heads=2)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(**_SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "gptj": lambda: tf.GPTJForCausalLM(
        tf.GPTJConfig(**_SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4)
    ),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            **_SMALL,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            pad_token_id=1,
        )
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(
        tf.MixtralConfig(**_BODY, num_key_value_heads=2, num_local_experts=4)
    ),
    "bert-mlm": lambda: tf.BertForMaskedLM(tf.BertConfig(**_BODY)),
    "bert-cls": lambda: tf.BertForSequenceClassification(tf.BertConfig(**_BODY, num_labels=3)),
    "roberta-cls": lambda: tf.RobertaForSequenceClassification(
        tf.RobertaConfig(**_BODY, num_labels=3, max_position_embeddings=66, pad_token_id=1)
    ),
    "llama-cls": lambda: tf.LlamaForSequenceClassification(
        tf.LlamaConfig(**_BODY, num_labels=3, pad_token_id=0)
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ),
}
_QV: dict[str, list[str]] = {
    **{base: ["q_proj", "v_proj"] for base in ("llama", "tied", "qwen2", "opt", "mixtral")},
    **{base: ["q_proj", "v_proj"] for base in ("gptj", "llama-cls")},
    **{base: ["query", "value"] for base in ("bert-mlm", "bert-cls", "roberta-cls")},
    "gpt2": ["c_attn"],
    "t5": ["q", "v"],
}
_TOKEN_BASES = ("llama", "tied", "gpt2", "opt", "qwen2", "bert-cls", "t5", "mixtral")
_TASKS = {
    **dict.fromkeys(("bert-cls", "roberta-cls", "llama-cls"), "SEQ_CLS"),
    **dict.fromkeys(("llama", "tied", "qwen2", "gpt2", "gptj", "opt", "mixtral"), "CAUSAL_LM"),
    "t5": "SEQ_2_SEQ_LM",
}


@dataclass(frozen=True)
class PeftCase:
    """One configuration of PEFT on one architecture.

    Args:
        base: a key of `BASES`.
        kind: PEFT's config class.
        options: its fields.
        exact: bmforge computes PEFT's logits; else it refuses the directory with this text.
        refused: part of the message of the refusal.
    """

    base: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    refused: str = ""

    @property
    def name(self) -> str:
        usual = _QV.get(self.base)
        options = {k: v for k, v in self.options.items() if k != "target_modules" or v != usual}
        said = " ".join(f"{k}={v}" for k, v in options.items())
        return f"{self.base} {self.kind.removesuffix('Config')} {said}"


def _lora(base: str, refused: str = "", **options: Any) -> PeftCase:
    told = {"r": 4, "lora_alpha": 8, "target_modules": _QV[base], "init_lora_weights": False}
    return PeftCase(base, "LoraConfig", {**told, **options}, refused)


def _cases() -> list[PeftCase]:
    found = [_lora(base) for base in BASES]
    found += [_lora(base, use_dora=True) for base in BASES if base != "mixtral"]
    found += [_lora(base, bias="all") for base in ("qwen2", "gpt2", "opt", "bert-mlm")]
    found += [_lora(base, bias="lora_only") for base in ("qwen2", "gpt2", "opt", "bert-mlm")]
    found += [_lora(base, lora_bias=True) for base in ("qwen2", "gpt2", "bert-cls")]
    found += [_lora(base, task_type=task) for base, task in _TASKS.items() if task == "SEQ_CLS"]
    patterns: list[dict[str, Any]] = [
        {"alpha_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 320}},
        {"alpha_pattern": {"q_proj": 320, "layers.0.self_attn.q_proj": 2}},
        {"rank_pattern": {"layers.1.self_attn.v_proj": 2, "v_proj": 3}},
        {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {".*v_proj": 5}, "use_rslora": True},
        {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 2}},
        {"use_rslora": True},
        {"layers_to_transform": [1]},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q_proj|up_proj)"},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["model.norm"]},
        {"modules_to_save": ["mlp"]},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
    ]
    found += [_lora("llama", **one) for one in patterns]
    found += [
        _lora("llama", f"init_lora_weights='{init}'", init_lora_weights=init)
        for init in ("pissa", "olora", "pissa_niter_2")
    ]
    found += [
        _lora("llama", "layer_replication", layer_replication=[[0, 2], [1, 2]]),
        *(_lora(base, trainable_token_indices=[8, 5, 12]) for base in _TOKEN_BASES),
        _lora("llama", trainable_token_indices={"embed_tokens": [9, 6]}, use_dora=True),
        _lora("llama", trainable_token_indices={"embed_tokens": [9, 6], "lm_head": [7]}),
        _lora("tied", trainable_token_indices={"embed_tokens": [9, 6], "lm_head": [9, 6]}),
        _lora("llama", trainable_token_indices=[8, 7], modules_to_save=["lm_head"]),
        _lora(
            "llama", "alora_invocation_tokens", alora_invocation_tokens=[3], task_type="CAUSAL_LM"
        ),
        _lora("bert-mlm", "trainable_token_indices", trainable_token_indices=[8, 5]),
        _lora("tied", target_modules=["lm_head", "q_proj"]),
        _lora("tied", target_modules=["embed_tokens", "q_proj"]),
        _lora("tied", target_modules=["embed_tokens"], ensure_weight_tying=True),
        _lora("tied", "ensure_weight_tying", modules_to_save=["embed_tokens"]),
        _lora("tied", modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        _lora("gpt2", modules_to_save=["ln_f"]),
        _lora("gpt2", modules_to_save=["mlp.c_fc"]),
        _lora("gpt2", target_modules=["c_fc"], modules_to_save=["c_attn"]),
        _lora("gpt2", target_modules=["c_attn", "c_proj", "c_fc"]),
        _lora("gpt2", target_modules=["wte", "c_attn"]),
        _lora("gpt2", fan_in_fan_out=True),
        _lora("bert-mlm", target_modules=["dense"]),
        _lora("bert-cls", modules_to_save=["classifier"]),
        _lora("bert-cls", modules_to_save=["pooler", "classifier"]),
        _lora("mixtral", target_parameters=["mlp.experts.down_proj"]),
        _lora("t5", target_modules=["q", "wi", "wo"]),
        _lora("t5", modules_to_save=["final_layer_norm"]),
    ]
    found += [
        PeftCase(base, "IA3Config", {"task_type": task})
        for base, task in _TASKS.items()
        if base not in ("mixtral", "tied", "gptj")
    ]
    found += [
        PeftCase(base, "LNTuningConfig", {"target_modules": norms})
        for base, norms in {
            "llama": ["input_layernorm", "norm"],
            "gpt2": ["ln_1", "ln_f"],
            "bert-cls": ["LayerNorm"],
            "t5": ["final_layer_norm"],
            "opt": ["self_attn_layer_norm"],
        }.items()
    ]
    prompts = (
        "llama",
        "tied",
        "gpt2",
        "opt",
        "gptj",
        "qwen2",
        "bert-cls",
        "roberta-cls",
        "llama-cls",
        "t5",
    )
    for base in prompts:
        told = {"num_virtual_tokens": 3, "task_type": _TASKS[base]}
        found.append(PeftCase(base, "PromptTuningConfig", told))
        if base not in ("tied", "gptj"):
            found.append(PeftCase(base, "PromptEncoderConfig", {**told, "encoder_hidden_size": 16}))
    for base in ("llama", "tied", "gpt2", "opt", "gptj", "qwen2", "mixtral"):
        told = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
        found.append(PeftCase(base, "PrefixTuningConfig", told))
    more = {"prefix_projection": True, "encoder_hidden_size": 16}
    found.append(PeftCase("gpt2", "PrefixTuningConfig", {**told, **more}))
    t5 = {"num_virtual_tokens": 3, "task_type": "SEQ_2_SEQ_LM"}
    found.append(PeftCase("t5", "PrefixTuningConfig", t5))
    found.append(PeftCase("t5", "PrefixTuningConfig", {**t5, **more}))
    return found


@cache
def make_base(base: str, folder: Path) -> Path:
    """Write a tiny base model with weights large enough to matter; return its directory."""
    torch.manual_seed(len(base))
    model = BASES[base]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / base)
    return folder / base


def open_base(base: str, directory: Path) -> Any:
    """Open a base in transformers."""
    made = BASES[base]()
    return type(made).from_pretrained(directory, attn_implementation="eager").eval()


def make_theirs(case: PeftCase, directory: Path, target: Path) -> None:
    """Write an adapter of PEFT whose tensors were all moved away from their start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(peft, case.kind)(**case.options)
        model = peft.get_peft_model(open_base(case.base, directory), config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        model.save_pretrained(target)


def inputs_of(base: str) -> dict[str, torch.Tensor]:
    """Return a batch whose logits are compared."""
    ids = torch.arange(5, 23).view(2, 9)
    if base == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :6]}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


CASES = {case.name: case for case in _cases()}
assert len(CASES) == len(_cases()), "two cases have one name"
