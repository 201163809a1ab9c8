"""Few-shot prompt tuning: `prompt-classify` and `prompt-generate`.

A template converts an example to text, and the model predicts the class or generates the answer at
the template's mask. Template and label words are written to ``run_dir/prompt``, next to the export.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bmforge.data.tasks import BenchmarkTask, TaskExample
from bmforge.data.tasks.metrics import score_task
from bmforge.errors import ConfigError
from bmforge.infer.generation import generate
from bmforge.infer.score import collect_rows
from bmforge.logging import get_logger
from bmforge.models import Model
from bmforge.models.changes import Change
from bmforge.parallel import World, run_on_first
from bmforge.recipes.inputs.document_segments import open_tokenizer
from bmforge.recipes.inputs.examples import open_examples
from bmforge.recipes.inputs.prompt_parts import (
    describe_template,
    find_words,
    open_template,
    open_words,
)
from bmforge.recipes.inputs.task_data import TaskDataConfig, read_examples
from bmforge.recipes.run import Launch, Results, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.run_dir import add_results, check_new_run
from bmforge.recipes.start import complete_model_config, traits_of
from bmforge.train import EvalResult, OptimConfig, TrainConfig
from bmforge.tune.prompt import (
    PromptGenerator,
    PromptRows,
    TargetRows,
    draw_few,
    draw_rows_,
    parse_template,
    prompt_objective,
    target_objective,
)
from bmforge.tune.prompt.classifier import score_batch
from bmforge.tune.prompt.files import write_prompt
from bmforge.tune.prompt.soft import number_rows

__all__ = [
    "PromptDataConfig",
    "PromptGenerateConfig",
    "PromptTuneConfig",
    "train_classes",
    "train_texts",
]

# Name of the model change that adds the soft tokens of a template.
_ROWS = "embed.prompt.weight"


@dataclass(kw_only=True)
class PromptDataConfig(TaskDataConfig):
    """Data options of a prompt run; the other fields are those of `TaskDataConfig`.

    Args:
        shots: number of training examples per label, or in total for a task with text answers; 0
            means all.
        seeds: number of runs with different training examples and orders, in subdirectories of
            `run_dir`.
    """

    shots: int = 0
    seeds: int = 1


@dataclass(kw_only=True)
class PromptGenerateConfig(RunConfig):
    """Config for training generation at a template's mask.

    The other fields are those of `RunConfig`.

    Args:
        data: task, its files, and batch sizes.
        template: file with one template per line (if None: the templates of the task).
        template_class: custom class that replaces `Template`, as module:Class or file.py:Class; its
            module is executed (if empty: `Template`).
        choice: index of the template in its file, and of the verbalizer in its file; 0 is the
            first.
        soft_front: number of trained soft tokens at the beginning of the prompt.
        cut: truncation of long examples: "tail" removes tokens from the end, "head" from the
            beginning, and "balanced" from the end of every field in proportion to its length.
        max_new_tokens: maximum length in tokens of an answer that is generated for evaluation.
    """

    data: PromptDataConfig = field(default_factory=lambda: PromptDataConfig(seq_len=256))
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            steps=100, optim=OptimConfig(lr=2e-5, weight_decay=0.01)
        )
    )
    template: Path | None = None
    template_class: str = ""
    choice: int = 0
    soft_front: int = 0
    cut: str = "tail"
    max_new_tokens: int = 32


@dataclass(kw_only=True)
class PromptTuneConfig(PromptGenerateConfig):
    """Config for training classification with a prompt.

    The other fields are those of `PromptGenerateConfig`.

    Args:
        verbalizer: file with the label words of each class (if None: the verbalizers of the task).
        verbalizer_class: custom class that replaces `ManualVerbalizer`, as module:Class or
            file.py:Class; its module is executed, and its constructor receives `join`, unless
            `join` is "first" (if empty: `ManualVerbalizer`).
        join: score of a label word with several tokens: "first" (logit of the first token), "max"
            or "mean" (over the logits of all tokens at one mask), or "joint" (log-probability of
            the whole word).
        behind: handling of template text after the mask, which a causal model does not read:
            "refuse" (error), "leave out" (drop the text) or "score" (score the text after each
            label word).
        calibrate: number of unlabeled examples for contextual calibration; 0 disables it.
        zero_shot: evaluate the model without training; the run consists of one step with learning
            rate 0.
    """

    verbalizer: Path | None = None
    verbalizer_class: str = ""
    join: str = "first"
    behind: str = "refuse"
    calibrate: int = 0
    zero_shot: bool = False


def train_classes(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume training of a classifier that uses a prompt template.

    Args:
        config: a `PromptTuneConfig` with a field `model`, the config of the model to train.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    if config.zero_shot:
        optim = dataclasses.replace(config.train.optim, lr=0.0, weight_decay=0.0)
        config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, steps=1, optim=optim)
        )
    return _run_seeds(config, _open_classes, launch)


def train_texts(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume training of a model to generate text at a template's mask.

    Args:
        config: a `PromptGenerateConfig` with a field `model`, the config of the model to train.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return _run_seeds(config, _open_texts, launch)


def _run_seeds(config: Any, open_data: Any, launch: Launch) -> RunResult:
    """Train once for every seed; write the mean and standard deviation of the metrics."""
    data = config.data
    data.check()
    check_new_run(config.run_dir if data.seeds == 1 else config.run_dir / f"seed-{data.seed}")
    head = traits_of(config.model).generation_head
    head = "masked_lm" if "masked_lm" in config.model.heads else head
    config = _with_rows(config)
    if data.seeds == 1:
        return launch(config, open_data, head=head)
    for number in range(data.seeds):
        own = dataclasses.replace(data, seeds=1, seed=data.seed + number)
        seed_dir = config.run_dir / f"seed-{own.seed}"
        seed_config = dataclasses.replace(
            config, data=own, seed=config.seed + number, run_dir=seed_dir
        )
        result = launch(seed_config, open_data, head=head)
        if result.stopped:
            return result
    run_dirs = [config.run_dir / f"seed-{data.seed + number}" for number in range(data.seeds)]
    run_on_first(lambda: add_results(config.run_dir, _summarize(run_dirs)))
    return result


def _summarize(run_dirs: Sequence[Path]) -> Results:
    """Return the mean and standard deviation of the metrics of several runs."""
    results = [json.loads((run_dir / "results.json").read_text("utf-8")) for run_dir in run_dirs]
    summary: Results = {}
    for metric, values in results[0].items():
        rows = [result[metric]["model"] for result in results if "model" in values]
        if rows:
            summary[metric] = {"mean": statistics.fmean(rows), "std": statistics.stdev(rows)}
            get_logger().info(
                "%s: %.4f, standard deviation %.4f", metric, *summary[metric].values()
            )
    return summary


def _with_rows(config: Any) -> Any:
    """Add the template's soft tokens to the run's `changes`, and to the trained modules."""
    if any(change.kind == "prompt" for change in (*config.changes, *config.model.changes)):
        return _train_rows(config)  # the config of a resumed run already has the soft tokens
    text = open_template(config, *_look(config))
    rows, _ = number_rows(parse_template(text), open_tokenizer(complete_model_config(config)))
    count = config.soft_front + len(rows)
    if not count:
        return config
    change = Change("prompt", ("embed",), {"length": count})
    return _train_rows(dataclasses.replace(config, changes=(*config.changes, change)))


def _train_rows(config: Any) -> Any:
    """Add the soft tokens to the modules that the adapter trains and saves in full."""
    adapter = config.adapter
    if adapter.kind is None or _ROWS in adapter.modules_to_save:
        return config
    if adapter.kind == "soft-prompt":
        raise ConfigError(
            "the template has soft tokens, which adapter.kind='soft-prompt' would replace. Use "
            "soft_front for soft tokens before the text, or another adapter."
        )
    delta = dataclasses.replace(adapter, modules_to_save=(*adapter.modules_to_save, _ROWS))
    return dataclasses.replace(config, adapter=delta)


def _look(config: Any) -> tuple[BenchmarkTask, TaskExample]:
    task, train, _ = read_examples(config.data)
    return task, train[0]


def _read(config: Any) -> tuple[BenchmarkTask, list[TaskExample], list[TaskExample]]:
    """Return a task, its few-shot training examples, and its held-out examples."""
    task, train, dev = read_examples(config.data)
    shots = config.data.shots
    if shots:
        per_label, total = (0, shots) if task.asks_for_text else (shots, 0)
        labels = [example.label for example in train]
        drawn, _ = draw_few(labels, per_label=per_label, total=total, seed=config.data.seed)
        train = [train[number] for number in drawn]
    return task, train, dev


def _open_classes(config: Any, rows: World) -> TrainingData:
    task, train, dev = _read(config)
    tokenizer = open_tokenizer(config)
    text = open_template(config, task, train[0])
    template = describe_template(config, tokenizer, text)
    words = open_words(config, task, train[0], tokenizer, template.num_masks).to(rows.device)
    size, settings = config.data.micro_batch_size, (config.data.seq_len, config.cut)

    def source(examples: Sequence[TaskExample]) -> PromptRows:
        labels = [_label(example) for example in examples]
        return PromptRows(template, words, examples, labels, *settings)

    def score(model: Any, examples: PromptRows, which: int) -> Tensor:
        def read(numbers: Sequence[int]) -> Tensor:
            batch = examples.collate([examples.make(n, ()) for n in numbers])
            inputs = {n: t.to(rows.device) for n, t in batch.items() if n != "labels"}
            scores = score_batch(model, words, inputs)
            assert scores is not None
            return scores[which]

        return collect_rows(model, len(examples), read, size, rows)

    def begin(model: Model) -> None:
        if template.rows:
            draw_rows_(model, template.rows, config.seed)
        _write(config, text, find_words(config, task, train[0]))
        if config.calibrate:
            words.calibrate_(score(model, source(train[: config.calibrate]), 1))

    def figures(model: Model, evaluation: EvalResult) -> Results:
        chosen = score(model, source(dev), 0).argmax(-1).tolist()
        answers: list[Any] = [
            e.choices[c] if isinstance(e.label, str) else c
            for c, e in zip(chosen, dev, strict=True)
        ]
        return {m: {"model": v} for m, v in score_task(task.name, answers, dev).items()}

    return open_examples(
        source(train),
        source(dev) if dev else None,
        config.data,
        rows,
        objective=prompt_objective(words),
        save_tokenizer=tokenizer.save_pretrained,
        figures=figures,
        begin=begin,
    )


def _label(example: TaskExample) -> int:
    """Return the index of an example's class."""
    if isinstance(example.label, str):
        return example.choices.index(example.label)
    if example.label is None:
        raise ConfigError(f"example {example.idx} has no label. Train on a split that has labels.")
    return example.label


