"""Finds, reads and writes the weight matrices of any model, and observes their inputs.

A linear layer (including transformers' Conv1D), an embedding, a head and each expert of a stack has
one matrix. All matrices have the shape (rows, columns): output features by input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.nn.int8 import Int8Experts, RowStore
from bmforge.nn.low_rank import linear_sizes
from bmforge.nn.moe import Experts
from bmforge.nn.part import AdapterModule
from bmforge.nn.quantized import PackedStore
from bmforge.surgery import find_repeated_blocks, match_names

__all__ = [
    "Matrix",
    "find_matrices",
    "has_weight_matrix",
    "is_stored",
    "default_matrix_names",
    "warn_of_stacks",
    "watch_inputs",
]

# Last parts of the names of router layers, which are not compressed.
_ROUTERS = ("router", "gate", "shared_gate", "shared_expert_gate")


@dataclass(frozen=True)
class Matrix:
    """Weight matrix of a model.

    Args:
        owner: name of the module that owns the parameter.
        module: module that owns the parameter.
        key: parameter name within the module.
        index: index of the expert in a stacked parameter; None if the parameter is one matrix.
    """

    owner: str
    module: nn.Module
    key: str = "weight"
    index: int | None = None

    @property
    def name(self) -> str:
        """Display name of the matrix: module, expert index, and parameter unless it is "weight"."""
        suffix = "" if self.index is None else f"[{self.index}]"
        return (
            f"{self.owner}{suffix}" if self.key == "weight" else f"{self.owner}.{self.key}{suffix}"
        )

    @property
    def parameter(self) -> nn.Parameter:
        """Parameter that contains the matrix, possibly in a stack."""
        return getattr(self.module, self.key)

    def read(self) -> Tensor:
        """Return a view of the matrix, (rows, columns)."""
        tensor = self.parameter.detach()
        if self.index is not None:
            return tensor[self.index]
        return tensor.t() if hasattr(self.module, "nf") else tensor

    def write_(self, values: Tensor) -> None:
        """Overwrite the values of the matrix.

        Shape:
            values: (rows, columns)
        """
        self.read().copy_(values)


def is_stored(module: nn.Module) -> bool:
    """Return True if the module's weights are stored as integers."""
    return isinstance(module, (PackedStore, RowStore, Int8Experts))


def find_matrices(model: nn.Module, where: Sequence[str] = ()) -> list[Matrix]:
    """Return the matrices of the modules that match the globs, in model order.

    Tied matrices are returned once.

    Args:
        model: any model.
        where: name globs of modules; a container such as a block selects all linear layers in it.
            If empty, linear layers and experts of the repeated blocks are selected, without
            routers.

    Raises:
        ConfigError: a glob matches no module or no matrix, or a matrix is stored as integers.
    """
    modules = dict(model.named_modules())
    names: dict[str, None] = {}
    for glob in where:
        inside = _inside(modules, match_names(modules, (glob,)))
        if not inside:
            raise ConfigError(
                f"the pattern {glob!r} in `where` matches no linear layer, embedding or experts. "
                "Use module names of the model."
            )
        names.update(dict.fromkeys(inside))
    if not where:
        names = dict.fromkeys(default_matrix_names(model))
    matrices, seen = [], set()
    for name in modules:
        if name not in names:
            continue
        if is_stored(modules[name]):
            raise ConfigError(
                f"{name} is a {type(modules[name]).__name__}, so its weights are already "
                "quantized. Prune, smooth or quantize the unquantized model instead."
            )
        for matrix in _matrices_of(name, modules[name]):
            if (id(matrix.parameter), matrix.index) not in seen:
                seen.add((id(matrix.parameter), matrix.index))
                matrices.append(matrix)
    return matrices


def default_matrix_names(model: nn.Module) -> list[str]:
    """Return the names of the linear layers and experts in a model's repeated blocks.

    Raises:
        ConfigError: there are no such layers.
    """
    modules = dict(model.named_modules())
    names = _inside(modules, list(find_repeated_blocks(model)))
    names = [name for name in names if not isinstance(modules[name], nn.Embedding)]
    if not names:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks with linear layers. Select layers "
            "with `where`."
        )
    return names


