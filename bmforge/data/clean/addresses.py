"""Recognizes IP addresses in text, and distinguishes them from version and section numbers.

Four numbers with dots are an address unless the text around them indicates a version or a section:
a word such as "version" or "section" before them, the end of a file name after them, or headings of
the parent section or of the sibling sections.
"""

from __future__ import annotations

import ipaddress
import re
from functools import cached_property

__all__ = ["ADDRESS", "AddressContext", "is_public_address"]

_GROUP = "[0-9A-Fa-f]{1,4}"
_QUAD = r"\d{1,3}(?:\.\d{1,3}){3}"
ADDRESS = re.compile(
    rf"(?<![\w.])(?<![0-9A-Fa-f:]:)(?:::ffff:{_QUAD}|(?:{_GROUP}:){{7}}{_GROUP}"
    rf"|(?:{_GROUP}:){{1,7}}(?::{_GROUP}){{1,7}}|(?:{_GROUP}:){{1,7}}:(?!\w))(?![\w:]|\.\d)"
    # "IP" or three letters may directly precede the number, but "v1.2.3.4" is a version.
    rf"|(?:(?<![A-Za-z0-9])|(?<=[Ii][Pp])|(?<=[A-Za-z]{{3}}))(?<!\d\.){_QUAD}(?!\d|\.\d)",
    re.ASCII,
)

_LOOK_BACK, _LOOK_AHEAD = 40, 24
_VERSION_WORDS = (
    r"versions?|vers?|v|releases?|rel|builds?|revisions?|rev|firmware|drivers?|patch(?:es)?|kernel"
    r"|upgrad(?:e|ed|es|ing)(?: to| from)?|EC|OID|oracle(?: database)?|windows|android|ios|macos"
    r"|chrome|chromium|firefox|safari|opera|java|jdk|jre|db2|websphere|esxi|vsphere|flash player"
    r"|sections?|sect?|chapters?|chap|(?:sub)?clauses?|paragraphs?|para|appendix|annex|articles?"
    r"|art|figures?|fig|tables?|tab|equations?|eq|theorem|lemma|definition|requirements?"
    r"|Abschnitt|Kapitel|chapitre|secci[oó]n|cap[ií]tulo|versi[oó]ne?|wersja|верси[яиюй]|раздел[аеу]?"
)
_SEPARATOR = r"\s?(?:,\s?(?:and|or)|,|and|or|to|through|[&/–、和及与至到-])\s?v?"
_VERSION_BEFORE = re.compile(
    rf"(?:(?<![A-Za-z0-9])(?:{_VERSION_WORDS})|§|版本|版|固件|驱动|内核|升级[到至]|第|章|节|バージョン|버전)"
    r"\.?\s{0,2}(?:(?:numbers?|no\.?|is|was|are|[号为是])\s{0,2})?[:：=#(（\"']?\s{0,2}"
    rf"v?(?:\d+(?:\.\d+){{1,4}}{_SEPARATOR}){{0,2}}$",
    re.IGNORECASE,
)
_NEXT_IN_LIST = re.compile(_SEPARATOR)
_PRODUCT_BEFORE = re.compile(r"(?:^|[\s(;,\"'])[A-Z][A-Za-z]+/$")  # a user agent: Opera/9.8.1.2
_HOST_BEFORE = re.compile(r"(?i:ip|ipv4|dns|tcp|udp|host|server)/$")
_VERSION_AFTER = re.compile(
    r"[-_.]?(?:tar|t?gz|bz2|xz|zip|7z|rar|deb|rpm|exe|msi|dmg|pkg|whl|jar|war|apk|ipa|iso|dll|so|img"
    r"|bin|amd64|x86|x64|i[3-6]86|arm64|aarch64|noarch|linux|win32|win64|darwin|[Ss]napshot|SNAPSHOT"
    r"|[Ff]inal|FINAL|[Rr]elease|RELEASE|alpha|beta|rc|RC|GA|el\d|fc\d|ubuntu)(?![a-z])"
    r"|[A-Za-z]{1,2}\d|[A-Za-z](?![A-Za-z])|\s(?i:release|version|build|firmware)(?![A-Za-z])"
    r"|\s?(?:版|固件|节(?!点)|章|条(?!目)|款)"
)
_PORT_AFTER = re.compile(r":\d{1,5}(?!\d)")
_HEADING = re.compile(
    r"^[#*\s]{0,6}[§第]?\s?(\d{1,3}\.\d{1,3}\.\d{1,3})(?:\.?[ \t]|[节章条]|$)", re.MULTILINE
)
_TITLED_HEADING = re.compile(
    r"^[#*\s]{0,6}§?\s?(\d{1,2}\.\d{1,2}(?:\.\d{1,2}\.\d{1,2})?)\.?[ \t]+([^\W\d_])", re.MULTILINE
)


def is_public_address(text: str) -> bool:
    """Return True for a public IPv4 address, or an IPv6 address of the assigned range 2000::/3."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return address.is_global and text[0] in "23" and len(text.partition(":")[0]) == 4
    return address.is_global


class AddressContext:
    """Decides by context whether numbers in a text, passed in order, are IP addresses."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._version_end = 0

    def is_address(self, start: int, end: int) -> bool:
        """Return False if the number at `start` to `end` is a version or a section number."""
        if ":" in self._text[start:end]:
            return True
        if self._is_version(start, end):
            self._version_end = end
            return False
        number = self._text[start:end]
        return number.rpartition(".")[0] not in self._sections and not self._is_titled(number)

    def _is_version(self, start: int, end: int) -> bool:
        after = self._text[end : end + _LOOK_AHEAD]
        if _PORT_AFTER.match(after):
            return False
        if self._version_end and _NEXT_IN_LIST.fullmatch(self._text, self._version_end, start):
            return True
        before = self._text[max(0, start - _LOOK_BACK) : start]
        if _VERSION_BEFORE.search(before) or _VERSION_AFTER.match(after):
            return True
        return bool(_PRODUCT_BEFORE.search(before)) and not _HOST_BEFORE.search(before)

    def _is_titled(self, number: str) -> bool:
        """Return True if `number`, such as "3.2.1.2", is a section number with a title.

        Section 3.2 or all sections before 3.2.1.2 (here 3.2.1.1) must have titles too, because a
        list of addresses rarely has titles, begins at 1, and omits no number.
        """
        titled = self._titled
        if number not in titled:
            return False
        parent, _, last = number.rpartition(".")
        siblings = range(1, max(int(last), 2) + 1)
        return number.rsplit(".", 2)[0] in titled or all(
            f"{parent}.{n}" in titled for n in siblings
        )

    @cached_property
    def _titled(self) -> frozenset[str]:
        """Section numbers with two or four parts at line starts, followed by a title."""
        headings = _TITLED_HEADING.findall(self._text)
        return frozenset(number for number, first in headings if not first.islower())

    @cached_property
    def _sections(self) -> frozenset[str]:
        """Three-part section numbers at line starts: "3.2.1" makes "3.2.1.4" a section number."""
        return frozenset(_HEADING.findall(self._text))
