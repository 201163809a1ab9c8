"""Cache of operator results on fake tensors, keyed by the metadata of the arguments.

A trace has thousands of operators, and most of them repeat those of the previous layout with other
shapes. torch recomputes the metadata of every result, and its own cache is nearly as slow as that.
This cache maps an operator and the metadata of its arguments directly to the metadata of the
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeOpCache", "tensors_of"]

# Builds the result of an operator: (arguments, mode) -> result.
Maker = Callable[[tuple[Any, ...], FakeTensorMode], Any]
# Makes a fake tensor from a meta tensor.
Wrapper = Callable[[Tensor, FakeTensorMode], FakeTensor]
# Tags of operators whose results depend on more than metadata, or that change their arguments.
_OTHER = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_ROOMS = ("aten", "prims", "bmforge", "fsdp")
# Collectives that return their first argument and an already completed Work handle.
_FIRST_COMES_BACK = {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"}
# Operators whose statistics have the input's dtype on CPUs, and fp32 on other devices.
_OF_THE_DEVICE = {"aten::native_layer_norm", "aten::native_layer_norm_backward"}


class FakeOpCache:
    """Runs operators on fake tensors; repeated calls take the result's metadata from the cache.

    A cache entry is verified when it is created: if it does not reproduce the operator's result, it
    is discarded, and the operator itself runs in every call.
    """

    def __init__(self) -> None:
        self._makers: dict[tuple[Any, ...], Maker | None] = {}
        self._works: dict[str, Any] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator; call it below autograd, in a `FakeTensorMode`."""
        mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is not None and func._schema.name in _FIRST_COMES_BACK:
            return self._send(func, args, kwargs)
        key = _key(func, args, kwargs, mode) if mode is not None and _is_determined(func) else None
        if key is None:
            if func.namespace == "profiler":  # profiler spans, irrelevant for fake tensors
                with torch._C._DisableTorchDispatch():
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        if key not in self._makers:
            make = _learn_on_meta(func, args, kwargs, mode)
            out = func(*args, **kwargs) if make is None else make(args, mode)
            self._makers[key] = make or _learn(out, args, kwargs, mode)
            return out
        make = self._makers[key]
        return func(*args, **kwargs) if make is None else make(args, mode)

    def _send(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a fake collective: return its input and a completed Work handle shared by all calls.

        The handle is created by the first call of each collective.
        """
        name = func._schema.name
        if name not in self._works:
            out = func(*args, **kwargs)
            self._works[name] = out[1]
            return out
        return args[0], self._works[name]


@cache
def _is_determined(func: Any) -> bool:
    """Return True if the metadata of the arguments fully determine the operator's result."""
    name = func._schema.name
    is_shape_op = name.split("::")[0] in _ROOMS and "lift" not in name
    return is_shape_op and not any(tag in func.tags for tag in _OTHER)


def _key(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> tuple[Any, ...] | None:
    """Return the cache key of a call; None if the call cannot be cached."""
    key: list[Any] = [func._schema.name, func._overloadname, *kwargs]
    if not (_add_to_key(args, key, mode) and _add_to_key(kwargs.values(), key, mode)):
        return None
    hashed = tuple(key)
    try:
        hash(hashed)
    except TypeError:
        return None
    return hashed


def _add_to_key(values: Iterable[Any], key: list[Any], mode: FakeTensorMode) -> bool:
    """Append the arguments' metadata to a cache key; return False if an argument has no key."""
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
            if not _add_to_key(value, key, mode):
                return False
        else:  # the type too, since 1, 1.0 and True are equal
            key += (type(value), value)
    return True


def _learn_on_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> Maker | None:
    """Build a cache entry by running the operator on meta tensors, faster than on fake tensors.

    Returns None if the arguments have no device or several devices, or the operator fails on meta
    tensors.
    """
    tensors = list(tensors_of((args, kwargs)))
    devices = {t.fake_device for t in tensors if isinstance(t, FakeTensor)}
    of_device = func._schema.name in _OF_THE_DEVICE or kwargs.get("device") is not None
    if len(devices) != 1 or of_device:
        return None
    with torch._C._DisableTorchDispatch():
        blanks = {id(t): _blank(t) for t in tensors}
        plain_args, plain_kwargs = _with_blanks((args, kwargs), blanks)
        try:
            out = func(*plain_args, **plain_kwargs)
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            return None
        return _learn(out, plain_args, plain_kwargs, mode, devices.pop())


def _blank(fake: Tensor) -> Tensor:
    """Return a meta tensor with the metadata (shape, strides, dtype) of a fake tensor."""
    blank = torch.empty(0, dtype=fake.dtype, device="meta")
    return blank.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())  # type: ignore[call-overload,no-any-return]


def _with_blanks(values: Any, blanks: dict[int, Tensor]) -> Any:
    """Return the arguments with each tensor replaced by its meta tensor."""
    if isinstance(values, Tensor):
        return blanks[id(values)]
    if isinstance(values, (list, tuple)):
        return type(values)(_with_blanks(value, blanks) for value in values)
    if isinstance(values, dict):
        return {name: _with_blanks(value, blanks) for name, value in values.items()}
    return values


def _learn(
    out: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: FakeTensorMode,
    device: torch.device | None = None,
) -> Maker | None:
    """Return a function (arguments, mode) that reproduces the result `out`; None if impossible.

    Args:
        out: result of the operator: fake tensors, or tensors on the meta device.
        args: positional arguments of the call, with the same kind of tensors.
        kwargs: keyword arguments of the call, with the same kind of tensors.
        mode: mode of the fake tensors.
        device: device of the fake tensors to create, if the tensors are meta tensors.
    """
    if out is None:
        return lambda args, mode: None
    if isinstance(out, (list, tuple)):
        makers_of_parts = [_learn(part, args, kwargs, mode, device) for part in out]
        makers, kind = [make for make in makers_of_parts if make is not None], type(out)
        if len(makers) < len(out) or kind not in (list, tuple):
            return None
        return lambda args, mode: kind(make(args, mode) for make in makers)
    if not (isinstance(out, FakeTensor) if device is None else _is_plain(out)):
        return None
    for index, value in enumerate(args):
        if value is out:
            return lambda args, mode: args[index]
    storages = {id(t): t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
    if id(out) in storages:
        return None
    shared = out.untyped_storage()._cdata
    wrap = _wrapper(device or out.fake_device, mode)
    if shared not in storages.values():
        make = _maker_of_new(out, wrap)
    else:
        owners = [n for n, value in enumerate(args) if storages.get(id(value)) == shared]
        if not owners:
            return None
        make = _maker_of_view(out, owners[0], wrap)
    return make if _is_like(make(args, mode), out, device is None) else None


def _is_plain(out: Any) -> bool:
    """Return True for a strided meta tensor without pending conjugation or negation."""
    plain = isinstance(out, Tensor) and out.is_meta and out.layout is torch.strided
    return plain and not (out.is_conj() or out.is_neg())


def _maker_of_new(out: Tensor, wrap: Wrapper) -> Maker:
    shape, stride, dtype = out.shape, out.stride(), out.dtype

    def make(args: tuple[Any, ...], mode: FakeTensorMode) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            blank = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return wrap(blank, mode)

    return make


def _maker_of_view(out: Tensor, index: int, wrap: Wrapper) -> Maker:
    shape, stride, dtype, offset = out.shape, out.stride(), out.dtype, out.storage_offset()

    def make(args: tuple[Any, ...], mode: FakeTensorMode) -> FakeTensor:
        storage = args[index].untyped_storage()
        with torch._C._DisableTorchDispatch():
            blank = torch.empty(0, dtype=dtype, device="meta")
            blank.set_(storage, offset, shape, stride)
        return wrap(blank, mode)

    return make


def _wrapper(device: torch.device, mode: FakeTensorMode) -> Wrapper:
    """Return a function that wraps a meta tensor as a fake tensor without the slow constructor."""
    with torch._C._DisableTorchDispatch():
        blank = torch.empty(0, device="meta")
    fields = dict(vars(FakeTensor(mode, blank, device)))
    del fields["fake_mode"]  # differs for every trace

    def wrap(blank: Tensor, mode: FakeTensorMode) -> FakeTensor:
        wrapped: Any = Tensor._make_subclass(
            FakeTensor, blank, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(wrapped)
        wrapped.__dict__.update(fields, fake_mode=mode)
        return wrapped  # type: ignore[no-any-return]

    return wrap


def _is_like(candidate: FakeTensor, out: Tensor, fake: bool) -> bool:
    """Return True if two tensors have equal metadata and, as fake tensors, equal dispatch keys."""

    def tell(tensor: Any) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()
        size = tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes()
        facts = *size, tensor.dtype, tensor.requires_grad
        keys = torch._C._dispatch_key_set(tensor)
        return (*facts, tensor.fake_device, tensor.constant, keys) if fake else facts

    return tell(candidate) == tell(out)


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        yield from tensors_of([*values.values()])
