"""Table of PEFT's adapter config fields, and how bmforge handles each of them.

A field is *read*, has *no effect* on what a saved adapter computes, or has *required* values: other
values, and fields that are not in the table, raise an error that names the field. A field has no
effect for one of three reasons: it describes how the adapter was initialized or trained; it
describes the file, not the values; or the tensors' names and shapes already determine it.
Source: PEFT 0.21, the config classes of its tuners. `tests/tune/delta/test_peft_directories.py`
compares the table with the installed version and the logits with those of PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bmforge.errors import ConfigError

__all__ = ["FIELDS", "NO_EFFECT", "READ", "check_fields"]

READ, NO_EFFECT = "read", "no effect"

# Values that a field must have; other values would change outputs in ways that are unsupported.
Required = tuple[Any, ...]

_ALL: Mapping[str, str | Required] = {
    "peft_type": READ,
    "modules_to_save": READ,
    "task_type": NO_EFFECT,  # the class that wraps the model in PEFT
    "auto_mapping": NO_EFFECT,
    "peft_version": NO_EFFECT,
    "base_model_name_or_path": NO_EFFECT,
    "revision": NO_EFFECT,
    "inference_mode": NO_EFFECT,  # whether PEFT trains the adapter
}
_TARGETED: Mapping[str, str | Required] = {
    **_ALL,
    "target_modules": NO_EFFECT,  # determined by the tensors' names
    "exclude_modules": NO_EFFECT,  # likewise
}
_PROMPT: Mapping[str, str | Required] = {
    **_ALL,
    "num_virtual_tokens": READ,
    "token_dim": NO_EFFECT,  # determined by the tensor's shape
    "num_transformer_submodules": READ,
    "num_attention_heads": NO_EFFECT,  # determined by the model
    "num_layers": NO_EFFECT,  # determined by the model
}
# Initializations that do not change the base's weights. The others (PiSSA, OLoRA, CorDA, LoftQ,
# LoRA-GA) subtract the initial adapter from the base every time PEFT loads the directory.
_INITS: Required = (True, False, None, "gaussian", "eva", "orthogonal")

FIELDS: Mapping[str, Mapping[str, str | Required]] = {
    "LORA": {
        **_TARGETED,
        "r": READ,
        "lora_alpha": READ,
        "lora_dropout": READ,
        "use_rslora": READ,
        "use_dora": READ,
        "lora_bias": READ,
        "rank_pattern": READ,
        "alpha_pattern": READ,
        "bias": READ,
        "target_parameters": READ,
        "ensure_weight_tying": READ,
        "init_lora_weights": _INITS,
        "fan_in_fan_out": NO_EFFECT,  # the shapes of the factors do not depend on it
        "layers_to_transform": NO_EFFECT,  # determined by the tensors' names
        "layers_pattern": NO_EFFECT,  # likewise
        "megatron_core": NO_EFFECT,  # a module's name, used with megatron_config only
        "loftq_config": NO_EFFECT,  # used with init_lora_weights="loftq" only
        "eva_config": NO_EFFECT,  # initialization
        "corda_config": NO_EFFECT,  # used with init_lora_weights="corda" only
        "lora_ga_config": NO_EFFECT,  # used with init_lora_weights="lora_ga" only
        "runtime_config": NO_EFFECT,  # where PEFT computes
        "qalora_group_size": NO_EFFECT,  # used with use_qalora only
        "megatron_config": (None,),
        "trainable_token_indices": READ,
        "velora_config": (None,),
        "alora_invocation_tokens": (None,),
        "use_qalora": (False, None),
        "monteclora_config": (None,),
        "layer_replication": (None,),
        "use_bdlora": (None, False),
        "arrow_config": (None,),
        "kasa_config": (None,),
    },
    "IA3": {
        **_TARGETED,
        "feedforward_modules": READ,
        "fan_in_fan_out": NO_EFFECT,  # the factors are per channel
        "init_ia3_weights": NO_EFFECT,
    },
    "LN_TUNING": _TARGETED,
    "PREFIX_TUNING": {
        **_PROMPT,
        "num_transformer_submodules": READ,
        "encoder_hidden_size": NO_EFFECT,  # PEFT folds the encoder when it saves
        "prefix_projection": NO_EFFECT,  # likewise
        "init_weights": NO_EFFECT,
    },
    "PROMPT_TUNING": {
        **_PROMPT,
        "prompt_tuning_init": NO_EFFECT,
        "prompt_tuning_init_text": NO_EFFECT,
        "tokenizer_name_or_path": NO_EFFECT,
        "tokenizer_kwargs": NO_EFFECT,
    },
    "P_TUNING": {
        **_PROMPT,
        "encoder_reparameterization_type": NO_EFFECT,  # PEFT folds the encoder when it saves
        "encoder_hidden_size": NO_EFFECT,  # likewise
        "encoder_num_layers": NO_EFFECT,  # likewise
        "encoder_dropout": NO_EFFECT,  # likewise
    },
}
"""PEFT's type -> field -> what is done with it."""


def check_fields(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a PEFT config field that would silently change the outputs.

    Args:
        config: config of an adapter directory; its `peft_type` must be a key of `FIELDS`.
    """
    kind = str(config["peft_type"])
    fields = FIELDS[kind]
    for name, value in config.items():
        rule = fields.get(name)
        if rule is None:
            if value not in (None, False, "", [], {}):
                raise ConfigError(
                    f"adapter_config.json has a field of {kind} that this version of bmforge "
                    f"does not support: {name}={value!r}. Remove the field if it does not "
                    "change what the adapter computes."
                )
        elif isinstance(rule, tuple) and value not in rule:
            raise ConfigError(
                f"{kind} with {name}={value!r} is not supported (supported: "
                f"{', '.join(map(repr, rule))}). {_ADVICE.get(name, _MERGE)}"
            )


_MERGE = "Merge the adapter in PEFT and load the merged model."
_ADVICE = {
    "init_lora_weights": (
        "This initialization changes the weights of the base model when PEFT loads it. Save the "
        "adapter again in PEFT with save_pretrained(..., "
        "path_initial_model_for_weight_conversion=...)."
    ),
}
