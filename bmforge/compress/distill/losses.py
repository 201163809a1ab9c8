"""Distillation losses per token: hidden states, attention, relations, values and logits.

Attention scores and token similarities have T x S entries per head, which the model's forward pass
does not store. They are recomputed in chunks of queries, and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bmforge.compress.distill.capture import AttentionInput
from bmforge.device import accumulation_dtype
from bmforge.errors import ShapeError
from bmforge.nn.softcap import apply_softcap

__all__ = [
    "compare_attention",
    "compare_logits",
    "compare_relations",
    "compare_states",
    "compare_values",
]

# Maximum number of scores per chunk.
_CHUNK_ELEMENTS = 1 << 22
_NEVER = -1e30


def compare_states(student: Tensor, teacher: Tensor, weights: Tensor, form: str) -> Tensor:
    """Return the distance of hidden states per token.

    Args:
        student: hidden states of the student.
        teacher: hidden states of the teacher, with the same hidden size.
        weights: token weights; tokens of weight 0 are excluded from the mean norms.
        form: "plain": mean squared difference; "mean_norm": the same after the student's and the
            teacher's vectors are divided by their mean norm in the sequence; "cosine": one minus
            the cosine similarity.

    Shape:
        student, teacher: (B, T, D); weights: (B, T); returns (B, T)
    """
    if student.shape != teacher.shape:
        raise ShapeError(
            f"the hidden states of the student have the shape {tuple(student.shape)}, but those of "
            f"the teacher have the shape {tuple(teacher.shape)}. Pair modules with the same "
            "tokens; different hidden sizes are supported for models whose config has hidden_size."
        )
    wide = accumulation_dtype(student.dtype)
    student_wide, teacher_wide = student.to(wide), teacher.to(wide)
    if form == "cosine":
        return 1 - F.cosine_similarity(student_wide, teacher_wide, dim=-1)
    if form == "mean_norm":
        student_wide, teacher_wide = (
            _by_mean_length(x, weights) for x in (student_wide, teacher_wide)
        )
    return (student_wide - teacher_wide).square().mean(-1)


def _by_mean_length(x: Tensor, weights: Tensor) -> Tensor:
    """Divide the vectors of each sequence by their mean norm."""
    counted = (weights > 0).to(x.dtype)
    total = (x.norm(dim=-1) * counted).sum(-1) / counted.sum(-1).clamp(min=1)
    return x / total.clamp(min=torch.finfo(x.dtype).tiny)[:, None, None]


def compare_values(student: AttentionInput, teacher: AttentionInput, channels: int) -> Tensor:
    """Return the mean squared difference of attention values per token.

    Args:
        student, teacher: recorded attention inputs.
        channels: number of value channels over all processes, by which the local sum is divided.

    Shape:
        returns (B, S)
    """
    student_values, teacher_values = _join_heads(student.value), _join_heads(teacher.value)
    if student_values.shape != teacher_values.shape:
        raise ShapeError(
            f"the attention values of the student have the shape {tuple(student_values.shape)}, "
            f"but those of the teacher have the shape {tuple(teacher_values.shape)}. For "
            'different sizes use kind="relation".'
        )
    wide = accumulation_dtype(student_values.dtype)
    return (student_values.to(wide) - teacher_values.to(wide)).square().sum(-1) / channels


def compare_attention(student: AttentionInput, teacher: AttentionInput, heads: int) -> Tensor:
    """Return the KL divergence of attention probabilities per query.

    Args:
        student, teacher: recorded attention inputs.
        heads: number of heads over all processes, by which the local sum is divided.

    Shape:
        returns (B, T)
    """
    if student.query.shape[:3] != teacher.query.shape[:3]:
        raise ShapeError(
            f"the queries of the student have (B, N, T) = {tuple(student.query.shape[:3])}, but "
            f"those of the teacher have {tuple(teacher.query.shape[:3])}. For different "
            'numbers of heads use kind="relation".'
        )

    def compare(start: int, stop: int) -> Tensor:
        student_probs, teacher_probs = (
            _log_attention(side, start, stop) for side in (student, teacher)
        )
        return _divergence(student_probs, teacher_probs).sum(1) / heads

    rows, count, length = student.query.shape[:3]
    return _in_chunks(compare, length, rows * count * student.key.shape[2])


def compare_relations(
    student: AttentionInput, teacher: AttentionInput, of: str, heads: int, share: int
) -> Tensor:
    """Return the KL divergence of token similarities per token, averaged over heads.

    Args:
        student, teacher: recorded attention inputs.
        of: "query", "key" or "value".
        heads: number of relation heads over all processes, into which the channels of student and
            teacher are split.
        share: number of processes among which the heads are split.

    Shape:
        returns (B, T)

    Source: Wang et al., "MiniLMv2" (2021).
    """
    num_local = heads // share
    student_parts, teacher_parts = (
        _divide(getattr(side, of), num_local, heads) for side in (student, teacher)
    )

    def compare(start: int, stop: int) -> Tensor:
        # The student's mask is used for both: without gradients, some models merge the mask into
        # the bias.
        both = (_relate(x, student, start, stop) for x in (student_parts, teacher_parts))
        return _divergence(*both).sum(1) / heads

    rows, count, length, _ = student_parts.shape
    return _in_chunks(compare, length, rows * count * length)


def compare_logits(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) times T^2 per row of logits; the logits must be unsharded.

    For a single logit (regression), the squared difference is returned.

    Shape:
        student, teacher: (..., L) for L classes or tokens; returns (...)
    """
    if student.shape != teacher.shape:
        raise ShapeError(
            f"the logits of the student have the shape {tuple(student.shape)}, but those of the "
            f"teacher have the shape {tuple(teacher.shape)}. Use models with the same vocabulary "
            "or labels."
        )
    wide = accumulation_dtype(student.dtype)
    student_wide, teacher_wide = student.to(wide), teacher.to(wide)
    if student_wide.shape[-1] == 1:
        return (student_wide - teacher_wide).square().squeeze(-1)
    both = (torch.log_softmax(x / temperature, -1) for x in (student_wide, teacher_wide))
    return _divergence(*both) * temperature**2


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum of p (log p - log q) over the last dim; terms with p = 0 are 0."""
    share = teacher.exp()
    return (share * (teacher - student)).masked_fill(share == 0, 0).sum(-1)


def _in_chunks(compare: Callable[[int, int], Tensor], length: int, each: int) -> Tensor:
    """Apply `compare` to chunks of queries, recomputed in backward; concatenate the results."""

    def parts() -> Iterator[Tensor]:
        step = max(1, _CHUNK_ELEMENTS // max(1, each))
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield checkpoint(compare, start, stop, use_reentrant=False)

    return torch.cat(list(parts()), -1)


def _log_attention(side: AttentionInput, start: int, stop: int) -> Tensor:
    """Return the log attention probabilities of some queries, (B, N, t, S)."""
    query, key = side.query[:, :, start:stop], side.key
    wide = accumulation_dtype(query.dtype)
    times = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(times, 1) if times > 1 else key
    scale = query.shape[-1] ** -0.5 if side.scale is None else side.scale
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    scores = apply_softcap(scores, side.softcap)
    if side.bias is not None:
        scores = scores + side.bias[:, :, start:stop]
    return _log_softmax_seen(scores, side, start, stop)


def _log_softmax_seen(scores: Tensor, side: AttentionInput, start: int, stop: int) -> Tensor:
    """Return the log-softmax over the keys that each query may attend to."""
    seen = side.mask
    if seen is not None and seen.shape[2] > 1:
        seen = seen[:, :, start:stop]
    if seen is None and side.causal and side.query.shape[2] > 1:
        position = torch.arange(scores.shape[-1], device=scores.device)
        seen = position[None, :] <= position[start:stop, None]
    return torch.log_softmax(scores if seen is None else scores.masked_fill(~seen, _NEVER), -1)


def _relate(x: Tensor, side: AttentionInput, start: int, stop: int) -> Tensor:
    """Return the log-softmax of similarities between some tokens and all tokens, (B, A, t, T)."""
    wide = x.to(accumulation_dtype(x.dtype))
    scores = wide[:, :, start:stop] @ wide.transpose(-1, -2) * x.shape[-1] ** -0.5
    return _log_softmax_seen(scores, side, start, stop)


def _join_heads(x: Tensor) -> Tensor:
    """Reshape (B, K, T, H) to (B, T, K * H)."""
    return x.transpose(1, 2).flatten(2)


def _divide(x: Tensor, num_local: int, heads: int) -> Tensor:
    """Split the channels of all heads into A relation heads: (B, A, T, channels / A)."""
    joined = _join_heads(x)
    if not num_local or joined.shape[-1] % num_local:
        raise ShapeError(
            f"relation_heads={heads} must divide the {joined.shape[-1]} channels of both models, "
            "and must be divisible by the number of processes over which the heads are divided."
        )
    return joined.unflatten(-1, (num_local, -1)).transpose(1, 2)
