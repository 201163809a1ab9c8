"""`init_distributed` and `config`: process groups, meshes and settings of a BMTrain program.

`config` is the only state of the package. Programs see a read-only mapping with BMTrain's keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from bmforge.compat.bmtrain.streams import STREAM_KEYS, current_stream, new_event
from bmforge.device import fork_random
from bmforge.errors import ConfigError, DistributedError, suggest
from bmforge.host_tuning import tune_host
from bmforge.parallel import Layout, World, build_mesh
from bmforge.parallel import init_distributed as join_world
from bmforge.parallel.groups import build_device_mesh, flatten_mesh
from bmforge.train.checkpoint.rng import seed_all

__all__ = [
    "Config", "Topology", "config", "init_distributed", "is_initialized", "rank", "synchronize",
    "topology", "world_size",
]  # fmt: skip


class Topology:
    """Coordinates of this process; pipeline stages vary slowest, tensor-parallel ranks fastest.

    Attributes:
        stages, stage_id: number of pipeline stages, and index of this process's stage.
        pipe_idx: index of this process's pipeline.
        zero_id, pp_zero_id: rank among the processes of the same pipeline stage.
        pp_zero_idx: index of the group of processes that shard the same parameters: the stage.
        tp_idx, tp_id: index of this process's tensor-parallel group, and rank in the group.
        tp_zero_id: rank among the processes with the same tensor-parallel part of the model.
    """

    def __init__(self, rank: int, pipe_size: int, tp_size: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.stages = self.pipe_size = pipe_size
        self.tp_size = tp_size
        self.stage_id, self.pipe_idx = divmod(rank, world_size // pipe_size)
        self.zero_id = self.pp_zero_id = self.pipe_idx
        self.pp_zero_idx = self.stage_id
        self.tp_idx, self.tp_id = divmod(rank, tp_size)
        self.tp_zero_id = self.pipe_idx // tp_size

    def get_group_id(self, name: str) -> int:
        """Return the index of this process's group: "pipe", "zero", "tp_zero" or "tp"."""
        tp_zero = self.stage_id * self.tp_size + self.tp_id
        groups = {"pipe": self.pipe_idx, "zero": self.stage_id, "tp": self.tp_idx}
        return {**groups, "tp_zero": tp_zero}[name]

    def get_group_rank(self, name: str) -> int:
        """Return this process's rank in its group: "pipe", "zero", "tp_zero" or "tp"."""
        ranks = {"pipe": self.stage_id, "zero": self.zero_id, "tp": self.tp_id}
        return {**ranks, "tp_zero": self.tp_zero_id}[name]


# BMTrain's `config` before `init_distributed`; programs log with `bmt.rank()` while they import.
_BEFORE_INIT = {"rank": 0, "local_rank": 0, "world_size": 1}


