"""Table of licenses and their terms, with the clause of each term.

Source: the texts at each entry's `url`. Ids are those of SPDX, https://spdx.org/licenses/; licenses
that SPDX does not list have the ids of Hugging Face's model cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["LICENSES", "PAIRS", "POLICIES", "RESTRICTS", "TERMS", "License"]

# Terms that a license may require of users and distributors of a work.
TERMS = {
    "attribution": "name the authors and the source",
    "notice": "keep the notices and the license text",
    "changes": "state the changes",
    "source": "distribute the source as well",
    "share-alike": "derived works must be under the same terms",
    "no-derivatives": "do not distribute modified versions",
    "non-commercial": "no use for commercial advantage",
    "commercial-terms": "request or register some commercial uses",
    "use-policy": "follow a list of prohibited uses, and pass it on",
    "naming": "derived works must show the name of the work in their name or on their pages",
    "no-other-models": "do not use the model or its output to improve other models",
}
# Terms that restrict a derived work and would be lost under another license.
RESTRICTS = (
    "share-alike",
    "no-derivatives",
    "non-commercial",
    "commercial-terms",
    "use-policy",
    "no-other-models",
)


_GPL_2 = ("GPL-2.0-only", "GPL-2.0-or-later")
_GPL_3 = ("GPL-3.0-only", "GPL-3.0-or-later", "AGPL-3.0-only", "AGPL-3.0-or-later")


@dataclass(frozen=True)
class License:
    """A license and its terms.

    Attributes:
        id: SPDX id, or the name used on model hubs.
        url: URL of its text.
        terms: dictionary from a key of `TERMS` to the clause of the text.
        compatible: ids of other licenses under which derived works may be distributed.
    """

    id: str
    url: str
    terms: Mapping[str, str] = field(default_factory=dict, hash=False)
    compatible: tuple[str, ...] = ()


def _creative_commons() -> list[License]:
    """Return the Creative Commons licenses, versions 2.0 to 4.0."""
    licenses = []
    # In versions 2.0 to 3.0 the conditions are the paragraphs of section 4 after (a), in this
    # order.
    for kind in ("BY", "BY-SA", "BY-NC", "BY-NC-SA", "BY-ND", "BY-NC-ND"):
        for version in ("2.0", "2.5", "3.0", "4.0"):
            parts = kind.split("-")
            if version == "4.0":
                terms = {"attribution": "section 3(a)", "changes": "section 3(a)(1)(B)"}
                terms |= {"share-alike": "section 3(b)"} if "SA" in parts else {}
                terms |= {"non-commercial": "section 2(a)(1)"} if "NC" in parts else {}
                terms |= {"no-derivatives": "section 2(a)(1)(B)"} if "ND" in parts else {}
            else:
                order = [
                    name
                    for name, part in (("share-alike", "SA"), ("non-commercial", "NC"))
                    if part in parts
                ]
                letters = zip((*order, "attribution"), "bcd", strict=False)
                terms = {name: f"section 4({letter})" for name, letter in letters}
                terms |= {"no-derivatives": "section 3"} if "ND" in parts else {}
            newer = [v for v in ("2.5", "3.0", "4.0") if v > version] if "SA" in parts else []
            more = [_GPL_3[0]] if (kind, version) == ("BY-SA", "4.0") else []
            licenses.append(
                License(
                    f"CC-{kind}-{version}",
                    f"https://creativecommons.org/licenses/{kind.lower()}/{version}/legalcode",
                    terms,
                    (*(f"CC-{kind}-{v}" for v in newer), *more),
                )
            )
    return licenses


def _gnu() -> list[License]:
    """Return the licenses of the GNU project, "only" and "or later"."""
    clauses = {
        "GPL-2.0": ("section 1", "section 2(a)", "section 3", "sections 2(b) and 6"),
        "GPL-3.0": ("section 4", "section 5(a)", "section 6", "sections 5(c) and 10"),
        "LGPL-2.1": ("section 1", "section 2(b)", "section 4", "sections 2(c) and 10"),
        "LGPL-3.0": ("section 4(a)", "section 2", "section 4(d)", "section 2"),
        "AGPL-3.0": ("section 4", "section 5(a)", "sections 6 and 13", "sections 5(c) and 10"),
    }
    into = {
        "GPL-2.0-or-later": ("GPL-2.0-only", *_GPL_3),
        "GPL-3.0-or-later": _GPL_3,
        "GPL-3.0-only": _GPL_3[2:],
        "AGPL-3.0-or-later": ("AGPL-3.0-only",),
    }
    for ending in ("only", "or-later"):
        into[f"LGPL-2.1-{ending}"] = ("LGPL-2.1-only", *_GPL_2, *_GPL_3)
        into[f"LGPL-3.0-{ending}"] = ("LGPL-3.0-only", *_GPL_3)
    licenses = []
    for name, (notice, changes, source, alike) in clauses.items():
        for ending in ("only", "or-later"):
            id = f"{name}-{ending}"
            terms = {"notice": notice, "changes": changes, "source": source, "share-alike": alike}
            folder = "licenses" if name.endswith("3.0") else "licenses/old-licenses"
            url = f"https://www.gnu.org/{folder}/{name.lower()}.html"
            licenses.append(License(id, url, terms, tuple(n for n in into.get(id, ()) if n != id)))
    return licenses


def _of_code() -> list[License]:
    """Return the public-domain dedications and the software licenses of the table."""
    both = {"notice": "the condition on notices"}
    return [
        License("CC0-1.0", "https://creativecommons.org/publicdomain/zero/1.0/legalcode"),
        License("CC-PDDC", "https://creativecommons.org/licenses/publicdomain/"),
        License("PDDL-1.0", "https://opendatacommons.org/licenses/pddl/1-0/"),
        License("Unlicense", "https://unlicense.org/"),
        License("0BSD", "https://opensource.org/license/0bsd"),
        License("MIT", "https://opensource.org/license/mit", both),
        License("MIT-0", "https://opensource.org/license/mit-0"),
        License("ISC", "https://opensource.org/license/isc-license-txt", both),
        License("Zlib", "https://opensource.org/license/zlib", {"notice": "3", "changes": "2"}),
        License("BSD-2-Clause", "https://opensource.org/license/bsd-2-clause", {"notice": "1, 2"}),
        License("BSD-3-Clause", "https://opensource.org/license/bsd-3-clause", {"notice": "1, 2"}),
        License(
            "Apache-2.0",
            "https://www.apache.org/licenses/LICENSE-2.0",
            {"notice": "section 4(a), (c), (d)", "changes": "section 4(b)"},
        ),
        License(
            "PSF-2.0",
            "https://docs.python.org/3/license.html",
            {"notice": "section 2", "changes": "section 3"},
        ),
        License(
            "MPL-2.0",
            "https://www.mozilla.org/MPL/2.0/",
            {"source": "section 3.2", "share-alike": "section 3.1", "notice": "section 3.4"},
            (*_GPL_2, *_GPL_3),
        ),
    ]


def _of_data() -> list[License]:
    """Return the licenses of the table that are for databases and data sets."""
    return [
        License(
            "ODbL-1.0",
            "https://opendatacommons.org/licenses/odbl/1-0/",
            {
                "attribution": "section 4.3",
                "notice": "section 4.2",
                "share-alike": "section 4.4",
                "source": "section 4.6",
            },
        ),
        License(
            "ODC-By-1.0",
            "https://opendatacommons.org/licenses/by/1-0/",
            {"attribution": "section 4.3", "notice": "section 4.2"},
        ),
        License(
            "CDLA-Permissive-2.0", "https://cdla.dev/permissive-2-0/", {"notice": "section 2.1"}
        ),
    ]


def _of_models() -> list[License]:
    """Return the licenses of the table that are for models."""
    hub = "https://huggingface.co/spaces"
    rail = {
        "use-policy": "sections 4 and 5, attachment A",
        "notice": "section 4",
        "changes": "section 4",
    }
    llama = {
        "notice": "section 1(b)(i)",
        "naming": "section 1(b)(i)",
        "use-policy": "section 1(b)(iv)",
        "commercial-terms": "section 2",
    }
    llama_2 = {name: clause for name, clause in llama.items() if name != "naming"}
    return [
        License("openrail", f"{hub}/bigscience/license", rail),
        License("bigscience-openrail-m", f"{hub}/bigscience/bigscience-openrail-m", rail),
        License("bigscience-bloom-rail-1.0", f"{hub}/bigscience/license", rail),
        License("creativeml-openrail-m", f"{hub}/CompVis/stable-diffusion-license", rail),
        License(
            "llama2",
            "https://ai.meta.com/llama/license/",
            {**llama_2, "no-other-models": "section 1(b)(v)"},
        ),
        License(
            "llama3",
            "https://www.llama.com/llama3/license/",
            {**llama, "no-other-models": "section 1(b)(v)"},
        ),
        *(
            License(name, f"https://www.llama.com/{name.replace('.', '_')}/license/", llama)
            for name in ("llama3.1", "llama3.2", "llama3.3")
        ),
        License(
            "gemma",
            "https://ai.google.dev/gemma/terms",
            {"notice": "section 3.1", "changes": "section 3.1", "use-policy": "section 3.2"},
        ),
        License(
            "MiniCPM-1.0",
            "https://github.com/OpenBMB/MiniCPM/blob/main/MiniCPM%20Model%20License.md",
            {
                "notice": "part two, 2",
                "naming": "part two, 2",
                "no-other-models": "part two, 2",
                "commercial-terms": "part two, 3",
                "use-policy": "part two, 4 and appendix A",
            },
        ),
    ]


LICENSES: Mapping[str, License] = {
    license.id: license
    for license in (*_creative_commons(), *_gnu(), *_of_code(), *_of_data(), *_of_models())
}

# Conflicting pairs that the terms above do not explain.
PAIRS = {
    ("Apache-2.0", "GPL-2.0-only"): ("patents", ("section 3", "section 6")),
}

# Terms that a policy excludes from a corpus; every policy excludes unknown licenses too.
POLICIES: Mapping[str, frozenset[str]] = {
    "known": frozenset(),
    "commercial": frozenset({"non-commercial", "commercial-terms", "no-derivatives"}),
    "permissive": frozenset(RESTRICTS),
}
