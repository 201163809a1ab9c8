"""Simulation of an accelerator that counts kernels, copies and waits per file and line.

Values are computed on the host. An operation on tensors of both host and accelerator raises an
error, as on a GPU. Torch allows only one custom backend per process, so tests that use it start
another process.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["DeviceTensor", "FakeAccelerator", "Usage"]

_NAME = "fakegpu"
# Operations that only create views or metadata; all others launch a kernel.
_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "unsqueeze",
        "squeeze",
        "transpose",
        "t",
        "expand",
        "slice",
        "select",
        "permute",
        "alias",
        "detach",
        "unbind",
        "split",
        "split_with_sizes",
        "as_strided",
        "_reshape_alias",
        "unfold",
        "diagonal",
        "lift",
        "lift_fresh",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "is_pinned",
        "_pin_memory",
        "pin_memory",
        "record_stream",
        "is_same_size",
        "sym_size",
        "sym_stride",
    ]
)
# Operations that make the host wait, because it reads the size or the value of the result.
_WAITS = frozenset(
    [
        "_local_scalar_dense",
        "nonzero",
        "equal",
        "is_nonzero",
        "masked_select",
        "unique_dim",
        "_unique2",
    ]
)
_COPIES = frozenset(["_to_copy", "copy_", "_copy_from", "_copy_from_and_resize"])
# Operator of bmforge -> number of kernels, for operators that launch more than one.
_KERNELS = {"multiply_packed": 2, "attend_pages": 2}  # at most


@dataclass
class Usage:
    """Counts of the kernels, copies and waits of a program on an accelerator.

    Args:
        kernels: number of kernels per operation.
        pinned: number of copies from page-locked host memory, per file and line.
        pageable: number of (blocking) copies from other host memory, per file and line.
        waits: number of waits for a value or a copy to the host, per file and line.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    pinned: Counter[str] = field(default_factory=Counter)
    pageable: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Reset all counts."""
        for counter in (self.kernels, self.pinned, self.pageable, self.waits):
            counter.clear()


class _Backend:
    """Device module with the functions that torch requires from a custom backend."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_device_name(self, device: Any = None) -> str:
        return "simulated accelerator"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 8 << 30, 8 << 30

    def max_memory_reserved(self, device: Any = None) -> int:
        return 0

    def max_memory_allocated(self, device: Any = None) -> int:
        return 0

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