def warn_of_stacks(model: nn.Module, where: Sequence[str], done: str) -> None:
    """Log a warning about experts in other libraries' models, which are left unchanged.

    transformers 5 stores the experts of a layer as three-dimensional parameters, which are not
    linear layers.

    Args:
        model: any model.
        where: globs of a config; nothing is logged if they name modules.
        done: participle for the message, such as "quantized".
    """
    if where:
        return
    stacks = [
        (f"{name}.{key}", parameter.numel())
        for name, module in model.named_modules()
        if not (isinstance(module, Experts) or is_stored(module))
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and parameter.is_floating_point()
    ]
    if stacks:
        total = sum(parameter.numel() for parameter in model.parameters())
        get_logger().warning(
            (
                "%d stacks of experts of this %s (%s, ...) with %.0f %% of its unquantized weights "
                "are not %s. Load the model with bmforge.models.AutoModel, which supports its "
                "experts."
            ),
            *(len(stacks), type(model).__name__, stacks[0][0]),
            *(100 * sum(count for _, count in stacks) / total, done),
        )


def _inside(modules: dict[str, nn.Module], names: Sequence[str]) -> list[str]:
    """Return the named modules with matrices; containers are replaced by their inner modules."""
    inside: dict[str, None] = {}
    parts = tuple(f"{n}." for n, module in modules.items() if isinstance(module, AdapterModule))
    for name in names:
        if _has_matrix(modules[name]) or has_weight_matrix(modules[name]):
            inside[name] = None
            continue
        for inner, module in modules.items():
            is_in = inner.startswith(f"{name}." if name else "") and not inner.startswith(parts)
            is_router = not set(_ROUTERS).isdisjoint(inner.split("."))
            if is_in and _has_matrix(module) and not is_router:
                inside[inner] = None
    return list(inside)


def has_weight_matrix(module: nn.Module) -> bool:
    """Return True if the module, of whatever class, has a 2-D floating-point `weight`."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.is_floating_point()


def _has_matrix(module: Any) -> bool:
    if isinstance(module, (Experts, nn.Embedding)) or is_stored(module):
        return True
    return linear_sizes(module) is not None and isinstance(getattr(module, "weight", None), Tensor)


def _matrices_of(name: str, module: nn.Module) -> Iterator[Matrix]:
    if not isinstance(module, Experts):
        yield Matrix(name, module)
        return
    for key, (count, _, _) in module.stack_sizes().items():
        for index in range(count):
            yield Matrix(name, module, key, index)


@contextmanager
def watch_inputs(
    matrices: Sequence[Matrix], note: Callable[[Matrix, Tensor], None]
) -> Iterator[None]:
    """Context manager that calls `note(matrix, input)` for every product with one of the matrices.

    Args:
        matrices: matrices of linear layers and experts.
        note: callback that receives a matrix and its input, (tokens, columns). Matrices with
            the same input receive the same tensor object, one after the other.
    """
    by_module: dict[int, list[Matrix]] = {}
    for matrix in matrices:
        by_module.setdefault(id(matrix.module), []).append(matrix)
    undo: list[Callable[[], None]] = []
    try:
        for members in by_module.values():
            module: Any = members[0].module
            if isinstance(module, Experts):
                reporting = partial(_multiply_and_report, module.multiply, members, note)
                module.__dict__["multiply"] = reporting
                undo.append(partial(module.__dict__.pop, "multiply"))
            else:
                hook = partial(_tell, members[0], note)
                undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
    finally:
        for restore in undo:
            restore()


def _tell(
    matrix: Matrix,
    note: Callable[[Matrix, Tensor], None],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    note(matrix, args[0] if args else next(iter(kwargs.values())))


def _multiply_and_report(
    inner: Callable[..., Tensor],
    members: Sequence[Matrix],
    note: Callable[[Matrix, Tensor], None],
    key: str,
    x: Tensor,
    ends: Tensor,
) -> Tensor:
    for matrix in members:
        if matrix.key == key:
            assert matrix.index is not None
            first = 0 if matrix.index == 0 else int(ends[matrix.index - 1])
            note(matrix, x[first : int(ends[matrix.index])])
    out: Tensor = inner(key, x, ends)
    return out
