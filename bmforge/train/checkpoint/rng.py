"""States of this process's random generators as tensors: Python, NumPy, torch, accelerator."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "capture_rng",
    "capture_torch",
    "reseed_rng",
    "restore_rng",
    "restore_torch",
    "seed_all",
]


def capture_rng() -> dict[str, Tensor]:
    """Return the state of every generator as uint8 host tensors, without advancing them."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "rng/python": _to_bytes([version, list(internal), gauss]),
        "rng/numpy": _to_bytes(
            [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]
        ),
    }
    return {**states, **capture_torch()}


def capture_torch() -> dict[str, Tensor]:
    """Return the state of torch's generators on the host and the accelerator."""
    states = {"rng/torch": torch.get_rng_state().clone()}
    device = _device_module()
    if device is not None:
        states["rng/accelerator"] = device.get_rng_state().cpu().clone()
    return states


def restore_rng(states: dict[str, Tensor]) -> None:
    """Restore every generator from the states that `capture_rng` returned.

    An accelerator that the saving process did not have is seeded from the restored torch state.
    """
    version, internal, gauss = _from_bytes(states["rng/python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = _from_bytes(states["rng/numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    restore_torch(states)


def restore_torch(states: dict[str, Tensor]) -> None:
    """Restore torch's generators from the states that `capture_torch` returned."""
    device = _device_module()
    if device is not None:
        if "rng/accelerator" in states:
            device.set_rng_state(states["rng/accelerator"])
        else:
            device.manual_seed(_seed_of(bytes(states["rng/torch"].numpy())))
    torch.set_rng_state(states["rng/torch"])


def reseed_rng(seed: int, step: int, rank: int) -> None:
    """Seed every generator from (seed, step, rank), reproducibly."""
    seed_all(_seed_of(f"{seed}/{step}/{rank}".encode()))


def seed_all(seed: int) -> None:
    """Seed every random generator with the same number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _seed_of(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def _device_module() -> Any:
    """Return torch's accelerator module, such as `torch.cuda`; None if there is no accelerator."""
    if not torch.accelerator.is_available():
        return None
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.numpy()))
