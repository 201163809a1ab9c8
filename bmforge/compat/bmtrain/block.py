"""Blocks, whose parameters are gathered together, and lists of blocks.

Sharding is torch's `fully_shard`, recomputation torch's `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from bmforge.compat.bmtrain.module import (
    DistributedModule,
    Facade,
    claim_blocks_,
    join_blocks_,
    make_distributed_,
)
from bmforge.compat.bmtrain.parameter import all_rows, mark_, mesh_of, origin_of
from bmforge.compat.bmtrain.runtime import config
from bmforge.errors import ConfigError
from bmforge.parallel.zero import param_groups_of
from bmforge.surgery import wrap_forward_, wrappers_of

__all__ = ["Block", "BlockError", "TransformerBlockList", "as_blocks"]


class BlockError(ConfigError, AssertionError):
    """Raised if a block or a list of blocks cannot be built from the given modules."""


class Block(Facade):
    """Wrapper that gathers a module's parameters when it runs, and recomputes its activations.

    Attributes, parameter names and saved keys are those of the wrapped module.

    Args:
        inner_module: module with distributed parameters; an ordinary module is converted.
        use_checkpoint: True to store only the inputs and recompute other activations in backward.
        zero_level: 3 to gather again in backward, 2 to keep gathered parameters until backward
            (default: the level of `init_distributed`, which is 3).
        initialized: accepted and ignored; the values of an ordinary module are always kept.
        mode: "PIPE" for blocks of a `PipelineTransformerBlockList`, which assigns their stage.

    Raises:
        BlockError: only some of the parameters are distributed.

    Comm: an all-gather in forward, and at level 3 in backward; a reduce-scatter in backward, fp32.
    """

    def __init__(
        self,
        inner_module: nn.Module,
        use_checkpoint: bool = True,
        zero_level: int | None = None,
        initialized: bool = False,
        mode: str = "BLOCK",
    ) -> None:
        config.need("Block")
        level = config["zero_level"] if zero_level is None else zero_level
        if level not in (2, 3) or mode not in ("BLOCK", "PIPE"):
            raise BlockError(
                f"zero_level={level} must be 2 or 3, and mode={mode!r} must be 'BLOCK' or 'PIPE'."
            )
        if isinstance(inner_module, Block):
            raise BlockError("inner_module is already a Block. Pass the module inside it.")
        _check(inner_module)
        super().__init__()
        # Share the module's tables, so that changes through the block are changes of the module.
        inner = vars(inner_module)
        is_made = "recompute" in dict(wrappers_of(inner_module))
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = inner[table]
        self.__dict__.update(zero_level=level, use_checkpoint=use_checkpoint, mode=mode)
        self.__dict__["_module"] = inner_module
        if not is_made:  # the module may already be wrapped by another block
            recomputed = inner_module if use_checkpoint else None
            wrap_forward_(inner_module, partial(_run, recomputed), "recompute")
        if mode == "BLOCK" or config["pipe_size"] == 1:
            self.shard()

    def shard(self) -> None:
        """Shard the parameters; call it after the block is placed on its pipeline stage."""
        if not isinstance(self._module, FSDPModule):
            _shard_(self._module, frees=self.zero_level == 3)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module; a list or tuple is returned as a tuple."""
        if isinstance(self._module, FSDPModule) and "_joined" not in self._module.__dict__:
            join_blocks_(self)
        with config.own_random(self.training):
            out = self._module(*args, **kwargs)
        if self.zero_level == 2 and not _has_backward(out):
            self.give_back()
        return tuple(out) if type(out) is list else out

    def give_back(self) -> None:
        """Reshard gathered parameters and free the full ones."""
        if isinstance(self._module, FSDPModule):
            if any(group._all_gather_result for group in param_groups_of(self._module)):
                self._module.unshard()  # finish a prefetch of parameters that were not used
            self._module.reshard()

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the wrapped module."""
        self.__dict__["training"] = mode
        self._module.train(mode)
        return self

    def apply(self, fn: Any) -> Self:
        """Apply `fn` to the wrapped module and its submodules."""
        self._module.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._module._apply(fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        if "_module" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_module" in self.__dict__:
            setattr(self.__dict__["_module"], name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)

    def _get_name(self) -> str:
        return f"Block[{self._module._get_name()}]"

    def extra_repr(self) -> str:
        """Return the extra description of the wrapped module."""
        return self._module.extra_repr()

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.give_back()
        self._module._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.give_back()
        self._module._load_from_state_dict(*args, **kwargs)


def _run_gathered(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward; gather its parameters first if backward is recomputing it."""
    # FSDP gathers for backward when a gradient arrives at the block's output, but backward from a
    # tensor that was recorded inside the block never passes through that output.
    if isinstance(module, FSDPModule) and torch._C._current_graph_task_id() != -1:
        module.unshard()
    # In its first call TorchScript's profiling executor saves other tensors for backward than in
    # later ones, so recomputation would not find the tensors that the first call saved.
    with torch.jit.optimized_execution(False):
        return forward(*args, **kwargs)