def _open_texts(config: Any, rows: World) -> TrainingData:
    task, train, dev = _read(config)
    tokenizer = open_tokenizer(config)
    text = open_template(config, task, train[0])
    template = describe_template(config, tokenizer, text)

    def source(examples: Sequence[TaskExample]) -> TargetRows:
        targets = [_target(task, example) for example in examples]
        return TargetRows(template, examples, targets, config.data.seq_len, config.cut)

    def begin(model: Model) -> None:
        if template.rows:
            draw_rows_(model, template.rows, config.seed)
        _write(config, text, {})

    def figures(model: Any, evaluation: EvalResult) -> Results:
        writer = PromptGenerator(model, template, generate)
        length = config.data.seq_len - config.max_new_tokens
        written = writer.write(
            dev, config.data.micro_batch_size, length, max_new_tokens=config.max_new_tokens
        )
        named = written if task.asks_for_text else [_number(task, answer) for answer in written]
        return {m: {"model": v} for m, v in score_task(task.name, named, dev).items()}

    return open_examples(
        source(train),
        source(dev) if dev else None,
        config.data,
        rows,
        objective=target_objective,
        save_tokenizer=tokenizer.save_pretrained,
        figures=figures,
        begin=begin,
    )


def _target(task: BenchmarkTask, example: TaskExample) -> str:
    """Return the target text of an example."""
    if example.answers:
        return example.answers[0]
    if isinstance(example.label, int):
        return (example.choices or task.label_names)[example.label]
    raise ConfigError(f"example {example.idx} has no answer. Train on a split that has answers.")


