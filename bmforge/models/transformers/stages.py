"""Runs a range of a transformers model's blocks, as one stage of a pipeline.

transformers' own forward runs on every stage and computes masks, rotary tables and head. Meanwhile,
stand-ins replace the blocks of other stages: the stand-in before this stage's first block returns
the activations of the previous stage, and the stand-in after this stage's last block ends the
forward pass. On later stages, a stand-in for the embedding returns zeros, which must not affect the
result. Whether an architecture can be split in this way is tested on a small copy of the model (see
`probe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bmforge.models.transformers.structure import Structure
from bmforge.records import Span

__all__ = [
    "SplitPoints",
    "StageEnd",
    "find_split_points",
    "run_stage",
    "stage_ends",
    "stage_modules",
]

T = TypeVar("T")
_ATOL = 1e-5


class StageEnd(Exception):  # noqa: N818 - not an error: it ends a forward
    """Exception that ends the forward pass of a stage; `output` is the next stage's input."""

    def __init__(self, output: Tensor) -> None:
        super().__init__("the last block of the stage")
        self.output = output


@dataclass(frozen=True)
class SplitPoints:
    """How a model can be split between its blocks into pipeline stages, if at all.

    Args:
        refusal: reason why the model cannot be split between its blocks; "" if it can.
        forms: mapping from block class name to the length of the tuple that the block returns; 0 if
            it returns a tensor.
        after: names of the stack's sibling modules that run only after the last block.
    """

    refusal: str = "its small copy was not tested"
    forms: Mapping[str, int] = field(default_factory=dict)
    after: frozenset[str] = frozenset()


class _StageProxy(nn.Module):
    """Stand-in for a module of another pipeline stage; forwards attribute access to that module."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.__dict__["source"] = source

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the replaced module."""
        return getattr(self.__dict__["source"], name)


class _OtherBlock(_StageProxy):
    """Stand-in for a block of another pipeline stage.

    Args:
        source: the replaced block.
        outputs: length of the tuple that the block returns; 0 if it returns a tensor.
        value: activations to return; if None, the input is returned.
        ends: True to end the forward pass here, since the stage runs no later block.
    """

    def __init__(self, source: nn.Module, outputs: int, value: Tensor | None, ends: bool) -> None:
        super().__init__(source)
        self.__dict__.update(outputs=outputs, value=value, ends=ends)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received activations, if there are any, else the input.

        Raises:
            StageEnd: the stage ends before this block.
        """
        x = args[0] if args else kwargs["hidden_states"]
        if self.ends:
            raise StageEnd(x)
        x = x if self.value is None else self.value
        return (x, *[None] * (self.outputs - 1)) if self.outputs else x


class _NoEmbedding(_StageProxy):
    """Stand-in for the token embedding of another pipeline stage; returns zeros.

    Args:
        source: the replaced embedding.
        like: tensor with the device and dtype of the zeros.
    """

    def __init__(self, source: nn.Module, like: Tensor) -> None:
        super().__init__(source)
        self.__dict__["like"] = like

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros with the shape of the token embeddings."""
        return self.like.new_zeros(*ids.shape, self.__dict__["source"].embedding_dim)


@contextmanager
def stage_modules(
    foreign: Any,
    whole: nn.Module,
    structure: Structure,
    split_points: SplitPoints,
    span: Span,
    stage_inputs: tuple[Tensor, ...],
) -> Iterator[None]:
    """Context manager: replace the modules of other stages with stand-ins.

    Args:
        foreign: transformers model, which may lack the modules of other stages.
        whole: model with all modules, possibly on the meta device; stand-ins get their attributes
            from it.
        structure: names of the main modules.
        split_points: result of `find_split_points`.
        span: range of this stage's blocks.
        stage_inputs: activations received from the previous stage; empty on the first stage.
    """
    name = structure.stacks[0]
    stack, blocks = foreign.get_submodule(name), dict(whole.get_submodule(name).named_children())
    owner_name, _, leaf = structure.embed.rpartition(".")
    owner = foreign.get_submodule(owner_name)
    stack_modules, embed = dict(stack._modules), owner._modules[leaf]
    for number, (key, block) in enumerate(blocks.items()):
        if span.first <= number < span.last:
            continue
        value = stage_inputs[0] if number == span.first - 1 else None
        outputs = split_points.forms.get(type(block).__name__, 0)
        stack._modules[key] = _OtherBlock(block, outputs, value, ends=number == span.last)
    if span.first:
        source = whole.get_submodule(structure.embed)
        owner._modules[leaf] = _NoEmbedding(source, stage_inputs[0])
    try:
        yield
    finally:
        stack._modules.update(stack_modules)
        owner._modules[leaf] = embed


