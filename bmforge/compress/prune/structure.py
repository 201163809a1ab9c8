"""Structured pruning as a compression method: one-shot, or by trained gates.

Gates are trained by the task's loss plus a Lagrangian that pulls the remaining cost to the target;
its multipliers grow while the target is missed. Once the target is reached the gates are fixed to 0
or 1, training continues, and `finish_` produces the smaller model.

Source: Louizos et al. (2018) for the gates; Wang et al., "Structured Pruning of Large Language
Models" (2020) for the Lagrangian; BMCook for the constants and the order of operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmforge.compress.method import MethodBase
from bmforge.compress.prune.binarize import SelectedUnits, binarize, open_units, plan_of_units
from bmforge.compress.prune.costs import Costs, SublayerCost
from bmforge.compress.prune.gates import (
    Gates,
    attach_gates_,
    detach_gates_,
    find_gates,
    fix_gates_,
    gate_probabilities,
)
from bmforge.compress.prune.plan import PruningPlan, blocks_of
from bmforge.compress.prune.shrink import Shrunk, shrink_
from bmforge.compress.prune.structure_config import StructureConfig
from bmforge.compress.prune.target import block_costs
from bmforge.errors import ConfigError
from bmforge.surgery import wrappers_of

__all__ = ["StructureConfig", "StructureMethod"]

_CLOSE = 5e-5
# Maximum common shift of the gates, and number of bisection steps.
_FAR, _HALVINGS = 32.0, 40


class StructureMethod(MethodBase):
    """Prunes the structure of a model, either when attached or by gates during training.

    Args:
        config: structured pruning settings.
        batches: calibration batches for the importance scores of one-shot pruning.

    Attributes:
        plan: pruning plan; None until it is decided.
    """

    name = "structure"

    def __init__(self, config: StructureConfig, batches: Iterable[Mapping[str, Any]] = ()) -> None:
        self.config, self.batches = config, batches
        self.plan: PruningPlan | None = None
        self.gates: Gates = {}
        self.costs = Costs({})
        self.wanted: dict[tuple[str, str], float] = {}
        self.shrunk: Shrunk | None = None
        self.missed = 1.0
        self._multipliers = torch.zeros(2, 1, dtype=torch.float64)
        self._moments = torch.zeros(2, 2, 1, dtype=torch.float64)
        self._step = 0

    def attach_(self, model: nn.Module) -> None:
        """Prune the model, or attach gates to it.

        Raises:
            ConfigError: a size is invalid for the model, or the target cannot be reached.
        """
        if not self.config.gates:
            self.shrunk = shrink_(model, self.config, self.batches)
            self.plan = self.shrunk.plan
            return
        self.costs = block_costs(model, self.config)
        self.wanted = open_units(model, self.config)
        self.gates = attach_gates_(model, self.config.gates, self.config.seed)
        self._start_(model)

    def _start_(self, model: nn.Module) -> None:
        """Check that the target can be reached, and start training the attached gates."""
        everything = {key: torch.ones(gate.units) for key, gate in self.gates.items()}
        try:  # report an unreachable target before training
            binarize(model, self.config, self.costs, everything)
        except ConfigError:
            detach_gates_(model)
            raise
        count = len(self.wanted) or 1
        self._multipliers = torch.zeros(2, count, dtype=torch.float64)
        self._moments = torch.zeros(2, 2, count, dtype=torch.float64)
        self._draw_(0)

    def optim_groups(self) -> dict[str, dict[str, float]]:
        """Return a dict from a glob of gate names to optimizer settings."""
        settings = {"lr": self.config.gate_lr, "weight_decay": 0.0}
        return {"**.delta": settings} if self.gates else {}

    def extra_loss(self, model: nn.Module, step: int) -> Tensor | None:
        """Return the Lagrangian term for the difference between expected cost and target.

        Raises:
            ConfigError: the model is a pipeline stage (whose gates are not visible to other
                stages), or tokens are sharded and hidden features have gates.
        """
        if not self.gates or self.plan is not None:
            return None
        if ("", "hidden") in self.gates and any(
            "tokens" in dict(wrappers_of(block)) for block in blocks_of(model).values()
        ):
            raise ConfigError(
                "gates of hidden features need all tokens on every process. Train them with "
                "sequence_parallel=False, or prune hidden_size without gates (gates=())."
            )
        if len(find_gates(model)) < len({id(gate) for gate in self.gates.values()}):
            raise ConfigError(
                "gates need all blocks on every process. Train them with pp=1, or prune "
                "without gates (gates=())."
            )
        missed = self._missed(step)
        linear, square = self._multipliers.to(missed.device)
        return (linear * missed + square * missed.square()).sum()

    def after_step_(self, model: nn.Module, step: int) -> None:
        """Update the multipliers, and fix the gates when the target is reached."""
        self._step = step
        if not self.gates or self.plan is not None:
            return
        with torch.no_grad():
            missed = self._missed(step).cpu()
            self.missed = float(missed.abs().max())
            self._ascend_(missed, step)
        warm = step >= self.config.warmup_steps
        if step >= self.config.gate_steps or (warm and self.missed < _CLOSE):
            self._fix_(model)
        else:
            self._draw_(step)

    def _draw_(self, step: int) -> None:
        for gate in self.gates.values():
            gate.draw_(self.config.seed, step)

    def _missed(self, step: int) -> Tensor:
        """Return the sparsity minus its target at this step: a scalar, or one value per layer."""
        grown = min(1.0, (step + 1) / max(1, self.config.warmup_steps))
        likely = gate_probabilities(self.gates)
        if self.wanted:
            parts = [
                (1 - likely[key].mean()) - grown * (1 - left) for key, left in self.wanted.items()
            ]
            return torch.stack(parts)
        sparsity = 1 - self.costs.expect(likely) / self.costs.total
        return (sparsity - grown * (1 - self.config.keep_ratio)).view(1)

    def _ascend_(self, missed: Tensor, step: int) -> None:
        """Run one Adam step of gradient ascent on the multipliers."""
        slopes = torch.stack((missed, missed.square()))
        first, second = self._moments
        first.mul_(0.9).add_(slopes, alpha=0.1)
        second.mul_(0.999).add_(slopes.square(), alpha=0.001)
        done = max(1, step)
        even = (first / (1 - 0.9**done)) / ((second / (1 - 0.999**done)).sqrt() + 1e-8)
        self._multipliers += self.config.gate_lr * even

    @torch.no_grad()
    def _fix_(self, model: nn.Module) -> None:
        """Decide which units to keep, and fix the gates accordingly."""
        self._shift_()
        likely = {key: value.cpu() for key, value in gate_probabilities(self.gates).items()}
        self.missed = float(self._missed(self.config.warmup_steps).abs().max())
        chosen = binarize(model, self.config, self.costs, likely)
        self.plan = self._plan(model, chosen)
        fix_gates_(chosen, self.gates)

    def _plan(self, model: nn.Module, chosen: SelectedUnits) -> PruningPlan:
        """Return the pruning plan that removes all units except the chosen ones."""
        return plan_of_units(model, chosen)

    def _shift_(self) -> None:
        """Shift the logits of all gates that share a target so that the target is met exactly."""
        targets = [[key] for key in self.wanted] or [list(self.gates)]
        for keys in targets:
            low, high = -_FAR, _FAR
            index = list(self.wanted).index(keys[0]) if self.wanted else 0
            moved = 0.0
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                for key in keys:
                    self.gates[key].delta.add_(middle - moved)
                moved = middle
                # Sparser than the target: open the gates further.
                too_sparse = float(self._missed(self.config.warmup_steps)[index]) > 0
                low, high = (middle, high) if too_sparse else (low, middle)

    def state_dict(self) -> dict[str, Any]:
        """Return the multipliers, their Adam moments, and the plan, if it is decided."""
        return {
            "step": self._step,
            "multipliers": self._multipliers.tolist(),
            "moments": self._moments.tolist(),
            "plan": None if self.plan is None else self.plan.to_json(),
            "times": self._times(),
            "open": {
                f"{name}/{kind}": gate.mask.nonzero().flatten().tolist()
                for (name, kind), gate in self.gates.items()
                if gate.mask is not None
            },
        }

    def _times(self) -> dict[str, Any]:
        """Return the measured block costs, saved because a new measurement would differ."""
        if self.config.target != "milliseconds":
            return {}
        return {
            name: {kind: asdict(half) for kind, half in halves.items()}
            for name, halves in self.costs.blocks.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state_dict`; call `attach_` first.

        Raises:
            ConfigError: the state belongs to another recipe.
        """
        multipliers = torch.tensor(state["multipliers"], dtype=torch.float64)
        if multipliers.shape != self._multipliers.shape:
            raise ConfigError(
                "the gates in this checkpoint were trained with another recipe. Resume with the "
                "recipe of the checkpoint."
            )
        self._multipliers = multipliers
        self._moments = torch.tensor(state["moments"], dtype=torch.float64)
        self._step = int(state["step"])
        if times := state.get("times"):
            self.costs = Costs(
                {
                    name: {kind: _to_sublayer_cost(values) for kind, values in halves.items()}
                    for name, halves in times.items()
                }
            )
        self.plan = None if state["plan"] is None else PruningPlan.from_json(state["plan"])
        if state["open"]:
            chosen = {
                (name, kind): tuple(numbers)
                for key, numbers in state["open"].items()
                for name, _, kind in [key.rpartition("/")]
            }
            fix_gates_(chosen, self.gates)
        elif self.gates:
            self._draw_(self._step)

    def finish_(self, model: nn.Module) -> dict[str, Any]:
        """Remove the gates and shrink the model; return results for the report.

        The sizes of a parallelized model do not change; export it, load it without parallelism, and
        pass the returned plan to `shrink_`.
        """
        if self.gates:
            if self.plan is None:
                self._fix_(model)
            assert self.plan is not None
            detach_gates_(model)
            self.gates = {}
            if any(isinstance(tensor, DTensor) for tensor in model.parameters()):
                return {"plan": self.plan.to_json(), "is_shrunk": False}
            self.shrunk = shrink_(model, self.plan, uniform=self.config.uniform)
        if self.shrunk is None:
            return {}
        return {
            "is_shrunk": True,
            "parameters_before": self.shrunk.parameters_before,
            "parameters_after": self.shrunk.parameters_after,
            "opens_elsewhere": self.shrunk.opens_elsewhere,
            "reason": self.shrunk.reason,
            "plan": self.shrunk.plan.to_json(),
        }


def _to_sublayer_cost(values: Mapping[str, Any]) -> SublayerCost:
    """Create a `SublayerCost` from the result of its `asdict`."""
    points = tuple((int(count), float(cost)) for count, cost in values["points"])
    return SublayerCost(**{**values, "points": points})
