"""Backward split into two parts: the input gradient now, the weight gradients later.

Zero-bubble schedules send a stage's input gradient as early as possible and fill idle time with
weight gradients. The first part records the gradients at the split nodes, the graph nodes at which
weights meet the path from the input to the outputs; the second part starts at the split nodes and
computes only the weight gradients. Weights with several split nodes (tied weights, a bias shared by
layers), and weights connected to an output outside this path, also get their full gradient.

Memory: the graph of the stage lives until the second part. Compute: one autograd call per split
node in the second part. With recomputed activations each call recomputes them, and a compiled block
is a single node that would run twice; do not split the backward of such blocks
(`Pipeline(split=())`).

Source: the idea of stage_backward_input and stage_backward_weight in torch.distributed.pipelining,
Qi et al. 2023 (2401.10241); reimplemented because torch 2.13 omits the gradients of weights that
reach an output outside of the path from the input, and raises an error for tied weights.
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
    """Weights whose gradients depend on the same split nodes and outputs."""

    leaves: list[Node]
    split_nodes: set[Node]
    outputs: set[Node]  # graph roots that lie off the path from the input


@dataclass
class WeightBackward:
    """Weight-gradient part of one split backward; call `run` once.

    Args:
        outputs: gradient edges at which the backward starts.
        grads: gradient of every output.
        node_grads: gradients at every split node, from the input-gradient part.
        groups: groups of weights to process; None if the input-gradient part was skipped, so that
            `run` computes the complete backward.
    """

    outputs: Sequence[GradientEdge]
    grads: Sequence[Tensor]
    node_grads: dict[Node, Grads] = field(default_factory=dict)
    groups: list[_Group] | None = None

    def run(self, *, all_groups: bool = False) -> None:
        """Accumulate the weights' gradients into their `.grad`.

        Args:
            all_groups: run the complete backward instead, for modules whose hooks need one
                complete backward (FSDP2 reduces gradients in such hooks).
        """
        if all_groups or self.groups is None:
            if self.outputs:
                torch.autograd.backward(self.outputs, self.grads)
        else:
            # Groups with several split nodes pass graph nodes that other groups still need.
            for group in sorted(self.groups, key=lambda g: len(g.split_nodes), reverse=True):
                self._run_group(group)
        # Frees the graph's tensors, even if the caller keeps this object.
        self.groups, self.outputs, self.grads, self.node_grads = [], (), (), {}

    def _run_group(self, group: _Group) -> None:
        starts = [
            (GradientEdge(split_node, slot), grad)
            for split_node in group.split_nodes
            for slot, grad in enumerate(self.node_grads.get(split_node, ()))
            if grad is not None
        ]
        starts += [
            (edge, grad)
            for edge, grad in zip(self.outputs, self.grads, strict=True)
            if edge.node in group.outputs
        ]
        if not starts:
            return
        shared = len(group.split_nodes) > 1
        with ExitStack() as hooks:
            # Between split nodes the input's gradient would flow again; `node_grads` has it.
            for split_node in group.split_nodes if shared else ():
                _hook(hooks, split_node, partial(_replace, self.node_grads[split_node]))
            torch.autograd.backward(
                [edge for edge, _ in starts],
                [grad for _, grad in starts],
                inputs=[leaf.variable for leaf in group.leaves],  # type: ignore[attr-defined]
                retain_graph=shared,
            )


def backward_input(
    outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> WeightBackward:
    """Accumulate the gradients of the inputs into their `.grad`.

    Returns the object that computes the weight gradients later.

    Without inputs this object computes the full backward.

    Args:
        outputs: gradient edges of the outputs, see `torch.autograd.graph.get_gradient_edge`.
        grads: gradient of every output.
        inputs: leaves that require a gradient.
    """
    if not inputs or not outputs:
        return WeightBackward(outputs, grads)
    above = _reverse(edge.node for edge in outputs)
    sources = {get_gradient_edge(tensor).node for tensor in inputs}
    path = _reachable(sources, above)
    # Only the nodes that accumulate into a leaf tensor have the attribute `variable`.
    leaves = [node for node in above if hasattr(node, "variable") and node not in sources]
    groups = _group(leaves, above, path, {edge.node for edge in outputs} - path)
    node_grads: dict[Node, Grads] = {}
    with ExitStack() as hooks:
        for split_node in {split_node for group in groups for split_node in group.split_nodes}:
            _hook(hooks, split_node, partial(node_grads.__setitem__, split_node))
        # With `inputs`, autograd skips products that lead to weights only; the graph is kept for
        # `run`.
        torch.autograd.backward(outputs, grads, inputs=inputs, retain_graph=True)
    return WeightBackward(outputs, grads, node_grads, groups)


def _hook(stack: ExitStack, node: Node, function: Callable[[Any], Any]) -> None:
    stack.callback(node.register_prehook(function).remove)


def _replace(saved: Grads, _: Grads) -> Grads:
    return saved


def _reverse(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the reversed autograd graph: for every node, the nodes that pass a gradient to it."""
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


def _reachable(
    starts: Iterable[Node], above: Mapping[Node, list[Node]], stop: Iterable[Node] = ()
) -> set[Node]:
    """Return all nodes reachable from `starts` in the graph `above`, without passing `stop`."""
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
    """Group weights whose gradients come from a common split node or output.

    Args:
        leaves: nodes of the weights.
        above: reversed graph; see `_reverse`.
        path: nodes between the inputs and the outputs of the stage.
        loose: outputs that are not on this path.
    """
    groups: dict[Node, _Group] = {}  # by split node or output
    for leaf in leaves:
        reached = _reachable([leaf], above, path)
        group = _Group([leaf], reached & path, reached & loose)
        # Weights that share a split node must run in one backward, since its graph is freed by it.
        for other in {id(g): g for n in reached if (g := groups.get(n))}.values():
            group.leaves += other.leaves
            group.split_nodes |= other.split_nodes
            group.outputs |= other.outputs
        groups.update(dict.fromkeys(group.split_nodes | group.outputs, group))
    return list({id(group): group for group in groups.values()}.values())
