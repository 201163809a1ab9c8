"""Options of `bmforge plan`. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["PlanCommand"]


@dataclass(kw_only=True)
class PlanCommand:
    """Estimate which parallel layouts of a model fit on given GPUs, and their speed.

    Args:
        model: name of a preset, or a model directory.
        task: training task to plan. For preferences and reward, a sequence is a pair of answers;
            for rl and distill, the plan includes the generation of answers.
        reference: reference model of preferences, or of rl with rl.beta above 0: adapter (the base
            model without the adapter), copy or precomputed (if None: for preferences, adapter with
            an adapter, else copy; for rl, none).
        reference_dtype: dtype of the copied reference model of preferences: int8 or int4 (if None:
            fp32).
        reference_offload: keep the copied reference model of preferences in host memory during
            optimizer steps.
        value_model: include the value model that `train rl --method ppo` trains; only for --task
            rl.
        teacher: teacher model for --task distill: name of a preset, or a model directory.
        distill_top_k: number of the teacher's most probable tokens in the loss of --task distill; 0
            means the whole vocabulary.
        max_num_seqs: number of answers that rl and distill generate concurrently (if None: 64).
        set: fields of the model's config to change, as FIELD=VALUE.
        changes: structural changes to the model, such as adapters or pruning, as JSON text or a
            JSON file (if None: no changes).
        freeze_base: train only the modules that `changes` adds; freeze the other weights.
        adapter: kind of adapter to train on all linear layers, such as lora (if None: train the
            whole model).
        adapter_rank: rank of the adapter (if None: 8).
        base_dtype: dtype of the frozen base model below the adapter: int8 or int4 for QLoRA (if
            None: the dtype given by precision).
        gpus: number of GPUs.
        gpu: GPU model, such as a100-80gb; a GPU without an entry in bmforge's table needs
            gpu_memory and gpu_tflops.
        gpu_memory: memory of a GPU in GiB (if None: the value in bmforge's table of GPUs).
        gpu_tflops: dense half-precision peak of a GPU in TFLOP/s (if None: the value in bmforge's
            table of GPUs).
        gpus_per_node: number of GPUs per node.
        interconnect: network between nodes: ethernet-10 to ethernet-100, ib-25 to ib-800, or a
            number in Gb/s per GPU.
        host_memory: host memory per node in GiB, available for offloading.
        batch: sequences per optimizer step over all GPUs (if None: the smallest number of at
            least 8 that divides evenly among the GPUs).
        seq: tokens per sequence (if None: the model's maximum, but at most 4,096).
        precision: dtype of the computation (if None: bf16 if the GPU supports it, else fp16).
        offload: also consider layouts that offload the optimizer states to host memory.
        compile: assume that the model's blocks are compiled with torch.compile.
        tokens: number of training tokens of the whole run, used to estimate hours and cost (if
            None: no estimate).
        price: price of one GPU hour (if None: no cost estimate).
        currency: currency of the price.
        rows: number of layouts in the printed table.
        plot: SVG file to write, with a chart of the memory of the printed layouts (if None: no
            chart).
        json: print all layouts as JSON instead of a table, in bytes and seconds.
    """

    model: Annotated[str, tyro.conf.Positional]
    task: Literal["pretrain", "conversations", "preferences", "reward", "rl", "distill"] = (
        "pretrain"
    )
    reference: Literal["adapter", "copy", "precomputed"] | None = None
    reference_dtype: Literal["int8", "int4"] | None = None
    reference_offload: bool = False
    value_model: bool = False
    teacher: str | None = None
    distill_top_k: int = 0
    max_num_seqs: int | None = None
    set: tuple[str, ...] = ()
    changes: str | None = None
    freeze_base: bool = False
    adapter: str | None = None
    adapter_rank: int | None = None
    base_dtype: Literal["int8", "int4"] | None = None
    gpus: int = 1
    gpu: str = "a100-80gb"
    gpu_memory: float | None = None
    gpu_tflops: float | None = None
    gpus_per_node: int = 8
    interconnect: str = "ib-200"
    host_memory: float = 1024.0
    batch: int | None = None
    seq: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    offload: bool = True
    compile: bool = False
    tokens: float | None = None
    price: float | None = None
    currency: str = "USD"
    rows: int = 12
    plot: Path | None = None
    json: bool = False
