"""Three steps of learning by a prompt on a layout; runs on every worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.models import (
    GLM,
    GPT2,
    T5,
    Bert,
    BertConfig,
    CPMAnt,
    CPMAntConfig,
    CPMBee,
    CPMBeeConfig,
    GLMConfig,
    GPT2Config,
    T5Config,
    init_weights_,
)
from bmforge.models.changes import Change
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    gradient_ranks,
    init_distributed,
    mesh_of,
    parallelize,
    run_step,
    sum_over_axes,
)
from bmforge.testing.character_tokenizer import character_tokenizer_for
from bmforge.testing.prompt_suite import PROMPT, prompted_config
from bmforge.train import clip_grad_norm_
from bmforge.tune.prompt import (
    ManualVerbalizer,
    PromptRows,
    Template,
    draw_rows_,
    prompt_objective,
)

_SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
_WIDE: dict[str, Any] = {**_SIZES, "intermediate_size": 40}
_LIVE: dict[str, Any] = {**_WIDE, "head_dim": 6, "num_buckets": 16}
KINDS: dict[str, tuple[Any, Any]] = {
    "bert": (Bert, BertConfig(**_WIDE, max_seq_len=40, init_std=0.2)),
    "gpt2": (GPT2, GPT2Config(**_WIDE, max_seq_len=40, init_std=0.2)),
    "t5": (T5, T5Config(**_LIVE, init_std=0.5)),
    "glm": (GLM, GLMConfig(**_SIZES, max_seq_len=40, init_std=0.2)),
    "cpm_ant": (CPMAnt, CPMAntConfig(**_LIVE, prompt_types=3, prompt_length=4, segment_types=5)),
    "cpm_bee": (CPMBee, CPMBeeConfig(**_LIVE, num_relations=80)),
}
EXAMPLES = [{"text_a": text} for text in ("a film", "not a good one", "so so", "dull")]
LABELS = [0, 1, 0, 1]


def learn(kind: str, layout: Layout, join: str, recompute: bool = False) -> dict[str, Tensor]:
    """Return the first loss, and every gradient and tensor that is here, whole."""
    init_distributed()
    model_class, config = KINDS[kind]
    change = Change("prompt", ("embed",), {"length": 2})
    config = prompted_config(config).replace(changes=(change,))
    model: Any = model_class.from_config(config, device="meta", dtype=torch.float64)
    tokenizer = character_tokenizer_for(model)
    template = Template(PROMPT, tokenizer, model)
    words = ManualVerbalizer([["good", "fine"], ["bad"]], tokenizer, join=join)
    rows = PromptRows(template, words, EXAMPLES, LABELS, seq_len=32)
    parallelize(model, layout, recompute=recompute)
    init_weights_(model, seed=3)
    draw_rows_(model, template.rows, seed=1)
    mesh = mesh_of(model)
    size, rank = data_parallel_size(mesh), data_parallel_rank(mesh)
    each = len(EXAMPLES) // (2 * size)
    batches = [
        rows.collate([rows.make((part * size + rank) * each + n, ()) for n in range(each)])
        for part in range(2)
    ]
    objective, items = prompt_objective(words), len(EXAMPLES) / size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: dict[str, Tensor] = {}
    for step in range(3):
        losses = run_step(model, lambda batch: objective(model, batch, items), batches)
        if step == 0:
            loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
            axes = ("dp_replicate", "dp_shard", "cp", "pp")
            found["loss"] = sum_over_axes(loss, mesh, *axes) / gradient_ranks(mesh)
            for name, parameter in model.named_parameters():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                found[f"grad/{name}"] = _whole(grad)
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"end/{name}": _whole(p) for name, p in model.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
