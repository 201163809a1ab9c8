"""GLM: a bidirectional text with masked spans (part A), and the spans' contents (part B).

Each token of part B has the position of the mask token of its span, and a second position within
the span. The original caches hidden states (`mems`); this implementation uses a KV cache with the
same results.

Source: Du et al., "GLM: General language model pretraining with autoregressive blank infilling"
(ACL 2022); names and fields are those of the published remote code, `modeling_glm.py`. GLM-4 has
the same model_type, but is the family `GLM4`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.device import reads_without_sync
from bmforge.errors import ConfigError, ShapeError
from bmforge.models.causal_lm import CausalLM, DecoderSpec
from bmforge.models.config import ModelConfig
from bmforge.models.encoder import DeepClassifier
from bmforge.models.heads import Head
from bmforge.models.traits import Traits
from bmforge.models.weights import WeightRule, linear_rules
from bmforge.nn import AttentionSpec, BlockSpec, MLPSpec, NormSpec, build_mask
from bmforge.nn.glm_positions import blank_positions

__all__ = ["GLM", "GLMConfig", "is_glm10b"]

# Fields that only one of the two models with model_type "glm" has.
_OURS = {"num_layers", "max_sequence_length", "block_position_encoding"}
_GLM4S = {"num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "partial_rotary_factor"}
# attention_scale only affects rounding: scores are divided by it, then multiplied by it.
_IGNORED_FIELDS = """
    attention_scale checkpoint_activations checkpoint_num_layers parallel_output spell_func
    output_predict bad_words_id classifier_dropout use_scaled_init_for_output_weights eop_tok_id
