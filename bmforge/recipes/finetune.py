"""Fine-tuning on published tasks: SuperGLUE's, CLUE's and others, and questions on a text.

An encoder classifies; of a task with choices it says of each whether it is right. Decoders and
encoder-decoders write: a label's word, or the right choice, is learned after its prompt, and of all
that could be answered the likeliest is taken. `results.json` has the task's own metrics on the
held-out split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.data import Batch
from bmforge.data.tasks import TASKS, TaskExample, read_task
from bmforge.data.tasks.metrics import score_task
from bmforge.data.tasks.rows import (
    AnswerRows,
    ClassRows,
    Pair,
    continue_prompt,
    decode_answer,
    encode_answers,
    fill_prompt,
    right_options,
)
from bmforge.data.tasks.wording import Wording, word_task
from bmforge.errors import ConfigError, DataError, suggest
from bmforge.infer.score import score_answers, score_classes, write_answers
from bmforge.models import Model
from bmforge.models.bert import BertConfig
from bmforge.models.gpt2 import GPT2Config
from bmforge.models.llama import LlamaConfig
from bmforge.models.t5 import T5Config
from bmforge.parallel import World
from bmforge.recipes.inputs.examples import ExampleConfig, collate, open_examples
from bmforge.recipes.inputs.pieces import open_tokenizer
from bmforge.recipes.run import Results, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import change_model, check_length, traits_of
from bmforge.tokenizers import Tokenizer
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
]


@dataclass(kw_only=True)
class TaskDataConfig(ExampleConfig):
    """What is learned; the fields not named here are `ExampleConfig`'s.

    Args:
        task: a name in `bmforge.data.tasks.TASKS`.
        paths: one folder: the task's own, or the one that holds a folder of its name.
        train_split: what is learned from.
        dev_split: what is held out; None evaluates nothing.
        seq_len: longest row in tokens; longer texts are cut.
    """

    task: str = "BoolQ"
    train_split: str = "train"
    dev_split: str | None = "dev"

    def check(self) -> None:
        """Raise `ConfigError` for a number out of range, an unknown task, or not one folder."""
        super().check()
        if self.task not in TASKS:
            raise ConfigError(
                f"data.task={self.task!r} is unknown.{suggest(self.task, TASKS)} "
                f"Known: {', '.join(TASKS)}."
            )
        if len(self.paths) != 1:
            raise ConfigError(f"data.paths={list(self.paths)} must be the one folder of the task.")
        if self.validation or self.split:
            raise ConfigError(
                "a task has splits of its own: set data.dev_split, and leave out data.validation "
                "and data.split."
            )


@dataclass(kw_only=True)
class TaskTuneConfig(RunConfig):
    """Fine-tune on a task; the fields not named here are `RunConfig`'s.

    Args:
        data: the task.
    """

    data: TaskDataConfig = field(default_factory=lambda: TaskDataConfig(seq_len=256))
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(optim=OptimConfig(lr=2e-5, weight_decay=0.01))
    )


@dataclass(kw_only=True)
class BertSuperGLUEConfig(TaskTuneConfig):
    """Fine-tune a BERT to classify; `model` is its size, with `init_from` that model's."""

    new_head: bool = True
    run_dir: Path = Path("runs/bert-superglue")
    model: BertConfig = field(default_factory=lambda: BertConfig.preset("bert-base-uncased"))


@dataclass(kw_only=True)
class T5SuperGLUEConfig(TaskTuneConfig):
    """Fine-tune a T5 to answer; `model` is its size, with `init_from` that model's."""

    run_dir: Path = Path("runs/t5-superglue")
    model: T5Config = field(default_factory=lambda: T5Config.preset("t5-v1_1-small"))


@dataclass(kw_only=True)
class GPT2SuperGLUEConfig(TaskTuneConfig):
    """Fine-tune a GPT-2 to answer; `model` is its size, with `init_from` that model's."""

    run_dir: Path = Path("runs/gpt2-superglue")
    model: GPT2Config = field(default_factory=lambda: GPT2Config.preset("gpt2-small"))


@dataclass(kw_only=True)
class LlamaSuperGLUEConfig(TaskTuneConfig):
    """Fine-tune a Llama to answer; `model` is its size, with `init_from` that model's."""

    run_dir: Path = Path("runs/llama-superglue")
    model: LlamaConfig = field(default_factory=lambda: LlamaConfig.preset("llama-3.2-1b"))


