"""Point-to-point messages between pipeline stages: tuples of tensors of any dtype and shape.

A message is a header and its tensors. The header, one int64 host tensor of fixed length, contains
the dtype, shape and requires_grad of every tensor, so shapes may change with every message. It
costs one host message of 1.2 kB (tens of microseconds of host time, independent of the devices) per
(micro-batch, edge, direction); a missing gradient is marked in the header, and no zeros are sent.
Headers are matched by tag, which gloo and the process groups of `init_distributed` support for host
tensors.

Tensors may travel over a backend that ignores tags and runs the operations between two ranks
sequentially, a send ending only when its receive has begun. With such a backend, two adjacent ranks
that both send first hang: in 1F1B one sends its next activation while the other sends a gradient.
So both ends follow one order of all messages between them, `order_messages`: a rank that is about
to send first posts the receives that precede the send in this order. Posting a receive blocks at
most until its header arrives, and the sender of the header is earlier in a valid sequential order
of all actions, so no cyclic wait can occur. The pairs of ranks connect before the first step, in
sorted order, since the first contact blocks both ends. The alternative, batch_isend_irecv of
matching sends and receives, would need both ends to know which ones match, and the shapes before
the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.errors import DistributedError, ShapeError
from bmforge.parallel.collectives import gather_into
from bmforge.parallel.pipeline.replay import order_messages
from bmforge.parallel.pipeline.schedules import Schedule, StageMessage

__all__ = ["MAX_DIMS", "MAX_TENSORS", "Link", "Route", "Tensors", "StageMessages", "share_from"]

Tensors = tuple[Tensor | None, ...]

MAX_TENSORS, MAX_DIMS = 16, 6
_ROW = 3 + MAX_DIMS  # dtype, wants gradient, number of dims, shape
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_NONE = -1


@dataclass(frozen=True)
class Link:
    """Connection of this process to the other ranks of its pipeline.

    Args:
        group: process group of the pipeline; its backend must support host and device tensors.
            None means the default group, or this process alone if there is no group.
        device: device of received tensors.
        slice_group: processes with the same activations (tensor-parallel group). Each sends a
            slice of every float tensor that is evenly divisible, and the receivers all-gather the
            slices.
    """

    group: dist.ProcessGroup | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    slice_group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This process's pipeline rank."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        """Number of pipeline ranks."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Open the connection of each pair of ranks by exchanging one byte, in sorted order."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for low, high in sorted(pair for pair in pairs if self.rank in pair):
            if self.rank == low:
                dist.send(byte, group=self.group, group_dst=high)
            else:
                dist.recv(byte, group=self.group, group_src=low)

    def parts(self, spec: _Spec) -> int:
        """Return the number of slices in which a tensor is sent; 1 if it is sent as a whole."""
        if self.slice_group is None or not spec.dtype.is_floating_point:
            return 1
        # An all-gather needs slices of equal length.
        size = dist.get_world_size(self.slice_group)
        return size if spec.numel and spec.numel % size == 0 else 1


@dataclass(frozen=True)
class _Spec:
    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def _encode(tensors: Tensors, what: object) -> Tensor:
    """Encode the header of a message; `what` is the message's name in errors."""
    if len(tensors) > MAX_TENSORS:
        raise ShapeError(
            f"{what} consists of {len(tensors)} tensors (pipeline stages send at most "
            f"{MAX_TENSORS}). Return fewer tensors from the block."
        )
    numbers = [0] * (1 + MAX_TENSORS * _ROW)
    numbers[0] = len(tensors)
    for index, tensor in enumerate(tensors):
        row = [_NONE] if tensor is None else _encode_one(tensor, f"{what}, tensor {index}")
        numbers[1 + index * _ROW : 1 + index * _ROW + len(row)] = row
    return torch.tensor(numbers, dtype=torch.int64)


def _encode_one(tensor: Tensor, what: str) -> list[int]:
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
        raise ShapeError(
            f"{what} is a {type(tensor).__name__} (pipeline stages send only ordinary tensors and "
            "None). Return tensors from the block."
        )
    if tensor.dtype not in _DTYPES or tensor.dim() > MAX_DIMS:
        raise ShapeError(
            f"{what} is {tensor.dtype} with {tensor.dim()} dims (pipeline stages send at most "
            f"{MAX_DIMS} dims of {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)})."
        )
    return [_DTYPES.index(tensor.dtype), tensor.requires_grad, tensor.dim(), *tensor.shape]


