"""Checks that `prepare` has read most of its input and kept at least one document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bmforge.data.prepare.funnel import Funnel
from bmforge.errors import DataError

__all__ = ["check_any_left", "check_unread_members"]


def check_unread_members(results: Sequence[Any], is_allowed: bool) -> None:
    """Raise an error if most bytes of the archives belong to members of unsupported formats."""
    funnel = Funnel()
    for result in results:
        funnel.merge(Funnel.from_record(result["funnel"]))
    unread = funnel.dropped.get("unknown_kind")
    if unread and 2 * unread.text_bytes > funnel.read.text_bytes and not is_allowed:
        raise DataError(
            f"{unread.text_bytes} of {funnel.read.text_bytes} bytes are in "
            f"{unread.documents} archive members of unsupported formats. Convert them to "
            ".txt or .jsonl, or leave them out with skip_unread=True (--skip-unread)."
        )


def check_any_left(results: Sequence[Any]) -> None:
    """Raise `DataError` if no document is left; the message lists the rules that dropped them."""
    if any(result["documents"] for result in results):
        return
    funnel = Funnel()
    for result in results:
        funnel.merge(Funnel.from_record(result["funnel"]))
    dropped = sorted(funnel.dropped.items(), key=lambda item: -item[1].documents)
    reasons = ", ".join(f"{rule} ({amount.documents})" for rule, amount in dropped)
    raise DataError(
        f"no text is left after cleaning, because all {funnel.read.documents} documents were "
        f"dropped (by rule: {reasons or 'none'}). Check the input and the rules."
    )
