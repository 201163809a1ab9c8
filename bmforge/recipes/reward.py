"""Training of reward models (`bmforge train reward`).

An outcome reward model is a sequence classifier with one output, trained on pairs of answers. A
process reward model is a token classifier with two classes, trained on labels of reasoning steps.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bmforge.align.reward import ProcessRewardObjective, RewardObjective
from bmforge.data.sources.step_labels import read_step_labels
from bmforge.errors import ConfigError
from bmforge.files import replace_file
from bmforge.logging import get_logger
from bmforge.parallel import World
from bmforge.recipes.inputs.examples import open_examples
from bmforge.recipes.inputs.preference_rows import PreferencePairs
from bmforge.recipes.inputs.step_rows import LabeledSteps, encode_steps
from bmforge.recipes.preferences import PairData, encode_files, open_template
from bmforge.recipes.prefix_sharing import refuse_prefix_sharing
from bmforge.recipes.reward_scores import PROCESS_HEAD, STEP_FILE, STEP_SEPARATOR
from bmforge.recipes.run import Launch, RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import change_model
from bmforge.train import OptimConfig, TrainConfig

__all__ = ["RewardConfig", "train_reward", "with_reward_head"]

_HEAD = "sequence_classification"


@dataclass(kw_only=True)
class RewardConfig(RunConfig):
    """Config for training a reward model; the other fields are those of `RunConfig`.

    Args:
        data: `paths` are JSON files or tables, or folders of them, with `prompt`,
            `chosen` and `rejected` (texts or messages), and optionally `margin` or scores.
        template: chat template: a file, or a name (chatml, llama3, ...) (if None: the tokenizer's,
            or the default one). The template is exported with the model.
        supervision: kind of labels: "outcome" (pairs of answers) or "process" (steps of an answer).
            With "process", the records in `data.paths` have the fields `prompt`, `completions` (the
            texts of the steps) and `labels` (true or false for each step), and batch sizes count
            answers.
        step_separator: text after each step with process supervision; it is exported with the model
            (if None: a line break).
        center_rewards_coefficient: weight of a loss term that keeps rewards near 0: the squared sum
            of the rewards of a pair. A common value is 0.01.
    """

    new_head: bool = True
    run_dir: Path = Path("runs/reward")
    data: PairData = field(default_factory=PairData)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            optim=OptimConfig(lr=1e-5, weight_decay=0.0), disable_dropout=True
        )
    )
    template: Path | None = None
    supervision: Literal["outcome", "process"] = "outcome"
    step_separator: str | None = None
    center_rewards_coefficient: float = 0.0


def train_reward(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume training of a reward model.

    Args:
        config: a `RewardConfig` whose `model` is a decoder's config.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    head, labels = (PROCESS_HEAD, 2) if config.supervision == "process" else (_HEAD, 1)
    return launch(config, _open_data, _check, head=head, num_labels=labels)


def _check(config: Any, processes: int) -> None:
    """Raise `ConfigError` for an option without effect."""
    refuse_prefix_sharing(config, "in reward models, which read the last token of a row")
    center = config.center_rewards_coefficient
    if center and config.supervision == "process":
        raise ConfigError(
            f"center_rewards_coefficient={center} has no effect with supervision=process, which "
            "has no pairs. Leave it out."
        )
    if config.step_separator is not None and config.supervision == "outcome":
        raise ConfigError(
            f"step_separator={config.step_separator!r} has no effect with supervision=outcome. Add "
            "--supervision process, or leave it out."
        )
    if config.step_separator == "":
        raise ConfigError(
            "step_separator is empty (expected: a text that ends each step, such as '\\n')."
        )


def with_reward_head(config: Any) -> Any:
    """Return the config of a run with the head of a reward model."""
    if config.supervision == "process":
        return change_model(config, head=PROCESS_HEAD, num_labels=2)
    return change_model(config, head=_HEAD, num_labels=1)


def _open_data(config: Any, rows: World) -> TrainingData:
    """Read and encode the pairs, or the steps with labels, of a run."""
    return (_open_steps if config.supervision == "process" else _open_pairs)(config, rows)


def _open_pairs(config: Any, rows: World) -> TrainingData:
    data = config.data
    tokenizer, template, save = open_template(config)
    learned, held_out = (
        PreferencePairs(
            encode_files(paths, config, tokenizer, template, has_margins=True), data.seq_len
        )
        if paths
        else None
        for paths in (data.paths, data.validation)
    )
    assert learned is not None  # data.check() refuses a run without paths
    return dataclasses.replace(
        open_examples(
            learned,
            held_out,
            data,
            rows,
            save_tokenizer=save,
            objective=RewardObjective(config.center_rewards_coefficient),
            special_ids=_padding(tokenizer),
        ),
        row_tokens=2 * learned.width,
    )


def _open_steps(config: Any, rows: World) -> TrainingData:
    data = config.data
    tokenizer, template, save_both = open_template(config)
    separator = STEP_SEPARATOR if config.step_separator is None else config.step_separator

    def read(paths: tuple[str, ...]) -> LabeledSteps:
        examples = [example for path in paths for example in read_step_labels(path)]
        encoded = [
            encode_steps(each, template, tokenizer, separator, data.ignore) for each in examples
        ]
        return LabeledSteps(encoded, data.seq_len)

    def save(directory: Path) -> None:
        save_both(directory)
        replace_file(directory / STEP_FILE, json.dumps({"step_separator": separator}) + "\n")

    learned, held_out = (read(paths) if paths else None for paths in (data.paths, data.validation))
    assert learned is not None  # data.check() refuses a run without paths
    objective = ProcessRewardObjective()
    return dataclasses.replace(
        open_examples(learned, held_out, data, rows, save_tokenizer=save, objective=objective),
        row_tokens=learned.width,
    )


def _padding(tokenizer: Any) -> dict[str, Any]:
    """Return the config field `pad_token_id` to export, None without a separate padding token.

    transformers reads the reward at the last token that is not padding. In training the reward is
    read at the EOS token, which therefore cannot be the padding token.
    """
    if tokenizer.pad_id is not None and tokenizer.pad_id != tokenizer.eos_id:
        return {"pad_token_id": tokenizer.pad_id}
    get_logger().warning(
        "the tokenizer has no separate padding token, so the exported model has no "
        "pad_token_id: score batches with an attention mask, or one text at a time"
    )
    return {"pad_token_id": None}