class Config(Mapping[str, Any]):
    """Global state of the package; a read-only mapping for programs.

    Attributes:
        device: device of this process.
        world: mesh of all processes.
        stage: mesh of this pipeline stage's processes.
        tp_zero: mesh of the processes with the same tensor-parallel part.
        keeps_whole: True if this process keeps gathered values (False on ranks that do not save).
        inspected: active `inspect_tensor` collectors, innermost last.
        debugged: values stored by `debug`.
        saving: thread of the last non-blocking `save`.
        grouped: messages queued by `nccl`; None outside of `groupStart` and `groupEnd`.
        host: process-wide torch settings, which last until the next `init_distributed`.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {"initialized": False}
        self._group: object = None
        self._is_inside = False
        self.keeps_whole = True
        self.inspected: list[Any] = []
        self.debugged: dict[str, Any] = {}
        self.saving: Any = None
        self.grouped: list[Any] | None = None
        self.host = ExitStack()

    def __getitem__(self, key: str) -> Any:
        if key == "initialized":
            return self.is_ready
        if not self.is_ready and key in _BEFORE_INIT:
            return _BEFORE_INIT[key]
        if key in STREAM_KEYS:
            return current_stream(self.device if self.is_ready else None)
        if key == "load_event":
            return new_event(self.device if self.is_ready else None)
        self.need(f"config[{key!r}]")
        if key == "save_thread":
            return self.saving
        if key == "finish_save":
            return self.saving is None or not self.saving.is_alive()
        if key not in self._values:
            raise KeyError(f"config has no key {key!r}.{suggest(key, self._values)}")
        return self._values[key]

    def __setitem__(self, key: str, value: object) -> None:
        raise ConfigError(
            f"config[{key!r}] = {value!r} is not allowed, because config is read-only. Pass the "
            "value to init_distributed."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_ready(self) -> bool:
        """True if `init_distributed` was called and its process group still exists."""
        return self._group is not None and dist.is_initialized() and dist.group.WORLD is self._group

    def need(self, what: str) -> None:
        """Raise an error that names the feature `what` if `init_distributed` was not called.

        Raises:
            DistributedError: `init_distributed` was not called.
        """
        if not self.is_ready:
            raise DistributedError(
                f"{what} needs a process group. Call bmt.init_distributed() first."
            )

    def join(self, world: World, values: Mapping[str, Any], layout: Layout) -> None:
        """Use an initialized process group: store its meshes, its settings and BMTrain's keys."""
        self.device = world.device
        mesh = build_mesh(layout, world.device)
        self.mesh: DeviceMesh = mesh
        self.tp_zero = mesh["dp_shard"]
        self.stage = mesh["dp_shard"] if layout.tp == 1 else flatten_mesh(mesh["dp_shard", "tp"])
        self.world = self.stage
        if layout.pp > 1:
            self.world = build_device_mesh(world.device.type, (world.size,), ("all",))
        tp, pipe = mesh["tp"].get_group(), mesh["pp"].get_group()
        groups = {
            "comm": self.world.get_group(),
            "zero_comm": self.world.get_group(),
            "pipe_comm": pipe,
            "pp_comm": pipe,
            "pp_zero_comm": self.stage.get_group(),
            "tp_comm": tp,
            "tp_zero_comm": self.tp_zero.get_group(),
            "pp_tp_zero_comm": self.tp_zero.get_group(),
        }
        self._values = {**values, **groups}
        self._group, self._is_inside, self.inspected = dist.group.WORLD, False, []
        self.saving, self.grouped = None, None

    @contextmanager
    def own_random(self, is_training: bool) -> Iterator[None]:
        """Context manager: use different dropout seeds on data-parallel processes.

        It has an effect in the outermost module only. The global seed is the same on all
        processes, so that they initialize equal weights.
        """
        enters = is_training and not self._is_inside and self.is_ready and torch.is_grad_enabled()
        if not enters or self["world_size"] == 1:
            yield
            return
        self._is_inside = True
        try:
            with fork_random(self["topology"].tp_zero_id + self["topology"].stage_id * 65536):
                yield
        finally:
            self._is_inside = False


config = Config()


