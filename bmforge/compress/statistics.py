"""What is gathered of the inputs of a matrix; see `calibrate.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from bmforge.compress.matrices import Matrix
from bmforge.device import wide_dtype
from bmforge.errors import ConfigError

__all__ = ["Hessian", "InputNorms", "InputSizes"]

_SAMPLED_ROWS = 512


class InputNorms:
    """Sums of squares of every column."""

    def __init__(self) -> None:
        self.squares: Tensor | None = None
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """Count inputs."""
        squares = x.to(wide_dtype(x.dtype)).square().sum(0)
        self.squares = squares if self.squares is None else self.squares + squares
        self.tokens += x.shape[0]

    @property
    def is_dead(self) -> bool:
        """Whether all inputs were zero."""
        return self.squares is not None and not bool(self.squares.any())

    @property
    def norms(self) -> Tensor:
        """The 2-norm of every column over all tokens.

        Columns that were always 0 count a millionth of the largest, so that of their weights the
        smallest are pruned first.
        """
        assert self.squares is not None
        norms = self.squares.sqrt()
        return norms.clamp(min=float(norms.max()) * 1e-6)


class InputSizes:
    """Largest and mean sizes of every column, and some rows."""

    def __init__(self) -> None:
        self.largest: Tensor | None = None
        self._sums: Tensor | None = None
        self._rows: list[Tensor] = []
        self.tokens = 0

    @property
    def is_dead(self) -> Tensor:
        """Columns that no token has excited: (columns,), bool."""
        assert self.largest is not None
        return self.largest == 0

    def add(self, x: Tensor) -> None:
        """Count inputs."""
        if not x.shape[0]:
            return
        wide = x.to(wide_dtype(x.dtype))
        sizes = wide.abs()
        largest, sums = sizes.amax(0), sizes.sum(0)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self._sums = sums if self._sums is None else self._sums + sums
        self.tokens += x.shape[0]
        self._rows.append(_spread(wide))

    @property
    def means(self) -> Tensor:
        """The mean size of every column."""
        assert self._sums is not None
        return self._sums / max(self.tokens, 1)

    def sample(self) -> Tensor:
        """Return some rows of all batches, evenly: (rows, columns)."""
        rows = torch.cat(self._rows)
        self._rows = [rows]
        return _spread(rows)


def _spread(rows: Tensor) -> Tensor:
    """Return at most so many rows, from the first to the last of them."""
    return rows[:: max(1, -(-rows.shape[0] // _SAMPLED_ROWS))]


class Hessian:
    """Products of inputs, ``X^T X``: of the squared error of a product, up to a factor."""

    def __init__(self) -> None:
        self.products: Tensor | None = None
        self.tokens = 0
        self._factor: Tensor | None = None

    @property
    def is_dead(self) -> bool:
        """Whether all inputs were zero, so that no weight matters more than another."""
        return self.products is not None and not bool(self.products.diagonal().any())

    @staticmethod
    def size_bytes(matrix: Matrix) -> int:
        """Return what it takes for the inputs of a matrix."""
        columns = matrix.read().shape[1]
        return columns * columns * wide_dtype(matrix.parameter.dtype).itemsize

    def add(self, x: Tensor) -> None:
        """Count inputs."""
        wide = x.to(wide_dtype(x.dtype))
        if self.products is None:
            self.products = wide.t() @ wide
        else:
            self.products.addmm_(wide.t(), wide)
        self.tokens += x.shape[0]

    def inverse_factor(self, damp: float, name: str) -> Tensor:
        """Return the upper Cholesky factor of the inverse of the damped Hessian.

        It takes the place of the products, and is made once for all matrices with these inputs.

        Args:
            damp: share of the mean of the diagonal that is added to it.
            name: of the matrix, for messages.

        Raises:
            ConfigError: it is not positive.
        """
        if self._factor is not None:
            return self._factor
        assert self.products is not None
        damped, self.products = self.products.div_(max(self.tokens, 1)), None
        damped.diagonal().add_(damp * damped.diagonal().mean())
        columns = damped.shape[0]
        # It is symmetric: seen turned it lies as LAPACK wants it, and every step is in its place.
        found, failed = damped.mT, torch.empty((), dtype=torch.int32, device=damped.device)
        torch.linalg.cholesky_ex(found, out=(found, failed))
        is_positive = not int(failed)
        if is_positive:
            torch.cholesky_inverse(found, out=found)
            torch.linalg.cholesky_ex(found, upper=True, out=(found, failed))
            # isfinite() of it would take a second matrix, and more.
            ends = torch.stack(found.mT.aminmax())  # as it lies
            is_positive = not int(failed) and bool(ends.isfinite().all())
        if not is_positive:
            raise ConfigError(
                f"{name}: the Hessian of what goes in is not positive with damp={damp}, "
                f"{self.tokens} tokens and {columns} columns. Give more texts, or raise damp (0.1)."
            )
        self._factor = found
        return found