@dataclass(kw_only=True)
class SQuADTuneConfig(TaskTuneConfig):
    """Fine-tune on questions on a text (SQuAD 1.1, and tasks of its form).

    Args:
        max_new_tokens: longest answer that is written when it is evaluated.
    """

    data: TaskDataConfig = field(default_factory=lambda: TaskDataConfig(task="SQuAD", seq_len=512))
    max_new_tokens: int = 32


@dataclass(kw_only=True)
class T5SQuADConfig(SQuADTuneConfig):
    """Fine-tune a T5 to answer questions; `model` is its size, with `init_from` that model's."""

    run_dir: Path = Path("runs/t5-squad")
    model: T5Config = field(default_factory=lambda: T5Config.preset("t5-v1_1-small"))


def tune_task(config: Any) -> RunResult:
    """Run, or go on with, fine-tuning on a task of which every example has options.

    Args:
        config: a `TaskTuneConfig` with the `model` of an encoder, which classifies, or of a decoder
            or encoder-decoder, which writes.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    config.data.check()
    traits = traits_of(config.model)
    if traits.reads == "both":
        labels = len(TASKS[config.data.task].label_names) or 2
        config = change_model(config, head="sequence_classification", num_labels=labels)
        return run_recipe(config, _open_classes, head="sequence_classification")
    return run_recipe(config, _open_answers, head=traits.writing_head)


def tune_squad(config: Any) -> RunResult:
    """Run, or go on with, fine-tuning on questions whose answer is a text.

    Args:
        config: a `SQuADTuneConfig` with the `model` of a decoder or encoder-decoder.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    return run_recipe(config, _open_squad, head=traits_of(config.model).writing_head)


def _read(config: Any) -> tuple[list[TaskExample], list[TaskExample]]:
    """Return the examples to learn from and those held out."""
    data = config.data
    data.check()
    check_length(config)
    train = read_task(data.task, data.paths[0], data.train_split)
    held_out = []
    if data.dev_split is not None:
        held_out = read_task(data.task, data.paths[0], data.dev_split)
        if data.validation_batches is not None:
            held_out = held_out[: data.validation_batches * data.micro_batch_size]
    if not train:
        raise DataError(f"{data.task} has no example to learn from in {data.paths[0]!r}.")
    return train, held_out


def _word(config: Any, example: TaskExample) -> Wording:
    """Return the task's wording, once it is clear that its examples have options."""
    wording = word_task(TASKS[config.data.task], example)
    if not wording.options(example):
        raise ConfigError(
            f"data.task={config.data.task!r} asks for a text, and has nothing to choose from. "
            "Train on it with the task squad (or the recipe t5-squad)."
        )
    return wording


def _choose(
    scores: Sequence[float], examples: Sequence[TaskExample], wording: Wording
) -> list[Any]:
    """Return what `score_task` wants: the best option of every example, as number or as text."""
    chosen: list[Any] = []
    at = 0
    for example in examples:
        options = wording.options(example)
        mine = scores[at : at + len(options)]
        at += len(options)
        best = max(range(len(options)), key=mine.__getitem__)
        chosen.append(options[best] if isinstance(example.label, str) else best)
    return chosen


def _figures(name: str, predicted: list[Any], examples: Sequence[TaskExample]) -> Results:
    found = score_task(name, predicted, examples)
    return {metric: {"model": value} for metric, value in found.items()}


def _class_rows(
    examples: Sequence[TaskExample], wording: Wording
) -> list[tuple[tuple[str, ...], int]]:
    """Return texts and classes: a row for every example, or for every one of its choices."""
    rows = []
    for example in examples:
        right = right_options(example, wording.options(example))
        if not example.choices:
            rows.append((wording.write_segments(example), right[0]))
        for number, choice in enumerate(example.choices):
            rows.append((wording.write_segments(example, choice), int(number in right)))
    return rows


def _open_classes(config: Any, rows: World) -> TrainingData:
    train, dev = _read(config)
    tokenizer, data = open_tokenizer(config), config.data
    labels = len(TASKS[data.task].label_names) or 2
    if config.model.num_labels != labels:
        raise ConfigError(
            f"init_from={config.init_from!r} classifies into {config.model.num_labels}, and "
            f"{data.task} has {labels} labels. Start from a checkpoint without a classifier."
        )
    wording = _word(config, train[0])
    marks = traits_of(config.model).marks_between
    source = ClassRows(_class_rows(train, wording), tokenizer, config, marks)
    held_out = ClassRows(_class_rows(dev, wording), tokenizer, config, marks) if dev else None

    def make(numbers: Sequence[int]) -> Batch:
        assert held_out is not None
        return collate([held_out.make(n, ()) for n in numbers], held_out.columns)

    def figures(model: Model, evaluation: EvalResult) -> Results:
        assert held_out is not None
        logits = score_classes(model, len(held_out), make, data.micro_batch_size, rows)
        if dev[0].choices:
            predicted = _choose((logits[:, 1] - logits[:, 0]).tolist(), dev, wording)
        else:
            predicted = logits.argmax(-1).tolist()
        return _figures(data.task, predicted, dev)

    return open_examples(
        source,
        held_out,
        data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
        figures=figures,
    )


