"""Peak memory that the planner predicts compared with the allocations of real runs on CPUs.

    python -m benchmarks.planner.memory [--only NAME ...]

Each run trains for two steps with AdamW and clipped gradients, in one or several processes. A
library in front of torch's allocator (`allocator_peak.c`, needs a C compiler) counts its
allocations in every thread. The table also shows the growth of the resident memory. The planner was
not fitted to these runs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness import build_counter, header, make_parser, rerun_command, table
from bmforge.cli.plan_workload import workload_of
from bmforge.host_memory import resident_bytes
from bmforge.models import init_weights_
from bmforge.models.bert import BertConfig
from bmforge.models.config import ModelConfig
from bmforge.models.gpt2 import GPT2Config
from bmforge.models.llama import LlamaConfig
from bmforge.models.t5 import T5Config
from bmforge.parallel import (
    Layout,
    OffloadConfig,
    init_distributed,
    mesh_of,
    parallelize,
    run_step,
)
from bmforge.parallel.planner.estimate import Estimator, PlanRequest, TrainingSetup
from bmforge.parallel.planner.hardware import Cluster, find_device
from bmforge.recipes.run import family_of
from bmforge.testing.pool import run_distributed
from bmforge.train import OptimConfig, clip_grad_norm_
from bmforge.train.offload.states import StateOffload
from bmforge.train.optim.build import build_optimizers

MIB = 2**20


def sizes(kind: type[ModelConfig], **changes: Any) -> ModelConfig:
    """Return a config of a small model."""
    usual = {"vocab_size": 8192, "hidden_size": 384, "num_heads": 6, "num_layers": 5}
    return kind(**{**usual, **changes})


GPT2_SMALL = sizes(GPT2Config, max_seq_len=512)
LLAMA_SMALL = sizes(LlamaConfig, intermediate_size=1024, max_seq_len=512)
BERT_SMALL = sizes(BertConfig, intermediate_size=1536, max_seq_len=512)
T5_SMALL = sizes(T5Config, intermediate_size=1024, head_dim=64)


@dataclass(frozen=True)
class Case:
    """A configuration of a run.

    Optimizer states are offloaded to disk, because a CPU's host memory is the device's memory.
    """

    name: str
    model: Any
    layout: Layout
    world: int = 1
    rows: int = 4
    micro_batches: int = 1
    recompute: bool = False
    precision: str = "fp32"
    length: int = 256
    on_disk: bool = False


CASES = (
    Case("GPT-2", GPT2_SMALL, Layout(zero=0)),
    Case("GPT-2, accumulating", GPT2_SMALL, Layout(zero=0), micro_batches=2),
    Case("GPT-2, recompute", GPT2_SMALL, Layout(zero=0), rows=8, recompute=True),
    Case("GPT-2, ZeRO-3", GPT2_SMALL, Layout(), world=2),
    Case("GPT-2, ZeRO-2, accumulating", GPT2_SMALL, Layout(zero=2), world=2, micro_batches=2),
    Case("GPT-2, replicas", GPT2_SMALL, Layout(zero=0), world=2),
    Case("Llama, tensor", LLAMA_SMALL, Layout(tp=2), world=2),
    Case("Llama, tensor + sequence, ZeRO-3",
         LLAMA_SMALL, Layout(tp=2, sequence_parallel=True), world=4, recompute=True),
    Case("Llama, context, ZeRO-3", LLAMA_SMALL, Layout(cp=2), world=2),
    Case("Llama, pipeline of 2", replace(LLAMA_SMALL, num_layers=6), Layout(zero=0, pp=2),
         world=2, micro_batches=4),
    Case("BERT, ZeRO-3, bf16", replace(BERT_SMALL, hidden_size=192, head_dim=32,
         intermediate_size=768), Layout(), world=2, rows=2, length=64, precision="bf16"),
    Case("T5, ZeRO-3, recompute", T5_SMALL, Layout(), world=2, recompute=True),
    Case("GPT-2, states on disk", GPT2_SMALL, Layout(zero=0), on_disk=True),
    Case("Llama, ZeRO-3, recompute, states on disk", LLAMA_SMALL, Layout(), world=2,
         recompute=True, on_disk=True),
)  # fmt: skip


def measure(case: Case) -> tuple[int, int]:
    """Train for two steps; return the peak of the allocations and the resident memory's growth."""
    init_distributed()
    gc.collect()
    counts = ctypes.CDLL(None)
    counts.allocator_live.restype = counts.allocator_peak.restype = ctypes.c_long
    resident, allocated = resident_bytes(), counts.allocator_live()
    counts.allocator_reset()
    highest = _train(case)
    return counts.allocator_peak() - allocated, highest - resident


def _train(case: Case) -> int:
    """Train for two steps; return the highest resident memory."""
    model = family_of(case.model).from_config(case.model, device="meta")
    parallelize(model, case.layout, precision=case.precision, recompute=case.recompute)
    init_weights_(model, 0)
    optimizers = build_optimizers(model, OptimConfig(), offloaded=case.on_disk)
    state_offload = None
    if case.on_disk:
        state_offload = StateOffload(model, optimizers, OffloadConfig(fraction=1.0, target="disk"))
    assert mesh_of(model) is not None
    ids = torch.randint(case.model.vocab_size, (case.rows, case.length))
    batches = [{"input_ids": ids, "labels": ids.clone()} for _ in range(case.micro_batches)]
    model.train()
    highest = 0
    for _ in range(2):
        run_step(model, lambda b: model(**b, num_items_in_batch=1000.0).loss, batches)
        highest = max(highest, resident_bytes())
        clip_grad_norm_(model, 1.0)
        if state_offload is not None:
            state_offload.settle()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return highest


def predict(case: Case) -> float:
    """Return the predicted peak memory of a process."""
    replicas = case.world // (case.layout.tp * case.layout.pp * case.layout.cp)
    request = PlanRequest(
        workload_of(case.name, case.model, case.length),
        Cluster(replace(find_device("a100-80gb"), is_host=True), case.world),
        case.rows * case.micro_batches * replicas,
        case.precision,
    )
    estimator = Estimator(request, exact_shards=True)
    choice = TrainingSetup(case.layout, case.rows, case.recompute, float(case.on_disk))
    return estimator.estimate(choice).memory.total


def run_counted() -> None:
    """Run this script again with the counting library in front of the allocator."""
    with tempfile.TemporaryDirectory() as folder:
        counted = {**os.environ, "LD_PRELOAD": build_counter(folder)}
        sys.exit(subprocess.run(rerun_command(*sys.argv[1:]), env=counted).returncode)


def main() -> None:
    """Print a row for every configuration."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    if "allocator_peak" not in os.environ.get("LD_PRELOAD", ""):
        run_counted()
    print(header(1, ["torch"]) + "\n")
    lines = []
    for case in CASES:
        if arguments.only and not any(word in case.name for word in arguments.only):
            continue
        planned = predict(case)
        measured = run_distributed(measure, case.world, case, timeout_s=450.0)
        real, grown = max(measured)
        sizes = f"{planned / MIB:.1f}", f"{real / MIB:.1f}"
        error = f"{planned / real - 1:+.2%}"
        lines.append([case.name, case.layout, case.world, *sizes, error, f"{grown / MIB:.0f}"])
        print(*lines[-1], sep=" | ", flush=True)
    columns = ["configuration", "layout", "processes", "planner, MiB", "allocator, MiB", "error",
               "growth of resident memory, MiB"]  # fmt: skip
    print("\n" + table(columns, lines))


if __name__ == "__main__":
    main()
