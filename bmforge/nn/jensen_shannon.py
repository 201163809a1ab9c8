"""Generalized Jensen-Shannon divergence between the predictions of two heads.

Only the logits of one chunk of tokens are in memory at a time; backward recomputes them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError, ShapeError
from bmforge.nn.distillation import HeadInput
from bmforge.nn.losses import split_chunks

__all__ = ["generalized_jsd", "linear_jsd"]

# Number of logits per chunk of tokens.
_CHUNK_ELEMENTS = 1 << 22


def generalized_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of every token.

    With M = beta * teacher + (1 - beta) * student, the divergence is beta KL(teacher || M) + (1 -
    beta) KL(student || M). For beta = 0 the function returns KL(teacher || student), and for beta =
    1 KL(student || teacher); up to a constant factor, these are the limits of the divergence.
    Log-probabilities may be -inf. An outcome that one distribution excludes adds 0 to this
    distribution's term; the divergence is infinite if p is above 0 and q is 0 in a term KL(p || q).

    Args:
        student: log-probabilities of the student.
        teacher: log-probabilities of the teacher.
        beta: interpolation weight, 0 to 1.

    Shape:
        student, teacher: (..., V); returns (...)

    Source: Agarwal et al., "On-policy distillation of language models" (arXiv 2306.13649).
    """
    if beta == 0:
        return _kl_divergence(teacher, student)
    if beta == 1:
        return _kl_divergence(student, teacher)
    weights = student.new_tensor([beta, 1 - beta]).log()
    # The gradient of logaddexp(-inf, -inf) is NaN, so an outcome that both exclude gets a finite
    # value, whose probability is 0 too.
    least = torch.finfo(student.dtype).min / 4
    mixture = torch.logaddexp(
        teacher.clamp(min=least) + weights[0], student.clamp(min=least) + weights[1]
    )
    from_teacher, from_student = (_kl_divergence(logs, mixture) for logs in (teacher, student))
    return beta * from_teacher + (1 - beta) * from_student


def _kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) over the last dim; terms with p = 0 are 0, and so are their gradients."""
    p = log_p.exp()
    # Masking the gap, not the product, keeps NaN out of the gradients too.
    return (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1)


def linear_jsd(
    student: HeadInput, teacher: HeadInput, beta: float, temperature: float = 1.0
) -> Tensor:
    """Return each token's divergence and reverse KL divergence, computed from hidden states.

    Args:
        student: inputs of the student's head.
        teacher: inputs of the teacher's head; no gradient flows into it.
        beta: interpolation of `generalized_jsd`.
        temperature: divisor of both models' logits (default: 1).

    Shape:
        returns (2, M): divergence, and KL(student || teacher) without gradient

    Raises:
        ShapeError: the vocabularies have different sizes.
        ConfigError: a head is quantized.

    Memory: logits of one chunk of tokens; backward recomputes them.
    """
    sizes = len(student.weight), len(teacher.weight)
    if sizes[0] != sizes[1]:
        raise ShapeError(
            f"student and teacher have different vocabularies: vocab_size={sizes[0]} and "
            f"{sizes[1]}. Use models with the same vocabulary."
        )
    if not (isinstance(student.weight, Tensor) and isinstance(teacher.weight, Tensor)):
        raise ConfigError(
            "distillation does not support quantized heads. Exclude the heads from the "
            "quantization."
        )
    size = max(1, _CHUNK_ELEMENTS // sizes[0])
    teacher = teacher.detach()
    parts = []
    for start, count in split_chunks(len(student.hidden), size):
        chunks = [head.select(slice(start, start + count)) for head in (student, teacher)]
        out = checkpoint(_measure, *chunks, beta, temperature, use_reentrant=False)
        parts.append(out)
    empty = student.hidden.new_zeros((2, 0), dtype=accumulation_dtype(student.hidden.dtype))
    return torch.cat([empty, *parts], 1)


def _measure(student: HeadInput, teacher: HeadInput, beta: float, temperature: float) -> Tensor:
    logs = [(head.logits() / temperature).log_softmax(-1) for head in (student, teacher)]
    divergence = generalized_jsd(logs[0], logs[1], beta)
    return torch.stack((divergence, generalized_jsd(logs[0], logs[1], 1.0).detach()))
