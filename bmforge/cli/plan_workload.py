"""Describes a model for the planner: its constructor, inputs and loss."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from bmforge.cli.plan_tasks import head_of_task, task_step
from bmforge.config import config_to_dict
from bmforge.errors import ConfigError, suggest
from bmforge.models import Model, freeze_base_
from bmforge.models.config import ModelConfig
from bmforge.models.hub import find_config
from bmforge.models.init import materialize_
from bmforge.models.stack import StackSpec, assign_cache_indices_
from bmforge.nn import (
    attention_bias,
    host_rows,
    jensen_shannon,
    logprobs,
    losses,
    mlp,
    norm,
    recompute,
    subset_logprobs,
)
from bmforge.parallel import expert
from bmforge.parallel.planner.storage_tracker import StorageTracker
from bmforge.parallel.planner.workload import Workload
from bmforge.recipes.base_weights import cast_frozen_
from bmforge.recipes.run import family_of
from bmforge.surgery import persistent_tensors

__all__ = ["build_value_model", "read_model", "trained_names", "workload_of"]


def read_model(name: str, changes: Sequence[str] = ()) -> tuple[type[Model], ModelConfig]:
    """Return the family and the modified config of a preset or model directory.

    Args:
        name: name of a preset, or a model directory.
        changes: fields to change, each as "field=value".

    Raises:
        ConfigError: `name` is neither a preset nor a model, or a field does not exist.
    """
    family, config = find_config(name)
    if not changes:
        return family, config
    field_names = {f.name for f in fields(config)} - {"raw"}
    values = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in field_names:
            raise ConfigError(
                f"--set {change!r} must be field=value (fields: "
                f"{', '.join(sorted(field_names))}).{suggest(key, field_names)}"
            )
        values[key] = _parse_value(text)
    return family, config.without_derived().replace(**values)


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def trained_names(command: Any, config: Any, task: str) -> tuple[str, ...] | None:
    """Return the names of modules to train in addition to an adapter; None for all modules.

    Args:
        command: a `PlanCommand`.
        config: config of the model.
        task: a key of `TASK_STEPS`.
    """
    if not command.freeze_base and not command.adapter:
        return None
    return tuple(config.heads[config.head].names) if task == "reward" else ()


def build_value_model(command: Any, config: Any, frozen_dtype: torch.dtype) -> nn.Module:
    """Build PPO's value model on the meta device: a reward model with the policy's sizes.

    Args:
        command: a `PlanCommand`.
        config: config of the policy.
        frozen_dtype: dtype in which frozen floating-point weights are stored.
    """
    config = head_of_task("reward", config)
    trained = trained_names(command, config, "reward")
    return workload_of(command.model, config, 2, trained, frozen_dtype, "reward").whole()


def workload_of(
    name: str,
    config: ModelConfig,
    row_tokens: int,
    trained: Collection[str] | None = None,
    frozen_dtype: torch.dtype = torch.float32,
    task: str = "pretrain",
) -> Workload:
    """Describe the training of a model on sequences of `row_tokens` tokens, for the planner.

    Args:
        name: name of the model, for display.
        config: config of the model, including its changes (`models.changes`).
        row_tokens: sequence length in tokens; for pairs of answers, length of one prompt with its
            answer.
        trained: names of the modules to train, in addition to those that changes add; None for all
            modules.
        frozen_dtype: dtype in which frozen floating-point weights are stored.
        task: task whose loss is included in the estimate, see `task_step`.

    Raises:
        ConfigError: sequences are longer than the model allows, or shorter than two tokens.
    """
    family = family_of(config)
    if row_tokens < 2:
        raise ConfigError(f"--seq {row_tokens} must be at least 2 tokens.")
    decoder = getattr(config, "num_decoder_layers", 0)
    if decoder not in (0, config.num_layers):
        raise ConfigError(
            f"{name} has {config.num_layers} encoder and {decoder} decoder blocks, but the planner "
            "needs equal numbers. Set num_layers and num_decoder_layers with --set."
        )
    # Rotary positions have no limit; sequences that are too long for learned positions are refused
    # before tracing.
    make = partial(_make, family, config, trained, frozen_dtype)
    model = make()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"--freeze-base leaves no parameter of {name!r} to train, because no adapter is "
            "attached to a layer. Attach one with --changes, or leave --freeze-base out."
        )
    limit = model.position_limit
    if limit is not None and row_tokens > limit:
        raise ConfigError(
            f"--seq {row_tokens} is more than the {limit} positions of {name}. Use at most "
            f"{limit}, or --set max_seq_len={row_tokens}."
        )
    first, *others = kinds = list(_find_kinds(model).values())
    order = [0] * config.num_layers
    for kind, numbers in enumerate(kinds):
        for number in numbers:
            order[number] = kind
    frozen = None if trained is None else sorted(trained)
    sizes = config_to_dict(config.replace(raw={}))
    key_values = (family.__name__, sizes, row_tokens, frozen, str(frozen_dtype), task)
    step = task_step(task)
    return Workload(
        name,
        _ShallowModels(make, first[0]),
        partial(step.make_batch, row_tokens),
        step.run,
        materialize_,
        config.num_layers,
        row_tokens * step.sequences,
        config.hidden_size,
        config.flops_per_token(row_tokens),
        make,
        tuple((_ShallowModels(make, numbers[0]), len(numbers)) for numbers in others),
        seen_as_plain,
        tuple(order),
        json.dumps(key_values, sort_keys=True, default=str),
    )


def _make(
    family: type[Model],
    config: ModelConfig,
    trained: Collection[str] | None,
    frozen_dtype: torch.dtype,
) -> Model:
    """Return the whole model on the meta device.

    Its base is frozen unless everything is trained.
    """
    model = family.from_config(config, device="meta")
    if trained is not None:
        freeze_base_(model, trained)
        cast_frozen_(model, frozen_dtype)
    return model


def _find_kinds(model: Model) -> dict[Any, list[int]]:
    """Group identical layers; return the indices in each group, the largest group first."""
    stacks = [model.get_submodule(name) for name in model.layout_rules().stacks]
    kinds: dict[Any, list[int]] = {}
    for number in range(len(stacks[0])):
        blocks: list[Any] = [stack.get_submodule(str(number)) for stack in stacks]
        specs = tuple(block.spec for block in blocks)
        tensors = tuple(
            (name, tensor.shape, tensor.dtype, tensor.requires_grad)
            for block in blocks
            for name, tensor in persistent_tensors(block).items()
        )
        kinds.setdefault((specs, tensors), []).append(number)
    return dict(sorted(kinds.items(), key=lambda kind: -len(kind[1])))


class _ShallowModels:
    """Builds models on the meta device whose stacks consist of copies of one layer.

    Caches them by depth.

    Args:
        make: function that returns the whole model.
        number: index of the layer to copy.
    """

    def __init__(self, make: Callable[[], Model], number: int) -> None:
        self.make, self.number = make, number
        self._made: dict[int, Model] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the object without its cache."""
        return _ShallowModels, (self.make, self.number)

    def __call__(self, depth: int) -> Model:
        """Return a model with `depth` blocks in every stack."""
        if depth not in self._made:
            self._made[depth] = self._shorten(self.make(), depth)
        return copy.deepcopy(self._made[depth])

    def _shorten(self, model: Model, depth: int) -> Model:
        for name in model.layout_rules().stacks:
            stack: Any = model.get_submodule(name)
            block = stack[str(self.number)]
            stack.clear()
            for index in range(depth):
                stack[str(index)] = copy.deepcopy(block)
            assign_cache_indices_(stack)
        spec = getattr(model, "spec", None)
        if isinstance(spec, StackSpec):
            model.spec = replace(spec, block=block.spec, blocks={})
        return model


