"""Programs in the shape of OpenDelta's README, overview and notes, with their import lines changed.

Each returns what it would print, or what its next lines would look at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import transformers

import bmforge.compat.bmtrain as bmt
import bmforge.compat.opendelta as od
from bmforge.compat.model_center.layer import Linear
from bmforge.compat.opendelta import (
    AdapterModel,
    AutoDeltaConfig,
    AutoDeltaModel,
    CompacterModel,
    LoraModel,
    LowRankAdapterModel,
    Visualization,
)
from bmforge.compat.opendelta.inspect import inspect_optimizer_statistics


class WrappedModel(nn.Module):
    def __init__(self, inner_model: nn.Module) -> None:
        super().__init__()
        self.inner = inner_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def must_try(make_t5: Callable[[], Any], published: str, folder: str) -> dict[str, Any]:
    """The README's walk: open, freeze, log, save, open again, detach, wrapped models."""
    t5 = make_t5()
    inputs_ids = torch.tensor([[5, 6, 7, 1]])
    said: dict[str, Any] = {"before": t5.generate(inputs_ids, max_new_tokens=8)}

    delta = AutoDeltaModel.from_finetuned(published, backbone_model=t5)
    delta.freeze_module()
    delta.log()
    said["with"] = t5.generate(inputs_ids, max_new_tokens=8)
    said["trained"] = list(t5.state_dict())

    delta.save_finetuned(folder)
    said["files"] = sorted(os.listdir(folder))
    t5 = make_t5()
    delta1 = AutoDeltaModel.from_finetuned(folder, backbone_model=t5)
    shutil.rmtree(folder)
    said["again"] = t5.generate(inputs_ids, max_new_tokens=8)
    delta1.detach()
    said["detached"] = t5.generate(inputs_ids, max_new_tokens=8)

    wrapped_model = WrappedModel(WrappedModel(t5))
    delta_config = AutoDeltaConfig.from_dict({"delta_type": "lora"})
    delta2 = AutoDeltaModel.from_config(delta_config, backbone_model=wrapped_model)
    delta2.log()
    said["wrapped"] = delta2.delta.places()
    delta2.detach()
    delta_config3 = AutoDeltaConfig.from_dict(
        {
            "delta_type": "lora",
            "modified_modules": ["[r]decoder.block.((2)|(3)).*DenseReluDense\\.wi"],
            "lora_r": 5,
        }
    )
    delta3 = AutoDeltaModel.from_config(delta_config3, backbone_model=wrapped_model)
    delta3.log()
    said["last layers"] = delta3.delta.places()
    said["rank"] = {p.shape for n, p in delta3.named_parameters() if n.endswith("down")}
    return said


def overview(bert: nn.Module) -> Any:
    """The overview's: rank and keys, in the words of that page."""
    delta_model = LoraModel(
        backbone_model=bert,
        rank=2,
        modified_keys=["2.attention.output.dense", "3.attention.self.value"],
    )
    delta_model.freeze_module(exclude=["deltas", "classifier"])
    delta_model.log()
    return delta_model


def basic_usage(model: nn.Module) -> Any:
    """Basic usage: look, put adapters, freeze but for one module, look."""
    Visualization(model).structure_graph()
    delta_model = AdapterModel(
        backbone_model=model, modified_modules=["output.dense"], bottleneck_dim=12
    )
    delta_model.log()
    delta_model.freeze_module(exclude=["deltas", "LayerNorm"], set_state_dict=True)
    delta_model.log()
    return delta_model


def save_light(backbone_model: nn.Module, file: str) -> float:
    """Space-efficient saving without changing the code: the state dict is what is trained."""
    delta_model = CompacterModel(backbone_model, reduction_factor=4)
    delta_model.freeze_module(exclude=["deltas"], set_state_dict=True)
    torch.save(backbone_model.state_dict(), file)
    backbone_model.load_state_dict(torch.load(file, weights_only=True), strict=False)
    return os.path.getsize(file) / 1024**2


