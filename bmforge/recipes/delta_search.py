"""Searches for the best adapter (type, targets, size) for a task by successive halving.

All candidates train for a few steps; the better ones continue, until one candidate is left. A
repeated call in the same directory resumes the search; `search.html` shows its state.
Source: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization" (2016).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bmforge.errors import ConfigError
from bmforge.files import read_json, replace_file
from bmforge.logging import get_logger
from bmforge.parallel import run_on_first
from bmforge.recipes.adapters import KINDS, AdapterConfig, attach_adapter
from bmforge.recipes.finetune import TaskTuneConfig, tune_task, with_classes
from bmforge.recipes.run import Launch, RunResult, run_recipe
from bmforge.recipes.run_dir import check_new_run
from bmforge.recipes.search_page import write_search_page
from bmforge.recipes.start import complete_model_config, family_of
from bmforge.train import OptimConfig, TrainConfig
from bmforge.value_ranges import check_values

__all__ = ["DeltaSearchConfig", "SearchConfig", "find_candidates", "plan_rounds", "search_deltas"]

# Kind of adapter -> its size option; the other kinds have no size option.
_SIZED = {
    "lora": "rank",
    "low-rank": "rank",
    "adapter": "width",
    "parallel-adapter": "width",
    "prefix": "length",
    "soft-prompt": "length",
}
# Kinds with fixed target modules.
_PLACED = ("parallel-adapter", "prefix", "soft-prompt")
_STATE, _PAGE = "search.json", "search.html"


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Search space of an adapter search.

    Args:
        kinds: kinds of adapters to try, with the names of `adapter.kind`.
        places: target modules to try. An entry can combine several with commas ("attn.q,attn.v");
            "usual" means the default targets of each kind.
        sizes: ranks, bottleneck widths or lengths to try, for kinds of adapters with such an
            option.
        max_trained: maximum number of trained parameters of a candidate, without new heads; 0 means
            no limit.
        keep_ratio: factor, at least 2, of successive halving: each round keeps 1 / keep_ratio of
            the candidates and trains them for keep_ratio times as many steps.
    """

    kinds: tuple[str, ...] = ("lora", "adapter", "compacter", "bitfit", "ia3")
    places: tuple[str, ...] = ("usual",)
    sizes: tuple[int, ...] = (4, 16, 64)
    max_trained: int = 0
    keep_ratio: int = 3

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an empty search or an unknown kind."""
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ConfigError(
                f"unknown adapter: search.kinds has {unknown[0]!r} (supported: {', '.join(KINDS)})."
            )
        if not (self.kinds and self.places and self.sizes):
            raise ConfigError("search.kinds, search.places and search.sizes must not be empty.")
        check_values(self, "search.")


@dataclass(kw_only=True)
class DeltaSearchConfig(TaskTuneConfig):
    """Config of a search for the best adapter for a task.

    The other fields are those of `TaskTuneConfig`.

    Args:
        search: search space.
        train: training settings of the last round; earlier rounds with more candidates have
            correspondingly fewer steps.
    """

    run_dir: Path = Path("runs/delta-search")
    search: SearchConfig = field(default_factory=SearchConfig)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(optim=OptimConfig(lr=1e-3, weight_decay=0.01))
    )


def search_deltas(config: Any, launch: Launch = run_recipe) -> RunResult:
    """Run or resume an adapter search.

    Args:
        config: a `DeltaSearchConfig` with a field `model`, the config of the model to train.

    Returns:
        The last run of the best candidate.

    Raises:
        ConfigError: there is nothing to try, there is no held-out data, or the directory contains
            another search.
        BmforgeError: see `run_recipe`.
    """
    if not (config.run_dir / _STATE).is_file():
        check_new_run(config.run_dir)
    if config.adapter.kind is not None:
        raise ConfigError("adapter.kind has no effect in a search. Set search.kinds instead.")
    if config.data.dev_split is None and not config.data.validation:
        raise ConfigError(
            "the search compares losses on validation data. Set data.dev_split or data.validation."
        )
    candidates = find_candidates(config)
    rounds = plan_rounds(len(candidates), config.train.steps, config.search.keep_ratio)
    state = _open_state(config.run_dir, candidates, rounds)
    names, result = list(candidates), None
    for number, (count, steps) in enumerate(rounds):
        results = state["rounds"][number]
        names = _best(state["rounds"][number - 1], count) if number else names
        for name in names:
            if name in results and not (number == len(rounds) - 1 and name == names[-1]):
                continue
            result = tune_task(_config_of(config, name, candidates[name].delta, steps), launch)
            if result.stopped:
                return result
            assert result.evaluation is not None
            metrics = _metrics_of(config.run_dir / "candidates" / name)
            results[name] = {"loss": result.evaluation.loss, "metrics": metrics}
            run_on_first(lambda: _save(config.run_dir, state))
    assert result is not None
    (best,) = _best(state["rounds"][-1], 1)
    get_logger().info("the best adapter is %s: %s", best, config.run_dir / "candidates" / best)
    return result


@dataclass(frozen=True)
class Candidate:
    """One candidate of an adapter search.

    Args:
        delta: config of the adapter.
        trained: number of trained parameters, not counting new heads.
    """

    delta: AdapterConfig
    trained: int


def find_candidates(config: Any) -> dict[str, Candidate]:
    """Return a dict from name to each candidate that fits the model and the parameter limit.

    Raises:
        ConfigError: no adapter fits.
    """
    search: SearchConfig = config.search
    sizes = complete_model_config(with_classes(config)).model
    candidates: dict[str, Candidate] = {}
    refused = []
    for name, delta in _spell(search):
        model = family_of(sizes).from_config(sizes, device="meta")
        candidate_config = dataclasses.replace(config, model=sizes, adapter=delta)
        try:
            adapter = attach_adapter(model, candidate_config)
        except ConfigError as error:
            refused.append(f"{name}: {error}")
            continue
        assert adapter is not None
        trained = sum(p.numel() for p in adapter.parameters())
        if search.max_trained and trained > search.max_trained:
            refused.append(
                f"{name}: its {trained:,} trained parameters are more than "
                f"search.max_trained={search.max_trained:,}"
            )
            continue
        candidates[name] = Candidate(delta, trained)
    for reason in refused:
        get_logger().info("not tried: %s", reason)
    if not candidates:
        raise ConfigError(
            f"no adapter of the search can be trained ({'; '.join(refused)}). Change search.kinds, "
            "search.places or search.sizes, or raise search.max_trained."
        )
    return candidates


def _spell(search: SearchConfig) -> list[tuple[str, AdapterConfig]]:
    """Return a (name, adapter config) pair for every distinct combination of the search space."""
    configs: dict[str, AdapterConfig] = {}
    for kind in search.kinds:
        for places in search.places if kind not in _PLACED else ("usual",):
            for size in search.sizes if kind in _SIZED else (None,):
                options: dict[str, Any] = {} if size is None else {_SIZED[kind]: size}
                if places != "usual":
                    options["target_modules"] = tuple(places.split(","))
                name = "-".join([kind, *(places.split(",") if places != "usual" else ())])
                name = name if size is None else f"{name}-{size}"
                configs[name] = AdapterConfig(kind=kind, **options)
    return list(configs.items())


def plan_rounds(count: int, steps: int, keep_ratio: int) -> list[tuple[int, int]]:
    """Return the number of candidates and the last training step of each round.

    Args:
        count: number of candidates.
        steps: steps of the last round.
        keep_ratio: each round keeps 1 / keep_ratio of the candidates and trains them keep_ratio
            times as many steps.
    """
    counts = [count]
    while counts[-1] > 1:
        counts.append(max(counts[-1] // keep_ratio, 1))
    last = len(counts) - 1
    return [(n, max(steps // keep_ratio ** (last - i), 1)) for i, n in enumerate(counts)]


def _config_of(config: Any, name: str, delta: AdapterConfig, steps: int) -> Any:
    """Return the config to train a candidate up to a step, with the last round's schedule."""
    train = config.train
    if train.schedule.kind not in ("constant", "noam") and train.schedule.total_steps is None:
        schedule = dataclasses.replace(train.schedule, total_steps=train.steps)
        train = dataclasses.replace(train, schedule=schedule)
    run_dir = config.run_dir / "candidates" / name
    train = dataclasses.replace(train, steps=steps)
    return dataclasses.replace(config, run_dir=run_dir, adapter=delta, train=train)


