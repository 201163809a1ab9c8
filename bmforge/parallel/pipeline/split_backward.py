"""Backward in two halves: the input's gradient now, the weights' later.

Zero-bubble schedules send a stage's input gradient on as early as they can and fill idle time with
the weights'. The first half notes the gradients that arrive at the joints, the nodes of the graph
at which weights meet the path from the input to the outputs; the second starts there and computes
nothing else. Weights that meet the path more than once (tied ones, a bias shared by layers), and
weights that reach an output without it, get their whole gradient too.

Memory: the graph of the stage lives until the second half.
Compute: one start of autograd per joint in the second half. Where activations are recomputed, each
start recomputes them, and a compiled block is one node, so that it runs twice: run backwards whole
there (`Pipeline(split=())`).

Source: the idea of stage_backward_input and stage_backward_weight in torch.distributed.pipelining,
Qi et al. 2023 (2401.10241); written anew because those (2.13) lose weights that reach an output
off the input's path and raise on tied ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["WeightBackward", "backward_input"]

Grads = tuple[Tensor | None, ...]


@dataclass(eq=False)
class _Group:
    """Weights whose gradients come from the same joints and outputs."""

    leaves: list[Node]
    joints: set[Node]
    outputs: set[Node]  # graph roots that lie off the path from the input


@dataclass
class WeightBackward:
    """The second half of one backward; `run` it once.

    Args:
        outputs: where the backward starts.
        grads: the gradient of every output.
        arrived: the gradients that came to every joint in the first half.
        groups: what is left to do; None: nothing was done yet, so everything.
    """

    outputs: Sequence[GradientEdge]
    grads: Sequence[Tensor]
    arrived: dict[Node, Grads] = field(default_factory=dict)
    groups: list[_Group] | None = None

    def run(self, *, whole: bool = False) -> None:
        """Add the weights' gradients to their `.grad`.

        Args:
            whole: run the complete backward again instead, so that the hooks of modules that wait
                for it (FSDP2 reduces gradients in one) see it.
        """
        if whole or self.groups is None:
            if self.outputs:
                torch.autograd.backward(self.outputs, self.grads)
        else:
            # Those with several joints pass through what other groups still need.
            for group in sorted(self.groups, key=lambda g: len(g.joints), reverse=True):
                self._run_group(group)
        self.groups, self.outputs, self.grads, self.arrived = [], (), (), {}

    def _run_group(self, group: _Group) -> None:
        starts = [
            (GradientEdge(joint, slot), grad)
            for joint in group.joints
            for slot, grad in enumerate(self.arrived.get(joint, ()))
            if grad is not None
        ]
        starts += [
            (edge, grad)
            for edge, grad in zip(self.outputs, self.grads, strict=True)
            if edge.node in group.outputs
        ]
        if not starts:
            return
        shared = len(group.joints) > 1
        with ExitStack() as hooks:
            # From one joint to the next the input's gradient flows again; it is in `arrived`.
            for joint in group.joints if shared else ():
                _hook(hooks, joint, partial(_replace, self.arrived[joint]))
            torch.autograd.backward(
                [edge for edge, _ in starts],
                [grad for _, grad in starts],
                inputs=[leaf.variable for leaf in group.leaves],  # type: ignore[attr-defined]
                retain_graph=shared,
            )


def backward_input(
    outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> WeightBackward:
    """Add the gradients of the inputs to their `.grad`; return what makes the weights'.

    Without inputs everything is left to the second half.

    Args:
        outputs: the edges of the outputs, from `torch.autograd.graph.get_gradient_edge`.
        grads: the gradient of every output.
        inputs: leaves that require a gradient.
    """
    if not inputs or not outputs:
        return WeightBackward(outputs, grads)
    above = _reverse(edge.node for edge in outputs)
    sources = {get_gradient_edge(tensor).node for tensor in inputs}
    path = _climb(sources, above)
    leaves = [node for node in above if hasattr(node, "variable") and node not in sources]
    groups = _group(leaves, above, path, {edge.node for edge in outputs} - path)
    arrived: dict[Node, Grads] = {}
    with ExitStack() as hooks:
        for joint in {joint for group in groups for joint in group.joints}:
            _hook(hooks, joint, partial(arrived.__setitem__, joint))
        torch.autograd.backward(outputs, grads, inputs=inputs, retain_graph=True)
    return WeightBackward(outputs, grads, arrived, groups)


def _hook(stack: ExitStack, node: Node, function: Callable[[Any], Any]) -> None:
    stack.callback(node.register_prehook(function).remove)


def _replace(saved: Grads, _: Grads) -> Grads:
    return saved


def _reverse(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return, for every node that the roots reach, the nodes that hand it a gradient."""
    above: dict[Node, list[Node]] = defaultdict(list)
    todo = list(dict.fromkeys(roots))
    for root in todo:
        above[root] = []
    while todo:
        node = todo.pop()
        for child, _ in node.next_functions:
            if child is not None:
                if child not in above:
                    todo.append(child)
                above[child].append(node)
    return above


def _climb(
    starts: Iterable[Node], above: Mapping[Node, list[Node]], stop: Iterable[Node] = ()
) -> set[Node]:
    """Return the starts and all that lies above them, up to the nodes in `stop` and with them."""
    seen = {start for start in starts if start in above}
    todo, ends = list(seen), set(stop)
    while todo:
        node = todo.pop()
        for parent in above[node] if node not in ends else ():
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return seen


def _group(
    leaves: Iterable[Node], above: Mapping[Node, list[Node]], path: set[Node], loose: set[Node]
) -> list[_Group]:
    """Put weights that share a joint, or an output off the path, into one group."""
    groups: dict[Node, _Group] = {}  # by joint or output
    for leaf in leaves:
        reached = _climb([leaf], above, path)
        group = _Group([leaf], reached & path, reached & loose)
        for other in {id(g): g for n in reached if (g := groups.get(n))}.values():
            group.leaves += other.leaves
            group.joints |= other.joints
            group.outputs |= other.outputs
        groups.update(dict.fromkeys(group.joints | group.outputs, group))
    return list({id(group): group for group in groups.values()}.values())
