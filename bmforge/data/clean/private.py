"""Private data in texts: found by form and checksum, masked by kind or a reason to drop.

What is masked depends on the text alone: every address becomes the same ``<EMAIL>``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, MissingDependencyError, suggest

__all__ = ["KINDS", "Found", "MaskPrivate", "find_private", "is_bank_card", "is_chinese_id"]


@dataclass(frozen=True)
class Found:
    """A piece of private data, and where it stands."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Kind:
    """How one kind is found: by a pattern, and a check of what it matches.

    Attributes:
        sign: what is in every text that the pattern matches, and is looked for sooner.
    """

    pattern: re.Pattern[str]
    check: Callable[[str], bool] | None = None
    meaning: str = ""
    sign: re.Pattern[str] | None = None


_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_PROVINCES = {
    *range(11, 16),
    *range(21, 24),
    *range(31, 38),
    *range(41, 47),
    *range(50, 55),
    *range(61, 66),
    71,
    *range(81, 84),
}


def is_chinese_id(number: str) -> bool:
    """Tell whether 18 characters are a citizen's number: province, day of birth, check digit.

    Source: GB 11643-1999 (ISO 7064, MOD 11-2).
    """
    if not re.fullmatch("[1-9][0-9]{16}[0-9Xx]", number) or int(number[:2]) not in _PROVINCES:
        return False
    try:
        born = date(int(number[6:10]), int(number[10:12]), int(number[12:14]))
    except ValueError:
        return False
    total = sum(weight * int(digit) for weight, digit in zip(_ID_WEIGHTS, number, strict=False))
    return born.year >= 1880 and "10X98765432"[total % 11] == number[17].upper()


def is_bank_card(number: str) -> bool:
    """Tell whether 13 to 19 digits, in groups or not, have Luhn's check digit."""
    digits = [int(one) for one in number if one.isdigit()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) < 2:
        return False
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(doubled) + sum(digits[-1::-2])) % 10 == 0


def _is_public_address(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_secret(text: str) -> bool:
    """Tell whether a value looks drawn at random: of two kinds of characters, few repeated."""
    value = re.split(r"[:=\s'\"]+", text)[-1] or text
    kinds = (str.islower, str.isupper, str.isdigit)
    return sum(any(map(kind, value)) for kind in kinds) >= 2 and len(set(value)) >= 8


_CITY = "京津沪渝冀豫云辽黑湘皖鲁新苏浙赣鄂桂甘晋蒙陕吉闽贵粤青藏川宁琼"
# Tried in this order: what one kind has taken, the next do not see.
KINDS = {
    "email": Kind(
        re.compile(
            r"(?<![\w.+-])[A-Za-z0-9][\w.+%-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)"
            r"{1,8}[A-Za-z]{2,24}(?![\w-])",
            re.ASCII,
        ),
        meaning="mail addresses",
        sign=re.compile("@"),
    ),
    "key": Kind(
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]{0,8000}?-----END [A-Z ]*PRIVATE KEY-----"
            r"|(?<![A-Za-z0-9_-])(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36,}"
            r"|sk-[A-Za-z0-9_-]{20,}|xox[abpr]-[A-Za-z0-9-]{10,}|AIza[0-9A-Za-z_-]{35}"
            r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})(?![A-Za-z0-9_-])"
            r"|(?i:api[_-]?key|secret|token|passwd|password)['\"]?\s*[:=]\s*['\"]?[A-Za-z0-9_/+-]{16,}"
        ),
        lambda text: text.startswith(("-----", "xox", "eyJ")) or _is_secret(text),
        "private keys, access keys of services, and passwords that look drawn at random",
    ),
    "id_card": Kind(
        re.compile(r"(?<![0-9A-Za-z])[1-9]\d{16}[\dXx](?![0-9A-Za-z])", re.ASCII),
        is_chinese_id,
        "Chinese citizens' numbers with a sound check digit and day of birth",
        re.compile("[0-9]{17}"),
    ),
    "bank_card": Kind(
        re.compile(
            r"(?<![\d.,-])[2-6]\d{3}(?:[ -]?\d{4}){2}(?:[ -]?\d{1,7})(?![\d.,-]*\d)", re.ASCII
        ),
        is_bank_card,
        "card numbers of 13 to 19 digits with Luhn's check digit",
        re.compile("[0-9]{4}"),
    ),
    "ip": Kind(
        re.compile(
            r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|(?:[0-9A-Fa-f]{1,4}:){2,7}(?::?[0-9A-Fa-f]{1,4}){1,7})"
            r"(?![\w:]|\.\d)",
            re.ASCII,
        ),
        _is_public_address,
        "public IPv4 and IPv6 addresses",
        re.compile(r"[0-9]\.[0-9]|:[0-9A-Fa-f]{1,4}:"),
    ),
    "plate": Kind(
        re.compile(
            rf"[{_CITY}][A-HJ-NP-Z][·• ]?(?:[DF][A-HJ-NP-Z0-9]\d{{4}}|\d{{5}}[DF]"
            r"|(?=[A-Z]{0,4}\d)[A-HJ-NP-Z0-9]{5})(?![A-Za-z0-9])"
        ),
        meaning="Chinese number plates",
    ),
    "phone": Kind(
        re.compile(
            r"(?<![\d.+-])(?:\+?86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}(?![\d-]*\d)"
            r"|(?<![\d.-])0\d{2,3}[- ]\d{7,8}(?!\d)|(?<![\d.-])(?:400|800)-?\d{3}-?\d{4}(?!\d)",
            re.ASCII,
        ),
        meaning="Chinese numbers; others in international form, or by `regions`",
        sign=re.compile("[0-9]{3}"),
    ),
}
_LIKE_PHONE = re.compile(r"\+\d|\(\d{2,5}\)|\d[\d .-]{6,}\d", re.ASCII)


