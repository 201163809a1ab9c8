"""Base class of the families' configs, with strict conversion from and to config.json.

An unknown field that could change results raises an error. Each family lists the fields that are
supported, ignored, or must have a fixed value.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from bmforge.config import config_from_dict
from bmforge.errors import ConfigError, suggest
from bmforge.models.changes import (
    CHANGES_KEY,
    QUANT_METHOD,
    QUANTIZATION_KEY,
    Change,
    changes_from_json,
    changes_to_json,
    quantization_to_json,
)
from bmforge.models.config_file import GENERATION_KEY, read_config_file
from bmforge.models.heads import Head, check_head
from bmforge.models.sizes import LayerSizes, Sizes
from bmforge.surgery import match_glob

__all__ = ["ModelConfig", "read_config_file", "without_changes"]

# Fields of config.json that do not affect a forward pass.
_IGNORED_FIELDS = """
    model_type architectures transformers_version torch_dtype dtype use_cache _name_or_path
    id2label label2id problem_type output_attentions output_hidden_states return_dict
    num_labels task_specific_params bos_token_id eos_token_id pad_token_id sep_token_id
    decoder_start_token_id gradient_checkpointing initializer_range chunk_size_feed_forward
    tokenizer_class _attn_implementation_autoset is_decoder torchscript prefix max_length
    auto_map pretraining_tp unsloth_version unsloth_fixed transformers.js_config finetuning_task
    _num_labels output_past max_sequence_length model_max_length is_llama_config
    _attn_implementation
"""
# Generation options, which transformers stored in config.json before generation_config.json.
_GENERATION_FIELDS = """
    do_sample num_beams top_k top_p temperature typical_p min_length early_stopping num_beam_groups
    diversity_penalty repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
_IGNORED = frozenset(f"{_IGNORED_FIELDS} {_GENERATION_FIELDS}".split())
_POSITIVE_FIELDS = """
    vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads num_labels
"""
_POSITIVE = frozenset(_POSITIVE_FIELDS.split())
# Key that earlier versions wrote, so that transformers refused layers of different sizes.
_PER_LAYER = "per_layer_config"
# Sizes that their family derives from other fields; config.json contains them, with bmforge's
# names, only for pruned models.
_OWN_SIZES = frozenset({"head_dim", "intermediate_size"})


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 1


