"""Task prompts and metrics, for fine-tuning and evaluation.

An encoder classifies; for a task with choices it classifies each choice as correct or wrong. A
decoder or encoder-decoder answers with the most likely option, or generates text if the task
requires it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bmforge.data import Batch
from bmforge.data.tasks import BenchmarkTask, TaskExample
from bmforge.data.tasks.metrics import score_task
from bmforge.data.tasks.rows import AnswerRows, ClassRows, Pair, continue_prompt, right_options
from bmforge.data.tasks.wording import Wording, word_task
from bmforge.errors import ConfigError, DataError
from bmforge.infer.score import score_answers, score_classes, write_answers
from bmforge.models import Model
from bmforge.parallel import World
from bmforge.recipes.inputs.examples import ExampleSource, collate
from bmforge.recipes.start import traits_of
from bmforge.tokenizers import Tokenizer
from bmforge.tokenizers.sentinels import decode_answer, encode_answers, fill_prompt

__all__ = ["EncodedClasses", "EncodedOptions", "EncodedTask", "EncodedQuestions", "count_classes"]


class EncodedTask(Protocol):
    """Interface of a task encoded for a model: its examples in the input format, and its metrics.

    Attributes:
        source: `ExampleSource` of the encoded examples with the correct answers.
    """

    source: ExampleSource

    def measure(self, model: Model, rows: World) -> dict[str, float]:
        """Return a model's metrics on the task, the same on every process. Collective.

        Args:
            model: the model, parallelized or not.
            rows: data-parallel rank and size of this process.
        """


def count_classes(task: BenchmarkTask) -> int:
    """Return an encoder's number of classes: one per label, or 2 for a task with choices."""
    return len(task.label_names) or 2


class EncodedClasses:
    """Examples for classification by an encoder; implements `EncodedTask`.

    Args:
        task: the task of the examples.
        examples: at least one example.
        tokenizer: the model's tokenizer.
        config: run config with `model`, and with `seq_len` and `micro_batch_size` in `data`.

    Raises:
        ConfigError: the task expects a free-form text, or the tokenizer has no separator token.
    """

    def __init__(
        self,
        task: BenchmarkTask,
        examples: Sequence[TaskExample],
        tokenizer: Tokenizer,
        config: Any,
    ) -> None:
        self._task, self._examples = task, examples
        self._size = config.data.micro_batch_size
        self._wording = _find_wording(task, examples[0])
        marks = traits_of(config.model).marks_between
        rows = _class_rows(examples, self._wording)
        self.source: Any = ClassRows(rows, tokenizer, config, marks)

    def measure(self, model: Model, rows: World) -> dict[str, float]:
        """Return the classification metrics; see `EncodedTask`."""
        source = self.source

        def make(numbers: Sequence[int]) -> Batch:
            return collate([source.make(n, ()) for n in numbers], source.columns)

        logits = score_classes(model, len(source), make, self._size, rows)
        if self._examples[0].choices:
            margins = (logits[:, 1] - logits[:, 0]).tolist()
            chosen = _choose(margins, self._examples, self._wording)
        else:
            chosen = logits.argmax(-1).tolist()
        return score_task(self._task.name, chosen, self._examples)


class EncodedOptions:
    """Multiple-choice examples whose options a generative model scores by likelihood.

    The arguments are those of `EncodedClasses`.

    Raises:
        ConfigError: the task expects a free-form text.
    """

    def __init__(
        self,
        task: BenchmarkTask,
        examples: Sequence[TaskExample],
        tokenizer: Tokenizer,
        config: Any,
    ) -> None:
        self._task, self._examples, self._data = task, examples, config.data
        self._wording = wording = _find_wording(task, examples[0])
        self._pairs = _pairs(examples, wording, tokenizer, config)
        firsts = (right_options(e, wording.options(e))[0] for e in examples)
        right = [options[n] for n, options in zip(firsts, self._pairs, strict=True)]
        self.source: Any = AnswerRows(right, config, traits_of(config.model).is_encoder_decoder)

    def measure(self, model: Model, rows: World) -> dict[str, float]:
        """Return the metrics of the most likely options; see `EncodedTask`."""
        flat, data = [pair for options in self._pairs for pair in options], self._data
        scores = score_answers(model, flat, data.micro_batch_size, rows, data.seq_len)
        chosen = _choose(scores, self._examples, self._wording)
        return score_task(self._task.name, chosen, self._examples)


