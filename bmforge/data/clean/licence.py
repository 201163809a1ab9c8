"""The licence of documents: said for those whose source says none, and what is kept by a policy."""

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
    """Return (path, id) of each of ``ID`` or ``PATH=ID``; the path of all documents is "".

    Raises:
        ConfigError: a licence is not known, or a path is named twice.
    """
    found: dict[str, str] = {}
    for one in given:
        path, mark, id = one.rpartition("=")
        where = str(Path(path).absolute()) if mark else ""
        if where in found:
            raise ConfigError(f"licence: {path or 'all'} is given two licences; name one")
        found[where] = check_licence(id, "licence")
    # The deepest place first.
    return tuple(sorted(found.items(), key=lambda item: -len(item[0])))


@dataclass(frozen=True)
class SayLicence:
    """A step that notes the licence of documents whose source says none.

    Attributes:
        places: of `read_licences`.
    """

    places: tuple[tuple[str, str], ...]

    @property
    def version(self) -> str:
        """What changes whenever a document may get another licence."""
        return f"licence=1 {self.places!r}"

    def __call__(self, document: Document) -> Document:
        """Return the document with its licence."""
        if document.licence:
            return document
        source = Path(document.source).absolute()
        for place, id in self.places:
            if not place or source == Path(place) or Path(place) in source.parents:
                return replace(document, licence=id)
        return document


@dataclass(frozen=True)
class KeepLicences:
    """A step that drops documents whose licence a policy of `licences.POLICIES` does not allow.

    Raises:
        ConfigError: there is no such policy.
    """

    policy: str

    def __post_init__(self) -> None:
        """Refuse a policy that is not there."""
        if self.policy not in POLICIES:
            known = (ANY_LICENCE, *POLICIES)
            raise ConfigError(
                f"licence_policy={self.policy!r} is unknown.{suggest(self.policy, known)} Known: "
                f"{', '.join(known)}."
            )

    @property
    def version(self) -> str:
        """What changes whenever a document may be judged differently."""
        return f"policy=1 {self.policy} {sorted(POLICIES[self.policy])}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document, or why it is dropped."""
        if obeys(document.licence, self.policy):
            return document
        said = licence_name(document.licence)
        return Drop("licence", said, self.policy, cut_excerpt(document.text))
