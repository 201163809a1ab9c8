"""Option dataclasses of commands, which `--help` shows.

This module imports nothing heavy, so that `--help` is fast. Each class can also be imported from
the package that uses it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bmforge.byte_sizes import parse_size
from bmforge.errors import ConfigError
from bmforge.files import check_place
from bmforge.prepare_settings import PrepareConfig

__all__ = [
    "CollectConfig",
    "EvaluateConfig",
    "MemoryOptions",
    "QualityConfig",
    "QuickstartConfig",
    "TalkConfig",
]


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Memory limits of a model.

    Args:
        device_budget: device memory for weights, KV cache and activations, as a size such as
            2GiB; weights that do not fit are read from disk when needed (if None: no limit).
        max_model_len: maximum sequence length, including new tokens, for which device_budget
            reserves memory (if None: 1024, or the model's maximum).
        quantize: quantize weights while loading: "int8", "int8-dynamic", "int4" or "int4-128";
            "keep" loads the integers of a GGUF, GPTQ or AWQ file, and "none" dequantizes them (if
            None: "keep" for such a file of a native family, else "none").
        devices: accelerators among which the model's blocks are divided, by index or name, such as
            0,1; device_budget applies to each of them (if None: one).
        backend: implementation of the architecture: "native" (bmforge's), "transformers", or "auto"
            ("native" if bmforge supports the architecture, else "transformers").
    """

    device_budget: str | None = None
    max_model_len: int | None = None
    quantize: str | None = None
    devices: str | None = None
    backend: Literal["auto", "native", "transformers"] = "auto"

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an invalid size, or for an option that has no effect."""
        if self.device_budget is not None:
            parse_size(self.device_budget, "device_budget")
        elif self.max_model_len is not None and self.devices is None:
            raise ConfigError(
                f"max_model_len={self.max_model_len} has no effect without device_budget. Leave it "
                "out, or set device_budget=2GiB."
            )

    @property
    def budget_bytes(self) -> int | None:
        """Memory budget in bytes; None for no limit."""
        return None if self.device_budget is None else parse_size(self.device_budget)

    @property
    def device_names(self) -> list[str] | None:
        """Device names; None for the default device."""
        if self.devices is None:
            return None
        return [name for name in map(str.strip, self.devices.split(",")) if name]


@dataclass(frozen=True)
class CollectConfig:
    """Options of a crawl.

    Args:
        hosts: other hosts that may be crawled besides those of the given addresses, as HOST or
            HOST:PORT.
        private_hosts: hosts that are allowed although their addresses are private or loopback.
        most_pages: maximum number of requests in a run.
        most_bytes: maximum total size of the responses in a run.
        most_page_bytes: maximum size of a response; larger ones are skipped.
        delay_s: seconds between two requests to a host, unless its robots.txt requires more.
        page_seconds: time limit of a response in seconds; slower ones are skipped.
        again: also check pages that were collected before, and store those that have changed.
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
    """Options for training a quality classifier and a perplexity model.

    Args:
        good: files or directories of texts of high quality, as examples for the classifier.
        bad: files or directories of other texts, most of them of lower quality (if empty: no
            classifier is trained).
        labeled: files with a text and its label in each record, instead of good and bad.
        label_field: field of a record that contains the label.
        good_labels: labels of good texts; texts with any other label are negatives.
        good_from: smallest label of a good text, if labels are numbers (if None: use
            good_labels).
        held_out_fraction: fraction of the texts that is used only to evaluate the classifier.
        out: directory for quality.npz and perplexity.npz.
        most_texts: maximum number of texts per class; they are selected by a hash.
        text_field: field of a record that contains the text.
        seed: random seed for the selection of texts and the order of training.
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
    """Train a small model on real text in minutes, and generate samples.

    Args:
        input: text files or directories (if empty: the help texts that come with Python).
        run_dir: directory for all outputs.
        steps: number of optimizer steps.
        fresh: start over, and remove the results of a previous quickstart in run_dir.
        prompt: text that the samples continue (if empty: the beginning of a held-out document).
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
    """Options of a chat; options that are None use the model's defaults.

    EVA's defaults are those of its original project.

    Args:
        system: system message.
        max_new_tokens: maximum length of an answer in tokens (if None: 128).
        min_new_tokens: minimum length of an answer in tokens.
        num_beams: number of beams; above 1 selects beam search instead of sampling.
        temperature: sampling temperature; 0 means greedy decoding (if None: 0.7).
        top_p: nucleus sampling probability (if None: 0.9).
        repetition_penalty: penalty above 1 for tokens that already occurred.
        length_penalty: exponent of the length in beam search scores.
        window: maximum number of tokens of the history that the model reads (EVA only).
        no_repeat_ngram: size of n-grams that may occur only once in an answer (EVA only).
        seed: random seed of sampling (if None: a different one each time).
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
        """Return the options that the user set, except `system`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {n: v for n, v in values.items() if v is not None and n != "system"}


@dataclass(kw_only=True)
class EvaluateConfig:
    """Options of an evaluation.

    Args:
        weights: directory of the weights if the model is a preset.
        text: text files or directories for perplexity and bits per byte.
        prepared: output directories of `bmforge prepare` (the validation split is used) or
            token stores, for perplexity and bits per byte.
        tasks: published tasks by name (BoolQ, SQuAD, ...), or .jsonl files of a custom task.
        task_data: directory of the published tasks.
        labels: labels of a custom task; for a classifier the order does not matter (if empty:
            those with which the classifier was trained).
        fields: names of the text fields of a custom task (if empty: those in its first line).
        split: split of published tasks.
        examples: maximum number of examples per task.
        seq_len: maximum sequence length in tokens (if None: that of the training run, or else
            the model's maximum up to 2048).
        micro_batch_size: sequences per forward pass and process.
        max_new_tokens: maximum length of generated answers.
        precision: dtype of the computation.
        out: JSON file to write the results to; it must not exist yet.
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
        """Raise `ConfigError` if there is nothing to evaluate on, or a value is out of range."""
        problems = []
        if not (self.text or self.prepared or self.tasks):
            problems.append("there is no evaluation data; pass --text, --prepared or --tasks")
        smallest = {"examples": 1, "seq_len": 2, "micro_batch_size": 1, "max_new_tokens": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                problems.append(f"{name}={value} must be at least {least}")
        if self.out is not None and self.out.exists():
            problems.append(f"out={str(self.out)!r} already exists; choose another file")
        elif self.out is not None:
            check_place(self.out, "out", is_file=True)
        for name in ("task_data", "labels", "fields", "examples"):
            if getattr(self, name) and not self.tasks:
                problems.append(f"{name} has no effect without tasks")
        if problems:
            raise ConfigError(f"{'; '.join(problems)}.")
