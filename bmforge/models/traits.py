"""Properties of a model family: attention pattern, generation and objective.

Every family defines them in `Model.family_traits`; `Model.traits` adds the properties that depend
on the config, such as whether the head generates text. Other packages use these properties instead
of checking a model's class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = ["Objective", "Positions", "Reading", "Traits"]

Reading = Literal["left", "both", "apart", "blanks"]
Positions = Literal["learned", "rotary", "alibi", "relative"]
Objective = Literal[
    "next token", "masked tokens", "spans", "blanks", "hidden tokens", "documents", "dialogues",
    "images",
]  # fmt: skip

_WRITING_HEADS = ("language_model", "sequence_to_sequence")


@dataclass(frozen=True)
class Traits:
    """Properties of a model or family.

    Args:
        reads: attention pattern for plain text. "left": causal; "both": bidirectional; "apart":
            encoder-decoder; "blanks": blank infilling (GLM), a bidirectional text and causal spans.
            (CPM-Bee's documents define another pattern.)
        objective: pretraining objective.
        positions: "learned": a table of max_seq_len positions; "rotary" and "alibi" (bias by
            distance): no maximum, trained up to max_seq_len; "relative": bucketed distances.
        has_images: True if the input is pixels instead of tokens.
        has_audio: True if the input is sound instead of tokens.
        sentinel: format of the tokens that mark masked spans, with {} for the span's index.
        ends_inside: True if the EOS token is part of the text in which spans are masked; if
            False, it is appended to source and target.
        marks_between: number of EOS tokens between two texts in one sequence.
        tokenizer: name of the family's tokenizer class, if its texts need that class's special
            tokens.
        writes: True if the model has a head that generates text.
        own_writing_head: name of this head, if it is not the usual one of causal or
            encoder-decoder models.
        position_limit: maximum input length in tokens; None for no limit.
    """

    reads: Reading
    objective: Objective
    positions: Positions
    has_images: bool = False
    has_audio: bool = False
    sentinel: str = ""
    ends_inside: bool = False
    marks_between: int = 1
    tokenizer: str = ""
    writes: bool = False
    own_writing_head: str = ""
    position_limit: int | None = None

    @property
    def writing_head(self) -> str:
        """Name of the head that generates text."""
        return self.own_writing_head or _WRITING_HEADS[self.reads == "apart"]

    @property
    def answer_sentinel(self) -> str:
        """Format of the sentinel token before an encoder-decoder's answers; "" for none (EVA)."""
        return "" if self.objective == "dialogues" else self.sentinel

    def of(self, config: Any) -> Traits:
        """Return the traits of a config's model, including `writes` and `position_limit`."""
        limit = config.max_seq_len if self.positions == "learned" else None
        return replace(self, writes=config.head in _WRITING_HEADS, position_limit=limit)

    def row_limit(self, config: Any) -> int | None:
        """Return the maximum training length in tokens for a config; None for no limit."""
        is_free = self.positions == "relative" or not config.max_seq_len  # 0 for recurrent models
        return None if is_free else config.max_seq_len