def run_stage(modules: Any, run: Callable[[], T]) -> T | Tensor:
    """Run the model with stand-ins; return its result or, before the last stage, the activations.

    Args:
        modules: context manager from `stage_modules`.
        run: function that calls the transformers model.
    """
    with modules:
        try:
            return run()
        except StageEnd as end:
            return end.output


def _observe(foreign: Any, structure: Structure, run: Callable[[], Any]) -> SplitPoints:
    """Run the model once with hooks; return its `SplitPoints`, without testing the stages."""
    if not structure.stacks or not structure.embed:
        return SplitPoints("it has no stack of blocks after a token embedding")
    owner_name, _, leaf = structure.stacks[0].rpartition(".")
    owner = foreign.get_submodule(owner_name)
    blocks, order = list(owner.get_submodule(leaf).children()), []
    forms: dict[str, int] = {}
    early: set[str] = set()
    after: set[str] = set()

    def note_block(block: nn.Module, args: Any, out: Any) -> None:
        order.append(id(block))
        forms[type(block).__name__] = len(out) if isinstance(out, (tuple, list)) else 0

    def note_other(name: str, module: nn.Module, args: Any, out: Any) -> None:
        (early if len(order) < len(blocks) else after).add(name)

    hooks = [block.register_forward_hook(note_block) for block in blocks]
    for name, module in owner.named_children():
        hooks.append(module.register_forward_hook(partial(note_other, name)))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if order != [id(block) for block in blocks]:
        return SplitPoints("its blocks do not run exactly once each, in the order of the stack")
    return SplitPoints("", forms, frozenset(after - early))


def find_split_points(
    small_copy: Any, structure: Structure, run: Callable[[], Tensor]
) -> SplitPoints:
    """Find out whether a model can be split between its blocks into pipeline stages.

    A small copy is split in two after each block in turn and must return the same logits.

    Args:
        small_copy: small copy of the model; see `small_copy.py`.
        structure: names of the model's main modules.
        run: function that returns the logits of the small copy.
    """
    expected, split_points = run(), _observe(small_copy, structure, run)
    if split_points.refusal:
        return split_points
    total = len(list(small_copy.get_submodule(structure.stacks[0]).children()))
    for cut in range(1, total):
        stage_inputs: tuple[Tensor, ...] = ()
        for span in (Span(0, cut, total), Span(cut, total, total)):
            modules = stage_modules(
                small_copy, small_copy, structure, split_points, span, stage_inputs
            )
            try:
                out = run_stage(modules, run)
            except Exception as error:  # any code of transformers may need what a stand-in lacks
                reason = f"it reads other blocks in its forward ({type(error).__name__})"
                return replace(split_points, refusal=reason)
            stage_inputs = (out,)
        if out.shape != expected.shape or not torch.allclose(out, expected, atol=_ATOL):
            return replace(split_points, refusal="more than one tensor passes between its blocks")
    return split_points


def stage_ends(
    structure: Structure, after: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the child names of modules that only the first or only the last stage needs.

    For the first stage, this is only the token embedding: later stages may need other modules.
    """
    stack = structure.stacks[0] if structure.stacks else ""

    def contains_stack(name: str) -> bool:
        owner = name.rpartition(".")[0]
        return bool(name) and (not owner or stack.startswith(f"{owner}."))

    first = [n.rpartition(".")[2] for n in (structure.embed,) if contains_stack(n)]
    last = [n.rpartition(".")[2] for n in (structure.head,) if contains_stack(n)]
    return tuple(first), tuple(sorted({*last, *after} - {*first}))
