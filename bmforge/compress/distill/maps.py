"""Which layer of a student learns from which layer of its teacher."""

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
    """Return (student's layer, teacher's layer), both counted from 0.

    Args:
        student: how many the student has.
        teacher: how many the teacher has.
        layers: "same": one to one, for equal depths; "uniform": every layer of the shallower one,
            spread evenly so that last meets last (TinyBERT); "skip": the same without that last
            pair, which predictions teach (PKD-skip); "last": the last layers of both (PKD-last).

    Raises:
        ConfigError: other depths and no map, or a map that leaves nothing.
    """
    if layers == "same":
        if student != teacher:
            raise ConfigError(
                f"the student has {student} layers, the teacher {teacher}: say which learns from "
                'which, layers="uniform", "last" or "skip", or pairs by name.'
            )
        return [(layer, layer) for layer in range(student)]
    count = min(student, teacher)
    if layers == "last":
        return [(student - count + i, teacher - count + i) for i in range(count)]
    pairs = [(_spread(i, count, student), _spread(i, count, teacher)) for i in range(count)]
    if layers == "skip":
        pairs.pop()
    if not pairs:
        raise ConfigError(f"layers={layers!r} leaves nothing of {student} and {teacher} layers.")
    return pairs


def _spread(index: int, count: int, depth: int) -> int:
    """Return the layer of `depth` that is as far along as layer `index` of `count`."""
    return -(-(index + 1) * depth // count) - 1


def find_stacks(model: nn.Module) -> dict[str, list[str]]:
    """Return the model's stacks: name -> names of its blocks, in order.

    Models of ours say where they are; of others the repeated blocks are found.

    Raises:
        ConfigError: there are none.
    """
    rules: Any = getattr(model, "layout_rules", None)
    if callable(rules):
        found = {
            stack: [f"{stack}.{key}" for key, _ in model.get_submodule(stack).named_children()]
            for stack in rules().stacks
        }
        return {stack: blocks for stack, blocks in found.items() if blocks}
    stacks: dict[str, list[str]] = {}
    for name in find_repeated_blocks(model):
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    if not stacks:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks: name pairs of modules in distill."
        )
    return stacks


def find_pairs(student: nn.Module, teacher: nn.Module, loss: DistillLoss) -> Pairs:
    """Return (student's module, teacher's module) by name, of one loss.

    Raises:
        ConfigError: other depths without a map, or names that there are not.
    """
    if loss.pairs:
        return _check_pairs(student, teacher, loss.pairs)
    mine, theirs = find_stacks(student), find_stacks(teacher)
    if len(mine) != len(theirs):
        raise ConfigError(
            f"the student has the stacks {', '.join(mine)}, the teacher {', '.join(theirs)}: name "
            "pairs of modules."
        )
    if loss.stack:
        mine, theirs = _pick(mine, loss.stack), _pick(theirs, loss.stack)
    found: Pairs = []
    for ours, others in zip(mine.values(), theirs.values(), strict=True):
        pairs = pair_layers(len(ours), len(others), loss.layers)
        found += [(ours[i], others[j]) for i, j in pairs]
    return found


def _pick(stacks: Mapping[str, list[str]], part: str) -> dict[str, list[str]]:
    """Return the stack of the encoder or of the decoder."""
    picked = {name: blocks for name, blocks in stacks.items() if part in name.split(".")}
    if len(picked) != 1:
        raise ConfigError(f"stack={part!r} is none of {', '.join(stacks)}: leave it out.")
    return picked


def _check_pairs(student: nn.Module, teacher: nn.Module, pairs: Sequence[tuple[str, str]]) -> Pairs:
    for place, model in enumerate((student, teacher)):
        known = dict(model.named_modules())
        for pair in pairs:
            name = pair[place].removeprefix(INTO)
            if name not in known:
                who = ("student", "teacher")[place]
                raise ConfigError(
                    f"distill.losses: the {who} has no module {name!r}.{suggest(name, known)}"
                )
    return list(pairs)
