"""Finds private data with patterns and checksums, and masks it or drops the document.

The mask depends on the kind alone: every e-mail address becomes the same ``<EMAIL>``.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise

from bmforge.data.clean.addresses import ADDRESS, AddressContext, is_public_address
from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, MissingDependencyError, suggest

__all__ = [
    "KINDS",
    "PrivateMatch",
    "MaskPrivate",
    "find_private",
    "is_bank_card",
    "is_chinese_id",
    "is_iban",
]


@dataclass(frozen=True)
class PrivateMatch:
    """One match of private data: its kind, and its start and end offset in the text."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class PrivateDataKind:
    """Detector of one kind of private data: a pattern, and a check of each match.

    Attributes:
        pattern: pattern of the data; if its group ``value`` matches, only that group is masked.
        check: function that returns True for a valid match; None to accept all matches.
        meaning: description for users.
        sign: cheap pattern that matches every text with private data of this kind; the full
            pattern is only searched in texts that `sign` matches.
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
    """Return True for a Chinese ID number with a valid province, date of birth and check digit.

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
    """Return True for 13 to 19 digits, perhaps with separators, with a valid Luhn check digit."""
    digits = [int(character) for character in number if character.isdigit()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) < 2:
        return False
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(doubled) + sum(digits[-1::-2])) % 10 == 0


def is_iban(number: str) -> bool:
    """Return True for an IBAN with the correct length for its country and valid check digits.

    Source: ISO 13616 (ISO 7064, MOD 97-10).
    """
    plain = re.sub("[ -]", "", number).upper()
    if _IBAN_LENGTHS.get(plain[:2]) != len(plain):
        return False
    digits = "".join(str(int(character, 36)) for character in plain[4:] + plain[:4])
    return int(digits) % 97 == 1


def is_us_ssn(number: str) -> bool:
    """Return True for a US social security number from a range that is in use.

    Source: SSA, 20 CFR 422.103: no area 000, 666 or 900 and above, no group 00, no serial 0000.
    """
    digits = re.sub("[- ]", "", number)
    area, group, serial = digits[:3], digits[3:5], digits[5:]
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def _is_secret(text: str) -> bool:
    """Return True if a value looks like a random secret, such as an API key, and not like a name.

    It must have two character classes (lower case, upper case, digits) and 8 distinct characters.
    A value without digits and without the prefix of a service, such as ``sk-``, must also change
    its case at least once per three characters, unlike the name `AccessTokenName`.
    """
    classes = sum(any(map(kind, text)) for kind in (str.islower, str.isupper, str.isdigit))
    changes = sum(a.isupper() != b.isupper() for a, b in pairwise(text))
    is_plain = not any(map(str.isdigit, text)) and not _KEY_PREFIX.match(text)
    is_name = is_plain and 3 * changes < len(text)
    return classes >= 2 and len(set(text)) >= 8 and not is_name


