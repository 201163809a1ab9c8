"""Evaluates a model on texts (perplexity) and tasks, on any layout.

Texts are evaluated with `train.evaluate`, like held-out data in training; tasks with
`task_prompts.py`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from bmforge.config import config_to_dict
from bmforge.data import Batch
from bmforge.data.clean.normalize import normalize_documents
from bmforge.data.sources.files import read_documents
from bmforge.data.tasks import find_task, read_task
from bmforge.data.tasks.rows import AnswerRows, Pair
from bmforge.errors import ConfigError, DataError
from bmforge.files import find_export, refuse_pipe, replace_file
from bmforge.host_tuning import tune_host
from bmforge.infer.score import roll_windows
from bmforge.logging import get_logger
from bmforge.models import Model, load_weights_
from bmforge.models.adapter_dirs import is_adapter
from bmforge.models.config import ModelConfig, read_config_file
from bmforge.models.file_fingerprint import fingerprint_of_files
from bmforge.models.hub import find_model, head_options
from bmforge.parallel import (
    Layout,
    World,
    build_mesh,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    parallelize,
    run_on_first,
)
from bmforge.recipes.adapter_dirs import find_source
from bmforge.recipes.inputs.corpus import open_held_out
from bmforge.recipes.inputs.examples import ExampleConfig, iter_held_out
from bmforge.recipes.inputs.task_data import (
    TaskDataConfig,
    label_names,
    open_task,
    order_labels,
)
from bmforge.recipes.run import Results
from bmforge.recipes.run_dir import add_results
from bmforge.recipes.start import find_start, traits_of
from bmforge.recipes.task_prompts import (
    EncodedClasses,
    EncodedOptions,
    EncodedQuestions,
    EncodedTask,
    count_classes,
)
from bmforge.settings import EvaluateConfig
from bmforge.tokenizers import AutoTokenizer, Tokenizer
from bmforge.train import evaluate, write_report
from bmforge.tune.delta import load_delta

__all__ = ["EvaluateConfig", "evaluate_model"]

_LONGEST = 2048
Measure = Callable[[], dict[str, float]]  # evaluates the model; returns metrics by name


@dataclass(frozen=True)
class _Subject:
    """Model under evaluation, with its tokenizer, sequence length and processes."""

    model: Model
    tokenizer: Tokenizer | None
    directory: Path
    mesh: DeviceMesh
    rows: World
    seq_len: int


@dataclass(frozen=True)
class _RowSettings:
    """Settings for encoding the examples of a task; the fields are those of a run config."""

    model: ModelConfig
    data: ExampleConfig
    max_new_tokens: int = 0


def evaluate_model(
    name: str,
    config: EvaluateConfig,
    layout: Layout | None = None,
    *,
    allow_other_base: bool = False,
) -> Results:
    """Evaluate a model; return its metrics, which are equal on every process.

    The result is a dict from the title of a metric to a dict from text or task to value. For the
    export of a run, the metrics are also added to the run's results and report.

    Args:
        name: directory or hub id of a model, a run directory, or a preset with `weights`.
        config: texts and tasks to evaluate on.
        layout: parallel layout (default: the weights are sharded over all processes).
        allow_other_base: accept an adapter that was trained on a base model with other weights.

    Raises:
        BmforgeError: a setting, the model, the data or the layout is invalid or unsuitable.
    """
    config.check()
    layout, out = layout or Layout(), config.out
    world = init_distributed()
    if out is not None:  # fail before the evaluation if it cannot be created
        run_on_first(lambda: out.parent.mkdir(parents=True, exist_ok=True))
    layout.check(world.size)
    subject = _open_subject(name, config, layout, world, allow_other_base)
    # All inputs are opened before evaluating, so that mistakes are reported early.
    measures = [(path, _open_text(subject, path, config)) for path in config.text]
    measures += [(path, _open_prepared(subject, path, config)) for path in config.prepared]
    measures += [(task, _open_task(subject, task, config)) for task in config.tasks]
    results: Results = {}
    with tune_host(world.device):
        for what, measure in measures:
            for metric, value in measure().items():
                results.setdefault(metric, {})[what] = value
    run_on_first(lambda: _store_results(name, subject, config, layout, results))
    return results


def _open_subject(
    name: str, config: EvaluateConfig, layout: Layout, world: World, allow_other_base: bool
) -> _Subject:
    """Parallelize a model and load this process's shards of its weights."""
    export = str(find_export(name))
    resolved = find_source(export) if is_adapter(export) else None
    start = find_start(export if resolved is None else str(resolved.model))
    source = start.init_from or config.weights
    if source is None:
        raise ConfigError(
            f"{name!r} is a preset without weights. Use a model directory, or the "
            "directory of the weights with --weights."
        )
    if start.init_from is not None and config.weights is not None:
        raise ConfigError(f"{name!r} already contains weights. Remove --weights.")
    directory = find_model(source)
    sizes = start.config
    if start.init_from is not None:
        sizes = sizes.replace(raw=read_config_file(directory))
    model = start.family.from_config(sizes, device="meta")
    adapter = None if resolved is None else resolved.adapter
    if adapter is not None:  # every process reads the whole base model
        model = start.family.from_pretrained(directory, **head_options(adapter, directory))
        read = partial(fingerprint_of_files, model, directory)
        check: dict[str, Any] = {"allow_other_base": allow_other_base, "base_fingerprint": read}
        load_delta(model, adapter, trainable=False, **check)
    mesh = build_mesh(layout, world.device)
    parallelize(model, layout, mesh=mesh, precision=config.precision, master_weights=False)
    if adapter is None:
        load_weights_(model, directory, device=world.device)
    else:
        directory = adapter
    rows = World(data_parallel_rank(mesh), data_parallel_size(mesh), world.device)
    longest = _length_in_run(directory) or min(sizes.max_seq_len, _LONGEST)
    limit = model.traits.row_limit(sizes)
    if config.seq_len is not None and limit is not None and config.seq_len > limit:
        raise ConfigError(
            f"seq_len={config.seq_len} is more than the model's {limit} positions. Use at most "
            f"{limit}."
        )
    return _Subject(
        model, _find_tokenizer(directory), directory, mesh, rows, config.seq_len or longest
    )


