"""Training of reward models (`bmforge train reward`) on pairs of answers.

A reward model is a sequence classifier with one output.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.align.reward import RewardObjective
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.parallel import World
from bmforge.recipes.inputs.examples import open_examples
from bmforge.recipes.inputs.preference_rows import PreferencePairs
from bmforge.recipes.inputs.splitting import refuse_split
from bmforge.recipes.preferences import PairData, encode_files, open_template
from bmforge.recipes.run import RunConfig, RunResult, TrainingData, run_recipe
from bmforge.recipes.start import change_model, check_length
from bmforge.train import OptimConfig, TrainConfig

__all__ = ["RewardConfig", "train_reward", "with_reward_head"]

_HEAD = "sequence_classification"


@dataclass(kw_only=True)
class RewardConfig(RunConfig):
    """Config to train a reward model; other fields are `RunConfig`'s.

    Args:
        data: `paths` are .jsonl, .json or .parquet files, or folders of them, with `prompt`,
            `chosen` and `rejected` (texts or messages), and optionally `margin` or scores.
        template: chat template: a file, or a name (chatml, llama3, ...); None selects the
            tokenizer's own, or a plain one. The template is exported with the model.
        center_rewards_coefficient: factor of the squared sum of both rewards, which keeps
            rewards near 0 (default: 0; 0.01 is usual).
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
    center_rewards_coefficient: float = 0.0


def train_reward(config: Any) -> RunResult:
    """Train a reward model, or resume such a run.

    Args:
        config: a `RewardConfig` with the `model` of a decoder.

    Raises:
        BmforgeError: see `run_recipe`.
    """
    if config.center_rewards_coefficient < 0:
        raise ConfigError(
            f"center_rewards_coefficient={config.center_rewards_coefficient} must be at least 0."
        )
    return run_recipe(with_reward_head(config), _open_data, head=_HEAD)


def with_reward_head(config: Any) -> Any:
    """Return a run's config with the head of a reward model."""
    return change_model(config, head=_HEAD, num_labels=1)


def _open_data(config: Any, rows: World) -> TrainingData:
    data = config.data
    data.check()
    refuse_split(data.split)
    check_length(config)
    tokenizer, template, save = open_template(config)
    learned, held_out = (
        PreferencePairs(encode_files(paths, config, tokenizer, template), data.seq_len)
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


def _padding(tokenizer: Any) -> dict[str, Any]:
    """Return the padding token for the exported config, as a dict; empty without a usable one.

    transformers reads the reward at the last token that is not padding. The model is trained at the
    EOS token, so the padding token must be another one.
    """
    if tokenizer.pad_id is not None and tokenizer.pad_id != tokenizer.eos_id:
        return {"pad_token_id": tokenizer.pad_id}
    get_logger().warning(
        "the tokenizer has no padding token of its own, so the exported model has no "
        "pad_token_id: score batches with an attention mask, or one text at a time"
    )
    return {"pad_token_id": None}