_KEY_PREFIX = re.compile("(?:hf|npm|gh[pousr]|github|glpat|pypi|sk|rk|SG|AIza|ya29)[_.-]?")
_LENGTHS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 "
    "EG29 ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 "
    "JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 "
    "PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 "
    "UA29 VA22 VG24 XK20"
)
_IBAN_LENGTHS = {entry[:2]: int(entry[2:]) for entry in _LENGTHS.split()}
_IBANS = "|".join(
    rf"(?:{'|'.join(country for country in _IBAN_LENGTHS if _IBAN_LENGTHS[country] == length)})"
    rf"\d{{2}}(?:[ -]?[A-Z0-9]){{{length - 4}}}"
    for length in sorted(set(_IBAN_LENGTHS.values()))
)
_CITY = "京津沪渝冀豫云辽黑湘皖鲁新苏浙赣鄂桂甘晋蒙陕吉闽贵粤青藏川宁琼"
# Matched in this order: a span matched by one kind is hidden from the later ones.
KINDS = {
    "email": PrivateDataKind(
        re.compile(
            r"(?<![A-Za-z0-9_])[A-Za-z0-9_][\w.+%'-]{0,63}@(?![1-4]x\.(?:png|jpe?g|gif|svg|webp))"
            r"(?:(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}"
            r"(?:xn--[A-Za-z0-9-]{2,59}|[A-Za-z]{2,24})(?![A-Za-z])"
            r"|\[?\d{1,3}(?:\.\d{1,3}){3}(?!\d|\.\d)\]?)",
            re.ASCII,
        ),
        meaning="mail addresses",
        sign=re.compile("@"),
    ),
    "key": PrivateDataKind(
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]{0,8000}?-----END [A-Z ]*PRIVATE KEY-----"
            r"|(?<![A-Za-z0-9_-])(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36,}"
            r"|github_pat_[A-Za-z0-9_]{22,}|glpat-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}"
            r"|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,}|dop_v1_[0-9a-f]{64}"
            r"|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|ya29\.[\w-]{20,}"
            r"|sk-[A-Za-z0-9_-]{20,}|xox[abeprs]-[A-Za-z0-9-]{10,}|AIza[0-9A-Za-z_-]{35}"
            r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})(?![A-Za-z0-9_-])"
            r"|(?i:api[_-]?key|secret|token|passwd|password)['\"]?\s*[:=]\s*['\"]?"
            r"(?P<value>[A-Za-z0-9_/+-]{16,})"
        ),
        lambda text: text.startswith(("-----", "xox", "eyJ", "dop_")) or _is_secret(text),
        "private keys, access keys of services, and passwords that look random",
    ),
    "id_card": PrivateDataKind(
        re.compile(r"(?<![0-9A-Za-z])[1-9]\d{16}[\dXx](?![0-9A-Za-z])", re.ASCII),
        is_chinese_id,
        "Chinese identity numbers with a valid check digit and date of birth",
        re.compile("[0-9]{17}"),
    ),
    "iban": PrivateDataKind(
        re.compile(rf"(?<![A-Za-z0-9])(?:{_IBANS})(?![A-Za-z0-9])", re.ASCII),
        is_iban,
        "international bank account numbers (IBAN) with valid check digits",
        re.compile("[A-Z]{2}[0-9]{2}"),
    ),
    "bank_card": PrivateDataKind(
        re.compile(
            r"(?<![\d.,-])(?:3[47]\d{2}[ -]?\d{6}[ -]?\d{5}"
            r"|3(?:0[0-5]|[68]\d)\d[ -]?\d{6}[ -]?\d{4}"
            r"|(?:[3-6]\d|2[2-7])\d{2}(?:[ -]?\d{4}){2}(?:[ -]?\d{1,7}))(?![\d.,-]*\d)",
            re.ASCII,
        ),
        is_bank_card,
        "card numbers of 13 to 19 digits with a valid Luhn check digit",
        re.compile("[0-9]{4}"),
    ),
    "ip": PrivateDataKind(
        ADDRESS,
        is_public_address,
        "public IPv4 and IPv6 addresses, but no version or section numbers",
        re.compile(r"[0-9]\.[0-9]|:[0-9A-Fa-f]{0,4}:"),
    ),
    "ssn": PrivateDataKind(
        re.compile(
            r"(?<![\d.-])(?i:ssn|social security(?: number| no\.?)?)[\s:#.]{0,4}"
            r"(?P<value>\d{3}[- ]?\d{2}[- ]?\d{4})(?![\d-]|\.\d)"
            r"|(?<![\w.-])\d{3}-\d{2}-\d{4}(?![\w-]|\.\d)",
            re.ASCII,
        ),
        is_us_ssn,
        "US social security numbers in an issued range",
        re.compile("[0-9]{2}[- ]?[0-9]{4}"),
    ),
    "plate": PrivateDataKind(
        re.compile(
            rf"[{_CITY}][A-HJ-NP-Z][·• ]?(?:[DF][A-HJ-NP-Z0-9]\d{{4}}|\d{{5}}[DF]"
            r"|(?=[A-Z]{0,4}\d)[A-HJ-NP-Z0-9]{5})(?![A-Za-z0-9])"
        ),
        meaning="Chinese number plates",
    ),
    "phone": PrivateDataKind(
        re.compile(
            r"(?<![\d.+-])(?:(?:\+|00)?86[ -]?)?1[3-9]\d[ -]?\d{4}[ -]?\d{4}(?![\d-]*\d)"
            r"|(?<![\d.-])(?:0\d{2,3}[- ]|[(（]0\d{2,3}[)）][- ]?)\d{7,8}(?!\d)"
            r"|(?<![\d.-])(?:400|800)-?\d{3}-?\d{4}(?!\d)",
            re.ASCII,
        ),
        meaning="Chinese and international phone numbers; others with `--phone-regions`",
        sign=re.compile("[0-9]{3}"),
    ),
}
# Full-width characters (in Chinese), digits of other scripts, and the spaces and hyphens that
# typesetters put into numbers become ASCII characters; the offsets stay the same.
_FOLDED = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_FOLDED |= dict.fromkeys((0xA0, 0x2002, 0x2007, 0x2009, 0x202F, 0x3000), ord(" "))
_FOLDED |= dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212), ord("-"))
_FOLDED |= {
    zero + digit: ord("0") + digit
    for zero in (0x660, 0x6F0, 0x966, 0x9E6)  # Arabic, Persian, Devanagari, Bengali
    for digit in range(10)
}
_LIKE_PHONE = re.compile(r"\+\d|\(\d{2,5}\)|\d[\d .-]{6,}\d", re.ASCII)


