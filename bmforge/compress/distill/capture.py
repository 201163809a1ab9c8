"""Records internal tensors of a model: hidden states, attention queries and keys, head inputs.

All hooks are installed before the model is parallelized, so that they see the local shard of each
tensor on any layout. They do nothing unless a `Recorder` is recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.nn import Attention, HeadInput, LMHead, linear_cross_entropy
from bmforge.nn.part import AdapterModule, TensorNote, attach_part_, detach_part_, find_like
from bmforge.nn.shard_hooks import VocabCut

__all__ = [
    "INTO",
    "AttentionInput",
    "Prediction",
    "Recorder",
    "TeacherView",
    "cross_entropy_of",
    "find_attention",
    "take_prediction",
]

_VIEW = "teacher_view"
# Prefix of a module name that selects the module's input instead of its output.
INTO = "into:"


class AttentionInput(NamedTuple):
    """Inputs of an attention operation; see `nn.attention.compute_attention`.

    Shape:
        query: (B, N, T, H); key, value: (B, K, S, H); mask: (B or 1, 1, T or 1, S);
        bias: (B or 1, N, T, S)
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    scale: float | None
    softcap: float | None = None


class Prediction(NamedTuple):
    """Inputs of a language model's head."""

    given: HeadInput
    labels: Tensor
    num_items: float | Tensor | None
    vocab: VocabCut | None


