"""GPT-2 and its layouts in plain torch, the reference of `layouts.py`.

The parameters have the names of `bmforge.models.GPT2`, so that both models load the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

__all__ = ["LAYOUTS", "PlainGPT"]

Step = Callable[[Tensor], Tensor]


class PlainAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        query, key, value = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in projected
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class PlainMLP(nn.Module):
    """MLP with a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


class PlainBlock(nn.Module):
    """Transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = PlainAttention(width, heads), PlainMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PlainGPT(nn.Module):
    """GPT-2; the modules that a pipeline stage does not have are None."""

    def __init__(self, sizes: dict[str, int], length: int) -> None:
        super().__init__()
        width, heads = sizes["hidden_size"], sizes["num_heads"]
        self.embed: Any = nn.Embedding(sizes["vocab_size"], width)
        self.embed_positions: Any = nn.Embedding(length, width)
        numbers = range(sizes["num_layers"])
        self.layers = nn.ModuleDict({str(i): PlainBlock(width, heads) for i in numbers})
        self.norm: Any = nn.LayerNorm(width)
        self.lm_head: Any = nn.Linear(width, sizes["vocab_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            x = self.embed(x) + self.embed_positions(positions)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None else self.lm_head(self.norm(x))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens."""
    targets = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def shard(model: PlainGPT) -> tuple[Step, Callable[[float], None]]:
    """Apply ZeRO-3 over all processes with `fully_shard`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step(ids: Tensor) -> Tensor:
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        return loss.detach()

    return step, lambda limit: clip(model, limit)


def clip(model: nn.Module, limit: float) -> None:
    """Clip gradients by their total norm."""
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def shard_tensors(model: PlainGPT) -> tuple[Step, Callable[[float], None]]:
    """Apply tensor and sequence parallelism with a parallel loss, with `parallelize_module`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    across = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    outside: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "embed_positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, outside)
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    for layer in model.layers.values():
        inside: dict[str, Any] = {"attn_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        inside |= {"attn": across, "mlp": across, "attn.o_proj": row, "mlp.down_proj": row}
        inside |= {f"attn.{name}_proj": column for name in "qkv"} | {"mlp.up_proj": column}
        parallelize_module(layer, mesh, inside)

    def step(ids: Tensor) -> Tensor:
        with loss_parallel():
            loss = next_token_loss(model(ids), ids)
            loss.backward()
        detached: Any = loss.detach()
        return detached.full_tensor() if hasattr(detached, "full_tensor") else detached

    return step, lambda limit: clip(model, limit)


def split_stages(model: PlainGPT, micro_batches: int = 4) -> tuple[Step, Callable[[float], None]]:
    """Split the model into pipeline stages (1F1B) with `torch.distributed.pipelining`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = len(model.layers)
    for number in range(count):
        if number * world // count != rank:
            del model.layers[str(number)]
    if rank:
        model.embed = model.embed_positions = None
    if rank < world - 1:
        model.norm = model.lm_head = None
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=next_token_loss)

    def step(ids: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=losses)
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(mean)
        return mean

    def clip_all(limit: float) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        square = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, square.sqrt())

    return step, clip_all


LAYOUTS = {"zero3": shard, "tp2": shard_tensors, "pp2": split_stages}