def _decode(header: Tensor) -> list[_Spec | None]:
    count, *numbers = header.tolist()
    specs: list[_Spec | None] = []
    for index in range(count):
        code, requires_grad, dims, *shape = numbers[index * _ROW : (index + 1) * _ROW]
        exists = code != _NONE
        specs.append(
            _Spec(_DTYPES[code], bool(requires_grad), tuple(shape[:dims])) if exists else None
        )
    return specs


class Route:
    """Ordered messages between each pair of ranks in a schedule; computed once per schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.messages = order_messages(schedule)
        self._index = {
            # A split backward sends its gradient after the first half, so one message name serves
            # both kinds.
            action._replace(kind="backward") if action.kind == "backward_input" else action: index
            for order in schedule.orders
            for index, action in enumerate(order)
            if action.kind != "backward_weight"
        }

    def made_at(self, message: StageMessage) -> int:
        """Return the index, in the sender's action list, of the action that produces a message."""
        return self._index[tuple(message)]  # type: ignore[index]

    def used_at(self, message: StageMessage) -> int:
        """Return the index, in the receiver's action list, of the action that needs a message."""
        return self._index[tuple(message._replace(stage=message.receiver))]  # type: ignore[index]

    def peer(self, rank: int, message: StageMessage) -> int:
        """Return the rank at the other end of a message."""
        ranks = self.schedule.stage_ranks
        sender, receiver = ranks[message.stage], ranks[message.receiver]
        return receiver if rank == sender else sender

    def tag(self, message: StageMessage) -> int:
        """Return the tag of the message's header; the tensors use the tags after it."""
        stages = self.schedule.num_stages
        number = (message.micro_batch * stages + message.stage) * 2 + (message.kind == "backward")
        return number * (1 + MAX_TENSORS)


@dataclass
class _Incoming:
    """Message to be received, with its posted receives."""

    specs: list[_Spec | None]
    buffers: list[Tensor | None]
    works: list[dist.Work] = field(default_factory=list)


@dataclass
class _Outgoing:
    """A message being sent; its tensors must stay alive until it has arrived."""

    message: StageMessage
    tensors: list[Tensor]
    works: list[dist.Work]