def init_distributed(
    init_method: str = "env://",
    seed: int = 0,
    pipe_size: int = -1,
    num_micro_batches: int | None = None,
    tp_size: int = 1,
    *,
    zero_level: int = 3,
    loss_scale_factor: float = 2.0,
    loss_scale_steps: int = 1024,
) -> None:
    """Join the other processes, seed the generators, and set up the process groups.

    Works under torchrun, `python -m torch.distributed.launch` and without a launcher; a process
    group that the program has initialized is used.

    Args:
        init_method: rendezvous URL of torch.distributed.
        seed: seed of torch, numpy and random, the same on every process; dropout masks differ.
        pipe_size: number of pipeline stages; -1 or 1 for no pipeline.
        num_micro_batches: number of micro-batches of a pipeline (default: `pipe_size`).
        tp_size: number of tensor-parallel processes per model.
        zero_level: default ZeRO level of a `Block`: 2 or 3.
        loss_scale_factor: factor of `optim_step`'s loss scale (older programs).
        loss_scale_steps: steps after which `optim_step`'s loss scale grows (older programs).

    Raises:
        ConfigError: the sizes do not fit the number of processes.
        DistributedError: the other processes do not join.
    """
    if zero_level not in (2, 3):
        raise ConfigError(f"zero_level={zero_level} must be 2 or 3.")
    world = _join_world(init_method)
    pipes = max(1, pipe_size)
    layout = Layout(zero=3, tp=tp_size, pp=pipes)
    layout.check(world.size)
    micros = pipes if num_micro_batches is None else num_micro_batches
    if micros < 1:
        raise ConfigError(f"num_micro_batches={num_micro_batches} must be at least 1.")
    switches = {
        "micros": micros,
        "zero_level": zero_level,
        "loss_scale_factor": loss_scale_factor,
        "loss_scale_steps": loss_scale_steps,
        "save_param_to_cpu": True,
        "gradient_inspect": False,
    }
    topology = Topology(world.rank, pipes, tp_size, world.size)
    config.join(world, {**_describe(topology), **switches}, layout)
    config.host.close()
    config.host.enter_context(tune_host(world.device))
    # In its first calls of a function, TorchScript's profiling executor saves other tensors for
    # backward than later, and recomputation in a block would raise an error about the difference.
    config.host.enter_context(torch.jit.optimized_execution(False))
    if world.size > 1:
        _support_anomaly_detection()
    seed_all(seed)


def _support_anomaly_detection() -> None:
    """Register a DTensor sharding rule for the NaN check of `torch.autograd.set_detect_anomaly`.

    torch 2.13 has no rule for its operator, and would raise an error in backward.
    """
    from torch.distributed.tensor.experimental import register_sharding

    # Every process gathers the whole mask, so all of them raise the error if there is a NaN.
    register_sharding(torch.ops.aten._is_any_true.default)(
        lambda mask: [([Replicate()], [Replicate()])]
    )


def _join_world(init_method: str) -> World:
    """Initialize the process group with the launcher's or the program's rendezvous."""
    if init_method != "env://" and not dist.is_initialized():
        size, own = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        dist.init_process_group(init_method=init_method, world_size=size, rank=own)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "10010")
    return join_world()


def _describe(topology: Topology) -> dict[str, Any]:
    """Return the entries of `config` that describe this process's ranks and group sizes."""
    size, pipes = topology.world_size, topology.pipe_size
    return {
        "initialized": True,
        "rank": topology.rank,
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "local_size": int(os.environ.get("LOCAL_WORLD_SIZE", str(size))),
        "world_size": size,
        "pipe_size": pipes,
        "pipe_enabled": pipes > 1,
        "tp_size": topology.tp_size,
        "tp_rank": topology.tp_id,
        "zero_rank": topology.zero_id,
        "zero_size": size // pipes,
        "tp_zero_rank": topology.tp_zero_id,
        "tp_zero_size": size // (pipes * topology.tp_size),
        "topology": topology,
    }


def is_initialized() -> bool:
    """Return True if `init_distributed` was called."""
    return config.is_ready


def rank() -> int:
    """Return the rank of this process; 0 before `init_distributed`, as in BMTrain."""
    return int(config["rank"])


def world_size() -> int:
    """Return the number of processes; 1 before `init_distributed`, as in BMTrain."""
    return int(config["world_size"])


def synchronize() -> None:
    """Wait for all processes (a barrier)."""
    config.need("synchronize()")
    if config["world_size"] > 1:
        dist.barrier(config["comm"])
    if config.device.type != "cpu":
        torch.accelerator.synchronize()


def topology(config: Mapping[str, Any]) -> Topology:
    """Return the coordinates of this process on the mesh, as in ``config["topology"]``."""
    return Topology(*(config[key] for key in ("rank", "pipe_size", "tp_size", "world_size")))