@dataclass(kw_only=True)
class ModelConfig:
    """Config fields that all families share; sizes in features, lengths in tokens.

    Args:
        vocab_size: vocabulary size V.
        hidden_size: width D of the hidden states.
        intermediate_size: width F of the MLP's hidden layer.
        num_layers: number of blocks.
        num_heads: number N of attention heads.
        num_kv_heads: number K of key-value heads; 0 means num_heads.
        head_dim: width H of a head; 0 means hidden_size / num_heads.
        max_seq_len: maximum sequence length.
        norm_eps: epsilon of the norms.
        init_std: standard deviation of the initialization.
        tie_word_embeddings: use the embedding as the head's weight.
        head: name of the task head, such as "language_model"; "" means the first of `heads`.
        num_labels: number of classes of a classifier.
        problem_type: problem type of a sequence classifier: "regression",
            "single_label_classification" or "multi_label_classification"; "" infers it.
        changes: changes applied to the model after it was built, in order; see `Model.change_`.
        raw: original contents of config.json, and of generation_config.json under
            "generation_config"; saving writes both back.
    """

    family: ClassVar[str] = ""
    # Values of model_type in config.json; if empty, only `family`.
    model_types: ClassVar[tuple[str, ...]] = ()
    # Preset or former short name -> hub id.
    hub_ids: ClassVar[dict[str, str]] = {}
    # The first is the head of the published checkpoints.
    heads: ClassVar[dict[str, Head]] = {}
    hf_names: ClassVar[dict[str, str]] = {}
    hf_ignored: ClassVar[frozenset[str]] = frozenset()
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # Values of fields that are absent in config.json, if they differ from the defaults here.
    hf_defaults: ClassVar[dict[str, Any]] = {}
    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    norm_eps: float
    init_std: float = 0.02
    tie_word_embeddings: bool = True
    head: str = ""
    num_labels: int = 2
    problem_type: str = ""
    changes: tuple[Change, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive missing sizes (K = N, H = D / N, F = 4 D if 0 is the default), and check them."""
        if not self.intermediate_size and getattr(type(self), "intermediate_size", 1) == 0:
            self.intermediate_size = 4 * self.hidden_size
        self.num_kv_heads = self.num_kv_heads or self.num_heads
        self.head_dim = self.head_dim or self.hidden_size // max(self.num_heads, 1)
        self.head = self.head or next(iter(self.heads))
        self.check()

    def states_size(self, name: str) -> bool:
        """Return True if config.json contains the field `name`, which only pruned models save."""
        is_own = name in _OWN_SIZES and name not in self.hf_names
        return is_own and self.raw.get(name) == getattr(self, name)

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Generation options from the model's files, with transformers' names.

        The options are those of generation_config.json or, if that file is missing, those of
        config.json, as in transformers.
        """
        if GENERATION_KEY in self.raw:
            return dict(self.raw[GENERATION_KEY] or {})
        names = set(_GENERATION_FIELDS.split())
        return {name: value for name, value in self.raw.items() if name in names}

    def find_unsavable(self, **needed: Any) -> Iterator[str]:
        """Yield a message for each field whose value config.json cannot express.

        Args:
            needed: the only value of each field that can be saved.
        """
        for name, need in needed.items():
            value = getattr(self, name)
            if value != need and not self.states_size(name):
                yield f"{name}={value!r} must be {need!r}"

    def check(self) -> None:
        """Raise a `ConfigError` that lists all inconsistencies among the fields."""
        check_head(type(self).__name__, self.head, self.heads)
        problems = [
            f"{name}={getattr(self, name)!r} must be a positive number"
            for name in self.hf_names
            if name in _POSITIVE and not _is_positive(getattr(self, name))
        ]
        problems = problems or list(self.problems())
        if problems:
            raise ConfigError(f"{type(self).__name__}: {'; '.join(problems)}.")

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among fields that are valid on their own."""
        heads, kv_heads, names = self.num_heads, self.num_kv_heads, self.hf_names
        if "num_heads" in names and "num_kv_heads" not in names and kv_heads != heads:
            yield f"num_kv_heads={kv_heads} must equal num_heads={heads}"
        elif heads % kv_heads:
            yield f"num_heads={heads} must be a multiple of num_kv_heads={kv_heads}"
        differs = heads * self.head_dim != self.hidden_size
        if "num_heads" in names and differs and not self.saves_head_dim():
            yield (
                f"hidden_size={self.hidden_size} must equal num_heads={heads} x "
                f"head_dim={self.head_dim}"
            )

    def saves_head_dim(self) -> bool:
        """Return True if the saved config determines `head_dim`."""
        return "head_dim" in self.hf_names or self.states_size("head_dim")

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True if the contents of a config.json belong to this family."""
        return raw.get("model_type") in (cls.model_types or (cls.family,))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a published preset by name, with some fields changed.

        Raises:
            ConfigError: the preset (the message suggests the nearest) or a field is unknown.
        """
        if name not in cls.presets:
            raise ConfigError(
                f"{cls.__name__} has no preset {name!r} (supported: {', '.join(cls.presets)})."
                f"{suggest(name, cls.presets)}"
            )
        return cls(**{**cls.presets[name], **changes})

    @classmethod
    def from_hf(cls, raw: dict[str, Any], allow_unknown: tuple[str, ...] = ()) -> Self:
        """Convert the contents of a transformers config.json to a config.

        Args:
            raw: contents of config.json.
            allow_unknown: names of unknown fields to accept.

        Raises:
            ConfigError: fields are unknown or have unsupported values; all are listed.
        """
        values, others = cls._read_special(without_changes(raw))
        if CHANGES_KEY in raw:
            values["changes"] = changes_from_json(raw[CHANGES_KEY], cls.__name__)
        values = {**cls._read_head(raw), **values}
        own_names = {published: own for own, published in cls.hf_names.items()}
        problems = []
        for name, value in others.items():
            if name in own_names:
                if value is not None:
                    values[own_names[name]] = value
            elif name in _OWN_SIZES and hasattr(cls, name):
                values[name] = value
            elif name in cls.hf_required:
                if value not in cls.hf_required[name]:
                    problems.append(f"{name}={value!r} (supported: {list(cls.hf_required[name])})")
            elif name in _IGNORED | cls.hf_ignored or name in allow_unknown:
                continue
            elif value not in (None, False, "", [], {}):
                problems.append(f"{name}={value!r} (unknown)")
        if problems:
            raise ConfigError(
                f"{cls.__name__} does not support these config fields, which could change results: "
                f"{', '.join(problems)}. If they do not matter for this model, list them in "
                "allow_unknown."
            )
        return cls(**{**cls.hf_defaults, **values}, raw=dict(raw))

    @classmethod
    def _read_head(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Return `head` (absent if unknown), `num_labels` and `problem_type` from a config.json."""
        values: dict[str, Any] = {"problem_type": raw.get("problem_type") or ""}
        for name, head in cls.heads.items():
            if set(raw.get("architectures") or ()) & {head.architecture, *head.aliases}:
                values["head"] = name
                break
        labels = raw.get("id2label") or {}
        values["num_labels"] = len(labels) or raw.get("num_labels") or 2
        return values

    def _write_head(self) -> dict[str, Any]:
        """Return the config.json fields for the head and the labels.

        The names of labels in `raw` are kept if the number of labels is unchanged.
        """
        head = self.heads[self.head]
        architectures = self.raw.get("architectures") or []
        same = bool(set(architectures) & {head.architecture, *head.aliases})
        out: dict[str, Any] = {"architectures": architectures if same else [head.architecture]}
        if self._read_head(self.raw)["num_labels"] != self.num_labels:
            out["id2label"] = {str(i): f"LABEL_{i}" for i in range(self.num_labels)}
            out["label2id"] = {f"LABEL_{i}": i for i in range(self.num_labels)}
        if self.problem_type:
            out["problem_type"] = self.problem_type
        return out

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Convert fields that need more than renaming; return their values and the other fields."""
        return {}, raw

    def _write_special(self) -> dict[str, Any]:
        """Return the fields that `_read_special` converts, with transformers' names and values."""
        return {}

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, including unused fields of the original file."""
        named = {published: getattr(self, own) for own, published in self.hf_names.items()}
        fixed = {"model_type": self.family, "initializer_range": self.init_std}
        raw = without_changes(self.raw)
        out = {**raw, **fixed, **self._write_head(), **named, **self._write_special()}
        if self.changes:
            out[CHANGES_KEY] = changes_to_json(self.changes)
        packed = quantization_to_json(self.changes)
        return out if packed is None else {**out, QUANTIZATION_KEY: packed}

    @classmethod
    def from_pretrained(cls, directory: str | Path, allow_unknown: tuple[str, ...] = ()) -> Self:
        """Read ``directory/config.json``; see `from_hf`."""
        return cls.from_hf(read_config_file(directory), allow_unknown)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_vocab_size(self, size: int) -> Self:
        """Return a copy with a different vocabulary size."""
        return self.replace(vocab_size=size)

    def without_derived(self) -> Self:
        """Return a copy whose derived fields are reset to 0, so that they are computed again.

        Used for the defaults of command line options. A model needs a config with the computed
        values.
        """
        copied = copy.copy(self)
        for name in ("intermediate_size", "num_kv_heads", "head_dim"):
            try:
                changes: dict[str, Any] = {name: 0}
                implied = getattr(dataclasses.replace(self, **changes), name)
            except ConfigError:
                continue
            if implied == getattr(self, name):
                setattr(copied, name, 0)
        return copied

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward per token in a sequence of `seq_len` tokens.

        Source: 6 per multiplied weight and 12 L N H T for attention, including the causal half that
            need not be computed (Chowdhery et al., "PaLM", 2022, appendix B).
        """
        layers = [layer for stack in self.stack_sizes().values() for layer in stack]
        weights = sum(layer.count_weights(self.hidden_size) for layer in layers)
        weights += self.vocab_size * self.hidden_size
        return 6.0 * weights + 12.0 * sum(layer.products for layer in layers) * seq_len

    @property
    def is_gated(self) -> bool:
        """True if the MLP has a gate."""
        return False

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Return the number of bytes that one token needs in the KV cache."""
        _, layers = list(self.stack_sizes().items())[-1]
        return sum(layer.kv_width for layer in layers) * bytes_per_element

    def stack_sizes(self) -> dict[str, list[LayerSizes]]:
        """Return a dict from stack name to the sizes of its layers; the last stack is the decoder.

        These are the sizes of `own_sizes` after applying the config's `changes`, such as pruning.
        """
        stacks = self.own_sizes()
        for change in self.changes:
            if change.kind != "resize":
                continue
            sizes = config_from_dict(Sizes, dict(change.options), "options.")
            for stack, layers in stacks.items():
                for number, layer in enumerate(layers):
                    name = f"{stack}.{number}"
                    if any(match_glob(name, glob) for glob in change.where):
                        layers[number] = layer.resized(sizes, name)
        return stacks

    def own_sizes(self) -> dict[str, list[LayerSizes]]:
        """Return the layer sizes before `changes`; families with differing layers override this."""
        return {"layers": [self.layer_sizes()] * self.num_layers}

    def layer_sizes(self) -> LayerSizes:
        """Return the sizes of a layer according to the config fields."""
        return LayerSizes(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.intermediate_size,
            self.is_gated,
        )


def without_changes(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a config.json without the entries that bmforge adds for changes."""
    quantization = raw.get(QUANTIZATION_KEY)
    is_own = isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD
    removed_keys = {CHANGES_KEY, QUANTIZATION_KEY} if is_own else {CHANGES_KEY}
    removed_keys |= {GENERATION_KEY}
    removed_keys |= {_PER_LAYER} if CHANGES_KEY in raw else set()
    return {name: value for name, value in raw.items() if name not in removed_keys}
