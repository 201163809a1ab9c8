"""Fine-tuning on published tasks, user-defined classification, and questions on a context.

An encoder learns to classify; decoders and encoder-decoders learn to generate a label's word, or
the correct choice, after a prompt. `results.json` has the task's metrics on the held-out split,
which `task_prompts.py` computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models import Model
from bmforge.models.bert import BertConfig
from bmforge.models.config_file import read_config_file
from bmforge.models.gpt2 import GPT2Config
from bmforge.models.hub import find_model
from bmforge.models.llama import LlamaConfig
from bmforge.models.t5 import T5Config
from bmforge.parallel import World
from bmforge.recipes.inputs.document_segments import open_tokenizer
from bmforge.recipes.inputs.examples import open_examples
from bmforge.recipes.inputs.task_data import (
    TaskDataConfig,
    label_names,
    open_task,
    order_labels,
    read_examples,
)
from bmforge.recipes.run import Launch, Results, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import change_model, traits_of
from bmforge.recipes.task_prompts import (
    EncodedClasses,
    EncodedOptions,
    EncodedQuestions,
    EncodedTask,
    count_classes,
)
from bmforge.train import EvalResult, OptimConfig, TrainConfig

__all__ = [
    "BertSuperGLUEConfig",
    "GPT2SuperGLUEConfig",
    "LlamaSuperGLUEConfig",
    "SQuADTuneConfig",
    "T5SQuADConfig",
    "T5SuperGLUEConfig",
    "TaskDataConfig",
    "TaskTuneConfig",
    "tune_squad",
    "tune_task",
    "with_classes",
]


@dataclass(kw_only=True)
class TaskTuneConfig(RunConfig):
    """Config for fine-tuning on a task; the other fields are those of `RunConfig`.

    Args:
        data: task, its files, and batch sizes.
    """

    data: TaskDataConfig = field(default_factory=lambda: TaskDataConfig(seq_len=256))
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(optim=OptimConfig(lr=2e-5, weight_decay=0.01))
    )


@dataclass(kw_only=True)
class BertSuperGLUEConfig(TaskTuneConfig):
    """Config for fine-tuning BERT as a classifier on a SuperGLUE task.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    new_head: bool = True
    run_dir: Path = Path("runs/bert-superglue")
    model: BertConfig = field(default_factory=lambda: BertConfig.preset("bert-base-uncased"))


@dataclass(kw_only=True)
class T5SuperGLUEConfig(TaskTuneConfig):
    """Config for fine-tuning T5 to generate the answers of a SuperGLUE task.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    run_dir: Path = Path("runs/t5-superglue")
    model: T5Config = field(default_factory=lambda: T5Config.preset("t5-v1_1-small"))


@dataclass(kw_only=True)
class GPT2SuperGLUEConfig(TaskTuneConfig):
    """Config for fine-tuning GPT-2 to generate the answers of a SuperGLUE task.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    run_dir: Path = Path("runs/gpt2-superglue")
    model: GPT2Config = field(default_factory=lambda: GPT2Config.preset("gpt2-small"))


@dataclass(kw_only=True)
class LlamaSuperGLUEConfig(TaskTuneConfig):
    """Config for fine-tuning Llama to generate the answers of a SuperGLUE task.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    run_dir: Path = Path("runs/llama-superglue")
    model: LlamaConfig = field(default_factory=lambda: LlamaConfig.preset("llama-3.2-1b"))


@dataclass(kw_only=True)
class SQuADTuneConfig(TaskTuneConfig):
    """Config for fine-tuning on questions about a context (SQuAD 1.1, and tasks in its format).

    Args:
        max_new_tokens: maximum length of a generated answer in evaluation.
    """

    data: TaskDataConfig = field(default_factory=lambda: TaskDataConfig(task="SQuAD", seq_len=512))
    max_new_tokens: int = 32


@dataclass(kw_only=True)
class T5SQuADConfig(SQuADTuneConfig):
    """Config for fine-tuning T5 to answer questions about a context.

    Fields set in `model` override those of the checkpoint in `init_from`.
    """

    run_dir: Path = Path("runs/t5-squad")
    model: T5Config = field(default_factory=lambda: T5Config.preset("t5-v1_1-small"))


def tune_task(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume fine-tuning on a task with answer options: classes, or choices per example.

    Args:
        config: a `TaskTuneConfig` whose `model` is the config of an encoder, which is trained to
            classify, or of a decoder or encoder-decoder, which is trained to generate.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    config, traits = with_classes(config), traits_of(config.model)
    if traits.attention == "bidirectional":
        return launch(config, _open_classes, head="sequence_classification")
    return launch(config, partial(_open, EncodedOptions), head=traits.generation_head)


def with_classes(config: Any) -> Any:
    """Check the data config, and set an encoder's number of outputs to the task's classes.

    If user data has the labels of the initial model's classifier, the labels are sorted into the
    order of the classifier's outputs.
    """
    config.data.check()
    if traits_of(config.model).attention != "bidirectional":
        return config
    if config.data.labels and config.init_from is not None:
        names = label_names(read_config_file(find_model(config.init_from)))
        ordered = order_labels(config.data.labels, names)
        if ordered != tuple(config.data.labels):
            get_logger().info("labels in the order of %s: %s", config.init_from, ", ".join(names))
            config = dataclasses.replace(
                config, data=dataclasses.replace(config.data, labels=ordered)
            )
    labels = count_classes(open_task(config.data))
    return change_model(config, head="sequence_classification", num_labels=labels)


def tune_squad(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume fine-tuning on questions that have a free-text answer.

    Args:
        config: a `SQuADTuneConfig` whose `model` is the config of a decoder or encoder-decoder.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    run = partial(_open, EncodedQuestions)
    return launch(config, run, head=traits_of(config.model).generation_head)


def _open_classes(config: Any, rows: World) -> TrainingData:
    task = open_task(config.data)
    if config.model.num_labels != count_classes(task):
        raise ConfigError(
            f"init_from={config.init_from!r} has {config.model.num_labels} classes, but "
            f"{task.name} has {count_classes(task)} labels. Start from a checkpoint without a "
            "classifier."
        )
    names = task.label_names
    words = {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    return _open(EncodedClasses, config, rows, special_ids=words if names else {})


def _open(
    form: Callable[..., EncodedTask], config: Any, rows: World, **fields: Any
) -> TrainingData:
    """Load a task as `TrainingData`.

    Args:
        form: class that encodes the examples for the model, such as `EncodedClasses`.
        config: the run's config.
        rows: data-parallel rank and size of this process.
        fields: further fields of `TrainingData`.
    """
    task, train, dev = read_examples(config.data)
    tokenizer = open_tokenizer(config)
    learned = form(task, train, tokenizer, config)
    held_out = form(task, dev, tokenizer, config) if dev else None

    def figures(model: Model, evaluation: EvalResult) -> Results:
        assert held_out is not None
        metrics = held_out.measure(model, rows)
        return {metric: {"model": value} for metric, value in metrics.items()}

    return open_examples(
        learned.source,
        None if held_out is None else held_out.source,
        config.data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
        figures=figures,
        **fields,
    )