def _open_state(
    run_dir: Path, candidates: Mapping[str, Candidate], rounds: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Load the saved state of a search, or create a new one.

    Raises:
        ConfigError: the directory contains another search.
    """
    fresh = {
        "candidates": {name: entry.trained for name, entry in candidates.items()},
        "plan": [list(entry) for entry in rounds],
        "rounds": [{} for _ in rounds],
    }
    file = run_dir / _STATE
    if not file.exists():
        return fresh
    state: dict[str, Any] = read_json(file)
    for key, name in (("candidates", "candidates"), ("plan", "rounds (candidates, steps)")):
        if state.get(key) != fresh[key]:
            raise ConfigError(
                f"run_dir={str(run_dir)!r} already contains a search with other {name}: the "
                f"saved search has {state.get(key)}, and this one has {fresh[key]}. Choose "
                "another run_dir, or restore the settings of the saved search."
            )
    return state


def _best(results: Mapping[str, Any], count: int) -> list[str]:
    """Return the names of the `count` candidates with the lowest losses, the best first."""
    return sorted(results, key=lambda name: (results[name]["loss"], name))[:count]


def _metrics_of(run_dir: Path) -> dict[str, float]:
    """Return the task metrics from a candidate's last evaluation."""
    file = run_dir / "results.json"
    recorded = read_json(file) if file.exists() else {}
    return {n: v["model"] for n, v in recorded.items() if n != "validation loss" and "model" in v}


def _save(run_dir: Path, state: Mapping[str, Any]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(run_dir / _STATE, json.dumps(state, indent=2) + "\n")
    write_search_page(run_dir / _PAGE, state, run_dir.name)
