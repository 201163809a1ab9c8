"""T5, T5 1.1, Flan-T5 (Raffel et al. 2020; Shazeer 2020; Chung et al. 2022), mT5 and Mengzi.

mT5 (Xue et al. 2021) is T5 1.1 with a different vocabulary; its published `model_type` is "mt5".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bmforge.errors import ConfigError
from bmforge.models.heads import Head
from bmforge.models.seq2seq import Seq2Seq
from bmforge.models.seq2seq_config import EncoderDecoderConfig
from bmforge.models.seq2seq_stack import Seq2SeqSpec
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec

__all__ = ["T5", "T5Config", "t5_heads", "t5_rules"]

# head -> (suffix of the class name, {bmforge's name of a linear layer: published name}, prefix of
# the body's names)
_HEADS: dict[str, tuple[str, dict[str, str], str]] = {
    "sequence_classification": (
        "ForSequenceClassification",
        {
            "classifier.dense": "classification_head.dense",
            "classifier.out": "classification_head.out_proj",
        },
        "transformer.",
    ),
    "token_classification": (
        "ForTokenClassification",
        {"classifier": "classifier"},
        "transformer.",
    ),
    "question_answering": ("ForQuestionAnswering", {"classifier": "qa_outputs"}, ""),
    "none": ("Model", {}, ""),
    "encoder": ("EncoderModel", {}, ""),
}


def t5_heads(stem: str, *more: str, old: tuple[str, ...] = ()) -> dict[str, Head]:
    """Return a dict from head name to head for T5 and families that are derived from it.

    Args:
        stem: prefix of transformers' class names.
        more: class-name prefixes of other models whose checkpoints these heads can load.
        old: other class names of the sequence-to-sequence head.
    """
    writer = "ForConditionalGeneration"
    head = {"lm_head.weight": "lm_head.weight"}
    aliases = (*(f"{other}{writer}" for other in more), *old)
    heads = {"sequence_to_sequence": Head(f"{stem}{writer}", head, "", aliases=aliases)}
    for name, (kind, modules, prefix) in _HEADS.items():
        names = {f"{a}.{k}": f"{b}.{k}" for a, b in modules.items() for k in ("weight", "bias")}
        aliases = tuple(f"{other}{kind}" for other in more)
        heads[name] = Head(f"{stem}{kind}", names, prefix, aliases=aliases)
    return heads


def _size(hidden: int, inner: int, layers: int, heads: int, width: int = 64) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "head_dim")
    return dict(zip(names, (hidden, inner, layers, heads, width), strict=True))


_GATED = {"feed_forward": "gated-gelu", "tie_word_embeddings": False, "scale_head": False}
_MT5 = {**_GATED, "model_type": "mt5", "vocab_size": 250112}
_SIZES_11 = {
    "small": _size(512, 1024, 8, 6),
    "base": _size(768, 2048, 12, 12),
    "large": _size(1024, 2816, 24, 16),
    "xl": _size(2048, 5120, 24, 32),
    "xxl": _size(4096, 10240, 24, 64),
}
_PRESETS = {
    "t5-small": _size(512, 2048, 6, 8),
    "t5-base": _size(768, 3072, 12, 12),
    "t5-large": _size(1024, 4096, 24, 16),
    "t5-3b": _size(1024, 16384, 24, 32, 128),
    "t5-11b": _size(1024, 65536, 24, 128, 128),
    **{f"t5-v1_1-{name}": {**size, **_GATED} for name, size in _SIZES_11.items()},
    **{f"mt5-{name}": {**size, **_MT5} for name, size in _SIZES_11.items()},
    "mengzi-t5-base": {**_SIZES_11["base"], **_MT5, "vocab_size": 32128},
    **{f"flan-t5-{name}": {**size, **_GATED} for name, size in _SIZES_11.items()},
}


def _owner(preset: str) -> str:
    """Return the hub organization that published a preset."""
    if preset.startswith("mengzi"):
        return "Langboat"
    return "google" if preset.startswith(("mt5", "flan", "t5-v1_1")) else "google-t5"


# Defaults of mT5's config.json fields that differ from T5's.
_MT5_DEFAULTS = {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}


@dataclass(kw_only=True)
class T5Config(EncoderDecoderConfig):
    """Config of T5; other fields are those of `ModelConfig`.

    Relative positions have no maximum; `max_seq_len` is the training length.

    Args:
        model_type: "t5" or "mt5", as published.
        num_layers: number of blocks of the encoder.
        num_decoder_layers: number of blocks of the decoder; 0 means num_layers.
        feed_forward: activation of the MLP, with the prefix "gated-" for a gated MLP, as in
            transformers ("gated-gelu" is the tanh approximation).
        num_buckets: number of relative position buckets.
        max_distance: distance beyond which all relative positions share a bucket.
        scale_head: multiply the input of the language-model head by D^-0.5, as in T5 1.0 with
            its tied head.
        init_std: factor on the paper's standard deviations.
        dropout: dropout probability of all dropout layers.
        classifier_dropout: dropout probability before and after a classifier's first layer.
        decoder_start_token_id: first token of every target.
        pad_token_id: id of padding tokens.
        eos_token_id: token that ends a source and a target.
    """

    family: ClassVar[str] = "t5"
    model_types: ClassVar[tuple[str, ...]] = ("t5", "mt5")
    heads: ClassVar[dict[str, Head]] = t5_heads("T5", "MT5", old=("T5WithLMHeadModel",))
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_layers": "num_layers",
        "num_decoder_layers": "num_decoder_layers",
        "num_heads": "num_heads",
        "head_dim": "d_kv",
        "norm_eps": "layer_norm_epsilon",
        "feed_forward": "feed_forward_proj",
        "num_buckets": "relative_attention_num_buckets",
        "max_distance": "relative_attention_max_distance",
        "init_std": "initializer_factor",
        "dropout": "dropout_rate",
        "classifier_dropout": "classifier_dropout",
        "decoder_start_token_id": "decoder_start_token_id",
        "pad_token_id": "pad_token_id",
        "eos_token_id": "eos_token_id",
    }
    # is_encoder_decoder follows from the head.
    hf_ignored: ClassVar[frozenset[str]] = frozenset({"is_encoder_decoder"})
    hf_defaults: ClassVar[dict[str, Any]] = {"dropout": 0.1}
    presets: ClassVar[dict[str, dict[str, Any]]] = _PRESETS
    hub_ids: ClassVar[dict[str, str]] = {name: f"{_owner(name)}/{name}" for name in _PRESETS}

    vocab_size: int = 32128
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 0
    head_dim: int = 64
    max_seq_len: int = 512
    norm_eps: float = 1e-6
    init_std: float = 1.0
    model_type: str = "t5"
    num_decoder_layers: int = 0
    feed_forward: str = "relu"
    num_buckets: int = 32
    max_distance: int = 128
    scale_head: bool = True
    dropout: float = 0.0
    classifier_dropout: float = 0.0
    decoder_start_token_id: int = 0
    pad_token_id: int = 0
    eos_token_id: int = 1

    def __post_init__(self) -> None:
        """Set the default number of decoder layers, and derive the fields of the base class."""
        self.num_decoder_layers = self.num_decoder_layers or self.num_layers
        super().__post_init__()

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        if self.model_type not in self.model_types:
            yield f"model_type={self.model_type!r} must be one of {', '.join(self.model_types)}"
        if self.model_type == "mt5" and self.scale_head:
            yield "scale_head=True is not supported by mT5 (set it to False)"

    @property
    def is_gated(self) -> bool:
        """True if the MLP has a gate."""
        return self.feed_forward.startswith("gated-")

    @property
    def activation(self) -> str:
        """Name of the MLP's activation in `nn.mlp.ACTIVATIONS`."""
        return "gelu_new" if self.feed_forward == "gated-gelu" else self.feed_forward.split("-")[-1]

    @classmethod
    def _read_special(cls, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        kind = raw.get("model_type") or "t5"
        if kind == "mt5":
            raw = {**_MT5_DEFAULTS, **{n: v for n, v in raw.items() if v is not None}}
        tied = raw.pop("tie_word_embeddings", None) is not False
        # Before transformers 5, tie_word_embeddings also enabled the scaling of the head's input.
        scaled = raw.pop("scale_decoder_outputs", tied) and kind == "t5"
        implied = cls(feed_forward=raw.get("feed_forward_proj") or "relu")._implied()
        conflicts = {n: v for n in implied if (v := raw.pop(n, None)) not in (None, implied[n])}
        if conflicts:
            raise ConfigError(
                f"T5Config: {conflicts} contradicts feed_forward_proj, which implies {implied}. "
                "Correct config.json."
            )
        values = {"model_type": kind, "tie_word_embeddings": tied, "scale_head": scaled}
        return {**values, "max_seq_len": raw.pop("n_positions", None) or 512}, raw

    def _implied(self) -> dict[str, Any]:
        """Return the fields of config.json that follow from feed_forward_proj."""
        return {"dense_act_fn": self.activation, "is_gated_act": self.is_gated}

    def _write_special(self) -> dict[str, Any]:
        fields = {
            **self._implied(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "is_encoder_decoder": self.head not in Seq2Seq.encoder_heads,
        }
        if self.model_type == "t5":
            fields["scale_decoder_outputs"] = self.scale_head
        if self.max_seq_len != (self.raw.get("n_positions") or 512):
            fields["n_positions"] = self.max_seq_len
        return fields

    def _write_head(self) -> dict[str, Any]:
        out = super()._write_head()
        if self.model_type == "mt5":
            out["architectures"] = [f"M{n}" if n[0] == "T" else n for n in out["architectures"]]
        return out

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of config.json, with the published `model_type`."""
        return {**super().to_hf(), "model_type": self.model_type}


class T5(Seq2Seq):
    """T5 with a sequence-to-sequence head."""

    config_class = T5Config
    family_traits = Traits("encoder-decoder", "spans", "relative", sentinel="<extra_id_{}>")

    def __init__(self, config: T5Config) -> None:
        heads, dropout = config.num_heads, config.dropout
        attn = AttentionSpec(heads, heads, config.head_dim, False, False, 1.0, dropout)
        # T5 was trained in bf16; in larger models the MLPs' outputs exceed fp16's range.
        mlp = MLPSpec(
            config.intermediate_size,
            config.activation,
            config.is_gated,
            bias=False,
            dropout=dropout,
            widens_half=True,
        )
        block = BlockSpec(
            config.hidden_size,
            attn,
            mlp,
            norm=NormSpec("rms", config.norm_eps),
            residual_dropout=dropout,
            guards_half=True,
        )
        spec = Seq2SeqSpec(
            block,
            config.num_layers,
            config.num_decoder_layers,
            num_buckets=config.num_buckets,
            max_distance=config.max_distance,
            dropout=dropout,
            classifier_dropout=config.classifier_dropout,
            head_scale=config.hidden_size**-0.5 if config.scale_head else 1.0,
        )
        super().__init__(config, spec)

    @property
    def hf_unused(self) -> tuple[str, ...]:  # type: ignore[override]
        """Name globs of unused weights: a bias of T5 1.0, and the decoder if there is none."""
        dead = "**decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        return (dead, "**decoder.**") if self.decoder is None else (dead,)

    def tied_copies(self) -> dict[str, str]:
        """Return a dict from the name of each stack's embedding copy to the shared embedding's."""
        return {
            f"{prefix}{stack}.embed_tokens.weight": f"{prefix}shared.weight"
            for prefix in ("", "transformer.")
            for stack in ("encoder", "decoder")
        }

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to transformers' names; see `t5_rules`."""
        return t5_rules(self.config.is_gated)


def t5_rules(is_gated: bool) -> list[WeightRule]:
    """Map parameter names to transformers' names of T5, in which sublayers are numbered.

    Args:
        is_gated: True if the MLP has a gate.
    """
    inputs = {"gate_proj": "wi_0", "up_proj": "wi_1"} if is_gated else {"up_proj": "wi"}
    sublayers = {
        "attn": {f"{n}_proj": f"SelfAttention.{n}" for n in "qkvo"},
        "cross_attn": {f"{n}_proj": f"EncDecAttention.{n}" for n in "qkvo"},
        "mlp": {a: f"DenseReluDense.{b}" for a, b in (*inputs.items(), ("down_proj", "wo"))},
    }
    rules = [WeightRule("embed.weight", "shared.weight")]
    for stack in ("encoder", "decoder"):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        names = {f"{stack}.norm": f"{stack}.final_layer_norm", f"{stack}.rel_bias": bias}
        parts = [part for part in sublayers if stack == "decoder" or part != "cross_attn"]
        for number, part in enumerate(parts):
            own, published = f"{stack}.layers.{{i}}.{part}", f"{stack}.block.{{i}}.layer.{number}"
            names[f"{own}_norm"] = f"{published}.layer_norm"
            names |= {f"{own}.{a}": f"{published}.{b}" for a, b in sublayers[part].items()}
        rules += linear_rules(names, ("weight",))
    return rules
