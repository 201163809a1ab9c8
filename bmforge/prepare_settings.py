"""Option dataclasses of `bmforge prepare`, in a module without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bmforge.config import GROUP, accept_ungrouped

__all__ = [
    "BpeConfig",
    "CleanConfig",
    "CorpusFilesConfig",
    "DuplicatesConfig",
    "ExecutionConfig",
    "FilterConfig",
    "PrepareConfig",
    "ReadConfig",
]


@dataclass(frozen=True, kw_only=True)
class BpeConfig:
    """Options of a BPE tokenizer that is trained while a corpus is prepared.

    Args:
        digits: splitting of numbers before merges are learned: "joined" (no splitting), "single"
            (single digits) or "triples" (groups of up to three digits).
        han: handling of Chinese characters: "joined" allows merges of several characters, "single"
            keeps each character separate.
        special_tokens: additional special tokens, such as <|im_start|>; their ids start at 1.
        min_frequency: minimum number of times that a pair of tokens must occur to be merged.
        max_token_length: maximum length of a token in bytes, at least 2 (if None: no limit).
    """

    digits: Literal["joined", "single", "triples"] = "joined"
    han: Literal["joined", "single"] = "joined"
    special_tokens: tuple[str, ...] = ()
    min_frequency: int = 2
    max_token_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """Options for reading input files.

    Args:
        errors: handling of bytes that cannot be decoded: "replace" inserts U+FFFD and counts
            the errors; "strict" rejects the file or entry.
        encoding: encoding of text that is not UTF-8, such as cp1252 or gb18030 (if empty: the
            declared encoding, or else the detected one).
        skip_bad: skip and count invalid lines and files instead of stopping with an error.
        skip_unread: continue even if more than half of the input's bytes are in unsupported file
            formats, instead of stopping with an error.
        text_field: field of a .jsonl line that contains the text.
        html_reader: library that extracts the main text of web pages; trafilatura is slower but
            extracts more text.
    """

    errors: Literal["replace", "strict"] = "replace"
    encoding: str = ""
    skip_bad: bool = False
    skip_unread: bool = False
    text_field: str = "text"
    html_reader: Literal["resiliparse", "trafilatura"] = "resiliparse"


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """Options for changing the text of documents.

    Args:
        text_repairs: text repairs to apply: "repair" (fix text decoded with the wrong encoding),
            "invisible" (remove zero-width characters), "width" (convert full-width letters and
            digits to half width), "simplified" or "traditional" (convert Chinese), "boilerplate"
            (remove lines of menus and notices), "wrapped" (join lines broken at a fixed width).
        mask_private: replace private data, such as e-mail addresses and phone numbers, with
            <EMAIL>, <PHONE> and similar placeholders.
        phone_regions: country codes, such as US and DE, whose national phone numbers are treated as
            private data, in addition to Chinese and international numbers.
    """

    text_repairs: tuple[
        Literal[
            "repair", "invisible", "width", "simplified", "traditional", "boilerplate", "wrapped"
        ],
        ...,
    ] = ()
    mask_private: bool = False
    phone_regions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Options for selecting documents by language, quality, source and license.

    Args:
        languages: keep only documents in these languages, given as codes such as "en" and "zh", or
            with a script, such as "zh-Hant"; "any" detects the language but keeps all documents (if
            empty: no language detection).
        by_paragraph: also remove paragraphs in other languages from the kept documents; requires
            languages.
        rules: published filter rules to apply: "english", "chinese", or "mixed" (the rules for the
            language of each document).
        bad_words: file with one word per line; documents with more than one of these words per two
            lines are dropped.
        bad_hosts: file with one host per line; documents from these hosts and their subdomains
            are dropped.
        scores: files written by `bmforge data quality`: "quality.npz" only records the scores,
            "quality.npz>=0.5" drops documents with a lower score, and "perplexity.npz=head,middle"
            drops the third of the documents with the highest perplexity.
        license: license of texts whose source does not state one: an SPDX id for all texts, or
            PATH=ID for the texts of a file or directory.
        license_policy: allowed licenses of documents: "any", "known" (recognized licenses),
            "commercial" (commercial use is allowed) or "permissive" (only attribution and notices
            are required).
    """

    languages: tuple[str, ...] = ()
    by_paragraph: bool = False
    rules: Literal["none", "english", "chinese", "mixed"] = "none"
    bad_words: str = ""
    bad_hosts: str = ""
    scores: tuple[str, ...] = ()
    license: tuple[str, ...] = ()
    license_policy: Literal["any", "known", "commercial", "permissive"] = "any"


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """Options for removing repeated texts and test examples.

    Args:
        near_duplicates: minimum Jaccard similarity, from 0.3 to 1, of the sets of word 5-grams of
            two documents; of similar documents, only one is kept (if None: drop only exact
            duplicates).
        repeated_paragraphs: minimum length in characters, for example 50, of paragraphs that are
            removed if they occurred before in any document (if None: remove none).
        repeated_spans: minimum length in words or Chinese characters, at least 50, of passages that
            are removed if they occurred before in any document (if None: remove none).
        earlier: directories of corpora prepared earlier with keep_index; documents that occur in
            one of them are dropped, and with near_duplicates also similar documents.
        decontaminate: test sets, as .jsonl, .json, .csv, .tsv, .parquet or .arrow files, also
            compressed, or as TASK=DIRECTORY for all splits of a task of `evaluate`, such as
            BoolQ=superglue; a document that contains one of their examples is dropped.
        cut_examples: cut the test examples out of a document instead of dropping it; requires
            decontaminate.
    """

    near_duplicates: float | None = None
    repeated_paragraphs: int | None = None
    repeated_spans: int | None = None
    earlier: tuple[str, ...] = ()
    decontaminate: tuple[str, ...] = ()
    cut_examples: bool = False


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Options for the worker processes and their limits.

    Args:
        workers: number of worker processes that read, clean and encode; 0 uses only the main
            process. The output is the same for any number.
        shard_bytes: approximate number of input bytes that a worker processes at a time; if
            `prepare` is killed, at most that much work per worker is lost.
        document_seconds: time limit per document in seconds; slower documents are dropped. Requires
            workers above 0.
        worker_memory_bytes: memory limit per worker in bytes; documents that need more are dropped.
            Requires workers above 0.
        keep_stages: keep the results of all stages, so that a later `prepare --overwrite` with
            other settings repeats only the stages that changed.
    """

    workers: int = 0
    shard_bytes: int = 1 << 26
    document_seconds: float = 300.0
    worker_memory_bytes: int = 1 << 32
    keep_stages: bool = False


@dataclass(frozen=True, kw_only=True)
class CorpusFilesConfig:
    """Options for additional output files.

    Args:
        join_stores: copy the token stores of all shards into one store; if False, they stay
            separate files, which needs less disk space.
        keep_dropped: write all dropped documents to dropped.jsonl instead of only a sample.
        keep_index: store an index of the texts, against which later corpora can be deduplicated
            with `earlier`.
    """

    join_stores: bool = True
    keep_dropped: bool = False
    keep_index: bool = False


@accept_ungrouped
@dataclass(frozen=True)
class PrepareConfig:
    """Options for preparing a corpus.

    The fields of the groups can also be given without the group: `PrepareConfig(rules="english")`.

    Args:
        vocab_size: vocabulary size of a newly trained BPE tokenizer, at least 257.
        validation_fraction: fraction of the text, in bytes, that is held out for validation, at
            least 0 and below 1. If there are few documents, the end of a document is held out.
        seed: random seed of the selection of held-out documents.
        tokenizer: directory of an existing tokenizer, such as that of a model or of another corpus
            (if empty: train a new one).
        bpe: options of the tokenizer that is trained.
        read: options for reading input files.
        clean: options for changing the text of documents.
        filter: options for selecting documents.
        duplicates: options for removing repeated texts and test examples.
        execution: options for the worker processes and their limits.
        files: options for additional output files.
    """

    vocab_size: int = 8192
    validation_fraction: float = 0.05
    seed: int = 0
    tokenizer: str = ""
    bpe: BpeConfig = field(default_factory=BpeConfig)
    read: ReadConfig = field(default_factory=ReadConfig, metadata=GROUP)
    clean: CleanConfig = field(default_factory=CleanConfig, metadata=GROUP)
    filter: FilterConfig = field(default_factory=FilterConfig, metadata=GROUP)
    duplicates: DuplicatesConfig = field(default_factory=DuplicatesConfig, metadata=GROUP)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig, metadata=GROUP)
    files: CorpusFilesConfig = field(default_factory=CorpusFilesConfig, metadata=GROUP)
