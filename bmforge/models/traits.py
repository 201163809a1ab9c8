"""Properties of a model family: attention pattern, generation and objective.

Every family defines them in `Model.family_traits`; `Model.traits` adds the properties that depend
on the config, such as whether the head generates text. Other packages use these properties instead
of checking a model's class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = ["AttentionPattern", "Objective", "Positions", "Traits"]

AttentionPattern = Literal["causal", "bidirectional", "encoder-decoder", "prefix"]
Positions = Literal["learned", "rotary", "alibi", "relative"]
Objective = Literal[
    "next token", "masked tokens", "spans", "blanks", "hidden tokens", "documents", "dialogues",
    "images",
]  # fmt: skip

_GENERATION_HEADS = ("language_model", "sequence_to_sequence")


@dataclass(frozen=True)
class Traits:
    """Properties of a model or family.

    Args:
        attention: attention pattern for plain text. "prefix": a bidirectional prefix, and causal
            spans that follow it, as in GLM. (CPM-Bee's documents define another pattern.)
        objective: pretraining objective, such as "next token" or "masked tokens".
        positions: "learned": a table of max_seq_len positions; "rotary" and "alibi" (bias by
            distance): no maximum, trained up to max_seq_len; "relative": bucketed distances.
        has_images: True if the input is pixels instead of tokens.
        has_audio: True if the input is sound instead of tokens.
        sentinel: format of the tokens that mark masked spans, with {} for the span's index, such as
            T5's "<extra_id_{}>"; "" for none.
        ends_inside: True if the EOS token is part of the text in which spans are masked; if
            False, it is appended to source and target.
        marks_between: number of EOS tokens between two texts in one sequence.
        tokenizer: name of the family's tokenizer class, if its texts need that class's special
            tokens.
        can_generate: True if the model has a head that generates text.
        own_generation_head: name of this head, if it is not the usual one of causal or
            encoder-decoder models.
        position_limit: maximum input length in tokens; None for no limit.
    """

    attention: AttentionPattern
    objective: Objective
    positions: Positions
    has_images: bool = False
    has_audio: bool = False
    sentinel: str = ""
    ends_inside: bool = False
    marks_between: int = 1
    tokenizer: str = ""
    can_generate: bool = False
    own_generation_head: str = ""
    position_limit: int | None = None

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the input and the answer are separate sequences."""
        return self.attention == "encoder-decoder"

    @property
    def generation_head(self) -> str:
        """Name of the head that generates text."""
        return self.own_generation_head or _GENERATION_HEADS[self.is_encoder_decoder]

    @property
    def answer_sentinel(self) -> str:
        """Format of the sentinel token before an encoder-decoder's answers; "" for none (EVA)."""
        return "" if self.objective == "dialogues" else self.sentinel

    def of(self, config: Any) -> Traits:
        """Return the traits of a config's model, including `can_generate` and `position_limit`."""
        limit = config.max_seq_len if self.positions == "learned" else None
        return replace(self, can_generate=config.head in _GENERATION_HEADS, position_limit=limit)

    def row_limit(self, config: Any) -> int | None:
        """Return the maximum training length in tokens for a config; None for no limit."""
        is_free = self.positions == "relative" or not config.max_seq_len  # 0 for recurrent models
        return None if is_free else config.max_seq_len