class EncodedQuestions:
    """Questions on a context, answered by generated text; implements `EncodedTask`.

    Args:
        task: the task of the examples.
        examples: at least one example.
        tokenizer: the model's tokenizer.
        config: run config as in `EncodedClasses`, and with `max_new_tokens`.

    Raises:
        ConfigError: the task does not ask questions on a context.
        DataError: a question has no answer.
    """

    def __init__(
        self,
        task: BenchmarkTask,
        examples: Sequence[TaskExample],
        tokenizer: Tokenizer,
        config: Any,
    ) -> None:
        if not {"question", "context"} <= set(examples[0].fields):
            raise ConfigError(
                f"data.task={task.name!r} has no questions about a context (supported: SQuAD, "
                "cmrc2018 and drcd). For a task with answer choices, use `bmforge train classify` "
                "or `bmforge train t5-superglue`."
            )
        self._task, self._examples, self._config = task, examples, config
        self._tokenizer, self._traits = tokenizer, traits_of(config.model)
        self._pairs = _ask(task, examples, tokenizer, config)
        self.source: Any = AnswerRows(self._pairs, config, self._traits.is_encoder_decoder)

    def measure(self, model: Model, rows: World) -> dict[str, float]:
        """Return the metrics of greedily generated answers; see `EncodedTask`."""
        prompts, data = [pair.prompt for pair in self._pairs], self._config.data
        sizes = (data.micro_batch_size, rows, data.seq_len, self._config.max_new_tokens)
        written = write_answers(model, prompts, *sizes)
        sentinel = self._traits.sentinel
        answers = [decode_answer(ids, self._tokenizer, sentinel) for ids in written]
        return score_task(self._task.name, answers, self._examples)


def _find_wording(task: BenchmarkTask, example: TaskExample) -> Wording:
    """Return a task's prompt templates; raise `ConfigError` if it has no answer options."""
    wording = word_task(task, example)
    if not wording.options(example):
        raise ConfigError(
            f"data.task={task.name!r} needs generated text and has no answer choices. Use "
            "`bmforge train squad` or `bmforge train t5-squad`."
        )
    return wording


def _choose(
    scores: Sequence[float], examples: Sequence[TaskExample], wording: Wording
) -> list[Any]:
    """Return the most likely option of every example, in the form that `score_task` expects."""
    chosen: list[Any] = []
    at = 0
    for example in examples:
        options = wording.options(example)
        own_scores = scores[at : at + len(options)]
        at += len(options)
        best = max(range(len(options)), key=own_scores.__getitem__)
        chosen.append(options[best] if isinstance(example.label, str) else best)
    return chosen


def _class_rows(
    examples: Sequence[TaskExample], wording: Wording
) -> list[tuple[tuple[str, ...], int]]:
    """Return (text segments, class index) pairs: one per example, or one per answer choice."""
    rows = []
    for example in examples:
        right = right_options(example, wording.options(example))
        if not example.choices:
            rows.append((wording.write_segments(example), right[0]))
        for number, choice in enumerate(example.choices):
            rows.append((wording.write_segments(example, choice), int(number in right)))
    return rows


def _pairs(
    examples: Sequence[TaskExample], wording: Wording, tokenizer: Tokenizer, config: Any
) -> list[list[Pair]]:
    """Return, for every example, (prompt, option) pairs of all options, as token ids."""
    width, traits, pairs = config.data.seq_len, traits_of(config.model), []
    for example in examples:
        options, prompt = wording.options(example), wording.write_prompt(example)
        if traits.is_encoder_decoder:
            read = fill_prompt(prompt, "", tokenizer, width, traits.sentinel)
            answers = encode_answers(options, tokenizer, traits.answer_sentinel)
            pairs.append([Pair(read, a) for a in answers])
        else:
            pairs.append(continue_prompt(prompt, options, tokenizer, width))
    return pairs


def _ask(
    task: BenchmarkTask, examples: Sequence[TaskExample], tokenizer: Tokenizer, config: Any
) -> list[Pair]:
    """Return a (question with context, first answer) pair for every example, as token ids."""
    width, traits = config.data.seq_len, traits_of(config.model)
    unanswered = [example.idx for example in examples if not example.answers]
    if unanswered:
        raise DataError(
            f"{task.name} contains questions without an answer: {unanswered[:5]}. Remove these "
            "questions."
        )
    questions = [f"Question: {e.fields['question'].strip()} Answer:" for e in examples]
    texts = [f"Context: {e.fields['context'].strip()}" for e in examples]
    right = [example.answers[0] for example in examples]
    if traits.attention == "causal":  # truncation removes the beginning, so the question comes last
        prompts = [f"{text} {question}" for text, question in zip(texts, questions, strict=True)]
        return [
            continue_prompt(prompt, [answer], tokenizer, width)[0]
            for prompt, answer in zip(prompts, right, strict=True)
        ]
    answers = encode_answers(right, tokenizer, traits.answer_sentinel)
    return [
        Pair(fill_prompt(question, text, tokenizer, width, traits.sentinel), answer)
        for question, text, answer in zip(questions, texts, answers, strict=True)
    ]
