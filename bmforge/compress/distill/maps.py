"""Pairs the layers of a student with the layers of its teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from bmforge.compress.distill.capture import INTO
from bmforge.compress.distill.config import DistillLoss
from bmforge.errors import ConfigError, suggest
from bmforge.surgery import find_repeated_blocks

__all__ = ["find_pairs", "find_stacks", "pair_layers"]

Pairs = list[tuple[str, str]]


def pair_layers(student: int, teacher: int, layers: str) -> list[tuple[int, int]]:
    """Return pairs (index of the student's layer, index of the teacher's layer).

    Args:
        student: number of layers of the student.
        teacher: number of layers of the teacher.
        layers: "same": one to one, for equal depths; "uniform": the layers of the shallower model
            with evenly spaced layers of the other model (TinyBERT); "skip": like "uniform", without
            the last pair, which the prediction loss already trains (PKD-skip); "last": the last
            layers of both models (PKD-last).

    Raises:
        ConfigError: the depths differ with "same", or there are no pairs.
    """
    if layers == "same":
        if student != teacher:
            raise ConfigError(
                f"the student has {student} layers and the teacher has {teacher}, so a mapping is "
                'needed. Set layers="uniform", "last" or "skip", or use pairs of module names.'
            )
        return [(layer, layer) for layer in range(student)]
    count = min(student, teacher)
    if layers == "last":
        return [(student - count + i, teacher - count + i) for i in range(count)]
    pairs = [(_same_depth(i, count, student), _same_depth(i, count, teacher)) for i in range(count)]
    if layers == "skip":
        pairs.pop()
    if not pairs:
        raise ConfigError(
            f"layers={layers!r} selects no pair of the {student} student and {teacher} teacher "
            'layers. Set layers="uniform" or "last".'
        )
    return pairs


def _same_depth(index: int, count: int, depth: int) -> int:
    """Return the layer index at the same relative depth as layer `index` of `count`."""
    return -(-(index + 1) * depth // count) - 1


def find_stacks(model: nn.Module) -> dict[str, list[str]]:
    """Return a dict from stack name to the names of the stack's blocks, in order.

    bmforge models declare their stacks; in other models the repeated blocks are detected.

    Raises:
        ConfigError: the model has no stacks.
    """
    rules: Any = getattr(model, "layout_rules", None)
    if callable(rules):
        blocks_of_stack = {
            stack: [f"{stack}.{key}" for key, _ in model.get_submodule(stack).named_children()]
            for stack in rules().stacks
        }
        return {stack: blocks for stack, blocks in blocks_of_stack.items() if blocks}
    stacks: dict[str, list[str]] = {}
    for name in find_repeated_blocks(model):
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    if not stacks:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks. Set pairs of module names in "
            "distill.losses."
        )
    return stacks


def find_pairs(student: nn.Module, teacher: nn.Module, loss: DistillLoss) -> Pairs:
    """Return the pairs (student module, teacher module) that a loss compares.

    Raises:
        ConfigError: the depths differ and `layers` is "same", or module names are unknown.
    """
    if loss.pairs:
        return _check_pairs(student, teacher, loss.pairs)
    student_stacks, teacher_stacks = find_stacks(student), find_stacks(teacher)
    if len(student_stacks) != len(teacher_stacks):
        raise ConfigError(
            f"the student has the stacks {', '.join(student_stacks)}, but the teacher has "
            f"{', '.join(teacher_stacks)}. Set pairs of module names in distill.losses."
        )
    if loss.stack:
        student_stacks, teacher_stacks = (
            _pick(student_stacks, loss.stack),
            _pick(teacher_stacks, loss.stack),
        )
    pairs_found: Pairs = []
    for own_blocks, others in zip(student_stacks.values(), teacher_stacks.values(), strict=True):
        pairs = pair_layers(len(own_blocks), len(others), loss.layers)
        pairs_found += [(own_blocks[i], others[j]) for i, j in pairs]
    return pairs_found


def _pick(stacks: Mapping[str, list[str]], part: str) -> dict[str, list[str]]:
    """Return the dict with only the stack `part` ("encoder" or "decoder")."""
    picked = {name: blocks for name, blocks in stacks.items() if part in name.split(".")}
    if len(picked) != 1:
        raise ConfigError(
            f"unknown stack: stack={part!r} (supported: {', '.join(stacks)}). Leave stack out "
            "to use all stacks."
        )
    return picked


def _check_pairs(student: nn.Module, teacher: nn.Module, pairs: Sequence[tuple[str, str]]) -> Pairs:
    for side, model in enumerate((student, teacher)):
        modules = dict(model.named_modules())
        for pair in pairs:
            name = pair[side].removeprefix(INTO)
            if name not in modules:
                who = ("student", "teacher")[side]
                raise ConfigError(
                    f"distill.losses: the {who} has no module {name!r}.{suggest(name, modules)}"
                )
    return list(pairs)
