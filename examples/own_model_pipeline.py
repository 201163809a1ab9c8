"""Train your own model and batch function with tensor, pipeline and data parallelism.

    python examples/own_model_pipeline.py --steps 20
    torchrun --nproc-per-node 4 examples/own_model_pipeline.py --steps 20 --tp 2 --pp 2
    torchrun --nproc-per-node 8 examples/own_model_pipeline.py --steps 20 --tp 2 --pp 2

Replacements for what programs for CPM-Pretrain passed to its engine:

- `LayerSpec`, which built layers lazily: the model is built on the meta device, without memory, and
  `init_weights_` initializes only the shard of each process.
- `model_provider`, `_input_grad` and `_input_type`: the forward runs the blocks in `span`. Its
  input is the output of the previous stage (`stage_inputs`), and it returns the input of the
  next one (`stage_outputs`): any tensors, with a gradient or without.
- `get_batch_pipe`: `make_batch` below. Every stage gets the whole batch.
- Megatron's `mpu` layers: `RULES` says which layers are cut, and how.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.models import init_weights_
from bmforge.models.rules import LayoutRules, TensorParallelRule
from bmforge.nn.shard_hooks import identity
from bmforge.parallel import (
    Layout,
    build_mesh,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    parallelize,
    shutdown_distributed,
)
from bmforge.train import OptimConfig, TrainConfig, Trainer

SEQ_LEN, ROWS_PER_STEP, MICRO_BATCHES = 48, 16, 4

RULES = LayoutRules(
    zero_units=("blocks.*",),
    recompute_units=("blocks.*",),
    tensor_parallel=(
        TensorParallelRule("embed", "embedding"),
        TensorParallelRule("blocks.*.mixer", "part"),
        TensorParallelRule("blocks.*.mixer.up", "column"),
        TensorParallelRule("blocks.*.mixer.down", "row"),
    ),
    stacks=("blocks",),
    pipeline_first=("embed*",),
    pipeline_last=("norm", "head"),
)


class Output(NamedTuple):
    """Output of a call: the results of the last stage, or the tensors for the next stage."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    stage_outputs: tuple[Tensor, ...] | None = None


class Mixer(nn.Module):
    """Mixes every position with the mean of the previous ones; channels are sharded over `tp`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.input_fn = identity  # tensor parallelism sums the gradient of its input here
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor, is_text: Tensor) -> Tensor:
        x = self.up(self.input_fn(x)) * is_text[..., None]
        count = is_text.cumsum(1).clamp(min=1)[..., None]
        return self.down(F.gelu(x + x.cumsum(1) / count))


class Block(nn.Module):
    """A norm and a mixer with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixer = Mixer(width, 3 * width)

    def forward(self, x: Tensor, is_text: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x), is_text)


class ByteModel(nn.Module):
    """Predicts the next byte; the texts of a batch are weighted."""

    stage_inputs: tuple[Tensor, ...] = ()

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.embed_positions = nn.Embedding(SEQ_LEN, width)
        self.blocks = nn.ModuleDict({str(i): Block(width) for i in range(depth)})
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def layout_rules(self) -> LayoutRules:
        """Return how layouts shard the modules."""
        return RULES

    def init_std(self, name: str) -> float:
        """Return the standard deviation of a parameter's initialization, by its name."""
        return 0.2 if name.startswith("embed") else 0.1

    def count_items(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of predictions in a batch."""
        return int((batch["labels"] != -100).sum())

    def forward(
        self,
        ids: Tensor,
        is_text: Tensor,
        weights: Tensor,
        labels: Tensor | None = None,
        num_items: float = 1.0,
    ) -> Output:
        first, last, total = getattr(self.blocks, "span", (0, len(self.blocks), len(self.blocks)))
        if first:
            x, is_text, weights = self.stage_inputs
        else:
            places = torch.arange(ids.shape[1], device=ids.device)
            x = self.embed(ids) + self.embed_positions(places)
        for number in range(first, last):
            x = self.blocks[str(number)](x, is_text)
        if last < total:
            return Output(
                stage_outputs=(x, is_text, weights)
            )  # float with gradient, bool, float without
        logits = self.head(self.norm(x))
        if labels is None:
            return Output(logits=logits)
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return Output((losses.sum(1) * weights).sum() / num_items)


def make_batch(texts: list[bytes], weights: list[float]) -> dict[str, Tensor]:
    """Convert raw texts to the model's arguments: your own `get_batch`."""
    ids = torch.zeros(len(texts), SEQ_LEN + 1, dtype=torch.int64)
    is_text = torch.zeros(len(texts), SEQ_LEN, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        is_text[row, : len(text) - 1] = True
    labels = ids[:, 1:].masked_fill(~is_text, -100)
    return {
        "ids": ids[:, :-1],
        "is_text": is_text,
        "weights": torch.tensor(weights),
        "labels": labels,
    }


class Texts:
    """This process's micro-batches, a pure function of the step."""

    def __init__(self, rank: int, size: int) -> None:
        self.lines = [line.encode() for text in topics.values() for line in text.splitlines()]
        self.lines = [line[: SEQ_LEN + 1] for line in self.lines if len(line) > 8]
        self.rank, self.size, self.step = rank, size, 0

    def __next__(self) -> list[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(self.step)
        chosen = torch.randint(len(self.lines), (ROWS_PER_STEP,), generator=draw).tolist()
        mine = chosen[self.rank :: self.size]
        rows = len(mine) // MICRO_BATCHES
        self.step += 1
        return [
            make_batch(
                [self.lines[n] for n in mine[start : start + rows]],
                [1.0 + n % 2 for n in mine[start : start + rows]],
            )
            for start in range(0, len(mine), rows)
        ]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def weighted_loss(model: nn.Module, batch: Mapping[str, Tensor], num_items: float) -> Any:
    """Call the model on a micro-batch; only the last pipeline stage returns a loss."""
    return model(**batch, num_items=num_items).loss


def main(
    steps: int = 20, tp: int = 1, pp: int = 1, zero: int = 3, run_dir: str | None = None
) -> list[float]:
    """Train, and return the loss of every step."""
    world = init_distributed()
    layout = Layout(zero=zero, tp=tp, pp=pp)  # type: ignore[arg-type]
    mesh = build_mesh(layout, world.device)
    with torch.device("meta"):
        model = ByteModel()
    parallelize(model, layout, mesh=mesh)
    init_weights_(model, seed=0, device=world.device)
    losses: list[float] = []
    trainer = Trainer(
        model,
        Texts(data_parallel_rank(mesh), data_parallel_size(mesh)),
        TrainConfig(steps=steps, optim=OptimConfig(lr=3e-3)),
        mesh=mesh,
        run_dir=run_dir,
        objective=weighted_loss,
        callbacks=[lambda trainer, row: losses.append(row["loss"])],
    )
    trainer.fit()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train a model of your own on any layout")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--zero", type=int, choices=[0, 2, 3], default=3)
    parser.add_argument("--run-dir", help="directory for metrics and checkpoints, to resume from")
    options = parser.parse_args()
    main(options.steps, options.tp, options.pp, options.zero, options.run_dir)
    shutdown_distributed()
