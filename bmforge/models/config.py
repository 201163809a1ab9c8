"""The base of every family's config: our field names, and strict exchange with `config.json`.

A config field of another library that could change numbers and is not understood raises. What is
handled, ignored or must have one value is data of the family.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from bmforge.errors import ConfigError, suggest

__all__ = ["ModelConfig", "read_config_file"]

# Fields of config.json that do not change a forward pass.
_IGNORED_FIELDS = """
    model_type architectures transformers_version torch_dtype dtype use_cache _name_or_path
    id2label label2id problem_type output_attentions output_hidden_states return_dict
    task_specific_params bos_token_id eos_token_id pad_token_id sep_token_id
    decoder_start_token_id gradient_checkpointing initializer_range chunk_size_feed_forward
    tokenizer_class _attn_implementation_autoset is_decoder torchscript prefix max_length
    do_sample num_beams top_k top_p temperature auto_map pretraining_tp unsloth_version
"""
_IGNORED = frozenset(_IGNORED_FIELDS.split())


@dataclass(kw_only=True)
class ModelConfig:
    """Fields that every decoder has. Widths in numbers of features, lengths in tokens.

    Args:
        vocab_size: V.
        hidden_size: D.
        intermediate_size: F.
        num_layers: number of blocks.
        num_heads: N.
        num_kv_heads: K; 0 takes num_heads.
        head_dim: H; 0 takes hidden_size / num_heads.
        max_seq_len: longest context.
        norm_eps: epsilon of the norms.
        init_std: standard deviation of freshly drawn weights.
        tie_word_embeddings: the head is the embedding.
        raw: the config.json this came from, written back on saving.
    """

    family: ClassVar[str] = ""
    hf_architecture: ClassVar[str] = ""
    hf_names: ClassVar[dict[str, str]] = {}
    hf_ignored: ClassVar[frozenset[str]] = frozenset()
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # What an absent field means in config.json, where that is not our default.
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
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the numbers against each other."""
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` with every contradiction among the fields."""
        problems = [
            f"{name}={getattr(self, name)!r} must be a positive number"
            for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads")
            if getattr(self, name) < 1
        ]
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if problems:
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(problems) + ".")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a published size by its name, with fields changed as asked.

        Raises:
            ConfigError: no such preset (the nearest is named) or no such field.
        """
        if name not in cls.presets:
            raise ConfigError(
                f"{cls.__name__} has no preset {name!r}.{suggest(name, cls.presets)} "
                f"Known: {', '.join(cls.presets)}."
            )
        return cls(**{**cls.presets[name], **changes})

    @classmethod
    def from_hf(cls, raw: dict[str, Any], allow_unknown: tuple[str, ...] = ()) -> Self:
        """Read a transformers config.

        Args:
            raw: the contents of config.json.
            allow_unknown: names of fields to accept although nothing here understands them.

        Raises:
            ConfigError: fields not understood, or values this family cannot compute; all listed.
        """
        values, rest = cls._take_special(dict(raw))
        theirs = {their: our for our, their in cls.hf_names.items()}
        problems = []
        for name, value in rest.items():
            if name in theirs:
                if value is not None:
                    values[theirs[name]] = value
            elif name in cls.hf_required:
                if value not in cls.hf_required[name]:
                    problems.append(f"{name}={value!r} (only {list(cls.hf_required[name])})")
            elif name in _IGNORED | cls.hf_ignored or name in allow_unknown:
                continue
            elif value not in (None, False, "", [], {}):
                problems.append(f"{name}={value!r} (unknown)")
        if problems:
            raise ConfigError(
                f"{cls.__name__} does not understand these config fields, and they could change "
                f"numbers: {', '.join(problems)}. If you know that they do not, name them in "
                "allow_unknown."
            )
        return cls(**{**cls.hf_defaults, **values}, raw=dict(raw))

    @classmethod
    def _take_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split off the fields that need more than a renaming; a family overrides this."""
        return {}, raw

    def _give_special(self) -> dict[str, Any]:
        """Return what `_take_special` took, in transformers' names."""
        return {}

    def to_hf(self) -> dict[str, Any]:
        """Return the config under transformers' names; what was read and not changed is kept."""
        named = {their: getattr(self, our) for our, their in self.hf_names.items()}
        fixed = {"model_type": self.family, "initializer_range": self.init_std}
        architectures = self.raw.get("architectures") or [self.hf_architecture]
        out = {**self.raw, **fixed, "architectures": architectures, **named}
        return {**out, **self._give_special()}

    @classmethod
    def from_pretrained(cls, directory: str | Path, allow_unknown: tuple[str, ...] = ()) -> Self:
        """Read ``directory/config.json``; see `from_hf`."""
        return cls.from_hf(read_config_file(directory), allow_unknown)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with fields changed."""
        return dataclasses.replace(self, **changes)

    def with_implied(self) -> Self:
        """Return a copy whose fields that follow from others are 0 again, to be set anew.

        It describes changes to make (the command line's defaults); a model needs them filled in.
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
        """Floating-point operations of forward and backward for one token in a row of `seq_len`.

        Source: 6 per weight that is multiplied, 12 L N H T for the attention products (Chowdhery et
        al., "PaLM", 2022, appendix B). The causal half that need not be computed is counted.
        """
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = self.hidden_size * self.intermediate_size * (3 if self.is_gated else 2)
        weights = self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size
        return 6 * weights + 12 * self.num_layers * self.num_heads * self.head_dim * seq_len

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate."""
        return False

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Bytes of keys and values that one token leaves in the cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element


def read_config_file(directory: str | Path) -> dict[str, Any]:
    """Return the contents of ``directory/config.json``.

    Raises:
        ConfigError: there is none, or it is not a JSON object.
    """
    file = Path(directory) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{str(directory)!r} holds no config.json, so it is not a model.")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{str(file)!r} is not valid JSON: {error}. Copy it anew.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{str(file)!r} holds a {type(raw).__name__}; it must be a JSON object.")
    return raw
