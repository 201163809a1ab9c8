"""Selects the single-document steps of `prepare` from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from bmforge.data.clean.drop import Drop
from bmforge.data.clean.filter_step import RuleFilter
from bmforge.data.clean.languages import CutParagraphs, DetectLanguage
from bmforge.data.clean.license import ANY_LICENSE, LicenseFilter, SetLicense, read_licenses
from bmforge.data.clean.lists import HostBlocklist, WordBlocklist, read_list
from bmforge.data.clean.normalize import normalize_text
from bmforge.data.clean.private import MaskPrivate
from bmforge.data.clean.score_files import read_score
from bmforge.data.clean.text_repairs import RepairText
from bmforge.data.prepare.documents import NORMALISE, DocumentStage
from bmforge.data.prepare.examples import DropExamples
from bmforge.data.sources.document import Document
from bmforge.errors import ConfigError, suggest
from bmforge.prepare_settings import FilterConfig, PrepareConfig

__all__ = ["choose_steps"]

_ANY = "any"
_SCRIPTS = {"simplified": "Hans", "traditional": "Hant"}
_REPAIRS = ("repair", "invisible", "width", *_SCRIPTS, "boilerplate", "wrapped")


def choose_steps(
    config: PrepareConfig, own: Sequence[DocumentStage] = ()
) -> tuple[DocumentStage, ...]:
    """Return the single-document steps in the order of execution, with the user's steps last.

    The encoding repair runs before `normalize_text`, which would drop control characters of wrongly
    decoded text. The other repairs run after language detection, as they depend on the language.
    Filter rules run before private data is masked.

    Raises:
        ConfigError: a setting of a step has an unknown value.
    """
    clean, repairs = config.clean, _choose_repairs(config.clean.text_repairs)
    steps = _source_steps(config.filter)
    if "repair" in clean.text_repairs:
        repair = RepairText()
        steps.append(DocumentStage("repair", repair, repair.version))
    steps.append(NORMALISE)
    steps += _language_steps(config.filter)
    if repairs != RepairText(repair=False):
        steps.append(DocumentStage("text_repairs", _RepairStep(repairs), repairs.version))
    steps += _quality_steps(config.filter)
    if config.duplicates.decontaminate:
        examples, cut = config.duplicates.decontaminate, config.duplicates.cut_examples
        drop = DropExamples(examples, cut).opened()
        steps.append(DocumentStage("decontaminate", drop, drop.version))
    elif config.duplicates.cut_examples:
        raise ConfigError(
            "cut_examples has no effect without decontaminate. Set decontaminate to the test sets."
        )
    if clean.mask_private:
        mask = MaskPrivate(regions=tuple(region.upper() for region in clean.phone_regions))
        steps.append(DocumentStage("mask_private", mask, mask.version, hides=True))
    elif clean.phone_regions:
        raise ConfigError(
            "phone_regions has no effect without mask_private. Set mask_private as well."
        )
    return (*steps, *own)


def _source_steps(options: FilterConfig) -> list[DocumentStage]:
    """Return the steps that set or check the license of a document, and drop blocked hosts."""
    steps = []
    if options.license:
        say = SetLicense(read_licenses(options.license))
        steps.append(DocumentStage("license", say, _hash_version(say.version)))
    if options.license_policy != ANY_LICENSE:
        keep = LicenseFilter(options.license_policy)
        steps.append(DocumentStage("license_policy", keep, _hash_version(keep.version)))
    if options.bad_hosts:
        hosts = HostBlocklist(read_list(options.bad_hosts, "bad_hosts"))
        steps.append(DocumentStage("bad_hosts", hosts, _hash_version(hosts.version)))
    return steps


def _language_steps(options: FilterConfig) -> list[DocumentStage]:
    """Return the steps that filter documents and paragraphs by language."""
    if not options.languages:
        if options.by_paragraph:
            raise ConfigError("by_paragraph=True has no effect without languages. Set languages.")
        return []
    named = _named_languages(options.languages)
    detect = DetectLanguage(named)
    steps = [DocumentStage("languages", detect, detect.version)]
    if options.by_paragraph:
        cut = CutParagraphs(named)
        steps.append(DocumentStage("paragraphs", cut, cut.version))
    return steps


def _quality_steps(options: FilterConfig) -> list[DocumentStage]:
    """Return the steps that filter documents by quality rules, blocked words and scores."""
    steps, judge = [], RuleFilter(options.rules)
    if options.rules != "none":
        steps.append(DocumentStage("rules", judge, judge.version))
    if options.bad_words:
        words = WordBlocklist(read_list(options.bad_words, "bad_words"))
        steps.append(DocumentStage("bad_words", words, _hash_version(words.version)))
    for option in options.scores:
        score = read_score(option)
        steps.append(
            DocumentStage(f"score {Path(score.path).stem}", score, _hash_version(score.version))
        )
    return steps


def _hash_version(version: str) -> str:
    """Hash a version string that contains a whole list, to keep it short."""
    return blake2b(version.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _choose_repairs(names: Sequence[str]) -> RepairText:
    """Return the text repairs that the settings name, except `repair`, which runs earlier."""
    for name in names:
        if name not in _REPAIRS:
            raise ConfigError(
                f"unknown repair: text_repairs contains {name!r} (supported: "
                f"{', '.join(_REPAIRS)}).{suggest(name, _REPAIRS)}"
            )
    scripts = [name for name in _SCRIPTS if name in names]
    if len(scripts) > 1:
        raise ConfigError(
            "text_repairs lists both 'simplified' and 'traditional'. Keep one of them."
        )
    switches = {name: name in names for name in _REPAIRS if name not in ("repair", *_SCRIPTS)}
    chinese = _SCRIPTS[scripts[0]] if scripts else ""
    return RepairText(repair=False, chinese=chinese, **switches)


def _named_languages(languages: Sequence[str]) -> tuple[str, ...]:
    if _ANY not in languages:
        return tuple(languages)
    if len(languages) > 1:
        raise ConfigError(
            f"{_ANY!r} in languages={tuple(languages)} cannot be combined with language codes. Use "
            f"{_ANY!r} alone, or remove it."
        )
    return ()


@dataclass(frozen=True)
class _RepairStep:
    """A step that repairs a text and normalizes the result again."""

    repair: RepairText

    def __call__(self, document: Document) -> Document | Drop:
        repaired = self.repair(document)
        return (
            repaired
            if isinstance(repaired, Drop)
            else replace(repaired, text=normalize_text(repaired.text))
        )