def find_private(
    text: str, kinds: tuple[str, ...] = tuple(KINDS), regions: tuple[str, ...] = ()
) -> list[Found]:
    """Return the private data in a text, in order; pieces do not overlap.

    Args:
        kinds: which to look for.
        regions: countries, such as ``"US"``, whose national phone numbers count too.

    Raises:
        MissingDependencyError: ``phonenumbers`` is not installed and something looks like a phone.
    """
    taken: list[Found] = []
    for kind in kinds:
        for found in _find_kind(text, kind, regions):
            if all(found.end <= one.start or one.end <= found.start for one in taken):
                taken.append(found)
    return sorted(taken, key=lambda one: one.start)


def _find_kind(text: str, kind: str, regions: tuple[str, ...]) -> Iterator[Found]:
    known = KINDS[kind]
    if known.sign is None or known.sign.search(text):
        for match in known.pattern.finditer(text):
            if known.check is None or known.check(match[0]):
                yield Found(kind, *match.span())
    if kind == "phone" and _LIKE_PHONE.search(text) and ("+" in text or regions):
        yield from _find_phones(text, regions)


def _find_phones(text: str, regions: tuple[str, ...]) -> Iterator[Found]:
    try:
        from phonenumbers import Leniency, PhoneNumberMatcher
    except ImportError as error:
        raise MissingDependencyError("phonenumbers", "data", "Finding phone numbers") from error
    for region in regions or (None,):
        for match in PhoneNumberMatcher(text, region, leniency=Leniency.VALID):
            yield Found("phone", match.start, match.end)


@dataclass(frozen=True)
class MaskPrivate:
    """A step that masks private data by kind, or drops documents with much of it.

    Attributes:
        kinds: which to mask.
        regions: countries whose national phone numbers count too.
        most: pieces from which on a document is dropped; None masks whatever their number.

    Raises:
        ConfigError: a kind is not known.
    """

    kinds: tuple[str, ...] = tuple(KINDS)
    regions: tuple[str, ...] = ()
    most: int | None = None

    def __post_init__(self) -> None:
        """Refuse a kind that is not known."""
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(
                    f"kinds: {kind!r} is unknown.{suggest(kind, KINDS)} Known: {', '.join(KINDS)}."
                )

    @property
    def version(self) -> str:
        """What changes whenever a text may come out differently."""
        return f"private=1 {self!r}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document with masks, or why it is dropped; no excerpt holds private data."""
        found = find_private(document.text, self.kinds, self.regions)
        if not found:
            return document
        parts, at = [], 0
        for one in found:
            parts += [document.text[at : one.start], f"<{one.kind.upper()}>"]
            at = one.end
        text = "".join((*parts, document.text[at:]))
        if self.most is not None and len(found) >= self.most:
            return Drop("private", len(found), self.most, cut_excerpt(text))
        return replace(document, text=text)
