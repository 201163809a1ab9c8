"""Parses robots.txt files: which paths a crawler may request.

Source: RFC 9309. ``Crawl-delay`` and the preferences against training (``Content-Signal:
ai-train=no``, ``Content-Usage: train-ai=n``), which the RFC does not define, are obeyed as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

__all__ = ["MOST_BYTES", "Robots", "parse_robots"]

MOST_BYTES = 512_000  # maximum size of a robots.txt; RFC 9309 requires at least 500 KiB
_LONGEST_DELAY_S = 3600.0
_LINE_END = re.compile(r"\r\n|\r|\n")
_TOKEN = re.compile("[A-Za-z_-]+")
_ESCAPED_SIGNS = re.compile("%(24|2[aA])")
_INDEX = re.compile(r"(.*/)index\.html?[^/]*")
_FIELDS = ("allow", "disallow", "crawl-delay", "content-signal", "content-usage")
_NO_TRAINING = re.compile(r"\b(?:ai-train|train-ai)\s*=\s*(?:no?|false)\b", re.I)
# Misspellings in robots.txt files that Google's parser accepts.
_TYPOS = {
    **dict.fromkeys(("dissallow", "dissalow", "disalow", "diasllow", "disallaw"), "disallow"),
    **dict.fromkeys(("useragent", "user agent"), "user-agent"),
    **dict.fromkeys(("site-map", "site map"), "sitemap"),
}


@dataclass(frozen=True)
class Robots:
    """Crawling rules of one host for one user agent.

    Attributes:
        rules: pairs of a flag (True to allow) and a path pattern.
        delay_s: seconds between two requests; None if the file has no delay.
        sitemaps: URLs of sitemaps.
        no_training: the line that forbids training models on the pages; "" if there is none.
    """

    rules: tuple[tuple[bool, str], ...] = ()
    delay_s: float | None = None
    sitemaps: tuple[str, ...] = ()
    no_training: str = ""

    def allows(self, path: str) -> bool:
        """Return True if a path with its query may be requested; the longest pattern decides."""
        if path == "/robots.txt":
            return True
        path = _normalize(path.replace("$", "%24").replace("*", "%2A"))
        fitting = [(len(rule), allowed) for allowed, rule in self.rules if _fits(rule, path)]
        return max(fitting)[1] if fitting else True  # between rules of equal length, allow wins


def parse_robots(text: str, agent: str) -> Robots:
    """Parse a robots.txt; return the rules for an agent, or by default the rules for all agents.

    Args:
        text: content of the file.
        agent: product token of the agent, such as ``bmforge``.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    names: list[str] = []
    in_rules, sitemaps = False, []
    # An incomplete byte order mark has been decoded as U+FFFD.
    for line in _LINE_END.split(text.lstrip("\ufeff\ufffd")):
        field, value = _split_line(line)
        if field == "sitemap":
            sitemaps.append(value)
        elif field == "user-agent":
            if in_rules:
                names, in_rules = [], False
            names.append(_product_token(value))
            groups.setdefault(names[-1], [])
        elif field in _FIELDS:
            # Fields that RFC 9309 does not define must not end the list of agents.
            in_rules = in_rules or field in ("allow", "disallow")
            for name in names:
                groups[name].append((field, value))
    lines = groups.get(agent.lower(), groups.get("*", []))
    rules = [(field == "allow", _normalize(v)) for field, v in lines if "allow" in field and v]
    # Google's parser takes an allowed index page as permission for its directory as well.
    indexes = [_INDEX.fullmatch(rule) for is_allowed, rule in rules if is_allowed]
    rules += [(True, f"{index[1]}$") for index in indexes if index]
    delays = [_seconds(value) for field, value in lines if field == "crawl-delay"]
    known_delays = [delay for delay in delays if delay is not None]
    refusals = (f"{field}: {value}" for field, value in lines if _NO_TRAINING.search(value))
    refused = next((refusal for refusal in refusals if refusal.startswith("content-")), "")
    return Robots(tuple(rules), max(known_delays, default=None), tuple(sitemaps), refused)


def _split_line(line: str) -> tuple[str, str]:
    """Split a line into field and value; a missing colon is tolerated."""
    line = line.partition("#")[0].strip()
    field, mark, value = line.partition(":")
    if not mark:
        field, value = (*line.split(None, 1), "", "")[:2]
    field = field.strip().lower()
    return _TYPOS.get(field, field), value.strip()


def _product_token(value: str) -> str:
    """Return an agent's product token without the version: ``bmforge`` for ``bmforge/1.0``."""
    if value.startswith("*"):
        return "*"
    token = _TOKEN.match(value)
    return token[0].lower() if token else ""


def _seconds(value: str) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    return min(seconds, _LONGEST_DELAY_S) if seconds >= 0 else None


def _normalize(path: str) -> str:
    """Return a path in canonical percent-encoding.

    Escaped ``*`` and ``$`` remain escaped, since the unescaped characters are wildcards.
    """
    path = _ESCAPED_SIGNS.sub(lambda sign: f"%25{sign[1].upper()}", path)
    return quote(unquote(path, errors="surrogateescape"), "/*$?=&;:@+!,~", errors="surrogateescape")


def _fits(rule: str, path: str) -> bool:
    """Return True if a robots.txt pattern matches the beginning of a path.

    The pattern may contain ``*`` and end with ``$``. The parts between wildcards are searched for
    one after the other, which takes linear time.
    """
    is_whole = rule.endswith("$")
    first, *parts = rule.removesuffix("$").split("*")
    if not path.startswith(first):
        return False
    if not parts:
        return not is_whole or path == first
    at = len(first)
    for part in parts[:-1]:
        index = path.find(part, at)
        if index < 0:
            return False
        at = index + len(part)
    last = parts[-1]
    if is_whole:
        return path.endswith(last) and len(path) - len(last) >= at
    return path.find(last, at) >= 0
