"""Reference vectors of an original implementation: weights, inputs, outputs, gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from bmforge.models import Model
from bmforge.testing.reference_pair import to_reference_names
from bmforge.testing.tolerance import assert_close

__all__ = ["Golden"]


class Golden:
    """A file with reference vectors.

    It has arrays named ``weight:NAME``, ``input:NAME``, ``output:NAME`` and ``grad:NAME``, and the
    original config as a JSON string.

    Args:
        path: path of the .npz file.
        atol: absolute tolerance of the outputs.
    """

    def __init__(self, path: Path, atol: float) -> None:
        self.atol = atol
        with np.load(path, allow_pickle=False) as arrays:
            self.config: dict[str, Any] = json.loads(str(arrays["config"]))
            loaded = {n: arrays[n] for n in arrays.files}
            tensors = {n: torch.from_numpy(a) for n, a in loaded.items() if a.dtype.kind != "U"}
        self.weights, self.inputs, self.outputs, self.gradients = (
            {n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)}
            for kind in ("weight:", "input:", "output:", "grad:")
        )

    def write(self, directory: Path, **fields: Any) -> None:
        """Write weights and config as a model directory; `fields` are added to the config."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.weights, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps({**self.config, **fields}))

    def check(self, name: str, actual: Tensor, rows: Any = ...) -> None:
        """Compare a tensor with the reference output `name`; `rows` selects a part of both."""
        want = self.outputs[name]
        assert_close({name: actual[rows]}, {name: want[rows]}, rtol=0.0, atol=self.atol)

    def check_gradients(self, model: Model) -> None:
        """Compare a model's gradients with all gradients in the file, by their original names."""
        got = to_reference_names(
            model,
            {
                n: torch.zeros_like(p) if p.grad is None else p.grad
                for n, p in model.named_parameters()
            },
        )
        assert self.gradients
        for name, want in self.gradients.items():
            bound = 1e-5 * want.abs().max().item() + 1e-7
            assert_close({name: got[name]}, {name: want}, rtol=0.0, atol=bound)
