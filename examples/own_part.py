"""Your own part in a bmforge model: a trained gate after every MLP, on any layout.

    python examples/own_part.py
    torchrun --nproc-per-node 2 examples/own_part.py --tp 2

The part defines the initialization of its tensor and the sharding that it supports; initialization,
tensor, pipeline and context parallelism, ZeRO, saving and loading then work.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from bmforge.models import Llama, LlamaConfig, Model, init_weights_, load_weights_
from bmforge.nn.part import AdapterModule, TensorNote, attach_part_
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    mesh_of,
    parallelize,
    run_step,
    shutdown_distributed,
)

ROWS, LENGTH = 8, 32
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, max_seq_len=64
)


class Gate(AdapterModule):
    """Multiplies a module's output by a trained vector."""

    sharding_styles = frozenset({"", "part"})  # unsharded modules, and those with sharded children

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def tensor_notes(self) -> Mapping[str, TensorNote]:
        """Return ones as the initialization, so that the model is initially unchanged."""
        return {"weight": TensorNote("ones")}

    def forward(self, out: Tensor) -> Tensor:
        return out * self.weight

    def join(self, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        """Return the new output from the MLP's inputs and output."""
        return self(out)


def build() -> Model:
    """Return a Llama with gates on the meta device."""
    model = Llama.from_config(CONFIG, device="meta", dtype=torch.float64)
    with torch.device("meta"):
        for block in model.layers.values():
            attach_part_(block.mlp, "gate", Gate(CONFIG.hidden_size).double())
    return model


def main(layout: Layout, steps: int = 4, export: str | None = None) -> dict[str, Any]:
    """Train a few steps on text; return the losses and the saved and reloaded parameters."""
    init_distributed()
    model = init_weights_(parallelize(build(), layout), seed=0)
    mesh = mesh_of(model)
    size, rank = data_parallel_size(mesh), data_parallel_rank(mesh)
    text = torch.tensor(list(" ".join(topics.values()).encode()[: ROWS * LENGTH]))
    rows = text.view(ROWS, LENGTH).chunk(size)[rank]
    batches = [{"input_ids": part, "labels": part} for part in rows.chunk(2)]
    items = ROWS * (LENGTH - 1) / size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        found = run_step(model, lambda b: model(**b, num_items_in_batch=items).loss, batches)
        losses.append(sum(loss.item() for loss in found))
        optimizer.step()
        optimizer.zero_grad()
    again = None
    if export is not None:
        model.save_pretrained(export)
        again = load_weights_(build(), export)
    return {
        "losses": losses,
        "again": again and {n: p.detach() for n, p in again.named_parameters()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    given = parser.parse_args()
    print(main(Layout(tp=given.tp, pp=given.pp))["losses"])
    shutdown_distributed()
