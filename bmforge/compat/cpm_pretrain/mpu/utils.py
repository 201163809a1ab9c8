"""Helpers to divide numbers and tensors into equal parts."""

from __future__ import annotations

from torch import Tensor

from bmforge.errors import ConfigError

__all__ = ["VocabUtility", "divide", "ensure_divisibility", "split_tensor_along_last_dim"]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise an error unless the denominator divides the numerator.

    Raises:
        ConfigError: the denominator does not divide the numerator.
    """
    if numerator % denominator:
        raise ConfigError(
            f"{numerator} is not divisible by {denominator}. Choose a multiple of {denominator}."
        )


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient of two numbers, which must divide evenly."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into equal parts along the last dim; the parts are views by default."""
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """Computes the range [first, last) of the vocabulary for a process."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the vocabulary range of a process from the size of each part."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the vocabulary range of a process from the size of the full vocabulary."""
        part = divide(global_vocab_size, world_size)
        return rank * part, (rank + 1) * part
