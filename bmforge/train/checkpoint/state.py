"""Contents of a checkpoint: tensors of the model and its optimizers, keyed by parameter name.

Optimizer state is keyed by parameter name, not by position, so it does not depend on groups, order
and layout. A tied parameter is stored once, under its first name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bmforge.errors import CheckpointError
from bmforge.memory.state_storage import StateStorage
from bmforge.parallel import STAGE_AXES, counts_here, pipeline_of
from bmforge.records import find_parallel_record, metadata_of
from bmforge.shards import (
    Box,
    Source,
    is_first_replica,
    is_streamed,
    local_box,
    local_tensor,
    source_of,
)
from bmforge.surgery import persistent_tensors
from bmforge.train.checkpoint.format import DTYPE_CODES
from bmforge.train.checkpoint.rng import capture_rng

__all__ = [
    "NOT_SETTINGS",
    "Optimizers",
    "Snapshot",
    "check_json",
    "dtype_name",
    "kind_of",
    "list_optimizers",
    "model_tensors",
    "named_tensors",
    "optimizer_parameters",
    "read_state",
    "state_tensor_name",
    "take_snapshot",
    "write_state",
]

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None

# Entries of a parameter group that are not saved or loaded, because they are not hyperparameters:
# its parameters, which are saved by name, and the choice of kernel, which depends on the machine.
NOT_SETTINGS = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
)
# Smaller tensors are saved in every checkpoint: counters and statistics may change.
_SMALLEST_FROZEN_BYTES = 1 << 10
_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Snapshot:
    """This process's part of a checkpoint: host copies that are independent of the model.

    Args:
        step: number of completed optimizer steps.
        tensors: dict from tensor name to this process's chunk; chunks that are on disk (`is_late`)
            are read only when they are written.
        boxes: dict from tensor name to the region of the whole tensor that the chunk covers.
        records: dict from tensor name to dtype and full shape, also for tensors that other
            processes write.
        frozen: names of the model's tensors that are frozen on this process.
        optimizer: dict from parameter name to optimizer class, hyperparameters, Python values and
            tensor names; None without an optimizer.
        state: caller's state as JSON text.
        seed: seed for the generators if the run is resumed with a different world size.
        rng: state of this process's generators.
        base: manifest entry of the omitted base weights; None if none are omitted.
    """

    step: int
    tensors: dict[str, Source]
    boxes: dict[str, Box]
    records: dict[str, dict[str, Any]]
    frozen: frozenset[str]
    optimizer: dict[str, Any] | None
    state: str
    seed: int
    rng: dict[str, Tensor]
    base: dict[str, Any] | None = None

    @property
    def is_late(self) -> bool:
        """True if some tensors are read only when they are written, so that training must wait."""
        return any(tensor.is_late for tensor in self.tensors.values())


def list_optimizers(optimizers: Optimizers) -> list[Optimizer]:
    """Return the optimizers as a list, which is empty for None."""
    if optimizers is None:
        return []
    if isinstance(optimizers, Sequence):
        return list(optimizers)
    return [optimizers]


def kind_of(optimizer: Optimizer) -> str:
    """Return the optimizer's class name in checkpoints, which does not depend on offloading."""
    return str(getattr(optimizer, "saved_as", type(optimizer).__name__))


def read_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return a parameter's optimizer state, with tensors as `Source` objects."""
    reader = getattr(optimizer, "read_state", None)
    values = optimizer.state.get(parameter, {}) if reader is None else reader(parameter)
    return {key: _as_source(value, parameter) for key, value in values.items()}


def _as_source(value: Any, parameter: Tensor) -> Any:
    if isinstance(value, StateStorage):
        return Source(parameter, value)
    return Source(value) if isinstance(value, Tensor) else value


def write_state(optimizer: Optimizer, parameter: Tensor, values: dict[str, Any]) -> None:
    """Set a parameter's optimizer state to values returned by `read_state`."""
    writer = getattr(optimizer, "write_state", None)
    if writer is None:
        optimizer.state[parameter] = values
    else:
        writer(parameter, values)


def state_tensor_name(parameter_name: str, key: str) -> str:
    """Return the checkpoint name of one tensor of an optimizer's state."""
    return f"optim/{parameter_name}/{key}"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from name to parameter or buffer; tied tensors appear once.

    Names do not contain wrappers. FSDP2 modules are resharded first: after a forward pass without a
    backward pass they would still have gathered parameters, which no optimizer updates.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {_plain_name(name): tensor for name, tensor in persistent_tensors(model).items()}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from checkpoint name to tensor with the model's tensors to save."""
    return {
        f"model/{name}": tensor
        for name, tensor in named_tensors(model).items()
        # Streamed weights that are not trained are not saved.
        if not is_streamed(tensor) or metadata_of(tensor).master is not None
    }


