"""Reports how much of the training data is skipped, and for which reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from bmforge.logging import get_logger, process_rank

__all__ = ["is_much", "log_skipped"]

_MUCH = 0.1


def is_much(count: int, total: int) -> bool:
    """Return True if `count` is more than a tenth of `total`."""
    return count > _MUCH * total


def log_skipped(
    reasons: Iterable[str], total: int, what: str, examples: Mapping[str, str] | None = None
) -> None:
    """Log on one process how many items were skipped for each reason; warn if there are many.

    Args:
        reasons: reason of each skipped item.
        total: number of all items.
        what: plural noun for the items in the message.
        examples: dict from reason to a message about one of the items.
    """
    counts = Counter(reasons)
    if not counts or process_rank():
        return
    parts = [f"{count} {reason}" for reason, count in counts.most_common()]
    shown = [(examples or {}).get(reason, "") for reason, _ in counts.most_common()]
    level = get_logger().warning if is_much(counts.total(), total) else get_logger().info
    level(
        "%d of %d %s were left out: %s%s",
        counts.total(),
        total,
        what,
        ", ".join(parts),
        "".join(f"; for instance {example}" for example in shown if example),
    )