class DeviceTensor(Tensor):
    """A tensor of the simulated accelerator.

    Args:
        host: host tensor with the values.
        accelerator: simulation that counts the tensor's operations.
    """

    host: Tensor
    accelerator: FakeAccelerator

    @staticmethod
    def __new__(cls, host: Tensor, accelerator: FakeAccelerator) -> DeviceTensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=accelerator.device,
        )

    def __init__(self, host: Tensor, accelerator: FakeAccelerator) -> None:
        self.host, self.accelerator = host, accelerator

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on a thread without `FakeAccelerator`'s mode, such as autograd's."""
        tensors = tree_leaves((args, kwargs))
        accelerator = next(t.accelerator for t in tensors if isinstance(t, DeviceTensor))
        return accelerator.run(func, args, kwargs or {})


class _PageLocked(Tensor):
    """A host tensor in page-locked memory; results of operations are ordinary tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class FakeAccelerator(TorchDispatchMode):
    """Context manager in which operations on the simulated accelerator are counted and computed.

    Args:
        operators: dict from the name of a bmforge operator to a function that replaces it, such as
            a kernel in Triton's interpreter; it is called with host tensors.

    Attributes:
        device: the accelerator's device.
        usage: counts since the last `usage.clear()`.
    """

    def __init__(self, operators: dict[str, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        _setup_privateuseone_for_python_backend(_NAME, backend_module=_Backend())
        self.device = torch.device(_NAME, 0)
        self.usage = Usage()
        self._operators = operators or {}
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("empty.memory_format", self._empty, "PrivateUse1")
        self._library.impl("empty_strided", self._empty_strided, "PrivateUse1")

    def send(self, tensor: Tensor) -> DeviceTensor:
        """Return an accelerator tensor that shares a host tensor's memory; no copy is counted."""
        return DeviceTensor(tensor, self)

    @torch.no_grad()
    def send_model_(self, model: nn.Module) -> nn.Module:
        """Move a model's parameters and buffers to the accelerator, without counting copies."""
        sent: dict[int, nn.Parameter] = {}  # tied parameters stay tied
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    if id(p) not in sent:
                        sent[id(p)] = nn.Parameter(self.send(p.data), p.requires_grad)
                    module._parameters[name] = sent[id(p)]
            for name, b in module._buffers.items():
                if b is not None:
                    module._buffers[name] = self.send(b)
        return model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of the simulated accelerator, or of the host."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        is_own = self._is_own(kwargs.get("device"))
        if is_own or any(isinstance(t, DeviceTensor) for t in leaves):
            return self.run(func, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "is_pinned":
            return isinstance(args[0], _PageLocked)
        if name in ("_pin_memory", "pin_memory"):
            return args[0].clone().as_subclass(_PageLocked)
        return func(*args, **kwargs)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Count an operation and compute it on the host."""
        namespace, _, name = func._schema.name.partition("::")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        wrapped = {id(t.host): t for t in tensors if isinstance(t, DeviceTensor)}
        goes_out = self._count(name, tensors, args, kwargs)
        plain_args, plain = tree_map(_unwrap, (args, kwargs))
        if self._is_own(plain.get("device")):
            plain["device"] = "cpu"
        plain.pop("pin_memory", None)
        compute = self._operators.get(name, func) if namespace == "bmforge" else func
        if namespace == "bmforge" and compute is func and name == "multiply_packed":
            compute = _multiply_wide
        with torch.no_grad():
            out = compute(*plain_args, **plain)
        if goes_out:
            return args[0] if name == "copy_" else out

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, DeviceTensor):
                return value
            same = wrapped.get(id(value))
            return DeviceTensor(value, self) if same is None else same

        return tree_map(wrap, out)

    def _count(self, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        """Count an operation; return True if the result is on the host."""
        line = _find_line()
        if name in _WAITS:
            self.usage.waits[line] += 1
        if name in _COPIES:
            source, into = _source_of_copy(name, args, kwargs, self.device)
            if into and not isinstance(source, DeviceTensor):
                is_locked = isinstance(source, _PageLocked)
                (self.usage.pinned if is_locked else self.usage.pageable)[line] += 1
                return False
            if not into:
                self.usage.waits[line] += 1
                return True
        on_host = [t for t in tensors if t.dim() and not isinstance(t, DeviceTensor)]
        if on_host and name not in _COPIES:
            raise RuntimeError(
                f"{name} got tensors on different devices (accelerator and CPU) at {line}. Move "
                "them to the same device."
            )
        if name not in _VIEWS:
            self.usage.kernels[name] += _KERNELS.get(name, 1)
        return False

    def _is_own(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == _NAME

    def _empty(self, size: Any, *, dtype: Any = None, **_: Any) -> DeviceTensor:
        return self.send(torch.empty(size, dtype=dtype))

    def _empty_strided(self, size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
        return self.send(torch.empty_strided(size, stride, dtype=dtype))


def _unwrap(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value


def _multiply_wide(x: Tensor, *others: Any) -> Tensor:
    """Multiply half-precision activations on the host, where the kernel supports only fp32."""
    *matrix, bias = others
    wide = None if bias is None else bias.float()
    return torch.ops.bmforge.multiply_packed(x.float(), *matrix, wide).to(x.dtype)


def _source_of_copy(name: str, args: Any, kwargs: Any, device: torch.device) -> tuple[Tensor, bool]:
    """Return the source of a copy, and True if the target is on the accelerator."""
    if name == "copy_":
        return args[1], isinstance(args[0], DeviceTensor)
    if name == "_to_copy":
        to = kwargs.get("device")
        into = isinstance(args[0], DeviceTensor) if to is None else torch.device(to) == device
        return args[0], into or (to is not None and torch.device(to).type == device.type)
    return args[0], isinstance(args[1], DeviceTensor)


def _find_line() -> str:
    """Return the innermost stack frame inside bmforge, as file:line."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename.replace("\\", "/").rpartition("/bmforge/")[2]
        if "/bmforge/" in frame.filename and not path.startswith("testing/"):
            return f"{path}:{frame.lineno}"
    return "?"
