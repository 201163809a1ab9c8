"""License steps: set a license for sources that do not state one, and filter by a policy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bmforge.data.clean.drop import Drop, cut_excerpt
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, suggest
from bmforge.licenses import POLICIES, check_license, is_license_allowed, license_name

__all__ = ["ANY_LICENSE", "LicenseFilter", "SetLicense", "check_places", "read_licenses"]

ANY_LICENSE = "any"


def read_licenses(options: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse license options into pairs (path, license id); the path is "" for an ``ID`` alone.

    Args:
        options: strings of the form ``ID`` or ``PATH=ID``.

    Raises:
        ConfigError: a license is unknown, or a path is named twice.
    """
    licenses: dict[str, str] = {}
    for option in options:
        path, mark, id = option.rpartition("=")
        where = os.path.abspath(path) if mark else ""
        if where in licenses:
            raise ConfigError(
                f"license={list(options)} has two licenses for {path or 'all files'}. Specify "
                "only one."
            )
        licenses[where] = check_license(id, "license")
    # Longest paths first, so that the most specific one matches.
    return tuple(sorted(licenses.items(), key=lambda item: -len(item[0])))


def check_places(options: Sequence[str], files: Sequence[Path]) -> None:
    """Raise `ConfigError` if no input file is at or below the path of a license option."""
    for root, id in read_licenses(options):
        if root and not any(_is_below(file, root) for file in files):
            raise ConfigError(
                f"license: no input file is {root!r} or below it, so {id} would apply to no text. "
                "Correct the path, or leave the option out."
            )


def _is_below(path: str | Path, root: str) -> bool:
    absolute = Path(os.path.abspath(path))
    return absolute == Path(root) or Path(root) in absolute.parents


@dataclass(frozen=True)
class SetLicense:
    """A step that sets the license of documents whose source does not state one.

    Attributes:
        places: pairs (path, license id) from `read_licenses`; the id applies to files below the
            path.
    """

    places: tuple[tuple[str, str], ...]

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"license=1 {self.places!r}"

    def __call__(self, document: Document) -> Document:
        """Return the document, with the license of its path if its source does not state one."""
        if document.license:
            return document
        for root, id in self.places:
            if not root or _is_below(document.source, root):
                return replace(document, license=id)
        return document


@dataclass(frozen=True)
class LicenseFilter:
    """A step that drops documents whose license a policy does not allow (`licenses.POLICIES`).

    Raises:
        ConfigError: the policy is unknown.
    """

    policy: str

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the policy is unknown."""
        if self.policy not in POLICIES:
            policies = (ANY_LICENSE, *POLICIES)
            raise ConfigError(
                f"unknown policy: license_policy={self.policy!r} (supported: "
                f"{', '.join(policies)}).{suggest(self.policy, policies)}"
            )

    @property
    def version(self) -> str:
        """Version of the step: a string that changes whenever its results may change."""
        return f"policy=1 {self.policy} {sorted(POLICIES[self.policy])}"

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document, or a `Drop` if its license is not allowed."""
        if is_license_allowed(document.license, self.policy):
            return document
        name = license_name(document.license)
        return Drop("license", name, self.policy, cut_excerpt(document.text))
