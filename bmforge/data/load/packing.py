"""Packs a token store into sequences of `seq_len` tokens, and finds their document boundaries.

All documents are concatenated in the store; a sequence is a window on that stream and may span
documents. Adjacent windows share one token, so every token is predicted: a sequence of T tokens has
T - 1 predictions, as the model shifts the labels itself (Hugging Face's convention).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bmforge.data.load.order import derive_key, draw_below, permute
from bmforge.data.store.token_store import TokenStore
from bmforge.errors import ConfigError, DataError

__all__ = ["Dataset", "PackedDataset", "document_starts", "reset_positions"]


class Dataset(Protocol):
    """Interface of a corpus for `DataLoader`: shuffled training and validation sequences."""

    seq_len: int
    eos_id: int | None

    def check_trainable(self) -> None:
        """Raise DataError if the corpus is shorter than one sequence."""

    def training_rows(self, numbers: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the sequences of the samples with global indices `numbers`: (B, seq_len)."""

    def num_held_out_rows(self) -> int:
        """Return the number of validation sequences in one epoch; the last may be shorter."""

    def held_out_rows(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return validation sequences, in stream order, and the number of real tokens in each."""

    def fingerprint(self) -> int:
        """Return a 63-bit hash that changes whenever the order of samples would change."""

    def content(self) -> int:
        """Return a 63-bit hash of the content of the corpus, independent of its location."""


class PackedDataset:
    """Fixed-length token sequences of one token store.

    Training reads the stream as a ring that is cut at a new offset in every epoch. Epoch e starts
    at a random offset o(seed, e); its windows begin at (o + i (T - 1)) mod num_tokens for i in [0,
    samples_per_epoch), in the order of a keyed permutation of i. No index is stored, however large
    the corpus is.

    Args:
        store: token store whose documents end with the end-of-document token.
        seq_len: tokens per sequence, at least 2.
        eos_id: end-of-document token id, needed only to separate documents.
        name: corpus name; part of the random key, so that the corpora of a mixture have independent
            orders.

    Raises:
        ConfigError: `seq_len` is below 2.
    """

    def __init__(
        self, store: TokenStore, seq_len: int, eos_id: int | None = None, name: str = ""
    ) -> None:
        if seq_len < 2:
            raise ConfigError(
                f"seq_len={seq_len} must be at least 2, so that each sequence has a token to "
                "predict."
            )
        self.store = store
        self.seq_len = seq_len
        self.eos_id = eos_id
        self.name = name
        self._tokens = store.map_for_random_access()

    @property
    def samples_per_epoch(self) -> int:
        """Number of training sequences in one epoch; 0 if the corpus is shorter than `seq_len`."""
        tokens = self.store.num_tokens
        return tokens // (self.seq_len - 1) if tokens >= self.seq_len else 0

    def check_trainable(self) -> None:
        """Raise DataError if the corpus is shorter than one sequence."""
        if self.samples_per_epoch == 0:
            tokens = self.store.num_tokens
            raise DataError(
                f"token store {str(self.store.prefix)!r} has {tokens} tokens, which are too few "
                f"for one sequence of seq_len={self.seq_len}. Add text, or set seq_len to at most "
                f"{max(tokens, 2)}."
            )

    def training_rows(self, numbers: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the token sequences of the samples with global indices `numbers`.

        Shape: numbers (B,), result (B, T) int64.
        """
        rows = np.empty((len(numbers), self.seq_len), dtype=np.int64)
        for row, start in zip(rows, self.training_starts(numbers, seed).tolist(), strict=True):
            self._copy_ring(start, row)
        return rows

    def training_starts(self, numbers: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the token offset at which each sample begins.

        Shape: numbers (B,), result (B,)
        """
        per_epoch, stride = self.samples_per_epoch, self.seq_len - 1
        epochs, indices = np.divmod(numbers, per_epoch)
        starts = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            key = derive_key(self.name, seed, epoch)
            in_epoch = epochs == epoch
            order = permute(indices[in_epoch], per_epoch, key)
            starts[in_epoch] = draw_below(stride, key) + order * stride
        return starts % self.store.num_tokens

    def _copy_ring(self, start: int, row: NDArray[np.int64]) -> None:
        """Fill `row` with the tokens from `start` on, wrapping around at the end of the corpus."""
        head = self._tokens[start : start + len(row)]
        row[: len(head)] = head
        row[len(head) :] = self._tokens[: len(row) - len(head)]

    def num_held_out_rows(self) -> int:
        """Return the number of validation sequences in one epoch; the last may be shorter."""
        return -(-max(self.store.num_tokens - 1, 0) // (self.seq_len - 1))

    def held_out_rows(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return validation sequences in stream order, and the number of real tokens in each.

        The last sequence is padded with zeros.

        Shape: numbers (B,), rows (B, T), lengths (B,)
        """
        rows = np.zeros((len(numbers), self.seq_len), dtype=np.int64)
        lengths = np.empty(len(numbers), dtype=np.int64)
        for i, number in enumerate(numbers.tolist()):
            start = number * (self.seq_len - 1)
            part = self.store.tokens[start : start + self.seq_len]
            rows[i, : len(part)] = part
            lengths[i] = len(part)
        return rows, lengths

    def fingerprint(self) -> int:
        """Return a 63-bit hash of the number of tokens, `seq_len` and the name."""
        text = repr((self.store.num_tokens, self.seq_len, self.name))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def content(self) -> int:
        """Return a 63-bit hash of the stored tokens; see `TokenStore.digest`."""
        return self.store.digest()


def document_starts(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], eos_id: int
) -> NDArray[np.bool_]:
    """Return a mask of the positions after an eos token, where a new document begins.

    Padding positions are False.

    Shape: rows (B, T), lengths (B,), result (B, T); column 0 is False.
    """
    starts = np.zeros(rows.shape, dtype=np.bool_)
    np.equal(rows[:, :-1], eos_id, out=starts[:, 1:])
    if len(lengths) and int(lengths.min()) < rows.shape[1]:
        starts &= np.arange(rows.shape[1]) < lengths[:, None]
    return starts


def reset_positions(
    starts: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return position ids, which restart at each document, and document ids within a sequence.

    Shape: starts (B, T), both results (B, T) int64.
    """
    width = starts.shape[1]
    columns = np.arange(width, dtype=np.int64)
    begins = np.where(starts, columns, 0)
    np.maximum.accumulate(begins, axis=1, out=begins)
    return columns - begins, np.cumsum(starts, axis=1, dtype=np.int64)
