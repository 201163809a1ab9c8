"""Black-box tuning: trains a soft prompt from scores only, without gradients.

The prompt's embeddings are optimized in a small random subspace. In each iteration CMA-ES requests
the scores of a few candidates and adapts its search distribution to these scores.
Source: Sun et al., "Black-box tuning for language-model-as-a-service" (2022); the search is that of
the library `cma` (Hansen).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bmforge.errors import ConfigError, MissingDependencyError
from bmforge.logging import track
from bmforge.shards import whole_tensor
from bmforge.surgery import eval_mode
from bmforge.tune.delta.soft_prompt import SoftPrompt

__all__ = ["BlackBoxConfig", "tune_black_box"]


@dataclass(frozen=True)
class BlackBoxConfig:
    """Settings of the black-box search for a soft prompt.

    Args:
        evaluations: maximum number of evaluations, including that of the initial prompt.
        dims: dimensions of the subspace.
        sigma: initial step size of CMA-ES; 1 moves the prompt's embeddings by about the standard
            deviation of the model's token embeddings.
        population: candidates per iteration (default: 0, which means 4 + 3 log(dims)).
        seed: random seed of subspace and search.
    """

    evaluations: int = 1000
    dims: int = 500
    sigma: float = 1.0
    population: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate the settings."""
        for name, least in (("evaluations", 2), ("dims", 1), ("population", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}.")
        if self.population == 1:
            raise ConfigError(
                "population=1 is too small (allowed: at least 2, or 0 for the default)."
            )
        if not (self.sigma > 0 and math.isfinite(self.sigma)):
            raise ConfigError(f"sigma={self.sigma} must be above 0 and finite.")


def tune_black_box(
    model: nn.Module,
    score: Callable[[nn.Module], float],
    *,
    length: int = 50,
    name: str = "default",
    config: BlackBoxConfig | None = None,
    **options: Any,
) -> SoftPrompt:
    """Search for a soft prompt with a high score; it stays attached to the model, frozen.

    Args:
        model: bmforge model that reads tokens; not parallelized.
        score: function called with the model, in evaluation mode and without gradients; higher is
            better. It should be deterministic: resampled examples only add noise.
        length: length of the prompt in tokens.
        name: name of the adapter.
        config: settings of the search.
        options: options of `SoftPrompt`, such as `words`.

    Returns:
        the prompt with the best of the evaluated embeddings, which include the initial ones; its
        attribute `scores` lists all scores in the order of evaluation.

    Raises:
        ConfigError: `score` returned a value that is not a number.
        MissingDependencyError: `cma` is not installed.
    """
    settings = config or BlackBoxConfig()
    prompt = SoftPrompt(model, length=length, name=name, seed=settings.seed, **options)
    try:
        with eval_mode(model):
            prompt.scores = _search(model, score, prompt, settings)
    except BaseException:
        prompt.remove()
        raise
    prompt.requires_grad_(False)
    return prompt


@torch.no_grad()
def _search(
    model: nn.Module,
    score: Callable[[nn.Module], float],
    prompt: SoftPrompt,
    config: BlackBoxConfig,
) -> list[float]:
    """Search for the best embeddings with CMA-ES, write them to the prompt; return all scores."""
    rows: Tensor = prompt.held[0].part.weight
    start, spread = rows.clone(), _spread_of(model)
    rng = np.random.default_rng(config.seed)
    ways = torch.from_numpy(rng.standard_normal((rows.numel(), config.dims))).to(rows)
    ways *= spread / math.sqrt(config.dims)
    strategy = _open_strategy(config, rng)
    scores: list[float] = []
    best, best_rows = -math.inf, start

    def ask(point: Any) -> float:
        nonlocal best, best_rows
        moved = ways @ torch.from_numpy(np.asarray(point)).to(rows)
        rows.copy_(start + moved.view_as(rows))
        value = float(score(model))
        if math.isnan(value):
            raise ConfigError(
                "the function score returned NaN. Let it return a finite number for each "
                "candidate (a higher number is better)."
            )
        scores.append(value)
        if value > best:
            best, best_rows = value, rows.clone()
        return -value

    ask(np.zeros(config.dims))
    for _ in track(range(config.evaluations // strategy.popsize), "black box"):
        if len(scores) + strategy.popsize > config.evaluations or strategy.stop():
            break
        points = strategy.ask()
        strategy.tell(points, [ask(point) for point in points])
    rows.copy_(best_rows)
    return scores


def _spread_of(model: Any) -> float:
    """Return the standard deviation of a model's token embeddings."""
    return float(whole_tensor(model.embed.weight.detach()).float().std())


def _open_strategy(config: BlackBoxConfig, rng: np.random.Generator) -> Any:
    try:
        import cma
    except ImportError as error:
        raise MissingDependencyError("cma", "tune", "black-box tuning") from error
    options: dict[str, Any] = {
        "verbose": -9,
        "seed": np.nan,  # do not reseed numpy's global generator
        "randn": lambda *shape: rng.standard_normal(shape),
        "maxfevals": config.evaluations,
    }
    if config.population:
        options["popsize"] = config.population
    return cma.CMAEvolutionStrategy(np.zeros(config.dims), config.sigma, options)
