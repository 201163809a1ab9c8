"""Options of commands, in dataclasses that the command line shows in `--help`.

This module imports nothing heavy, so that `--help` is fast; each class is also importable from the
package that uses it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bmforge.errors import ConfigError

__all__ = [
    "CollectConfig",
    "EvaluateConfig",
    "MemoryOptions",
    "BpeConfig",
    "PrepareConfig",
    "QualityConfig",
    "QuickstartConfig",
    "TalkConfig",
    "parse_size",
]

# Unit of a size, in lower case -> bytes.
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1 << (10 * n) for n, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)}


def parse_size(text: str, name: str = "size") -> int:
    """Parse a size such as ``2GiB``, ``500 MB`` or ``123456`` into bytes.

    Args:
        text: number and unit: B, KB, MB, GB, TB (powers of 1000), KiB, ... TiB (powers of 1024).
        name: name of the option, for the error message.

    Raises:
        ConfigError: invalid size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(
            f"invalid size: {name}={text!r} (a number and a unit, such as 2GiB, 1.5GB or 800MiB)."
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Memory limits of a model.

    Args:
        device_budget: device memory for weights, KV cache and the largest step, as a size such as
            2GiB; weights that do not fit are read from disk when needed (default: no limit).
        max_tokens: with device_budget, longest sequence to plan for, new tokens included (default:
            1024, or the model's maximum).
        quantize: quantize weights while loading: int8, int8-dynamic, int4 or int4-128; keep loads
            the integers of a GGUF, GPTQ or AWQ file.
        devices: accelerators over which the blocks are divided, by index or name, such as 0,1; the
            budget applies to each (default: one).
        backend: implementation of the architecture: native for the families of bmforge,
            transformers for that library, auto for a native family where there is one.
    """

    device_budget: str | None = None
    max_tokens: int | None = None
    quantize: str | None = None
    devices: str | None = None
    backend: Literal["auto", "native", "transformers"] = "auto"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an invalid size or an option without effect."""
        if self.device_budget is not None:
            parse_size(self.device_budget, "device_budget")
        elif self.max_tokens is not None and self.devices is None:
            raise ConfigError(
                f"max_tokens={self.max_tokens} has no effect without device_budget. Leave it out, "
                "or set device_budget=2GiB."
            )

    @property
    def budget_bytes(self) -> int | None:
        """Budget in bytes; None without one."""
        return None if self.device_budget is None else parse_size(self.device_budget)

    @property
    def device_names(self) -> list[str] | None:
        """Device names; None for the default device."""
        if self.devices is None:
            return None
        return [name for name in map(str.strip, self.devices.split(",")) if name]


@dataclass(frozen=True, kw_only=True)
class BpeConfig:
    """Options of the BPE tokenizer that a preparation trains.

    Args:
        digits: how digits are divided before merges are learned: joined leaves numbers whole,
            single makes each digit a token, triples makes groups of at most three.
        han: single makes each Chinese character a unit that is not merged with others.
        special_tokens: extra special tokens, such as <|im_start|>; they get the ids from 1 on.
        min_frequency: a pair of tokens that occurs less often is not merged.
        max_token_length: longest token in bytes; None sets no bound.
    """

    digits: Literal["joined", "single", "triples"] = "joined"
    han: Literal["joined", "single"] = "joined"
    special_tokens: tuple[str, ...] = ()
    min_frequency: int = 2
    max_token_length: int | None = None


@dataclass(frozen=True)
class PrepareConfig:
    """How to prepare a corpus.

    Args:
        vocab_size: token ids of the BPE tokenizer when one is trained, at least 257.
        validation_fraction: share of the text's bytes to hold out, 0 <= fraction < 1; of few
            documents, the end of one is taken.
        seed: decides which documents are held out.
        errors: handling of single characters that do not decode: replace puts U+FFFD and counts
            them, strict refuses the entry.
        skip_bad: count bad lines and files instead of stopping at them.
        skip_unread: go on where more than half of the input's bytes are of kinds that are not read.
        text_field: the field of a .jsonl line that holds the text.
        tokenizer: directory of the tokenizer to use, of any kind that
            `bmforge.tokenizers.AutoTokenizer` opens: a model's, or another corpus's, so that
            several share one. Empty trains a new one.
        bpe: options of the tokenizer that is trained.
        html_reader: extractor of the main text of web pages; trafilatura is slower, and finds more.
        tidy: repairs of the texts: repair (what was read in a wrong encoding), invisible
            (marks without width), width (letters and digits of half width), simplified or
            traditional (Chinese), boilerplate (lines of menus and notices), wrapped (lines that
            were broken at a width).
        languages: keep documents in these languages alone, as codes such as en and zh; any keeps
            all, and notes the language of each. Empty does not ask.
        by_paragraph: with languages, cut paragraphs in others out of what is left.
        mask_private: write <EMAIL>, <PHONE> and so on in the place of private data.
        phone_regions: countries, such as US and DE, whose national phone numbers count as private
            data besides Chinese and international ones.
        rules: which published rules drop documents: for English, for Chinese, or for each document
            those of its language.
        bad_words: a file with a word on each line; documents with more than one in two lines are
            dropped.
        bad_hosts: a file with a host on each line; documents from them, and from hosts below them,
            are dropped.
        scores: files of `bmforge data quality`: quality.npz notes the score, quality.npz>=0.5 drops
            documents below, perplexity.npz=head,middle those of the worst third.
        decontaminate: test sets whose examples drop a document that holds one: .jsonl files, or
            TASK=FOLDER for all splits of a task that evaluate knows, such as BoolQ=superglue.
        cut_examples: cut such examples out of the document instead.
        licence: the licence of texts whose source says none: an id of SPDX for all, or PATH=ID for
            those of a file or below a directory.
        licence_policy: which licences documents may have: any; known ones; those that let
            anything be sold (commercial); those that ask for no more than names and notices.
        near_duplicates: drop all but one of documents whose sets of word 5-grams have this Jaccard
            similarity or a higher one, 0.3 to 1; None drops exact copies alone.
        repeated_paragraphs: cut paragraphs of so many characters or more, 50 for example, that
            another document has too, or that a document repeats; the first one stays.
        repeated_spans: cut stretches of so many words or Chinese characters, 50 or more, that occur
            before, in the same document or in another one.
        earlier: corpora that were prepared with keep_index; what they hold is dropped, also what is
            nearly the same, where near_duplicates says so.
        keep_index: keep an index of the texts, so that later corpora can be compared with them.
        workers: processes that read, clean and encode; 0 does it all in this one. Only with workers
            do the two limits below hold. What is written does not depend on it.
        shard_bytes: a worker takes about so much input at a time, and a kill costs so much work.
        document_seconds: a document that takes a worker longer is left out.
        worker_memory_bytes: with a document that makes a worker hold more, so is it.
        join_stores: copy the stores of all shards into one; else each stays one of its own, which
            takes less disk, and all are read as one.
        keep_dropped: keep all documents that are dropped in dropped.jsonl, not samples.
        keep_stages: keep the work of the stages, so that the next preparation in the same place,
            with other settings and overwrite, does only what they change.
    """

    vocab_size: int = 8192
    validation_fraction: float = 0.05
    seed: int = 0
    errors: Literal["replace", "strict"] = "replace"
    skip_bad: bool = False
    skip_unread: bool = False
    text_field: str = "text"
    tokenizer: str = ""
    bpe: BpeConfig = field(default_factory=BpeConfig)
    html_reader: Literal["resiliparse", "trafilatura"] = "resiliparse"
    tidy: tuple[
        Literal[
            "repair", "invisible", "width", "simplified", "traditional", "boilerplate", "wrapped"
        ],
        ...,
    ] = ()
    languages: tuple[str, ...] = ()
    by_paragraph: bool = False
    mask_private: bool = False
    phone_regions: tuple[str, ...] = ()
    rules: Literal["none", "english", "chinese", "mixed"] = "none"
    bad_words: str = ""
    bad_hosts: str = ""
    scores: tuple[str, ...] = ()
    decontaminate: tuple[str, ...] = ()
    cut_examples: bool = False
    licence: tuple[str, ...] = ()
    licence_policy: Literal["any", "known", "commercial", "permissive"] = "any"
    near_duplicates: float | None = None
    repeated_paragraphs: int | None = None
    repeated_spans: int | None = None
    earlier: tuple[str, ...] = ()
    keep_index: bool = False
    workers: int = 0
    shard_bytes: int = 1 << 26
    document_seconds: float = 300.0
    worker_memory_bytes: int = 1 << 32
    join_stores: bool = True
    keep_dropped: bool = False
    keep_stages: bool = False


@dataclass(frozen=True)
class CollectConfig:
    """How to collect pages.

    Args:
        hosts: hosts that may be asked besides those of the addresses, as HOST or HOST:PORT.
        private_hosts: hosts whose addresses may be private, or of this machine.
        most_pages: requests of a run.
        most_bytes: maximum size of all answers in a run.
        most_page_bytes: maximum size of one answer; a larger one is left out.
        delay_s: seconds between two requests to a host, more where its robots.txt says so.
        page_seconds: an answer that takes longer is left out.
        again: ask for known addresses too, if they have changed.
        agent: User-Agent header; include a contact address.
    """

    hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    most_pages: int = 1000
    most_bytes: int = 1 << 30
    most_page_bytes: int = 1 << 25
    delay_s: float = 2.0
    page_seconds: float = 60.0
    again: bool = False
    agent: str = "bmforge (collects text to train language models)"


@dataclass(kw_only=True)
class QualityConfig:
    """Training of a quality classifier and a perplexity model.

    Args:
        good: files or directories of good texts.
        bad: files or directories of other texts, of which some may be good; none trains no
            classifier.
        labeled: files with a text and its label in each record; they replace good and bad.
        label_field: field of a record that holds the label.
        good_labels: labels of good texts; all other labels are of the other class.
        good_from: smallest label of a good text if labels are numbers; none uses good_labels.
        held_out_fraction: share of the texts that only measures the classifier.
        out: directory for quality.npz and perplexity.npz.
        most_texts: largest number of texts of each class, chosen by a hash.
        text_field: field of a record that holds the text.
        seed: random seed of the choice of texts and of the training order.
    """

    good: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    labeled: tuple[str, ...] = ()
    label_field: str = "label"
    good_labels: tuple[str, ...] = ("good", "1")
    good_from: float | None = None
    held_out_fraction: float = 0.1
    out: Path
    most_texts: int = 20_000
    text_field: str = "text"
    seed: int = 0


@dataclass(kw_only=True)
class QuickstartConfig:
    """Options of the quickstart.

    Args:
        input: text files or directories (default: the help texts that come with Python).
        run_dir: directory of all outputs.
        steps: number of optimizer steps.
        fresh: start over and remove the results of an earlier quickstart in run_dir.
        prompt: text that the samples continue (default: start of a held-out document).
        samples: number of samples to generate.
        prepare: options of the text preparation.
    """

    input: tuple[str, ...] = ()
    run_dir: Path = Path("runs/quickstart")
    steps: int = 600
    fresh: bool = False
    prompt: str = ""
    samples: int = 2
    prepare: PrepareConfig = field(
        default_factory=lambda: PrepareConfig(vocab_size=1024, validation_fraction=0.1)
    )


@dataclass(frozen=True, kw_only=True)
class TalkConfig:
    """Options of a chat; None is the model's default (for EVA that of the original project).

    Args:
        system: system message.
        max_new_tokens: maximum length of an answer in tokens (default: 128).
        min_new_tokens: minimum length of an answer in tokens.
        num_beams: number of beams; above 1 selects beam search instead of sampling.
        temperature: sampling temperature (default: 0.7).
        top_p: nucleus sampling probability (default: 0.9).
        repetition_penalty: penalty above 1 for tokens that already occurred.
        length_penalty: exponent of the length in beam search scores.
        window: EVA: maximum number of history tokens that the model reads.
        no_repeat_ngram: EVA: size of n-grams that may occur only once in an answer.
        seed: random seed of sampling (default: a different one each time).
    """

    system: str | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    num_beams: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    window: int | None = None
    no_repeat_ngram: int | None = None
    seed: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that are set, except `system`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {n: v for n, v in values.items() if v is not None and n != "system"}


@dataclass(kw_only=True)
class EvaluateConfig:
    """Options of an evaluation.

    Args:
        weights: directory of the weights, if the model is given by a preset.
        text: text files or directories for perplexity and bits per byte.
        prepared: directories of `bmforge prepare` (their validation split) or token stores, for the
            same metrics.
        tasks: published tasks by name (BoolQ, SQuAD, ...), or .jsonl files of a custom task.
        task_data: directory of the published tasks.
        labels: labels of a custom task (default: those that the classifier was trained with).
        fields: text fields of a custom task (default: those of its first line).
        split: split of published tasks.
        examples: maximum number of examples per task.
        seq_len: maximum sequence length in tokens (default: that of the training run, else the
            model's, at most 2048).
        micro_batch_size: sequences per forward pass and process.
        max_new_tokens: maximum length of generated answers.
        precision: dtype of the computation.
        out: JSON file for the results, which must not exist yet.
    """

    weights: str | None = None
    text: tuple[str, ...] = ()
    prepared: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    task_data: str | None = None
    labels: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    split: str = "dev"
    examples: int | None = None
    seq_len: int | None = None
    micro_batch_size: int = 8
    max_new_tokens: int = 32
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    out: Path | None = None

    def check(self) -> None:
        """Raise `ConfigError` if there is nothing to evaluate, or a value is out of range."""
        problems = []
        if not (self.text or self.prepared or self.tasks):
            problems.append("nothing to evaluate on: give --text, --prepared or --tasks")
        smallest = {"examples": 1, "seq_len": 2, "micro_batch_size": 1, "max_new_tokens": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                problems.append(f"{name}={value} must be at least {least}")
        if self.out is not None and self.out.exists():
            problems.append(f"out={str(self.out)!r} already exists; choose another file")
        for name in ("task_data", "labels", "fields", "examples"):
            if getattr(self, name) and not self.tasks:
                problems.append(f"{name} has no effect without tasks")
        if problems:
            raise ConfigError(f"{'; '.join(problems)}.")