def _find_run(directory: Path) -> Path | None:
    """Return the directory of the run that wrote an export; None for any other directory."""
    run = directory.resolve().parent
    return run if directory.name == "export" and (run / "run.toml").is_file() else None


def _length_in_run(directory: Path) -> int | None:
    """Return the sequence length of the run that trained a model; None if unknown."""
    run = _find_run(directory)
    recorded = {} if run is None else tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))
    length = recorded.get("data", {}).get("seq_len")
    return length if isinstance(length, int) else None


def _find_tokenizer(directory: Path) -> Tokenizer | None:
    """Load the tokenizer of a model directory; return None if there is no tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(directory)
    except DataError as error:
        get_logger().info("the model has no tokenizer: %s", error)
        return None


def _need_tokenizer(subject: _Subject) -> Tokenizer:
    if subject.tokenizer is None:
        raise ConfigError(
            f"{str(subject.directory)!r} has no tokenizer, which is needed to evaluate "
            "texts and tasks. Copy the model's tokenizer there."
        )
    return subject.tokenizer


def _need_next_tokens(model: Model) -> None:
    if model.traits.attention != "causal" or not model.traits.can_generate:
        raise ConfigError(
            f"a {type(model).__name__} with the head {model.config.head!r} does not predict "
            "next tokens, so its perplexity is not defined. Evaluate it on tasks."
        )


def _open_text(subject: _Subject, path: str, config: EvaluateConfig) -> Measure:
    """Open text files, with BOS before every document; return a function that evaluates on them."""
    model, tokenizer = subject.model, _need_tokenizer(subject)
    _need_next_tokens(model)
    first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    begin = [] if first is None else [first]
    pairs: list[Pair] = []
    text_bytes = 0
    for document in normalize_documents(read_documents(path)):
        (ids,) = tokenizer.encode_plain([document.text])
        pairs += roll_windows(ids, begin, subject.seq_len)
        text_bytes += len(document.text.encode())
    if not pairs:
        raise DataError(f"{path!r} contains no token to predict. Use a longer text.")
    if not begin:
        get_logger().info(
            (
                "%s: bits per byte are not computed, because the tokenizer has no "
                "beginning-of-sequence token"
            ),
            path,
        )
    data = ExampleConfig(seq_len=subject.seq_len, micro_batch_size=config.micro_batch_size)
    source = AnswerRows(pairs, _RowSettings(model.config, data), reads_apart=False)
    rows = subject.rows
    batches = iter_held_out(source, data, rows.rank, rows.size)
    return lambda: _measure_text(subject, batches, text_bytes if begin else None)


def _open_prepared(subject: _Subject, path: str, config: EvaluateConfig) -> Measure:
    """Open a token store, in sequences as in training; return a function that evaluates on it."""
    _need_next_tokens(subject.model)
    held_out = open_held_out(
        path, subject.seq_len, subject.model.config.vocab_size, str(subject.directory)
    )
    rows = subject.rows
    batches = held_out.batches(config.micro_batch_size, rows.rank, rows.size)
    return lambda: _measure_text(subject, batches, held_out.text_bytes)


def _measure_text(
    subject: _Subject, batches: Iterable[Batch], text_bytes: int | None
) -> dict[str, float]:
    """Return the perplexity, and the bits per byte if the number of bytes is known."""
    evaluation = evaluate(subject.model, batches, mesh=subject.mesh, device=subject.rows.device)
    figures = {"perplexity": evaluation.perplexity}
    if text_bytes:
        figures["bits per byte"] = evaluation.bits_per_byte(text_bytes)
    return figures


def _open_task(subject: _Subject, name: str, config: EvaluateConfig) -> Measure:
    """Open a task, with prompts in the model's format; return a function that evaluates on it."""
    model, tokenizer = subject.model, _need_tokenizer(subject)
    data = _describe_task(name, subject, config)
    task = open_task(data)
    examples = (
        list(task.read(Path(name)))
        if data.task is None
        else read_task(data.task, data.paths[0], config.split)
    )[: config.examples]
    if not examples:
        raise DataError(
            f"{name!r} contains no example (needed: at least one). Choose another file."
        )
    reading = _RowSettings(model.config, data, config.max_new_tokens)
    traits = traits_of(model.config)
    form: Callable[..., EncodedTask]
    if traits.attention == "bidirectional" and not traits.has_images and not task.asks_for_text:
        has = model.config.num_labels if model.config.head == "sequence_classification" else 0
        if has != count_classes(task):
            raise ConfigError(
                f"{name} has {count_classes(task)} classes, but the {type(model).__name__} with "
                f"the head {model.config.head!r} has {has} classes. Fine-tune it first with "
                "`bmforge train classify`."
            )
        own = _own_labels(model)
        if order_labels(task.label_names, own) != tuple(task.label_names):
            raise ConfigError(
                f"the outputs of the classifier are {', '.join(own)}, but {name} has these labels "
                f"in the order {', '.join(task.label_names)}. Pass the examples as a .jsonl file, "
                "whose labels are matched by their names."
            )
        form = EncodedClasses
    elif traits.attention in ("causal", "encoder-decoder") and traits.can_generate:
        form = EncodedQuestions if task.asks_for_text else EncodedOptions
    else:
        raise ConfigError(
            f"a {type(model).__name__} with the head {model.config.head!r} cannot be "
            f"evaluated on {name}. Use a model with a language model head or a classifier."
        )
    return partial(form(task, examples, tokenizer, reading).measure, model, subject.rows)