class StageMessages:
    """Sends and receives the messages of one execution of a schedule.

    Sends are asynchronous. The tensors of a sent message are kept until a later message from its
    receiver proves that it arrived, so only messages in flight occupy memory.
    """

    def __init__(self, route: Route, link: Link) -> None:
        self._route, self._link, self._rank = route, link, link.rank
        self._done: dict[int, int] = defaultdict(int)  # messages posted, per peer
        self._incoming: dict[StageMessage, _Incoming] = {}
        self._outgoing: dict[int, list[_Outgoing]] = defaultdict(list)

    def send(self, message: StageMessage, tensors: Tensors) -> None:
        """Send a message asynchronously; its tensors must not be changed in place afterwards."""
        peer = self._route.peer(self._rank, message)
        header = _encode(tensors, message)
        self._post_until(peer, message)
        self._done[peer] += 1
        parcel = [header, *(self._cut(tensor) for tensor in tensors if tensor is not None)]
        tag = self._route.tag(message)
        with self._named(message, peer):
            works = [
                dist.isend(tensor, group=self._link.group, group_dst=peer, tag=tag + index)
                for index, tensor in enumerate(parcel)
                if tensor.numel()
            ]
        self._outgoing[peer].append(_Outgoing(message, parcel, works))

    def receive(self, message: StageMessage) -> Tensors:
        """Wait for a message; its tensors require a gradient if those of the sender did."""
        peer = self._route.peer(self._rank, message)
        self._post_until(peer, message)
        if message not in self._incoming:
            self._post(peer, message)
        incoming = self._incoming.pop(message)
        with self._named(message, peer):
            for work in incoming.works:
                work.wait()
        made_at = self._route.made_at(message)
        # The peer produced this message in its action `made_at`, so it has received all messages
        # that it used up to there.
        arrived = [o for o in self._outgoing[peer] if self._route.used_at(o.message) <= made_at]
        self._release(peer, arrived)
        pairs = zip(incoming.specs, incoming.buffers, strict=True)
        return tuple(self._join(spec, buffer) for spec, buffer in pairs)

    def finish(self) -> None:
        """Wait until all sent messages have arrived."""
        for peer, outgoing in self._outgoing.items():
            self._release(peer, list(outgoing))

    def _post_until(self, peer: int, message: StageMessage) -> None:
        """Post the receives that come before `message` in the message order of the two ranks."""
        order = self._route.messages[min(peer, self._rank), max(peer, self._rank)]
        # An earlier call may already have posted this message, while it posted those before a send.
        while message not in self._incoming and order[self._done[peer]] != message:
            self._post(peer, order[self._done[peer]])

    def _post(self, peer: int, message: StageMessage) -> None:
        header = torch.empty(1 + MAX_TENSORS * _ROW, dtype=torch.int64)
        tag = self._route.tag(message)
        with self._named(message, peer):
            # The buffers can only be allocated with the shapes, so this receive blocks.
            dist.recv(header, group=self._link.group, group_src=peer, tag=tag)
            specs = _decode(header)
            incoming = _Incoming(specs, [self._room(spec) for spec in specs])
            present = [buffer for buffer in incoming.buffers if buffer is not None]
            incoming.works += [
                dist.irecv(buffer, group=self._link.group, group_src=peer, tag=tag + index)
                for index, buffer in enumerate(present, start=1)
                if buffer.numel()
            ]
        self._incoming[message] = incoming
        self._done[peer] += 1

    def _release(self, peer: int, outgoing: list[_Outgoing]) -> None:
        for each in outgoing:
            with self._named(each.message, peer):
                for work in each.works:
                    work.wait()
        gone = {each.message for each in outgoing}
        self._outgoing[peer] = [o for o in self._outgoing[peer] if o.message not in gone]

    @contextmanager
    def _named(self, message: StageMessage, peer: int) -> Iterator[None]:
        """Context manager: turn backend errors into a DistributedError that names the message."""
        try:
            yield
        except RuntimeError as error:
            raise DistributedError(
                f"pipeline rank {self._rank} lost the connection to rank {peer} at the "
                f"{message.kind} message of stage {message.stage}, micro-batch "
                f"{message.micro_batch}. Look for an error of that rank first; if it has none, "
                f"it hangs or was killed. The error: {error}"
            ) from error

    def _cut(self, tensor: Tensor) -> Tensor:
        """Return the slice of a tensor that this process sends."""
        # Backends send contiguous memory only, and the slices are cut from the flat tensor.
        tensor = tensor.detach().contiguous()
        parts = self._link.parts(_Spec(tensor.dtype, False, tuple(tensor.shape)))
        if parts == 1:
            return tensor
        return tensor.view(-1).chunk(parts)[dist.get_rank(self._link.slice_group)]

    def _room(self, spec: _Spec | None) -> Tensor | None:
        if spec is None:
            return None
        parts = self._link.parts(spec)
        shape = spec.shape if parts == 1 else (spec.numel // parts,)
        return torch.empty(shape, dtype=spec.dtype, device=self._link.device)

    def _join(self, spec: _Spec | None, buffer: Tensor | None) -> Tensor | None:
        if spec is None or buffer is None:
            return None
        if self._link.parts(spec) > 1:
            gathered = buffer.new_empty(spec.numel)
            gather_into(gathered, buffer, group=self._link.slice_group)
            buffer = gathered.view(spec.shape)
        # A leaf: each stage has its own autograd graph, and its input's `.grad` is the next
        # message.
        return buffer.requires_grad_(spec.requires_grad)


def share_from(owner: int, tensors: Tensors | None, link: Link) -> Tensors:
    """Broadcast tensors from the rank `owner` to every rank of the pipeline.

    Comm: one broadcast of a header and one of every tensor.
    """
    if link.size == 1:
        assert tensors is not None
        return tensors
    header = torch.empty(1 + MAX_TENSORS * _ROW, dtype=torch.int64)
    if tensors is not None:
        header = _encode(tensors, "a shared output")
    # The header goes first: other ranks cannot allocate the tensors without it.
    dist.broadcast(header, group=link.group, group_src=owner)
    shared: list[Tensor | None] = []
    for index, spec in enumerate(_decode(header)):
        tensor: Tensor | None = None
        if tensors is not None and (own := tensors[index]) is not None:
            tensor = own.detach().contiguous()
        elif spec is not None:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=link.device)
        if tensor is not None and tensor.numel():
            dist.broadcast(tensor, group=link.group, group_src=owner)
        shared.append(tensor)
    return tuple(shared)
