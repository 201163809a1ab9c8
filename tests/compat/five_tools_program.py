"""A program with five of the old tools: pretrain, tune, compress and run a GPT-2.

Only its import lines differ from those of the old packages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bmforge.compat.bminf as bminf
import bmforge.compat.bmtrain as bmt
from bmforge.compat.bmcook import CookTrainer
from bmforge.compat.bmcook.utils.config import ConfigParser
from bmforge.compat.model_center.dataset import DistributedDataLoader
from bmforge.compat.model_center.model import GPT2, GPT2Config
from bmforge.compat.opendelta import AutoDeltaModel, LoraModel

VOCAB, LENGTH = 64, 16
CONFIG = {
    "vocab_size": VOCAB, "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 64,
    "num_layers": 2, "dropout_p": 0.0, "position_size": 64, "half": False,
}  # fmt: skip
HIDDEN = "[post]encoder.layers.1.ffn:[post]encoder.layers.1.ffn"
COOK = {
    "distillation": {"ce_scale": 0.5, "mse_hidn_scale": 1, "mse_hidn_module": [HIDDEN]},
    "quantization": {"is_quant": True, "quantized_module": []},
}


class Counting(torch.utils.data.Dataset):
    """Rows of numbers that count up from a random start, modulo the vocabulary size."""

    def __init__(self, size: int) -> None:
        self.starts = torch.randint(VOCAB, (size,), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (self.starts[index] + torch.arange(LENGTH + 1)) % VOCAB
        row = {"input_ids": ids[:-1].int(), "targets": ids[1:].long()}
        return {**row, "length": torch.tensor(LENGTH)}


def train(model: Any, epochs: int, lr: float, teacher: Any = None) -> list[float]:
    """Train the parameters that need a gradient; with a teacher, compress as well."""
    entropy = bmt.loss.FusedCrossEntropy(ignore_index=-100)

    def loss_func(logits: Tensor, targets: Tensor) -> Tensor:
        return entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = bmt.optim.AdamOffloadOptimizer(trained, weight_decay=1e-2)
    scheduler = bmt.lr_scheduler.Noam(
        optimizer, start_lr=lr, warmup_iter=4, end_iter=-1, num_iter=0
    )
    manager = bmt.optim.OptimManager(loss_scale=1024)
    manager.add_optimizer(optimizer, scheduler)
    if teacher is not None:
        CookTrainer.set_compression(ConfigParser("cook.json"), model, optimizer, teacher)
    losses = []
    for epoch in range(epochs):
        model.train()
        for data in DistributedDataLoader(Counting(64), batch_size=16, shuffle=True):
            ids, targets, length = data["input_ids"], data["targets"], data["length"]
            manager.zero_grad()
            if teacher is not None:
                loss = CookTrainer.forward(model, loss_func, targets, ids, length).loss
            else:
                loss = loss_func(model(ids, length).logits, targets)
            losses.append(bmt.sum_loss(loss).item())
            manager.backward(loss)
            norm = manager.clip_grad_norm(
                optimizer.param_groups, max_norm=1.0, scale=optimizer.scale, norm_type=2
            )
            manager.step()
        bmt.print_rank(f"epoch {epoch} | loss {losses[-1]:.4f} | norm {norm:.4f}")
    return losses


def generate(model: Any, start: list[int], count: int) -> list[int]:
    """Continue ids by greedy decoding without a cache."""
    model.eval()
    ids = torch.tensor([start])
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids.int(), torch.tensor([ids.size(1)])).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()


def main() -> tuple[list[list[float]], list[list[int]]]:
    """Run all steps in the working directory; return the losses and the generated ids."""
    Path("cook.json").write_text(json.dumps(COOK))
    Path("base").mkdir()
    Path("base/config.json").write_text(json.dumps(CONFIG))
    bmt.init_distributed(seed=7, zero_level=2)
    model = GPT2(GPT2Config.from_json_file("base/config.json"))
    bmt.init_parameters(model)
    first = train(model, epochs=6, lr=2e-2)
    bmt.save(model, "base/pytorch_model.pt")

    teacher, student = GPT2.from_pretrained("base"), GPT2.from_pretrained("base")
    delta = LoraModel(student, modified_modules=["project_q", "project_v"], lora_r=4)
    delta.freeze_module(exclude=["deltas"], set_state_dict=True)
    second = train(student, 3, 1e-2, teacher)
    delta.save_finetuned("delta")

    plain = GPT2.from_pretrained("base")
    AutoDeltaModel.from_finetuned("delta", backbone_model=plain)
    before = generate(plain, [3, 4, 5], 8)
    small = bminf.wrapper(plain, quantization=True)
    return [first, second], [before, generate(small, [3, 4, 5], 8)]
