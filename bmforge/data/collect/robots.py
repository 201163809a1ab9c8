"""robots.txt: what an agent may ask for.

Source: RFC 9309; ``Crawl-delay``, which it does not have, is obeyed too.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

__all__ = ["MOST_BYTES", "Robots", "parse_robots"]

MOST_BYTES = 512_000  # what stands behind is not read, as RFC 9309 allows from 500 KiB on
_LONGEST_DELAY_S = 3600.0


@dataclass(frozen=True)
class Robots:
    """What one agent may ask of one host.

    Attributes:
        rules: whether it is allowed, and the pattern of the path.
        delay_s: seconds between two requests, None where it does not say.
        sitemaps: addresses that it names.
    """

    rules: tuple[tuple[bool, str], ...] = ()
    delay_s: float | None = None
    sitemaps: tuple[str, ...] = ()

    def allows(self, path: str) -> bool:
        """Tell whether a path with its query may be asked for: the longest pattern decides."""
        if path == "/robots.txt":
            return True
        path = _normalise(path)
        fitting = [(len(rule), allowed) for allowed, rule in self.rules if _fits(rule, path)]
        return max(fitting)[1] if fitting else True  # of two of one length, the one that allows


def parse_robots(text: str, agent: str) -> Robots:
    """Return what a robots.txt says to an agent: by name, or else to all.

    Args:
        agent: its product token, such as ``bmforge``.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    names: list[str] = []
    in_rules, sitemaps = False, []
    for line in text.lstrip("\ufeff").splitlines():
        field, mark, value = line.partition("#")[0].partition(":")
        field, value = field.strip().lower(), value.strip()
        if not mark:
            continue
        if field == "sitemap":
            sitemaps.append(value)
        elif field == "user-agent":
            if in_rules:
                names, in_rules = [], False
            names.append(value.lower())
            groups.setdefault(names[-1], [])
        elif field in ("allow", "disallow", "crawl-delay"):
            in_rules = True
            for name in names:
                groups[name].append((field, value))
    lines = groups.get(agent.lower(), groups.get("*", []))
    rules = tuple((field == "allow", _normalise(v)) for field, v in lines if field[0] != "c" and v)
    delays = [found for field, v in lines if field[0] == "c" and (found := _seconds(v)) is not None]
    return Robots(rules, max(delays, default=None), tuple(sitemaps))


def _seconds(value: str) -> float | None:
    try:
        found = float(value)
    except ValueError:
        return None
    return min(found, _LONGEST_DELAY_S) if found >= 0 else None


def _normalise(path: str) -> str:
    """Return a path with what need not be escaped as it is, and the rest escaped alike."""
    return quote(unquote(path, errors="surrogateescape"), "/*$?=&;:@+!,~", errors="surrogateescape")


def _fits(rule: str, path: str) -> bool:
    """Tell whether a pattern with ``*`` and a ``$`` at its end fits the beginning of a path.

    Each piece is looked for behind the one before, so it takes linear time for each.
    """
    is_whole = rule.endswith("$")
    first, *pieces = rule.removesuffix("$").split("*")
    if not path.startswith(first):
        return False
    if not pieces:
        return not is_whole or path == first
    at = len(first)
    for piece in pieces[:-1]:
        found = path.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    last = pieces[-1]
    if is_whole:
        return path.endswith(last) and len(path) - len(last) >= at
    return path.find(last, at) >= 0
