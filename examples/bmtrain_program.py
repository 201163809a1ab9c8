"""A training program written for BMTrain; only its first import has changed.

    python examples/bmtrain_program.py
    torchrun --nproc-per-node 2 examples/bmtrain_program.py
    python -m torch.distributed.launch --nproc-per-node 2 examples/bmtrain_program.py

It learns to copy a sequence. The processes share the rows of the same batches, so the losses do not
depend on their number.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

import bmforge.compat.bmtrain as bmt

VOCAB, WIDTH, LENGTH, ROWS = 64, 64, 16, 32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Linear(bmt.DistributedModule):
    """A projection."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(out, width),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, std=width**-0.5),
        )
        self.bias = bmt.DistributedParameter(torch.empty(out), init_method=torch.nn.init.zeros_)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection of `x`."""
        return F.linear(x, self.weight, self.bias)


class TransformerBlock(bmt.DistributedModule):
    """Attention and a feed-forward layer with residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Apply attention, then the feed-forward layer."""
        rows, length, width = x.shape
        query, key, value = self.qkv(F.layer_norm(x, (width,))).chunk(3, -1)
        heads = [t.view(rows, length, self.heads, -1).transpose(1, 2) for t in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (width,)))))


class Model(bmt.DistributedModule):
    """Embeddings, blocks and a head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        normal = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.1)
        self.tokens = bmt.DistributedParameter(torch.empty(VOCAB, WIDTH), init_method=normal)
        self.positions = bmt.DistributedParameter(torch.empty(LENGTH, WIDTH), init_method=normal)
        self.blocks = bmt.TransformerBlockList(
            [bmt.CheckpointBlock(TransformerBlock(WIDTH, 4)) for _ in range(layers)]
        )
        self.head = Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        x = F.embedding(ids, self.tokens) + self.positions[:length]
        return self.head(F.layer_norm(self.blocks(x, mask), (WIDTH,)))


def batch(step: int) -> Tensor:
    """Return this process's rows: random tokens, repeated once."""
    draw = torch.Generator().manual_seed(step)
    half = torch.randint(0, VOCAB, (ROWS, LENGTH // 2), generator=draw)
    rows = torch.cat((half, half), 1).chunk(bmt.world_size())[bmt.rank()]
    return rows.to(DEVICE)


def main(steps: int = 100) -> list[float]:
    """Train, and return the losses."""
    bmt.init_distributed(seed=0)
    model = Model()
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=1e-2)
    lr_scheduler = bmt.lr_scheduler.Noam(optimizer, start_lr=1e-2, warmup_iter=10, end_iter=steps)
    optim_manager = bmt.optim.OptimManager(loss_scale=None)
    optim_manager.add_optimizer(optimizer, lr_scheduler)
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    losses = []
    for step in range(steps):
        ids = batch(step)
        logits = model(ids[:, :-1])
        loss = loss_func(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        losses.append(bmt.sum_loss(loss).item())
        optim_manager.zero_grad()
        optim_manager.backward(loss)
        norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        optim_manager.step()
        bmt.print_rank(f"step {step} loss {losses[-1]:.6f} norm {norm:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train a copying model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0)  # old launcher
    main(parser.parse_args().steps)
