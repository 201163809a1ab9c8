"""Train an unmodified Hugging Face model, sharded over the processes.

    bmforge prepare --out runs/text
    python examples/train_hugging_face.py --data runs/text
    torchrun --nproc-per-node 2 examples/train_hugging_face.py --data runs/text --family llama

The model is an ordinary `transformers` one with random weights; put
`AutoModelForCausalLM.from_pretrained(...)` in its place to start from trained ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bmforge.data import DataLoader, PackedDataset, TokenStore
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

SEQ_LEN = 64


def build_model(family: str, vocab_size: int) -> PreTrainedModel:
    """Return a small random model, the same on every process before it is sharded."""
    torch.manual_seed(0)
    if family == "gpt2":
        shape = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": SEQ_LEN}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=vocab_size, use_cache=False, **shape, **dropout)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQ_LEN,
            use_cache=False,
        )
    )


def main(
    data: str, family: str = "gpt2", steps: int = 50, run_dir: str | None = None
) -> list[float]:
    """Train, and return the loss of every step."""
    world = init_distributed()
    store = TokenStore(Path(data) / "train" / "tokens")
    model = build_model(family, int(store.tokens.max()) + 1).to(world.device)
    layout = Layout(zero=3)
    mesh = build_mesh(layout, world.device)
    parallelize(model, layout, mesh=mesh)
    loader = DataLoader(
        PackedDataset(store, SEQ_LEN),
        global_batch_size=8,
        micro_batch_size=4,
        rank=data_parallel_rank(mesh),
        world=data_parallel_size(mesh),
    )
    losses: list[float] = []
    trainer = Trainer(
        model,
        loader,
        TrainConfig(steps=steps, optim=OptimConfig(lr=3e-3)),
        mesh=mesh,
        run_dir=run_dir,
        callbacks=[lambda trainer, row: losses.append(row["loss"])],
    )
    with loader:
        trainer.fit()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train a Hugging Face model")
    parser.add_argument("--data", required=True, help="directory written by `bmforge prepare`")
    parser.add_argument("--family", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--run-dir", help="directory for metrics and checkpoints, to resume from")
    arguments = parser.parse_args()
    main(arguments.data, arguments.family, arguments.steps, arguments.run_dir)
    shutdown_distributed()