def _pairs(
    examples: Sequence[TaskExample], wording: Wording, tokenizer: Tokenizer, config: Any
) -> list[list[Pair]]:
    """Return every example's prompt with each of its options."""
    width, traits, found = config.data.seq_len, traits_of(config.model), []
    for example in examples:
        options, prompt = wording.options(example), wording.write_prompt(example)
        if traits.reads == "apart":
            read = fill_prompt(prompt, "", tokenizer, width, traits.sentinel)
            answers = encode_answers(options, tokenizer, traits.answer_sentinel)
            found.append([Pair(read, a) for a in answers])
        else:
            found.append(continue_prompt(prompt, options, tokenizer, width))
    return found


def _open_answers(config: Any, rows: World) -> TrainingData:
    train, dev = _read(config)
    tokenizer, data = open_tokenizer(config), config.data
    wording = _word(config, train[0])

    def learned(examples: Sequence[TaskExample], pairs: Sequence[list[Pair]]) -> AnswerRows:
        firsts = (right_options(e, wording.options(e))[0] for e in examples)
        right = [options[n] for n, options in zip(firsts, pairs, strict=True)]
        return AnswerRows(right, config, traits_of(config.model).reads == "apart")

    pairs = _pairs(dev, wording, tokenizer, config)

    def figures(model: Model, evaluation: EvalResult) -> Results:
        flat = [pair for options in pairs for pair in options]
        scores = score_answers(model, flat, data.micro_batch_size, rows, data.seq_len)
        return _figures(data.task, _choose(scores, dev, wording), dev)

    return open_examples(
        learned(train, _pairs(train, wording, tokenizer, config)),
        learned(dev, pairs) if dev else None,
        data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
        figures=figures,
    )


def _ask(config: Any, examples: Sequence[TaskExample], tokenizer: Tokenizer) -> list[Pair]:
    """Return every question on its text, with its first answer."""
    data, traits = config.data, traits_of(config.model)
    unanswered = [example.idx for example in examples if not example.answers]
    if unanswered:
        raise DataError(f"{data.task}: these questions have no answer: {unanswered[:5]}.")
    asked = [f"Question: {e.fields['question'].strip()} Answer:" for e in examples]
    texts = [f"Context: {e.fields['context'].strip()}" for e in examples]
    right = [example.answers[0] for example in examples]
    if traits.reads == "left":  # what is too long loses its beginning, so the question is last
        prompts = [f"{text} {question}" for text, question in zip(texts, asked, strict=True)]
        return [
            continue_prompt(prompt, [answer], tokenizer, data.seq_len)[0]
            for prompt, answer in zip(prompts, right, strict=True)
        ]
    answers = encode_answers(right, tokenizer, traits.answer_sentinel)
    return [
        Pair(fill_prompt(question, text, tokenizer, data.seq_len, traits.sentinel), answer)
        for question, text, answer in zip(asked, texts, answers, strict=True)
    ]


def _open_squad(config: Any, rows: World) -> TrainingData:
    train, dev = _read(config)
    tokenizer, data = open_tokenizer(config), config.data
    traits = traits_of(config.model)
    if not {"question", "context"} <= set(train[0].fields):
        raise ConfigError(
            f"data.task={data.task!r} has no question on a context. Tasks that have are SQuAD, "
            "cmrc2018 and drcd; for one with choices use the task classify (or t5-superglue)."
        )
    held_out = _ask(config, dev, tokenizer)

    def figures(model: Model, evaluation: EvalResult) -> Results:
        prompts = [pair.prompt for pair in held_out]
        sizes = (data.micro_batch_size, rows, data.seq_len, config.max_new_tokens)
        written = write_answers(model, prompts, *sizes)
        answers = [decode_answer(ids, tokenizer, traits.sentinel) for ids in written]
        return _figures(data.task, answers, dev)

    apart = traits.reads == "apart"
    return open_examples(
        AnswerRows(_ask(config, train, tokenizer), config, apart),
        AnswerRows(held_out, config, apart) if dev else None,
        data,
        rows,
        save_tokenizer=tokenizer.save_pretrained,
        figures=figures,
    )
