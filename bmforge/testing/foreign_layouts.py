"""Compares small transformers models on parallel layouts with the same models on one process.

The test suite and `dev/transformers_table.py` use this module for every model type of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.models import AutoModel, load_weights_
from bmforge.models.transformers.small_copy import build_small_copy
from bmforge.models.transformers.stages import run_stage, stage_modules
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    mesh_of,
    parallelize,
    run_step,
)
from bmforge.records import Span
from bmforge.testing.pool import run_distributed
from bmforge.tune.delta import Lora

__all__ = [
    "compare_layout",
    "compare_stages",
    "default_config",
    "random_rows",
    "save_small_model",
]

_INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 1024,
    "indexer_compress_ratio": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# model_type -> fields without which transformers cannot build a model of the default config.
_REQUIRED: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_index": 150},
    "blt": {"use_cache": False},  # transformers 5.24 cannot create its cache
    "chameleon": {  # letters stand for the digits of an image token
        "vocabulary_map": {
            "<image>": 150,
            "IMGIMGAZ": 151,
            "IMGIMGBZ": 152,
            "IMGIMGCZ": 153,
            "IMGIMGDZ": 154,
        },
    },
    "encoder-decoder": {"decoder_start_token_id": 0},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        },
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", *["sparse"] * 31],
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 6,
        },
    },
    "diffusion_gemma": {
        "text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 150,
            "<|extra_200|>": 155,
            **{f"<|visual token {code:06d}|>": 151 + code for code in range(4)},
        },
    },
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [22, 22, 20]}},
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5}},
    },
    "granite4_vision": {
        "deepstack_layer_map": [[1, 0], [2, 1]],
        "downsample_rate": "2/4",
        "spatial_target_layers": [2, 3],
    },
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": _SECTIONS}},
    "instructblip": {"image_token_index": 150},
    "instructblipvideo": {"video_token_index": 150},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "qwen2_5_omni_thinker": {
        "vision_start_token_id": 151652,
        "text_config": {"rope_parameters": _SECTIONS},
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "pop2piano": {"decoder_start_token_id": 0},
    "switch_transformers": {"decoder_start_token_id": 0},
    # Without noise on the codes of sound, which would differ between processes.
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": {"vae_std": 0.0}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    **{
        kind: {"text_config": {"rope_parameters": _SECTIONS}}
        for kind in (
            "glm46v",
            "glm4v",
            "glm_ocr",
            "glmga",
            "paddleocr_vl",
            "qwen2_5_vl",
            "qwen2_vl",
        )
    },
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
}


def default_config(kind: str) -> Any:
    """Return the default config of a `model_type`, with the fields that have no usable default."""
    return transformers.AutoConfig.for_model(kind, **copy.deepcopy(_REQUIRED.get(kind, {})))


def random_rows() -> dict[str, Tensor]:
    """Return four sequences of token ids and labels, with different numbers of labels."""
    ids = torch.randint(5, 150, (4, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :7] = -100
    return {"input_ids": ids, "labels": labels}


def save_small_model(kind: str, directory: Path) -> None:
    """Save a small random language model of a `model_type`.

    Raises:
        Exception: the architecture cannot be built with small sizes.
    """
    build_small_copy(default_config(kind), "language_model").save_pretrained(directory)


def compare_layout(
    directory: Path,
    layout: Layout,
    adapter: bool = False,
    batch: Mapping[str, Tensor] | None = None,
) -> str:
    """Compare the loss and all gradients of a step on two processes with those on one process.

    Args:
        directory: saved model.
        layout: layout of two processes.
        adapter: train a LoRA adapter on all linear layers instead of the model.
        batch: inputs with labels, in four rows; default: those of a causal language model.

    Returns:
        "" if they are equal; the error message if the model does not support the layout

    Raises:
        AssertionError: the loss or a gradient differs.
    """
    plain = AutoModel.from_pretrained(directory, backend="transformers")
    if adapter:
        _attach_adapter_(plain)
    batch = random_rows() if batch is None else batch
    loss = plain(**batch).loss
    loss.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    ranks = run_distributed(_compute, 2, directory, layout, adapter, batch)
    for result in ranks:
        if isinstance(result, str):
            return result
    present = set().union(*(gradients for _, gradients in ranks))
    missing = [n for n, gradient in wanted.items() if n not in present and bool(gradient.any())]
    assert not missing, f"no gradient of {missing}"
    for got_loss, gradients in ranks:
        torch.testing.assert_close(got_loss, loss.detach(), rtol=1e-4, atol=1e-6)
        for name, gradient in gradients.items():
            expected = wanted.get(name, torch.zeros_like(gradient))
            bound = 5e-5 * max(0.02, float(expected.abs().max()))
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=bound, msg=name)
    return ""


def compare_stages(directory: Path) -> str:
    """Compare gradients of a model split into two pipeline stages with those of the whole model.

    Both stages run in this process, which is faster than `compare_layout` with pp=2, but does not
    test the messages between stages.

    Args:
        directory: saved model.

    Returns:
        "" if they are equal; the reason if the model cannot be split

    Raises:
        AssertionError: a gradient differs.
    """
    model = AutoModel.from_pretrained(directory, backend="transformers")
    split_points = model.behavior.split_points
    if split_points.refusal:
        return split_points.refusal
    foreign, structure, ids = model.foreign, model.structure, random_rows()["input_ids"]
    weights = torch.randn(512, generator=torch.Generator().manual_seed(0))

    def run() -> Tensor:
        logits: Tensor = model(ids).logits
        return (logits * weights[: logits.shape[-1]]).sum()

    run().backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    total = len(list(foreign.get_submodule(structure.stacks[0]).children()))
    stage_inputs: tuple[Tensor, ...] = ()
    outputs = []
    for span in (Span(0, total // 2, total), Span(total // 2, total, total)):
        modules = stage_modules(foreign, foreign, structure, split_points, span, stage_inputs)
        outputs.append(run_stage(modules, run))
        if not span.first:
            stage_inputs = (outputs[0].detach().requires_grad_(),)
    outputs[1].backward()
    outputs[0].backward(stage_inputs[0].grad)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, expected in wanted.items():
        gradient = gradients.get(name, torch.zeros_like(expected))
        bound = 1e-5 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=bound, msg=name)
    return ""


def _attach_adapter_(model: Any) -> None:
    """Attach a LoRA adapter on all linear layers, with random values in all its tensors."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in Lora(model, targets=["all-linear"], rank=2).parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)


