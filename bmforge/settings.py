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
    "ChatSessionConfig",
]


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Memory limits of a model.

    Args:
        device_budget: limit of the device memory for weights, KV cache and activations, as a size
            such as 2GiB; weights that do not fit are streamed from disk (if None: no limit).
        max_model_len: maximum sequence length, including new tokens, for which device_budget
            reserves memory (if None: 1024, or the model's maximum).
        quantize: quantization of the weights during loading: "int8", "int8-dynamic", "int4" or
            "int4-128"; "keep" keeps the integers of a GGUF, GPTQ or AWQ model, and "none"
            dequantizes them (if None: "keep" for a quantized model that bmforge implements itself,
            else "none").
        devices: accelerators among which the model's blocks are divided, as a comma-separated list
            of indices or names, such as 0,1; device_budget applies to each (if None: a single
            device).
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
        hosts: hosts that may be crawled in addition to those of the URLs, as HOST or HOST:PORT.
        private_hosts: hosts that may be crawled although their IP addresses are private or
            loopback, as HOST or HOST:PORT.
        most_pages: maximum number of requests in a run.
        most_bytes: maximum total size of the responses in a run, in bytes.
        most_page_bytes: maximum size of a response in bytes; larger responses are skipped.
        delay_s: minimum time in seconds between two requests to the same host; a longer crawl delay
            in robots.txt takes precedence.
        page_seconds: time limit in seconds for a response; slower responses are skipped.
        again: request pages of earlier runs again, and store those that have changed.
        agent: User-Agent header of the requests; it should include a contact address.
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
        good: files or directories with texts of high quality: positive examples for the classifier,
            and training texts of the perplexity model.
        bad: files or directories with other texts, mostly of lower quality, as negative examples
            for the classifier (if empty: no classifier is trained).
        labeled: files whose records contain a text and its label; replaces good and bad.
        label_field: field of a record that contains the label.
        good_labels: labels of high-quality texts; texts with any other label are negative examples.
        good_from: minimum label of a high-quality text, for numeric labels (if None: use
            good_labels).
        held_out_fraction: fraction of the texts, from 0 to 1, that is held out to evaluate the
            classifier.
        out: output directory for quality.npz and perplexity.npz.
        most_texts: maximum number of texts per class; a hash of the text selects them.
        text_field: field of a record that contains the text.
        seed: random seed of the selection of texts and of the training order.
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
        run_dir: output directory of the run.
        steps: number of optimizer steps.
        fresh: delete the results of an earlier quickstart in run_dir and start over.
        prompt: beginning of the generated samples (if empty: the beginning of a held-out document).
        samples: number of text samples to generate after training.
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
class ChatSessionConfig:
    """Options of a chat; options that are None use the model's defaults.

    EVA's defaults are those of its original project.

    Args:
        system: text of the system message (if None: no system message).
        max_new_tokens: maximum length of an answer in tokens (if None: 128).
        min_new_tokens: minimum length of an answer in tokens (if None: no minimum).
        num_beams: number of beams; a number above 1 selects beam search instead of sampling (if
            None: 1).
        temperature: sampling temperature; 0 means greedy decoding (if None: 0.7).
        top_p: sample from the smallest set of most probable tokens whose probabilities sum to at
            least this value (if None: 0.9).
        repetition_penalty: factor above 1 that makes tokens that already occurred less probable (if
            None: no penalty).
        length_penalty: beam search divides the score of a sequence by its length to the power of
            this value (if None: 1).
        window: maximum number of tokens of the chat history in the prompt, for EVA only.
        no_repeat_ngram: size of the n-grams that may occur only once in an answer, for EVA only.
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
        weights: directory of the weights, required if the model is the name of a preset.
        text: text files or directories for perplexity and bits per byte.
        prepared: output directories of `bmforge prepare` (the validation split is used) or
            token stores, for perplexity and bits per byte.
        tasks: names of published tasks, such as BoolQ and SQuAD, or .jsonl files of a custom task.
        task_data: directory with the datasets of the published tasks.
        labels: labels of a custom task; for a classifier their order does not matter (if empty: the
            labels with which the classifier was trained).
        fields: names of the text fields of a custom task (if empty: the text fields of the file's
            first line).
        split: dataset split of the published tasks to evaluate.
        examples: maximum number of examples per task (if None: all).
        seq_len: maximum sequence length in tokens (if None: the length of the training run, or else
            the model's maximum, but at most 2048).
        micro_batch_size: number of sequences per forward pass on each process.
        max_new_tokens: maximum length of a generated answer in tokens.
        precision: dtype of the computation.
        out: JSON file for the results, which must not exist yet (if None: only print the results).
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
