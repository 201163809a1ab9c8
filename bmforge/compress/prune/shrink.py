"""`shrink_`: one-shot structured pruning to exact sizes, a cost target, or a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bmforge.compress.prune.apply_plan import Shrunk, apply_plan_, check_plan
from bmforge.compress.prune.compensate import reconstruct_
from bmforge.compress.prune.importance import measure_importance
from bmforge.compress.prune.make_plan import choose_plan
from bmforge.compress.prune.plan import PruningPlan, blocks_of
from bmforge.compress.prune.structure_config import StructureConfig, requested_sizes
from bmforge.compress.prune.target import plan_for_target
from bmforge.errors import ConfigError
from bmforge.surgery import eval_mode

__all__ = ["Shrunk", "choose_structure", "shrink_"]


def shrink_(
    model: Any,
    what: StructureConfig | PruningPlan,
    batches: Iterable[Mapping[str, Any]] = (),
    *,
    uniform: bool = False,
) -> Shrunk:
    """Prune the structure of a model in place, without training.

    Args:
        model: bmforge model of any family, with its weights, before `parallelize`.
        what: config with sizes or a cost target, or a pruning plan.
        batches: keyword arguments of the model's forward for measuring importance, with labels
            for ``by="taylor"``; not needed for a plan.
        uniform: raise an error for sizes that only bmforge can load, like
            `StructureConfig.uniform`.

    Returns:
        applied plan, parameter counts, and whether transformers can load the model

    Raises:
        ConfigError: a size is invalid for the model, or the target cannot be reached. The model is
            then unchanged.
    """
    if isinstance(what, PruningPlan):
        return apply_plan_(model, what, uniform=uniform)
    if what.gates:
        raise ConfigError(
            f"gates={what.gates} must be trained. Use StructureMethod in a training run, or "
            "leave gates out."
        )
    batches = list(batches)
    plan = choose_structure(model, what, batches)
    uniform = uniform or what.uniform
    if what.compensate and batches:
        check_plan(model, plan, uniform=uniform)
        reconstruct_(model, plan, batches)
    return apply_plan_(model, plan, uniform=uniform)


def choose_structure(
    model: Any, config: StructureConfig, batches: Iterable[Mapping[str, Any]] = ()
) -> PruningPlan:
    """Return the pruning plan for a model without changing it; see `shrink_`."""
    with eval_mode(model):
        scores = measure_importance(model, batches, config.by)
    if config.target != "sizes":
        return plan_for_target(model, config, scores)
    gone = {}
    for stack in dict.fromkeys(name.rpartition(".")[0] for name in blocks_of(model)):
        count = len(model.get_submodule(stack))
        if config.num_layers > count:
            raise ConfigError(
                f"num_layers={config.num_layers} is more than the {count} layers of {stack}. "
                "Use a smaller number."
            )
        gone[stack] = count - (config.num_layers or count)
    counts = {"attn": config.attn_layers, "mlp": config.mlp_layers}
    return choose_plan(
        model,
        scores,
        requested_sizes(model, config),
        gone=gone,
        halves={half: count for half, count in counts.items() if count},
        hidden_size=config.hidden_size,
    )