def _describe_task(name: str, subject: _Subject, config: EvaluateConfig) -> TaskDataConfig:
    """Return the checked data config of a task."""
    sizes: dict[str, Any] = {
        "seq_len": subject.seq_len,
        "micro_batch_size": config.micro_batch_size,
    }
    if name.endswith(".jsonl"):
        own = _own_labels(subject.model)
        labels = order_labels(config.labels, own) or own
        if not labels:
            raise ConfigError(
                f"{name!r} is a custom task, whose labels bmforge cannot know. Pass the labels "
                "with --labels."
            )
        data_config = TaskDataConfig(labels=labels, fields=config.fields, paths=(name,), **sizes)
    else:
        refuse_pipe(name)
        if config.task_data is None:
            raise ConfigError(
                f"the folder with the data of {name} is not set. Pass it with --task-data."
            )
        data_config = TaskDataConfig(task=find_task(name).name, paths=(config.task_data,), **sizes)
    data_config.check()
    return data_config


def _own_labels(model: Model) -> tuple[str, ...]:
    """Return the label names of a classifier in order; empty for other models."""
    is_classifier = model.config.head == "sequence_classification"
    return label_names(model.config.raw) if is_classifier else ()


def _store_results(
    name: str, subject: _Subject, config: EvaluateConfig, layout: Layout, results: Results
) -> None:
    """Write the metrics to the output file, and add them to the results of the training run."""
    if config.out is not None:
        settings = {n: v for n, v in config_to_dict(config).items() if n != "out"}
        settings |= {"seq_len": subject.seq_len, "layout": layout.unusual()}
        content = {"model": name, "results": results, "settings": settings}
        replace_file(config.out, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    run = _find_run(subject.directory)
    if run is not None:
        try:
            add_results(run, results)
            get_logger().info("report: %s", write_report(run))
        except OSError as error:  # the metrics are still returned
            get_logger().warning(
                "the results of the evaluation could not be saved in the run directory: %s", error
            )
