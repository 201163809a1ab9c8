"""A third party's template class: its examples' texts stand in marks that are never cut."""

from __future__ import annotations

from bmforge.tune.prompt import Template
from bmforge.tune.prompt.pieces import Wrapped


class QuotedTemplate(Template):
    """Puts commas around every text that may be cut."""

    def wrap(self, example):
        """As the base, with marks around."""
        found = []
        for piece in super().wrap(example):
            around = piece.kind == "text" and piece.shortenable
            found += [Wrapped(" ,"), piece, Wrapped(" ,")] if around else [piece]
        return found