def find_private(
    text: str, kinds: tuple[str, ...] = tuple(KINDS), regions: tuple[str, ...] = ()
) -> list[PrivateMatch]:
    """Find the private data in a text, in order and without overlaps.

    Args:
        text: text to search.
        kinds: kinds of private data to search for.
        regions: country codes, such as ``"US"``, whose national phone numbers are also found.

    Raises:
        MissingDependencyError: ``phonenumbers`` is not installed and something looks like a phone
            number.
    """
    folded = text.translate(_FOLDED)
    starts: list[int] = []
    taken: list[PrivateMatch] = []  # sorted, in parallel with `starts`
    for kind in kinds:
        for private in _find_kind(folded, kind, regions):
            at = bisect(starts, private.start)
            is_free = at == 0 or taken[at - 1].end <= private.start
            if is_free and (at == len(taken) or private.end <= starts[at]):
                starts.insert(at, private.start)
                taken.insert(at, private)
    return taken


def _find_kind(text: str, kind: str, regions: tuple[str, ...]) -> Iterator[PrivateMatch]:
    kind_rule = KINDS[kind]
    if kind_rule.sign is None or kind_rule.sign.search(text):
        context = AddressContext(text) if kind == "ip" else None
        for match in kind_rule.pattern.finditer(text):
            group = "value" if match.groupdict().get("value") else 0
            start, end = match.span(group)
            is_valid = kind_rule.check is None or kind_rule.check(match[group])
            if is_valid and (context is None or context.is_address(start, end)):
                yield PrivateMatch(kind, start, end)
    if kind == "phone" and _LIKE_PHONE.search(text) and ("+" in text or regions):
        yield from _find_phones(text, regions)


def _find_phones(text: str, regions: tuple[str, ...]) -> Iterator[PrivateMatch]:
    try:
        from phonenumbers import Leniency, PhoneNumberMatcher
    except ImportError as error:
        raise MissingDependencyError("phonenumbers", "data", "detecting phone numbers") from error
    for region in regions or (None,):
        for match in PhoneNumberMatcher(text, region, leniency=Leniency.VALID):
            yield PrivateMatch("phone", match.start, match.end)


def _check_regions(regions: tuple[str, ...]) -> None:
    try:
        from phonenumbers import SUPPORTED_REGIONS
    except ImportError as error:
        raise MissingDependencyError("phonenumbers", "data", "detecting phone numbers") from error
    for region in regions:
        if region not in SUPPORTED_REGIONS:
            raise ConfigError(
                f"unknown region: phone_regions contains {region!r} (supported: ISO 3166-1 country "
                "codes such as US, DE or JP)."
            )


@dataclass(frozen=True)
class MaskPrivate:
    """A step that masks private data, or drops documents with too many matches.

    Attributes:
        kinds: kinds of private data to mask.
        regions: country codes whose national phone numbers are also masked.
        most: smallest number of matches for which the document is dropped; None to never drop.

    Raises:
        ConfigError: a kind or region is unknown.
    """

    kinds: tuple[str, ...] = tuple(KINDS)
    regions: tuple[str, ...] = ()
    most: int | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an unknown kind or region."""
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(
                    f"unknown kind: kinds contains {kind!r} (supported: "
                    f"{', '.join(KINDS)}).{suggest(kind, KINDS)}"
                )
        if self.regions:
            _check_regions(self.regions)

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"private=4 {self!r}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the masked document, or a `Drop`, whose excerpt contains no private data."""
        private = find_private(document.text, self.kinds, self.regions)
        if not private:
            return document
        parts, at = [], 0
        for match in private:
            parts += [document.text[at : match.start], f"<{match.kind.upper()}>"]
            at = match.end
        text = "".join((*parts, document.text[at:]))
        if self.most is not None and len(private) >= self.most:
            return Drop("private", len(private), self.most, cut_excerpt(text))
        return replace(document, text=text)
