"""Random generators for tensor-parallel groups, and activation recomputation.

Recomputation in backward restores torch's default generators and those of the tracker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from bmforge.compat.cpm_pretrain.mpu.initialize import get_model_parallel_rank
from bmforge.device import keep_random
from bmforge.errors import ConfigError
from bmforge.train.checkpoint.rng import capture_torch, restore_torch

__all__ = [
    "CudaRNGStatesTracker", "checkpoint", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed",
]  # fmt: skip

_OWN = "model-parallel-rng"
# Difference between the shared seed and the seeds per rank, as in Megatron.
_APART = 2718
States = dict[str, dict[str, Tensor]]


class CudaRNGStatesTracker:
    """Named random generators of the accelerator, or of the CPU if there is none."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all generators."""
        self._states: States = {}
        self._seeds: set[int] = set()

    def get_states(self) -> States:
        """Return the state of each generator."""
        return dict(self._states)

    def set_states(self, states: States) -> None:
        """Restore the state of each generator."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a named generator.

        Raises:
            ConfigError: the name or the seed is taken.
        """
        if seed in self._seeds or name in self._states:
            raise ConfigError(
                f"a generator with the name {name!r} or the seed {seed} already exists. Choose "
                "another name and seed, or call reset() first."
            )
        self._seeds.add(seed)
        with keep_random():
            torch.manual_seed(seed)
            self._states[name] = capture_torch()

    @contextmanager
    def fork(self, name: str = _OWN) -> Iterator[None]:
        """Context manager: use a named generator instead of the default one.

        Raises:
            ConfigError: there is no generator of that name.
        """
        if name not in self._states:
            raise ConfigError(
                f"there is no random generator {name!r}. Call "
                "mpu.model_parallel_cuda_manual_seed(seed), or add(name, seed)."
            )
        with keep_random():
            restore_torch(self._states[name])
            try:
                yield
            finally:
                self._states[name] = capture_torch()


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the generators of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generator shared by the tensor-parallel group, and add one generator per rank."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add(_OWN, seed + _APART + get_model_parallel_rank())


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without keeping its activations, which backward recomputes."""
    before = _tracker.get_states()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return _with_states(None), _with_states(before)

    return recompute(function, *args, use_reentrant=False, context_fn=contexts)


@contextmanager
def _with_states(states: States | None) -> Iterator[None]:
    """Context manager: use the given generator states inside, and the current ones afterwards."""
    if states is None:
        yield
        return
    now = _tracker.get_states()
    _tracker.set_states(states)
    try:
        yield
    finally:
        _tracker.set_states(now)