def compose(model: nn.Module) -> list[Any]:
    """Several deltas, some on the same layers."""
    delta_model = LoraModel(backbone_model=model, modified_modules=["key"], lora_r=1)
    delta_model2 = AdapterModel(backbone_model=model, modified_modules=["output"], bottleneck_dim=4)
    delta_model3 = AdapterModel(backbone_model=model, modified_modules=["output"])
    delta_model4 = LowRankAdapterModel(
        backbone_model=model, modified_modules=["output"], reduction_factor=8
    )
    delta_model.log()
    return [delta_model, delta_model2, delta_model3, delta_model4]


def plug_and_unplug(model: nn.Module, look: Callable[[], Any]) -> list[Any]:
    """Multitask serving: each delta goes in and out alone."""
    seen = [look()]
    delta_model = LoraModel(backbone_model=model, modified_modules=["intermediate.dense"])
    nn.init.normal_(dict(delta_model.named_parameters())["delta_modules.0.up"])
    seen.append(look())
    delta_model.detach()
    seen.append(look())
    delta_model.attach()
    seen.append(look())
    delta_model2 = AdapterModel(backbone_model=model, modified_modules=["attention.output.dense"])
    nn.init.normal_(dict(delta_model2.named_parameters())["delta_modules.0.up_weight"])
    delta_model.detach()
    seen.append(look())
    delta_model2.detach()
    delta_model.attach()
    seen.append(look())
    return seen


class BertModel(torch.nn.Module):
    def __init__(self, bert: nn.Module, num_types: int) -> None:
        super().__init__()
        self.bert = bert
        self.dense = Linear(bert.input_embedding.dim_model, num_types)
        bmt.init_parameters(self.dense)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        pooler_output = self.bert(*args, **kwargs, output_pooler_output=True).pooler_output
        return self.dense(pooler_output)


def train_with_bmtrain(
    make_bert: Callable[[], nn.Module], delta_type: str, steps: int = 3
) -> dict[str, Any]:
    """The tutorial with BMTrain: a delta on a ModelCenter BERT, trained by its own loop."""
    bmt.init_distributed(seed=0)
    model = BertModel(make_bert(), 2)
    if delta_type == "lora":
        delta_model = LoraModel(
            backbone_model=model, modified_modules=["project_q", "project_k"], backend="bmt"
        )
    elif delta_type == "adapter":
        delta_model = AdapterModel(
            backbone_model=model, modified_modules=["self_att", "ffn"], backend="bmt"
        )
    else:
        delta_model = od.BitFitModel(
            backbone_model=model, modified_modules=["self_att", "ffn"], backend="bmt"
        )
    delta_model.freeze_module(exclude=["deltas"], set_state_dict=True)
    delta_model.log()
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=0.0)
    inspect_optimizer_statistics(optimizer)
    lr_scheduler = bmt.lr_scheduler.NoDecay(
        optimizer, start_lr=1e-2, warmup_iter=0, end_iter=-1, num_iter=0
    )
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    optim_manager = bmt.optim.OptimManager(loss_scale=None)
    optim_manager.add_optimizer(optimizer, lr_scheduler)
    rows = 4 // bmt.world_size()
    mine = slice(bmt.rank() * rows, (bmt.rank() + 1) * rows)
    losses = []
    for _ in range(steps):
        input_ids = (torch.arange(24).view(4, 6) % 20)[mine]
        labels = torch.tensor([0, 1, 1, 0])[mine]
        logits = model(input_ids, attention_mask=torch.ones_like(input_ids))
        loss = loss_func(logits.view(-1, logits.shape[-1]), labels.view(-1))
        losses.append(bmt.sum_loss(loss).item())
        optim_manager.zero_grad()
        optim_manager.backward(loss)
        optim_manager.clip_grad_norm(optimizer.param_groups, 10.0, norm_type=2)
        optim_manager.step()
    return {"losses": losses, "trained": list(model.state_dict()), "places": delta_model}


def tiny_t5() -> Any:
    """A T5 of transformers, the same at every call."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=4, d_ff=32, num_layers=4, num_heads=4,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def tiny_bert() -> Any:
    """A BERT of transformers with a classifier."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=32, max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()