def _plain_name(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def optimizer_parameters(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, Tensor, dict[str, Any], Optimizer]]:
    """Yield (name, parameter, its group, its optimizer) for all parameters of the optimizers.

    Raises:
        CheckpointError: an optimizer has a parameter that the model does not have.
    """
    names = {id(tensor): name for name, tensor in model_tensors(model).items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise CheckpointError(
                        f"the {type(optimizer).__name__} contains a parameter of shape "
                        f"{tuple(parameter.shape)} that the model does not contain. Create the "
                        "optimizer from the model's parameters, after parallelize."
                    )
                yield name.removeprefix("model/"), parameter, group, optimizer


def take_snapshot(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    step: int,
    state: dict[str, Any] | None,
    rank: int,
    base: dict[str, Any] | None = None,
) -> Snapshot:
    """Copy this process's part of all state to the host; training may continue afterwards.

    Args:
        model: model, as in `save_checkpoint`.
        optimizers: optimizers, as in `save_checkpoint`.
        step: number of completed optimizer steps.
        state: JSON-serializable state.
        rank: rank of this process.
        base: result of `describe_base` for omitted base weights.

    Raises:
        CheckpointError: a tensor or a value has an unsupported type.

    Memory:
        The size of this process's shards of parameters, buffers and optimizer state.
    """
    state = dict(state or {})
    check_json(state, "state")
    record, pipeline = find_parallel_record(model), pipeline_of(model)
    mesh = None if record is None else record.mesh
    leads = rank == 0 if mesh is None else counts_here(mesh, *STAGE_AXES)

    away = frozenset(() if base is None else base["names"])

    def is_first_stage(name: str) -> bool:
        """Return True on the first pipeline stage that has the tensor and therefore writes it."""
        plain = name.removeprefix("model/")
        return pipeline is None or pipeline.rank_of(plain) == pipeline.rank

    owned: dict[str, tuple[Source, bool]] = {
        name: (source_of(tensor), is_first_replica(tensor, leads) and is_first_stage(name))
        for name, tensor in model_tensors(model).items()
        if name.removeprefix("model/") not in away
    }
    fixed = {name for name, (source, _) in owned.items() if _is_fixed(source.pattern)}
    listed = list_optimizers(optimizers)
    described: dict[str, Any] | None = {} if listed else None
    for name, parameter, group, optimizer in optimizer_parameters(model, listed):
        values = read_state(optimizer, parameter)
        assert described is not None
        fixed.discard(f"model/{name}")
        described[name] = _describe(name, values, group, optimizer)
        for key in described[name]["tensors"]:
            writes = _writes_state(values[key], parameter, leads) and is_first_stage(name)
            owned[state_tensor_name(name, key)] = (values[key], writes)
    seed = state.get("seed")
    own = {name: source for name, (source, writes) in owned.items() if writes and source.size_bytes}
    return Snapshot(
        step=step,
        records={name: _record(name, source) for name, (source, _) in owned.items()},
        boxes={name: local_box(source.pattern) for name, source in own.items()},
        tensors={name: source.taken() for name, source in own.items()},
        frozen=frozenset(fixed),
        optimizer=described,
        state=json.dumps(state),
        seed=seed if isinstance(seed, int) else torch.initial_seed(),
        rng=capture_rng(),
        base=base,
    )


def _describe(
    name: str, values: dict[str, Any], group: dict[str, Any], optimizer: Optimizer
) -> dict[str, Any]:
    """Return the manifest entry of a parameter's optimizer state, without the tensors' values."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Source)}
    check_json(plain, f"optimizer.state[{name!r}]")
    hyper = {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key not in NOT_SETTINGS
    }
    check_json(hyper, f"the parameter group of {name!r}")
    return {
        "optimizer": kind_of(optimizer),
        "group": hyper,
        "values": plain,
        "tensors": [key for key, value in values.items() if isinstance(value, Source)],
    }


def _is_fixed(tensor: Tensor) -> bool:
    """Return True for a tensor that is not trained and large enough to be stored separately."""
    is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    return not is_trained and tensor.numel() * tensor.element_size() >= _SMALLEST_FROZEN_BYTES


def _writes_state(source: Source, parameter: Tensor, leads: bool) -> bool:
    """Return True on the one process that writes this tensor of a parameter's state."""
    if isinstance(source.pattern, DTensor) or not isinstance(parameter, DTensor):
        return is_first_replica(source.pattern, leads)
    coordinate = parameter.device_mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def _record(name: str, source: Source) -> dict[str, Any]:
    record = {"dtype": dtype_name(source.dtype), "shape": list(source.pattern.shape)}
    if source.keeper is not None:
        return record
    local = local_tensor(source.pattern.detach())
    if (
        local.dtype not in DTYPE_CODES
        or local.layout != torch.strided
        or local.is_meta
        or hasattr(local, "__tensor_flatten__")
    ):
        raise CheckpointError(
            f"{name} cannot be saved, because it is a {type(local).__name__} with "
            f"dtype={local.dtype}, layout={local.layout}, device={local.device} (needed: a dense "
            "tensor that is not on the meta device)."
        )
    return record


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in manifests."""
    return str(dtype).removeprefix("torch.")


def check_json(value: Any, where: str) -> None:
    """Raise an error unless `value` survives a JSON round trip (tuples become lists).

    Raises:
        CheckpointError: JSON does not support a type; the message names it and its location.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{where} has the key {key!r}, but only string keys can be saved. Convert the "
                    "key to a string."
                )
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | bool | None):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, but only numbers, strings, lists, dicts and "
            "None can be saved. Convert it to one of these types."
        )
