"""License of documents: default licenses for sources that state none, and filtering by a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, suggest
from bmforge.licences import POLICIES, check_licence, licence_name, obeys

__all__ = ["ANY_LICENCE", "KeepLicences", "SayLicence", "read_licences"]

ANY_LICENCE = "any"


def read_licences(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return (path, id) of each ``ID`` or ``PATH=ID``; the path of a plain ``ID`` is "".

    Raises:
        ConfigError: a license is unknown, or a path is named twice.
    """
    found: dict[str, str] = {}
    for one in given:
        path, mark, id = one.rpartition("=")
        where = str(Path(path).absolute()) if mark else ""
        if where in found:
            raise ConfigError(f"licence: {path or 'all'} is given two licences; name one")
        found[where] = check_licence(id, "licence")
    # Longest paths first, so that the most specific one matches.
    return tuple(sorted(found.items(), key=lambda item: -len(item[0])))


@dataclass(frozen=True)
class SayLicence:
    """A step that sets the license of documents whose source states none.

    Attributes:
        places: pairs (path, id) from `read_licences`.
    """

    places: tuple[tuple[str, str], ...]

    @property
    def version(self) -> str:
        """Version string that changes whenever a document may get another license."""
        return f"licence=1 {self.places!r}"

    def __call__(self, document: Document) -> Document:
        """Return the document with its license."""
        if document.licence:
            return document
        source = Path(document.source).absolute()
        for place, id in self.places:
            if not place or source == Path(place) or Path(place) in source.parents:
                return replace(document, licence=id)
        return document


@dataclass(frozen=True)
class KeepLicences:
    """A step that drops documents whose license a policy of `licences.POLICIES` does not allow.

    Raises:
        ConfigError: the policy is unknown.
    """

    policy: str

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an unknown policy."""
        if self.policy not in POLICIES:
            known = (ANY_LICENCE, *POLICIES)
            raise ConfigError(
                f"licence_policy={self.policy!r} is unknown.{suggest(self.policy, known)} Known: "
                f"{', '.join(known)}."
            )

    @property
    def version(self) -> str:
        """Version string that changes whenever a document may be judged differently."""
        return f"policy=1 {self.policy} {sorted(POLICIES[self.policy])}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document, or a `Drop` if its license is not allowed."""
        if obeys(document.licence, self.policy):
            return document
        said = licence_name(document.licence)
        return Drop("licence", said, self.policy, cut_excerpt(document.text))