def _run(module: nn.Module | None, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward; no output is a view, so ``x += y`` on an output is safe.

    Args:
        module: module to recompute in backward; if None, activations are saved instead.
        forward: forward of the module.
        args, kwargs: arguments of the module.
    """
    if module is None:
        return _no_views(forward(*args, **kwargs))
    # With early_stop, code at the end of forward (such as a call counter) would not run again.
    out = checkpoint(
        _run_gathered, module, forward, *args, use_reentrant=False, early_stop=False, **kwargs
    )
    return _no_views(out)


def _no_views(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.clone() if out._is_view() and out.requires_grad else out
    return type(out)(map(_no_views, out)) if type(out) in (tuple, list) else out


def _check(module: nn.Module) -> None:
    """Distribute an ordinary module.

    Raise an error if only some of its parameters are distributed.
    """
    named = dict(module.named_parameters())
    plain = [name for name, param in named.items() if origin_of(param) is None]
    is_plain = not any(isinstance(m, DistributedModule) for m in module.modules())
    if plain and (len(plain) < len(named) or not is_plain):
        raise BlockError(
            f"{type(module).__name__} has parameters that are not distributed: "
            f"{', '.join(plain)}. Create them with bmt.DistributedParameter, or wrap their "
            "modules with bmt.BMTrainModelWrapper(module)."
        )
    if is_plain:
        make_distributed_(module)


def _shard_(module: nn.Module, frees: bool) -> None:
    """Shard with `fully_shard` the largest group of parameters with the same dtype and mesh.

    With `frees`, gathered parameters are freed after forward (ZeRO-3).

    `fully_shard` accepts only one dtype and mesh; the few other parameters are gathered by the
    modules that own them.
    """
    kinds: dict[Any, list[nn.Parameter]] = {}
    for param in module.parameters():
        origin = origin_of(param)
        assert origin is not None
        mesh = mesh_of(origin)
        if mesh.size() > 1 and param.dim() and not origin.in_block:
            kinds.setdefault((mesh, param.dtype), []).append(param)
    if not kinds:
        return
    mesh, dtype = max(kinds, key=lambda kind: sum(p.numel() for p in kinds[kind]))
    taken = {id(param) for param in kinds[mesh, dtype]}
    places = [
        (owner, name, param)
        for owner in module.modules()
        for name, param in owner._parameters.items()
        if param is not None and id(param) in taken
    ]
    gathered = {id(p): nn.Parameter(all_rows(p), p.requires_grad) for _, _, p in places}
    for owner, name, param in places:
        owner._parameters[name] = gathered[id(param)]
    is_half = dtype in (torch.float16, torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_half else None)
    gathered_ids = {id(param) for param in gathered.values()}
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=frees,
        mp_policy=policy,
        ignored_params={p for p in module.parameters() if id(p) not in gathered_ids},
    )
    # Gradients are sums here: the loss is divided beforehand, see `OptimManager`.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    for owner, name, param in places:
        origin, sharded = origin_of(param), owner._parameters[name]
        assert origin is not None
        assert sharded is not None
        mark_(sharded, origin, in_block=True)


def _has_backward(out: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(out))


def as_blocks(modules: Iterable[nn.Module], mode: str) -> list[Block]:
    """Wrap modules in blocks; the same module may occur twice, the same block may not.

    Raises:
        BlockError: a block occurs twice or has a different mode.
    """
    blocks: list[Block] = []
    for index, module in enumerate(modules):
        block = module if isinstance(module, Block) else Block(module, mode=mode)
        if any(block is other for other in blocks):
            raise BlockError(
                f"Block {index} is already in the list. To use its weights twice, pass the "
                "module itself."
            )
        if mode == "PIPE" and block.mode != mode:
            raise BlockError(
                f'Block {index} has mode="BLOCK", but a PipelineTransformerBlockList needs '
                'mode="PIPE". Use bmt.Block(module, mode="PIPE"), or pass the module itself.'
            )
        blocks.append(block)
    return blocks


class TransformerBlockList(nn.Module):
    """List of blocks that run in sequence.

    Args:
        modules: blocks, or modules to wrap in blocks.
        num_hidden: number of leading arguments that a block computes for the next block; the
            other arguments are the same for all blocks.
    """

    mode = "BLOCK"

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1) -> None:
        super().__init__()
        self.num_hidden = num_hidden
        for index, block in enumerate(as_blocks(modules, self.mode)):
            self._modules[str(index)] = block

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, index: int | str | slice) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return list(self)[index] if isinstance(index, int) else self._modules[index]

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Run the blocks in sequence.

        Args:
            args: `num_hidden` hidden states, then arguments that are the same for all blocks.
            return_hidden_states: True to also return the inputs of each block, stacked on a new
                first dim.
            kwargs: keyword arguments that are the same for all blocks.
        """
        if "_claims" not in self.__dict__:
            claim_blocks_(self)
        hidden, others = args[: self.num_hidden], args[self.num_hidden :]
        seen: list[tuple[Any, ...]] = []
        for block in self:
            seen.append(hidden)
            out = block(*hidden, *others, **kwargs)
            hidden = out if isinstance(out, tuple) else (out,)
            if len(hidden) != self.num_hidden:
                raise BlockError(
                    f"a block returned {len(hidden)} values, but num_hidden={self.num_hidden}. Set "
                    "num_hidden to the number of values that every block returns."
                )
        if return_hidden_states:
            return *hidden, *(torch.stack(column) for column in zip(*seen, strict=True))
        return hidden if self.num_hidden > 1 else hidden[0]