@contextmanager
def seen_as_plain(follower: StorageTracker) -> Iterator[None]:
    """Context manager in which fake tensors count as ordinary tensors and long loops are shortened.

    `nn.recompute` frees only the outputs of ordinary tensors, which it identifies by their address.
    Fake tensors have no address, so their storages identify them here. Attention with a trained
    bias loops over equal tiles, and the loss loops over equal chunks; only two iterations of each
    loop are traced, with the tile size of the planned device. If the planned device is a CPU,
    RMSNorm and gates are traced as the host kernels, which save only their inputs. All processes
    are assumed to have the same number of tokens.

    Args:
        follower: recorder of the trace.
    """
    kind: Any = FakeTensor
    tiles, chunks = attention_bias._tiles, losses.split_chunks

    def few_tiles(query: Tensor, key: Tensor) -> Iterator[Any]:
        return follower.shorten(tiles(query, key), lambda tile: tile.size)

    def few_chunks(count: int, rows: int) -> Iterator[Any]:
        return follower.shorten(chunks(count, rows), lambda chunk: chunk[1])

    def even_lengths(rows: Tensor, group: Any) -> list[int]:
        return [rows.shape[0]] * group.size()

    swapped: list[tuple[Any, str, Any]] = [
        (expert, "_lengths", even_lengths),
        (recompute, "Tensor", FakeTensor),
        (attention_bias, "_tiles", few_tiles),
        (losses, "split_chunks", few_chunks),
        (logprobs, "split_chunks", few_chunks),
        (jensen_shannon, "split_chunks", few_chunks),
        (subset_logprobs, "split_chunks", few_chunks),
        (losses, "is_host", lambda device: follower.copies),  # fake tensors are on the CPU
        (norm, "host_rms_norm", _FakeHostNorm.apply),
        (mlp, "host_gated", _FakeHostGated.apply),
    ]
    for module, name, suits in _HOST_KERNELS:
        swapped.append((module, name, partial(_takes_host_kernel, follower.copies, suits)))
    if not follower.copies:  # copies are made by processors
        tile = attention_bias._TILE_ELEMENTS // torch.get_num_threads()
        swapped.append((attention_bias, "_HOST_TILE_ELEMENTS", tile))
    before = [getattr(module, name) for module, name, _ in swapped]
    for module, name, value in swapped:
        setattr(module, name, value)
    kind.data_ptr = lambda tensor: tensor.untyped_storage()._cdata
    try:
        yield
    finally:
        for (module, name, _), value in zip(swapped, before, strict=True):
            setattr(module, name, value)
        del kind.data_ptr


_HOST_KERNELS: list[tuple[Any, str, Callable[..., bool]]] = [
    (norm, "can_use_host_rms_norm", host_rows.supports_host_rms_norm),
    (mlp, "can_use_host_gated", host_rows.supports_host_gated),
]


def _takes_host_kernel(is_host: bool, suits: Callable[..., bool], *tensors: Tensor) -> bool:
    """Return True if the planned device is a CPU and `suits` accepts the tensors for its kernel."""
    is_plain = not any(isinstance(tensor, DTensor) for tensor in tensors)
    return is_host and is_plain and suits(*tensors)


class _FakeHostNorm(torch.autograd.Function):
    """Allocates and saves the tensors of `host_rms_norm`, without computing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


class _FakeHostGated(torch.autograd.Function):
    """Allocates and saves the tensors of `host_gated`, without computing."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up), None