def _number(task: BenchmarkTask, written: str) -> int:
    """Return the index of the class whose name was generated; -1 if no class matches."""
    names = [name.lower() for name in task.label_names]
    return names.index(written.lower()) if written.lower() in names else -1


def _write(config: Any, text: str, words: Mapping[str, Sequence[str]]) -> None:
    """Write the template and the label words next to the export."""
    base_name = f"`{config.init_from}`" if config.init_from else "a randomly initialized model"
    task = config.data.task or "a user-defined task"
    kinds = [
        f"It is read by `{option_value}`.\n"
        for name in ("template_class", "verbalizer_class")
        if (option_value := getattr(config, name, ""))
    ]
    card = (
        f"# A prompt for {task}\n\n{type(config.model).__name__.removesuffix('Config')}, from "
        f"{base_name}; {config.data.shots or 'all'} examples of a label, seed "
        f"{config.data.seed}.\n\n"
        f"    {text}\n\nRead it with `bmforge.tune.prompt.read_template` and `read_verbalizer`, "
        f"or pass the files to `bmforge train prompt-classify`.\n{''.join(kinds)}"
    )
    if _ROWS in config.adapter.modules_to_save and not config.adapter.merge:
        card += (
            "\nThe adapter in `export` contains the soft tokens of the template: load the base "
            "model, create the template on it, then call `load_delta(model, 'export')`.\n"
        )
    folder = config.run_dir / "prompt"
    rows = list(words.values())
    run_on_first(lambda: write_prompt(folder, text, rows, list(words), card))
