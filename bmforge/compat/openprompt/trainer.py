"""OpenPrompt's runners, which train, validate and test a prompted model from a config.

The configuration is any object with the attributes of OpenPrompt's `CfgNode`; `bmforge migrate`
converts its YAML files to configs of `bmforge train`, which can also save, resume and shard a
training run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from bmforge.compat.openprompt.metrics import classification_metrics, generation_metric
from bmforge.errors import CheckpointError, ConfigError
from bmforge.logging import get_logger
from bmforge.train.checkpoint.rng import seed_all

__all__ = ["BaseRunner", "ClassificationRunner", "GenerationRunner", "set_seed"]


class BaseRunner:
    """Trains a prompted model and keeps the checkpoint with the best validation score.

    Args:
        model: prompted model.
        config: configuration with `train`, `plm.optimize` and `logging.path`; a template or
            verbalizer that is trained also needs an `optimize` section.
        train_dataloader, valid_dataloader, test_dataloader: `PromptDataLoader` of each split.
    """

    def __init__(
        self,
        model: Any,
        config: Any = None,
        train_dataloader: Any = None,
        valid_dataloader: Any = None,
        test_dataloader: Any = None,
    ) -> None:
        if config is None:
            raise ConfigError("config=None is not allowed. Pass the configuration of the run.")
        self.model, self.config = model, config
        self.train_dataloader = train_dataloader
        self.loaders = {"validation": valid_dataloader, "test": test_dataloader}
        self.best_score: float | None = None
        self.global_step = 0

    def training_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError(f"{type(self).__name__} must implement training_step().")

    def inference_step(self, batch: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return the predictions for a batch and the correct answers."""
        raise NotImplementedError(f"{type(self).__name__} must implement inference_step().")

    def score(self, predictions: list[Any], answers: list[Any]) -> dict[str, float]:
        """Compute the configured metrics; the first one selects checkpoints."""
        raise NotImplementedError(f"{type(self).__name__} must implement score().")

    def checkpoint_path(self, name: str) -> Path:
        """Return the file path of a checkpoint."""
        return Path(self.config.logging.path) / "checkpoints" / f"{name}.ckpt"

    def load_checkpoint(self, name: str) -> None:
        """Load the weights of a checkpoint.

        Raises:
            CheckpointError: the checkpoint does not exist.
        """
        path = self.checkpoint_path(name)
        if not path.is_file():
            raise CheckpointError(
                f"{str(path)!r} does not exist, so no checkpoint can be loaded. Train first, or "
                "choose another checkpoint."
            )
        self.model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))

    def fit(self, ckpt: str | None = None) -> float | None:
        """Train, and return the best validation score.

        Args:
            ckpt: name of a checkpoint whose weights training starts from.
        """
        if ckpt:
            self.load_checkpoint(ckpt)
        steps, epochs = self._length()
        optimizers = [*self._optimizers()]
        schedulers = [
            LambdaLR(optimizer, partial(_linear_rate, warmup, steps))
            for optimizer, warmup in optimizers
            if warmup is not None
        ]
        for epoch in range(epochs):
            self._train_epoch([optimizer for optimizer, _ in optimizers], schedulers, steps)
            score = self.inference_epoch("validation")
            get_logger().info("epoch %d: validation score %.4f", epoch + 1, score)
            if self.best_score is None or self._is_better(score):
                self.best_score = score
                self._save("best")
            self._save("last")
            if self.global_step >= steps:
                break
        return self.best_score

    @torch.no_grad()
    def inference_epoch(self, split: str) -> float:
        """Evaluate the "validation" or "test" split; return the first metric."""
        self.model.eval()
        predictions, answers = [], []
        for batch in self.loaders[split]:
            batch_predictions, batch_answers = self.inference_step(batch.to(self.model.device))
            predictions += batch_predictions
            answers += batch_answers
        return next(iter(self.score(predictions, answers).values()))

    def test(self, ckpt: str | None = None) -> float:
        """Return the test score of a checkpoint, or of the current weights."""
        if ckpt:
            self.load_checkpoint(ckpt)
        return self.inference_epoch("test")

    def run(self, ckpt: str | None = None) -> float:
        """Train, and return the test score of the best checkpoint."""
        self.fit(ckpt)
        return self.test("best")

    def _length(self) -> tuple[int, int]:
        """Return the number of training steps, and an upper bound on the number of epochs."""
        train = self.config.train
        per_epoch = max(1, len(self.train_dataloader) // train.gradient_accumulation_steps)
        steps, epochs = getattr(train, "num_training_steps", None), train.num_epochs
        if steps is None and epochs is None:
            raise ConfigError(
                "train.num_epochs and train.num_training_steps are both None. Set one of them."
            )
        return (per_epoch * epochs, epochs) if steps is None else (steps, -(-steps // per_epoch))

    def _is_better(self, score: float) -> bool:
        assert self.best_score is not None
        higher = getattr(getattr(self.config, "checkpoint", None), "higher_better", True)
        return score > self.best_score if higher else score < self.best_score

    def _save(self, name: str) -> None:
        path = self.checkpoint_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), path)

    def _optimizers(self) -> Iterator[tuple[torch.optim.Optimizer, int | None]]:
        """Yield the optimizers of model, template and verbalizer, with their warm-up steps."""
        plm = self.config.plm.optimize
        if not plm.freeze_para:
            decayed: list[nn.Parameter] = []
            others: list[nn.Parameter] = []
            for name, parameter in self.model.plm.named_parameters():
                is_excluded = any(part in name for part in plm.no_decay)
                (others if is_excluded else decayed).append(parameter)
            groups = [
                {"params": decayed, "weight_decay": plm.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
            betas, eps = getattr(plm, "betas", (0.9, 0.999)), getattr(plm, "eps", 1e-8)
            optimizer = torch.optim.AdamW(groups, lr=plm.lr, betas=tuple(betas), eps=eps)
            yield optimizer, _warmup_of(plm)
        for part in ("template", "verbalizer"):
            options = getattr(self._part_config(part), "optimize", None)
            parameters = [*getattr(self.model, part, nn.Module()).parameters()]
            if options is None or not parameters:
                continue
            name = getattr(options, "name", "AdamW")
            if name.lower() != "adamw":
                raise ConfigError(f"{part} optimize.name={name!r} is unknown (supported: AdamW).")
            eps = getattr(options, "adam_epsilon", 1e-8)
            yield torch.optim.AdamW(parameters, lr=options.lr, eps=eps), _warmup_of(options)

    def _part_config(self, part: str) -> Any:
        """Return the options of the template or verbalizer that the configuration names."""
        name = getattr(self.config, part, None)
        return getattr(self.config, name, None) if name else None

    def _train_epoch(
        self, optimizers: list[torch.optim.Optimizer], schedulers: list[Any], steps: int
    ) -> None:
        self.model.train()
        train = self.config.train
        accumulate, largest_norm = train.gradient_accumulation_steps, train.max_grad_norm
        for number, batch in enumerate(self.train_dataloader, 1):
            (self.training_step(batch.to(self.model.device)) / accumulate).backward()
            if number % accumulate:
                continue
            if largest_norm > 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), largest_norm)
            for step in (*optimizers, *schedulers):
                step.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.global_step += 1
            if self.global_step >= steps:
                return


class ClassificationRunner(BaseRunner):
    """Runner of a `PromptForClassification`.

    Args:
        loss_function: function of logits and labels (default: cross-entropy).
        id2label: dict from class index to name, for the loose metrics.
        args, options: as in `BaseRunner`.
    """

    def __init__(
        self,
        *args: Any,
        loss_function: Callable[[Tensor, Tensor], Tensor] | None = None,
        id2label: Mapping[int, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.loss_function = loss_function or nn.functional.cross_entropy
        self.id2label = id2label

    def training_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a batch."""
        return self.loss_function(self.model(batch), batch["label"])

    def inference_step(self, batch: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return the predicted and the true classes."""
        return self.model(batch).argmax(-1).tolist(), batch["label"].tolist()

    def score(self, predictions: list[Any], answers: list[Any]) -> dict[str, float]:
        """Compute the metrics in `config.classification.metric`."""
        separator = getattr(getattr(self.config, "dataset", None), "label_path_sep", None) or "-"
        return {
            name: classification_metrics(predictions, answers, name, self.id2label, separator)
            for name in self.config.classification.metric
        }


class GenerationRunner(BaseRunner):
    """Runner of a `PromptForGeneration`."""

    def training_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.model(batch)
        return loss

    def inference_step(self, batch: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return the generated and the correct texts."""
        options = {k: v for k, v in vars(self.config.generation).items() if k != "metric"}
        return self.model.generate(batch, **options)[1], list(batch["tgt_text"])

    def score(self, predictions: list[Any], answers: list[Any]) -> dict[str, float]:
        """Compute the metrics in `config.generation.metric`."""
        names = self.config.generation.metric
        return {name: generation_metric(predictions, answers, name) for name in names}


def set_seed(seed: int | None) -> None:
    """Seed the generators of Python, NumPy and torch; if None, do nothing."""
    if seed is not None:
        seed_all(seed)


def _warmup_of(options: Any) -> int | None:
    """Return the warm-up steps of a linear schedule; None without a schedule."""
    scheduler = getattr(options, "scheduler", None)
    return None if scheduler is None else int(scheduler.num_warmup_steps)


def _linear_rate(warmup: int, total: int, step: int) -> float:
    """Return the learning rate factor: linear warm-up, then linear decay to 0."""
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / max(1, total - warmup))
