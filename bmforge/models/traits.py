"""What others must know of a family to use it: how it reads, whether it writes, what it learns.

Every family sets these as data (`Model.family_traits`); what follows from a config, such as whether
there is a head that writes, is filled in by `Model.traits`. Nobody outside `models` asks for a
family's class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = ["Objective", "Positions", "Reading", "Traits"]

Reading = Literal["left", "both", "apart", "blanks"]
Positions = Literal["learned", "rotary", "relative"]
Objective = Literal[
    "next token", "masked tokens", "spans", "blanks", "hidden tokens", "documents", "dialogues",
    "images",
]  # fmt: skip

_WRITING_HEADS = ("language_model", "sequence_to_sequence")


@dataclass(frozen=True)
class Traits:
    """How a family is used.

    Args:
        reads: "left": a token sees those before it; "both": all tokens see all; "apart": an encoder
            sees all of a text, a decoder writes another; "blanks": a text is seen in both
            directions, and what is left out of it is written from the left. This is about plain
            ids: how CPM-Bee reads a document, the document says.
        objective: what the family was pretrained to do.
        positions: "learned": a table with an end; "rotary": they go on, and were trained up to
            max_seq_len; "relative": distances, of which far ones are all the same.
        has_images: it reads pixels rather than tokens.
        sentinel: the tokens that stand for cut-out spans, with {} for their number.
        ends_inside: the end token of a text is one of those that spans are cut from; otherwise it
            stands behind source and target.
        marks_between: end marks between two texts that are read together.
        tokenizer: the class of the family's own tokenizer, where its texts need that one's marks.
        writes: the model has a head that writes text.
        position_limit: the longest input in tokens; None where positions go on.
    """

    reads: Reading
    objective: Objective
    positions: Positions
    has_images: bool = False
    sentinel: str = ""
    ends_inside: bool = False
    marks_between: int = 1
    tokenizer: str = ""
    writes: bool = False
    position_limit: int | None = None

    @property
    def writing_head(self) -> str:
        """The head that writes text."""
        return _WRITING_HEADS[self.reads == "apart"]

    @property
    def answer_sentinel(self) -> str:
        """What an encoder-decoder's answers begin with, {} for its number; EVA's just end."""
        return "" if self.objective == "dialogues" else self.sentinel

    def of(self, config: Any) -> Traits:
        """Return what holds for a model of this config."""
        limit = config.max_seq_len if self.positions == "learned" else None
        return replace(self, writes=config.head in _WRITING_HEADS, position_limit=limit)

    def row_limit(self, config: Any) -> int | None:
        """Return the longest row in tokens that a model of this config may learn from, if any."""
        return None if self.positions == "relative" else config.max_seq_len
