"""Spellings of license names in package metadata and on web pages, with their SPDX ids."""

from __future__ import annotations

import re

__all__ = ["ALIASES", "PORT", "shorten_name"]

ALIASES = {
    "public domain": "CC-PDDC",
    "publicdomain": "CC-PDDC",
    "pd": "CC-PDDC",
    "cc0": "CC0-1.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "odbl": "ODbL-1.0",
    "odc-by": "ODC-By-1.0",
    "pddl": "PDDL-1.0",
    "python-2.0": "PSF-2.0",
    "minicpm": "MiniCPM-1.0",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "CC0-1.0",
    "cc0 1.0 universal": "CC0-1.0",
    "open database license": "ODbL-1.0",
    "https://www.gnu.org/licenses/gpl-3.0.en.html": "GPL-3.0-only",
    **dict.fromkeys(
        ("mit license", "the mit license", "the mit license (mit)", "expat", "mit-license"), "MIT"
    ),
    **dict.fromkeys(
        ("apache 2", "apache license, version 2.0", "apache software license 2.0", "asl 2.0"),
        "Apache-2.0",
    ),
    **dict.fromkeys(
        ("bsd 3-clause", "bsd 3-clause license", "3-clause bsd license", "new bsd license"),
        "BSD-3-Clause",
    ),
    **dict.fromkeys(("bsd 2-clause", "bsd 2-clause license", "simplified bsd"), "BSD-2-Clause"),
    **dict.fromkeys(("isc license", "isc license (iscl)"), "ISC"),
    **dict.fromkeys(("psf", "python software foundation license"), "PSF-2.0"),
    **dict.fromkeys(("mpl 2.0", "mozilla public license 2.0 (mpl 2.0)"), "MPL-2.0"),
    **dict.fromkeys(("the unlicense", "the unlicense (unlicense)"), "Unlicense"),
}

# Prefixes of trove classifiers, https://pypi.org/classifiers/.
_CLASSIFIER = re.compile(r"license :: (?:osi approved :: )?")
_GNU_NAME = re.compile(
    r"gnu (general|lesser general|affero general) public license,?(?: version)? v?"
    r"(\d(?:\.\d)?)( or later)?(?: \([al]?gplv\d(?:\.\d)?\+?\))?"
)
_GNU_KINDS = {"general": "gpl", "lesser general": "lgpl", "affero general": "agpl"}
# Allowed text after the version: a port to a country's law. Any other text may remove rights.
PORT = (
    r"unported|international|intl|generic|igo|universal|public domain dedication|licen[cs]e|deed|"
    r"germany|deutschland|france|japan|spain|italy|austria|switzerland|china|china mainland|taiwan|"
    r"hong kong|united states|us|uk|england and wales|scotland|canada|australia|brazil|poland|"
    r"netherlands|de|fr|jp|es|it|at|ch|cn|tw|hk|ca|au|br|pl|nl"
)
# Title of a license, optionally in the sentence of its badge. The elements must be hyphenated, and
# only a port may follow the version.
_TITLE = re.compile(
    r"(?:this work is licensed under a )?(?:creative commons )?"
    r"attribution((?:-(?:noncommercial|sharealike|noderivatives|noderivs))*)(?: license)? "
    rf"(\d\.\d)(?: (?:{PORT}))?(?: public)?(?: licen[cs]e)?"
    r"(?: \(cc (by(?:-(?:nc|sa|nd))*) \2\))?\.?"
)
_ELEMENTS = {"noncommercial": "nc", "sharealike": "sa", "noderivatives": "nd", "noderivs": "nd"}


def shorten_name(text: str) -> str:
    """Return the short name for the full title of a CC or GNU license, without classifier prefix.

    Args:
        text: name in lower case; other texts are returned unchanged.
    """
    text = _CLASSIFIER.sub("", text, count=1)
    if title := _TITLE.fullmatch(text):
        kind = "-".join(["by", *(_ELEMENTS[part] for part in title[1].split("-")[1:])])
        # A title and a short name that contradict each other name no license.
        return f"cc-{kind}-{title[2]}" if title[3] in (None, kind) else text
    if name := _GNU_NAME.fullmatch(text):
        return f"{_GNU_KINDS[name[1]]}-{name[2]}{'+' if name[3] else ''}"
    return text
