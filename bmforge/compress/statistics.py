"""Calibration statistics of a matrix's inputs; see `calibrate.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.compress.matrices import Matrix
from bmforge.device import accumulation_dtype
from bmforge.errors import ConfigError

__all__ = ["Hessian", "InputNorms", "InputSizes", "Moments"]

_SAMPLED_ROWS = 512


class InputNorms:
    """Sum of squares of every input column; used by Wanda."""

    def __init__(self) -> None:
        self.squares: Tensor | None = None
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Add the inputs of a batch, (tokens, columns)."""
        squares = x.to(accumulation_dtype(x.dtype)).square().sum(0)
        self.squares = squares if self.squares is None else self.squares + squares
        self.tokens += x.shape[0]

    @property
    def is_dead(self) -> bool:
        """True if all inputs were zero."""
        return self.squares is not None and not bool(self.squares.any())

    @property
    def norms(self) -> Tensor:
        """2-norm of every column over all tokens.

        For columns that are always 0, the norm is a millionth of the largest norm, so that the
        smallest of their weights are pruned first.
        """
        assert self.squares is not None
        norms = self.squares.sqrt()
        return norms.clamp(min=float(norms.max()) * 1e-6)


class InputSizes:
    """Maximum and mean absolute value of every input column, and the inputs of some tokens."""

    def __init__(self) -> None:
        self.largest: Tensor | None = None
        self._sums: Tensor | None = None
        self._rows: list[Tensor] = []
        self.tokens = 0

    @property
    def is_dead(self) -> Tensor:
        """Bool mask of the columns that are 0 for every token, (columns,)."""
        assert self.largest is not None
        return self.largest == 0

    def add(self, x: Tensor) -> None:
        """Add the inputs of a batch, (tokens, columns)."""
        if not x.shape[0]:
            return
        wide = x.to(accumulation_dtype(x.dtype))
        sizes = wide.abs()
        largest, sums = sizes.amax(0), sizes.sum(0)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self._sums = sums if self._sums is None else self._sums + sums
        self.tokens += x.shape[0]
        self._rows.append(_sample_rows(wide))

    @property
    def means(self) -> Tensor:
        """Mean absolute value of every column."""
        assert self._sums is not None
        return self._sums / max(self.tokens, 1)

    def sample(self) -> Tensor:
        """Return evenly spaced rows from all batches, (rows, columns)."""
        rows = torch.cat(self._rows)
        self._rows = [rows]
        return _sample_rows(rows)


def _sample_rows(rows: Tensor) -> Tensor:
    """Return at most `_SAMPLED_ROWS` evenly spaced rows."""
    return rows[:: max(1, -(-rows.shape[0] // _SAMPLED_ROWS))]


class Hessian:
    """Sum of ``X^T X`` over the inputs: the Hessian of the squared output error up to a factor."""

    def __init__(self) -> None:
        self.products: Tensor | None = None
        self.tokens = 0
        self._factor: Tensor | None = None

    @property
    def is_dead(self) -> bool:
        """True if all inputs were zero, so that no weight has an effect."""
        return self.products is not None and not bool(self.products.diagonal().any())

    @staticmethod
    def size_bytes(matrix: Matrix) -> int:
        """Return the size in bytes of the Hessian for a matrix."""
        columns = matrix.read().shape[1]
        return columns * columns * accumulation_dtype(matrix.parameter.dtype).itemsize

    def add(self, x: Tensor) -> None:
        """Add the inputs of a batch, (tokens, columns)."""
        wide = x.to(accumulation_dtype(x.dtype))
        if self.products is None:
            self.products = wide.t() @ wide
        else:
            self.products.addmm_(wide.t(), wide)
        self.tokens += x.shape[0]

    def inverse_factor(self, damp: float, name: str) -> Tensor:
        """Return the upper Cholesky factor of the inverse of the damped Hessian.

        The factor overwrites the sum of ``X^T X``; it is computed once for all matrices with the
        same inputs.

        Args:
            damp: fraction of the mean diagonal that is added to the diagonal.
            name: name of the matrix for messages.

        Raises:
            ConfigError: the Hessian is not positive definite.
        """
        if self._factor is not None:
            return self._factor
        assert self.products is not None
        damped, self.products = self.products.div_(max(self.tokens, 1)), None
        damped.diagonal().add_(damp * damped.diagonal().mean())
        columns = damped.shape[0]
        # The matrix is symmetric: its transpose is column-major, so LAPACK works in place.
        factor, failed = damped.mT, torch.empty((), dtype=torch.int32, device=damped.device)
        torch.linalg.cholesky_ex(factor, out=(factor, failed))
        is_positive = not int(failed)
        if is_positive:
            torch.cholesky_inverse(factor, out=factor)
            torch.linalg.cholesky_ex(factor, upper=True, out=(factor, failed))
            # isfinite() of the full matrix would allocate a second matrix; minimum and maximum
            # suffice.
            ends = torch.stack(factor.mT.aminmax())  # contiguous
            is_positive = not int(failed) and bool(ends.isfinite().all())
        if not is_positive:
            raise ConfigError(
                f"{name}: the Hessian of the inputs is not positive definite with damp={damp}, "
                f"{self.tokens} tokens and {columns} columns. Pass more texts, or increase damp "
                "(for example to 0.1)."
            )
        self._factor = factor
        return factor


class Moments:
    """Mean and second moments of the inputs."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._hessian = Hessian()

    def add(self, x: Tensor) -> None:
        """Add the inputs of a batch, (tokens, columns)."""
        total = x.double().sum(0)
        self._total = total if self._total is None else self._total + total
        self._hessian.add(x)

    @property
    def mean(self) -> Tensor:
        """Mean input: (columns,)."""
        assert self._total is not None
        return (self._total / self._hessian.tokens).to(self.second.dtype)

    @property
    def second(self) -> Tensor:
        """Mean of ``x x^T`` over the tokens: (columns, columns)."""
        assert self._hessian.products is not None
        return self._hessian.products / self._hessian.tokens