"""
_DROPOUTS = ("dropout", "attn_dropout", "embed_dropout")


def is_glm10b(raw: dict[str, Any]) -> bool:
    """Return True if a config.json with model_type "glm" belongs to this family, not to GLM-4."""
    return raw.get("model_type") == "glm" and bool(_OURS & set(raw)) and not _GLM4S & set(raw)


def _size(vocab: int, hidden: int, layers: int, heads: int, length: int = 1024) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_seq_len")
    return dict(zip(names, (vocab, hidden, layers, heads, length), strict=True))


# ModelCenter's ids of the Chinese vocabulary's special tokens.
_CHINESE = {"sop_token_id": 50006, "mask_token_id": 50008}


@dataclass(kw_only=True)
class GLMConfig(ModelConfig):
    """Config of GLM; other fields are those of `ModelConfig`.

    Args:
        dropout: dropout probability of each sublayer's output.
        attn_dropout: dropout probability of attention weights.
        embed_dropout: dropout probability after the embedding.
        sop_token_id: token that begins a span of part B; if set, positions and the length of the
            bidirectional text (part A) are derived from the ids.
        mask_token_id: mask token, which replaces a span in part A.
    """

    family: ClassVar[str] = "glm"
    heads: ClassVar[dict[str, Head]] = {
        "language_model": Head("GLMForConditionalGeneration", aliases=("GLMModel",)),
        "sequence_classification": Head(
            "GLMForSequenceClassification",
            {f"classifier.dense.{kind}": f"dense.{kind}" for kind in ("weight", "bias")}
            | {f"classifier.out.{kind}": f"out_proj.{kind}" for kind in ("weight", "bias")},
        ),
        "none": Head("GLMModel", prefix=""),
    }
    hf_names: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "max_seq_len": "max_sequence_length",
        "norm_eps": "layernorm_epsilon",
        "dropout": "output_dropout_prob",
        "attn_dropout": "attention_dropout_prob",
        "embed_dropout": "embedding_dropout_prob",
        "sop_token_id": "sop_tok_id",
        "mask_token_id": "mask_tok_id",
        "init_std": "initializer_range",
    }
    hf_ignored: ClassVar[frozenset[str]] = frozenset(_IGNORED_FIELDS.split())
    hf_required: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_position_encoding": (True,),
        "relative_encoding": (False, None),
        "pool_token": ("cls",),
        "tie_word_embeddings": (True,),
    }
    hf_defaults: ClassVar[dict[str, Any]] = dict.fromkeys(_DROPOUTS, 0.1)
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "glm-515m": _size(30592, 1152, 30, 18, 512),
        "glm-2b": _size(50304, 2048, 36, 32),
        "glm-10b": _size(50304, 4096, 48, 64),
        "glm-large-zh": {**_size(50048, 1024, 24, 16), **_CHINESE},
        "glm-10b-zh": {**_size(50048, 4096, 48, 64), **_CHINESE},
    }
    hub_ids: ClassVar[dict[str, str]] = {n: f"THUDM/{n.replace('zh', 'chinese')}" for n in presets}

    vocab_size: int = 30592
    hidden_size: int = 1024
    intermediate_size: int = 0
    num_layers: int = 24
    num_heads: int = 16
    num_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 512
    norm_eps: float = 1e-5
    dropout: float = 0.0
    attn_dropout: float = 0.0
    embed_dropout: float = 0.0
    sop_token_id: int | None = None
    mask_token_id: int | None = None

    def problems(self) -> Iterator[str]:
        """Yield a message for each inconsistency among the fields."""
        yield from super().problems()
        yield from self.find_unsavable(
            intermediate_size=4 * self.hidden_size, tie_word_embeddings=True
        )
        if (self.sop_token_id is None) != (self.mask_token_id is None):
            yield "sop_token_id and mask_token_id must be set together"

    @classmethod
    def opens(cls, raw: dict[str, Any]) -> bool:
        """Return True if the contents of a config.json belong to this family."""
        return is_glm10b(raw)

    @classmethod
    def from_hf(cls, raw: dict[str, Any], allow_unknown: tuple[str, ...] = ()) -> Self:
        """Convert the contents of a config.json; raise `ConfigError` for those of GLM-4."""
        if fields := sorted(_GLM4S & set(raw)):
            raise ConfigError(
                f"config.json has {', '.join(fields)}, so the model is a GLM-4, which has the "
                "model_type 'glm' but another architecture than GLM-10B. Use a GLM-10B "
                "checkpoint."
            )
        return super().from_hf(raw, allow_unknown)

    @classmethod
    def _read_head(cls, raw: dict[str, Any]) -> dict[str, Any]:
        is_bare = raw.get("architectures") == ["GLMModel"] and not raw.get("output_predict")
        return super()._read_head(raw) | ({"head": "none"} if is_bare else {})

    def _write_special(self) -> dict[str, Any]:
        return {"block_position_encoding": True, "output_predict": self.head == "language_model"}


class GLM(CausalLM):
    """GLM with a language-model head, tied to the embedding.

    Its `forward` is that of `CausalLM`, except for two arguments:

    Args:
        attention_mask: (B,) or one number: length of the bidirectional text (part A); or
            (B, 1, T, past + T): mask over pairs of tokens; or (B, past + T): 1 for tokens, 0 for
            padding. Without lengths, part A is derived from the ids if the config has
            `sop_token_id`; otherwise it is empty.
        position_ids: (B or 1, 2, T): positions, and positions within spans; or (B or 1, T):
            positions only. By default they are derived from the ids like part A, or counted.
    """

    config_class = GLMConfig
    family_traits = Traits("prefix", "blanks", "learned", tokenizer="GLMTokenizer")
    scales_residuals = True
    hf_prefix = "glm."

    def __init__(self, config: GLMConfig) -> None:
        width, heads, rows = config.hidden_size, config.num_heads, config.max_seq_len + 1
        attn = AttentionSpec(heads, heads, config.head_dim, dropout=config.attn_dropout)
        mlp, norm = MLPSpec(config.intermediate_size, "gelu"), NormSpec("layer", config.norm_eps)
        block = BlockSpec(width, attn, mlp, norm=norm, residual_dropout=config.dropout)
        spec = DecoderSpec(block, num_positions=rows, embed_dropout=config.embed_dropout)
        super().__init__(config, spec)
        self.embed_blocks = nn.Embedding(rows, width)
        if config.head == "sequence_classification":
            self.classifier = DeepClassifier(width, config.num_labels, config.dropout)

    def derive_positions(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the positions (B, 2, T) and the length of part A (B,), derived from token ids.

        See `nn.glm_positions`. The config must have `sop_token_id` and `mask_token_id`.
        """
        if input_ids.dim() != 2:
            raise ShapeError(
                "the mask tokens of the text are located in input_ids, which is missing. With "
                "inputs_embeds, pass position_ids (B, 2, T) and the length of part A as "
                "attention_mask (B,)."
            )
        padding = attention_mask if attention_mask is None or attention_mask.dim() == 2 else None
        ids = self.config.sop_token_id, self.config.mask_token_id
        return blank_positions(input_ids, *ids, padding)

    def row_positions(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """Return the positions of full sequences (B, 2, T); None without `sop_token_id`."""
        if self.config.sop_token_id is None:
            return None
        return self.derive_positions(input_ids, attention_mask)[0]

    def _count_positions(self, inputs: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
        positions = self.row_positions(inputs, attention_mask)
        if positions is not None and past:
            raise ShapeError(
                "position_ids (B, 2, T) is required with a KV cache, because the position of a "
                "mask token depends on the whole sequence. Compute it with model.row_positions."
            )
        return super()._count_positions(inputs, None, past) if positions is None else positions

    def _embed(self, x: Tensor, position_ids: Tensor) -> Tensor:
        if position_ids.dim() == 2:
            position_ids = torch.stack((position_ids, torch.zeros_like(position_ids)), 1)
        limit = self.embed_positions.num_embeddings - 1
        if reads_without_sync(position_ids) and position_ids.numel() and position_ids.max() > limit:
            raise ShapeError(
                f"position_ids has values up to {int(position_ids.max())} (allowed: 0 to "
                f"max_seq_len={limit}). Truncate the input."
            )
        positions = self.embed_positions(position_ids[:, 0]) + self.embed_blocks(position_ids[:, 1])
        x = x + positions
        dropout = self.spec.embed_dropout
        return F.dropout(x, dropout, self.training) if dropout else x

    def _build_masks(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None,
        document_ids: Tensor | None,
        past: int,
    ) -> dict[int | None, Tensor | None]:
        if attention_mask is not None and attention_mask.dim() == 4:
            return {None: attention_mask.bool()}
        batch_size, prefix = inputs.shape[0], None
        if attention_mask is not None and attention_mask.dim() < 2:
            count = attention_mask.numel()
            if count not in (1, batch_size):
                raise ShapeError(
                    f"attention_mask has {count} lengths, but the batch has {batch_size} "
                    "sequences. Pass one length per sequence."
                )
            prefix, attention_mask = attention_mask.reshape(-1).expand(batch_size), None
        elif self.config.sop_token_id is not None and not past:
            prefix = self.derive_positions(inputs, attention_mask)[1]
        mask = build_mask(
            (batch_size, inputs.shape[1]),
            inputs.device,
            past=past,
            attention_mask=attention_mask,
            document_ids=document_ids,
            prefix_lengths=prefix,
        )
        return {None: mask}

    def _pick_tokens(self, inputs: Tensor, attention_mask: Tensor | None) -> Tensor:
        return torch.zeros(inputs.shape[0], dtype=torch.long, device=inputs.device)

    def _check_length(self, length: int) -> None:
        """Accept any length: only positions are limited, and generated tokens reuse positions."""

    def weight_rules(self) -> list[WeightRule]:
        """Map parameter names to names in checkpoints; q, k and v are fused."""
        width, block, published = self.config.hidden_size, "layers.{i}.", "layers.{i}."
        names = {
            "embed_positions": "position_embeddings",
            "embed_blocks": "block_position_embeddings",
            "norm": "final_layernorm",
            f"{block}attn_norm": f"{published}input_layernorm",
            f"{block}mlp_norm": f"{published}post_attention_layernorm",
            f"{block}attn.o_proj": f"{published}attention.dense",
            f"{block}mlp.up_proj": f"{published}mlp.dense_h_to_4h",
            f"{block}mlp.down_proj": f"{published}mlp.dense_4h_to_h",
        }
        renamed = linear_rules({own: f"glm.transformer.{name}" for own, name in names.items()})
        fused = [
            WeightRule(
                f"{block}attn.{part}.{kind}",
                f"glm.transformer.{published}attention.query_key_value.{kind}",
                part=(number * width, 3 * width),
            )
            for kind in ("weight", "bias")
            for number, part in enumerate(("q_proj", "k_proj", "v_proj"))
        ]
        return [WeightRule("embed.weight", "glm.word_embeddings.weight"), *renamed, *fused]
