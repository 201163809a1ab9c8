"""Training with zeros on layouts; runs in the pool's workers."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from bmforge.compress.prune import PruneConfig, Sparsifier
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig, init_weights_
from bmforge.parallel import (
    Layout,
    OffloadConfig,
    build_mesh,
    data_parallel_rank,
    data_parallel_size,
    init_distributed,
    parallelize,
)
from bmforge.shards import local_box, put_values_, source_of, whole_tensor
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, Trainer

SIZES: dict[str, Any] = {"vocab_size": 29, "num_layers": 2, "num_heads": 2, "max_seq_len": 16}


def build(family: str) -> Any:
    if family == "gpt2":
        return GPT2.from_config(GPT2Config(**SIZES, hidden_size=20), device="meta")
    config = LlamaConfig(**SIZES, hidden_size=16, intermediate_size=24, num_kv_heads=2, head_dim=8)
    return Llama.from_config(config, device="meta")


class Loader:
    """Cuts the global batch of every step by process; carries the state of the zeros along."""

    def __init__(self, rank: int, world: int, sparsifier: Sparsifier) -> None:
        self.rank, self.world, self.step, self.sparsifier = rank, world, 0, sparsifier

    def __next__(self) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.step)
        ids = torch.randint(0, 29, (8, 10), generator=generator)
        self.step += 1
        mine = ids.chunk(self.world)[self.rank]
        return [{"input_ids": part, "labels": part} for part in mine.split(1)]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "zeros": self.sparsifier.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.sparsifier.load_state_dict(state["zeros"])


def run(
    family: str,
    layout: Layout,
    config: PruneConfig,
    steps: int,
    *,
    optimizer: str = "adamw",
    offload: OffloadConfig | None = None,
    run_dir: str | None = None,
    until: int | None = None,
    at_once: bool = False,
    precision: str = "fp32",
    dtype: torch.dtype = torch.float64,
    kill_at: int | None = None,
) -> dict[str, Tensor]:
    """Train with zeros; return every parameter that is here, whole."""
    world = init_distributed()
    model = build(family).to(dtype)
    sparsifier = Sparsifier(config)
    sparsifier.attach_(model)
    mesh = build_mesh(layout, world.device)
    parallelize(model, layout, mesh=mesh, precision=precision)
    init_weights_(model, seed=3)
    if at_once:
        _halve_(model, sparsifier)

    def go_on(trainer: Trainer, row: Any) -> None:
        if trainer.step == kill_at:
            os._exit(9)
        sparsifier.after_step_(trainer.model, trainer.step)

    trainer = Trainer(
        model,
        Loader(data_parallel_rank(mesh), data_parallel_size(mesh), sparsifier),
        TrainConfig(
            steps=steps,
            save_every_steps=None if run_dir is None else 5,
            grad_clip=0.5,
            precision=precision,  # type: ignore[arg-type]
            optim=OptimConfig(name=optimizer, lr=1e-2),
            schedule=ScheduleConfig("constant", warmup_steps=0),
        ),
        mesh=mesh,
        run_dir=run_dir,
        offload=offload,
        callbacks=(go_on,),
    )
    trainer.fit(until)
    return {name: _whole(parameter) for name, parameter in model.named_parameters()}


def _whole(parameter: Tensor) -> Tensor:
    source = source_of(parameter)
    if source.keeper is None:
        return whole_tensor(parameter).clone()
    return source.read()


@torch.no_grad()
def _halve_(model: Any, sparsifier: Sparsifier) -> None:
    """Zeros that a checkpoint would have brought: every second weight, the same on any layout."""
    for owner, key in sparsifier._places.values():
        module = model
        for part in owner.split("."):
            module = None if module is None else module._modules.get(part)
        if module is None:
            continue
        parameter = getattr(module, key)
        values = whole_tensor(parameter)
        values = values * (torch.arange(values.numel()).view(values.shape) % 2)
        put_values_(parameter, values[local_box(parameter).slices])