class TeacherView(AdapterModule):
    """Trained projection of a block's output to the teacher's width; removed after training.

    Args:
        width: hidden size D of the student.
        teacher_width: hidden size of the teacher.
        like: tensor whose dtype and device are used.

    Shape:
        x: (..., D) -> (..., teacher_width)
    """

    is_delta = True

    def __init__(self, width: int, teacher_width: int, like: Tensor) -> None:
        super().__init__()
        empty = torch.empty(teacher_width, width, dtype=like.dtype, device=like.device)
        self.weight = nn.Parameter(empty)
        self.recorder: Recorder | None = None
        self.place = ""

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return the initialization of the weight, which is not sharded.

        The standard deviation 1/sqrt(D) roughly preserves norms.
        """
        return {"weight": TensorNote(self.weight.shape[1] ** -0.5)}

    def forward(self, x: Tensor) -> Tensor:
        """Project hidden states to the teacher's width."""
        # Clone: the backward pass needs this weight before FSDP has all-gathered the block's
        # weights again.
        return F.linear(x, self.weight.to(x.dtype).clone())

    def join(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """Return the block's output unchanged and record its projection to the teacher's width."""
        if self.recorder is not None and self.recorder.is_recording:
            self.recorder.states[self.place] = self(out)
        return out


class Recorder:
    """Records internal tensors of a model during one call.

    Attributes:
        states: dict from module name to output, projected to the teacher's width if there is a
            `TeacherView`.
        attention: dict from module name to the inputs of its attention operation.
        prediction: inputs of the head.
        inputs: keyword arguments of the model's call.
        output: result of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.is_recording = False
        self.clear()
        self._undo: list[Callable[[], Any]] = []
        before = model.register_forward_pre_hook(partial(_note_inputs, self), with_kwargs=True)
        after = model.register_forward_hook(partial(_note_output, self))
        self._undo += [before.remove, after.remove]

    def clear(self) -> None:
        """Delete the recorded tensors."""
        self.states: dict[str, Tensor] = {}
        self.attention: dict[str, AttentionInput] = {}
        self.prediction: Prediction | None = None
        self.inputs: dict[str, Any] = {}
        self.output: Any = None

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Context manager that records model calls, and deletes the recorded tensors at the end."""
        self.clear()
        self.is_recording = True
        try:
            yield self
        finally:
            self.is_recording = False
            self.clear()

    def watch_state_(self, model: nn.Module, name: str) -> None:
        """Record a module's output, or its input if the name begins with "into:"."""
        module = model.get_submodule(name.removeprefix(INTO))
        if name.startswith(INTO):
            hook = partial(_note_entering, self, name)
            self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        elif not hasattr(module, _VIEW):
            hook = partial(_note_state, self, name)
            self._undo.append(module.register_forward_hook(hook).remove)

    def watch_projected_(self, model: nn.Module, name: str, width: int, teacher_width: int) -> None:
        """Record the output of a module, projected to the teacher's width.

        Raises:
            ConfigError: the name refers to a module's input, to which no projection can be
                attached.
        """
        if name.startswith(INTO):
            raise ConfigError(
                f"{name} is the input of a module, which cannot be projected to the teacher's "
                f"hidden size {teacher_width}. Use the module that outputs this tensor instead."
            )
        module = model.get_submodule(name)
        if hasattr(module, _VIEW):
            return
        part = TeacherView(width, teacher_width, find_like(module))
        part.recorder, part.place = self, name
        attach_part_(module, _VIEW, part)
        self._undo.append(partial(detach_part_, module, _VIEW))

    def watch_attention_(self, model: nn.Module, name: str) -> None:
        """Record queries, keys, values and mask of an attention module."""
        attn = find_attention(model, name)
        own = attn.attention_fn
        attn.attention_fn = noting = partial(_note_mix, self, name, attn.softcap, own)

        def undo() -> None:
            if attn.attention_fn is noting:
                attn.attention_fn = own

        self._undo.append(undo)

    def watch_head_(self, head: LMHead, measure: Callable[..., Tensor]) -> None:
        """Make an LM head compute its loss with the function `measure`."""
        head.measure = measure

        def undo() -> None:
            head.measure = None

        self._undo.append(undo)

    def leave_(self) -> None:
        """Remove all hooks from the model."""
        while self._undo:
            self._undo.pop()()


def find_attention(model: nn.Module, name: str) -> Attention:
    """Return the attention module `name`, or the attention module of the block `name`.

    Raises:
        ConfigError: the module has no bmforge attention.
    """
    module: Any = model.get_submodule(name)
    attn = module if isinstance(module, Attention) else getattr(module, "attn", None)
    if not isinstance(attn, Attention):
        raise ConfigError(
            f"{name} of {type(model).__name__} has no attention module of bmforge "
            "(`nn.Attention`) whose queries and keys can be compared. Pair other modules, or "
            "use a loss on hidden states."
        )
    return attn


def _note_inputs(
    recorder: Recorder, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if recorder.is_recording:
        recorder.inputs = dict(kwargs)


def _note_output(recorder: Recorder, module: nn.Module, args: Any, out: Any) -> None:
    if recorder.is_recording:
        recorder.output = out


def _note_state(recorder: Recorder, name: str, module: nn.Module, args: Any, out: Any) -> None:
    if recorder.is_recording:
        recorder.states[name] = out[0] if isinstance(out, tuple) else out


def _note_entering(
    recorder: Recorder, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if recorder.is_recording:
        recorder.states[name] = args[0] if args else next(iter(kwargs.values()))


def _note_mix(
    recorder: Recorder,
    name: str,
    softcap: float | None,
    inner: Callable[..., Tensor],
    *arguments: Any,
    **more: Any,
) -> Tensor:
    if recorder.is_recording:
        recorder.attention[name] = AttentionInput(*arguments[:7])._replace(softcap=softcap)
    return inner(*arguments, **more)


def take_prediction(
    recorder: Recorder,
    head_input: HeadInput,
    labels: Tensor,
    num_items: float | Tensor | None,
    vocab: VocabCut | None,
) -> Tensor:
    """Record the inputs of the teacher's head, and return 0 instead of its loss.

    Without an active recording, the head's usual loss is returned.
    """
    if recorder.is_recording:
        recorder.prediction = Prediction(head_input.detach(), labels, num_items, vocab)
        return head_input.hidden.new_zeros(())
    return cross_entropy_of(head_input, labels, num_items, vocab)


def cross_entropy_of(
    head_input: HeadInput, labels: Tensor, num_items: float | Tensor | None, vocab: VocabCut | None
) -> Tensor:
    """Return the cross-entropy loss that the head computes by default."""
    hidden, weight, bias, added, cap = head_input
    return linear_cross_entropy(hidden, weight, labels, bias, num_items, vocab, added, cap)
