"""Measures a process's communication: every collective and message, with its size.

All collectives and messages, including those of FSDP2, DTensor and functional collectives, end in
an operator of the namespaces `c10d` or `_c10d_functional`, and a `TorchDispatchMode` sees every
operator, including those of the backward pass: on a CPU, the backward pass runs on the calling
thread, and autograd's threads inherit the modes of that thread. Patching the functions of
`torch.distributed` instead would miss callers that imported them by name (bmforge's own
`collectives.py`), and functional collectives, which call none of them.

Traffic of the rendezvous store (also used to create groups) is not counted, nor are calls from
threads that the program itself starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmforge.errors import DistributedError

__all__ = ["Communication", "Traffic", "Volume", "add_up"]

_NAMESPACES = ("c10d", "_c10d_functional")
# Prefix of operator names -> kind of communication; the first match is used.
_KINDS = {
    **{"allgather": "all_gather", "all_gather": "all_gather"},
    **{"allreduce": "all_reduce", "all_reduce": "all_reduce"},
    **{"alltoall": "all_to_all", "all_to_all": "all_to_all"},
    **{"reduce_scatter": "reduce_scatter", "reduce": "reduce"},
    **{"broadcast": "broadcast", "gather": "gather", "scatter": "scatter"},
    **{"send": "send", "isend": "send", "recv": "recv", "irecv": "recv"},
    **{"barrier": "barrier", "monitored_barrier": "barrier"},
}
_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")
# Names of the operators' input arguments.
_INPUTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")


class Communication(NamedTuple):
    """One collective or message.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, ...
        num_bytes: size of the input on this process; for recv, size of the received tensor.
    """

    kind: str
    num_bytes: int


class Volume(NamedTuple):
    """Number of calls and total bytes of one kind of communication."""

    number: int
    num_bytes: int


class Traffic(TorchDispatchMode):
    """Counts the collectives and messages that this process issues in ``with Traffic()``.

    Attributes:
        calls: number of calls per `Communication`, including calls in groups of one process.

    Raises:
        DistributedError: the communication operator is unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Communication] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count a communication operator, and run it."""
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # the operator is dispatched again on the local tensors
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace in _NAMESPACES and name not in _SILENT:
            self.calls[_read_call(func, args, kwargs)] += 1
        return func(*args, **kwargs)

    @property
    def volumes(self) -> dict[str, Volume]:
        """Dict from kind of communication to number of calls and total bytes."""
        return add_up(self.calls.elements())


def _read_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Communication:
    """Return the kind and size in bytes of an operator call."""
    name = func._schema.name.partition("::")[2].lstrip("_")
    kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs = next((arguments[key] for key in _INPUTS if key in arguments), None)
    if kind is None or inputs is None:
        raise DistributedError(
            f"the traffic of the collective {func} cannot be counted. Add its name to _KINDS in "
            "bmforge/testing/traffic.py."
        )
    tensors = (t for t in tree_leaves(inputs) if isinstance(t, Tensor))
    # A barrier's tensor only selects the device.
    return Communication(kind, 0 if kind == "barrier" else sum(t.nbytes for t in tensors))


def add_up(calls: Iterable[Communication]) -> dict[str, Volume]:
    """Return a dict from kind of communication to number of calls and total bytes."""
    volumes: dict[str, Volume] = {}
    for kind, num_bytes in calls:
        number, total = volumes.get(kind, Volume(0, 0))
        volumes[kind] = Volume(number + 1, total + num_bytes)
    return volumes
