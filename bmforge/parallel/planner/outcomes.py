"""What operators on fake tensors return, remembered by what they are given.

A trace is thousands of operators, and one layout's are mostly the last one's with other shapes.
torch finds out anew what each returns, or remembers it in a way that costs nearly as much. Here an
operator and the metadata of its arguments lead straight to the metadata of what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["Outcomes", "tensors_of"]

# Makes what an operator returns: (arguments, mode) -> the result.
Maker = Callable[[tuple[Any, ...], FakeTensorMode], Any]
# Their results depend on more than metadata, or their arguments are not the same after them.
_OTHER = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_ROOMS = ("aten", "prims", "bmforge", "fsdp")


class Outcomes:
    """Runs operators on fake tensors; what was run before is put together without running.

    What is remembered is tried at once: if it does not make what the operator has made, it is
    forgotten and the operator always runs.
    """

    def __init__(self) -> None:
        self._makers: dict[tuple[Any, ...], Maker | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operator returns, called below autograd with a `FakeTensorMode` on."""
        mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        key = _key(func, args, kwargs, mode) if mode is not None and _is_told(func) else None
        if key is None:
            if func.namespace == "profiler":  # the names of spans, which fakes need not know
                with torch._C._DisableTorchDispatch():
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        if key not in self._makers:
            out = func(*args, **kwargs)
            self._makers[key] = _learn(out, args, kwargs, mode)
            return out
        make = self._makers[key]
        return func(*args, **kwargs) if make is None else make(args, mode)


@cache
def _is_told(func: Any) -> bool:
    """Whether metadata tell what an operator returns."""
    name = func._schema.name
    known = name.split("::")[0] in _ROOMS and "lift" not in name
    return known and not any(tag in func.tags for tag in _OTHER)


def _key(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> tuple[Any, ...] | None:
    """Return what tells a call; None where it cannot be told."""
    key: list[Any] = [func._schema.name, func._overloadname, *kwargs]
    if not (_tell(args, key, mode) and _tell(kwargs.values(), key, mode)):
        return None
    found = tuple(key)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def _tell(values: Iterable[Any], key: list[Any], mode: FakeTensorMode) -> bool:
    """Add what tells arguments to a key; return whether it tells them."""
    for value in values:
        if isinstance(value, FakeTensor):
            plain = value.fake_mode is mode and value.constant is None
            if not plain or value.layout is not torch.strided:
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype)
            key += (value.fake_device, value.requires_grad)
        elif isinstance(value, Tensor):
            return False
        elif isinstance(value, (list, tuple)):
            key += (type(value), len(value))
            if not _tell(value, key, mode):
                return False
        else:  # 1, 1.0 and True are equal
            key += (type(value), value)
    return True


def _learn(
    out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> Maker | None:
    """Return what makes the like of a result from the like of the arguments; None if nothing."""
    if out is None:
        return lambda args, mode: None
    if isinstance(out, (list, tuple)):
        made = [_learn(part, args, kwargs, mode) for part in out]
        makers, kind = [make for make in made if make is not None], type(out)
        if len(makers) < len(out) or kind not in (list, tuple):
            return None
        return lambda args, mode: kind(make(args, mode) for make in makers)
    if not isinstance(out, FakeTensor):
        return None
    for place, value in enumerate(args):
        if value is out:
            return lambda args, mode: args[place]
    storages = {id(t): t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
    if id(out) in storages:
        return None
    shared = out.untyped_storage()._cdata
    if shared not in storages.values():
        make = _maker_of_new(out)
    else:
        owners = [n for n, value in enumerate(args) if storages.get(id(value)) == shared]
        if not owners:
            return None
        make = _maker_of_view(out, owners[0])
    return make if _is_like(make(args, mode), out) else None


def _maker_of_new(out: FakeTensor) -> Maker:
    shape, stride, dtype = out.shape, out.stride(), out.dtype
    wrap = _wrapper(out)

    def make(args: tuple[Any, ...], mode: FakeTensorMode) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            blank = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return wrap(blank, mode)

    return make


def _maker_of_view(out: FakeTensor, place: int) -> Maker:
    shape, stride, dtype, offset = out.shape, out.stride(), out.dtype, out.storage_offset()
    wrap = _wrapper(out)

    def make(args: tuple[Any, ...], mode: FakeTensorMode) -> FakeTensor:
        storage = args[place].untyped_storage()
        with torch._C._DisableTorchDispatch():
            blank = torch.empty(0, dtype=dtype, device="meta")
            blank.set_(storage, offset, shape, stride)
        return wrap(blank, mode)

    return make


def _wrapper(out: FakeTensor) -> Callable[[Tensor, FakeTensorMode], FakeTensor]:
    """Return what makes a fake tensor of one on meta, like `out`, without its slow constructor."""
    device = out.fake_device
    with torch._C._DisableTorchDispatch():
        blank = torch.empty(0, device="meta")
    fields = dict(vars(FakeTensor(out.fake_mode, blank, device)))
    del fields["fake_mode"]  # of each trace its own

    def wrap(blank: Tensor, mode: FakeTensorMode) -> FakeTensor:
        made: Any = Tensor._make_subclass(
            FakeTensor, blank, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(fields, fake_mode=mode)
        return made  # type: ignore[no-any-return]

    return wrap


def _is_like(made: FakeTensor, out: FakeTensor) -> bool:
    """Whether two tensors have the same metadata and would be computed with by the same kernels."""

    def tell(tensor: FakeTensor) -> tuple[Any, ...]:
        storage, keys = tensor.untyped_storage(), torch._C._dispatch_key_set(tensor)
        size = tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes()
        return *size, tensor.dtype, tensor.fake_device, tensor.constant, tensor.requires_grad, keys

    return tell(made) == tell(out)


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        yield from tensors_of([*values.values()])