def _compute(
    directory: Path, layout: Layout, adapter: bool, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]] | str:
    """Return the loss and the gradients of two micro-batches, or the layout's error message."""
    if adapter:
        model: Any = AutoModel.from_pretrained(directory, backend="transformers")
        _attach_adapter_(model)
    else:
        model, files = AutoModel.describe_pretrained(directory, backend="transformers")
    try:
        parallelize(model, layout)
    except ConfigError as error:
        return str(error)
    if not adapter:
        load_weights_(model, files)
    model.eval()  # without dropout, masked spectrograms and statistics of batches
    mesh = mesh_of(model)
    size = data_parallel_size(mesh)
    items = model.count_items(batch) / size
    own = {n: t.chunk(size)[data_parallel_rank(mesh)] for n, t in batch.items()}
    halves = [{n: t.chunk(2)[half] for n, t in own.items()} for half in (0, 1)]
    losses = run_step(model, lambda part: model(**part, num_items_in_batch=items).loss, halves)
    loss = torch.stack([*losses, torch.zeros(())]).sum()
    # The mean over data-parallel ranks; with a pipeline, the loss on the last stage.
    if size > 1 or layout.pp > 1:
        dist.all_reduce(loss)
        loss = loss / size
    return loss, {n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()  # type: ignore[no-any-return]
