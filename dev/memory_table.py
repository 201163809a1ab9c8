"""Write docs/reference/memory.md: GPU memory of tuning, by model size and method.

    python dev/memory_table.py

Every figure is the line "least memory" of `bmforge plan`: one row at a time, with recompute. The
planner traces fake tensors, so no GPU and no weights are needed; the whole table takes minutes.
`tests/architecture` checks the smallest model's row.
"""

from __future__ import annotations

from pathlib import Path

from bmforge.cli.plan import make_request
from bmforge.cli.plan_options import PlanCommand
from bmforge.parallel.layout import Layout
from bmforge.parallel.planner.estimate import Estimator, TrainingSetup
from bmforge.parallel.planner.trace_cache import TraceStore, default_directory

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "memory.md"
ROW_TOKENS = 2048
MODELS = {
    "0.6B": "qwen3-0.6b",
    "1B": "llama-3.2-1b",
    "3B": "llama-3.2-3b",
    "8B": "llama-3.1-8b",
    "32B": "qwen3-32b",
    "70B": "llama-3.1-70b",
}
LORA = {"adapter": "lora"}
# Title: options of `bmforge plan`, and the share of the optimizer states on the host.
METHODS: dict[str, tuple[dict[str, str], float]] = {
    "full": ({}, 0.0),
    "full, optimizer offloaded": ({}, 1.0),
    "LoRA": (LORA, 0.0),
    "QLoRA int8": ({**LORA, "base_dtype": "int8"}, 0.0),
    "QLoRA int4": ({**LORA, "base_dtype": "int4"}, 0.0),
}
INTRO = f"""# GPU memory by model size and method

Look up how much GPU memory a model needs, and choose a method that fits. The figures are GiB on
one GPU, as `bmforge plan` estimates them. They assume:

- one sequence of {ROW_TOKENS:,} tokens per micro-batch, with recompute (`--recompute`),
- bf16 and AdamW,
- for LoRA and QLoRA, rank 8 on all linear layers.

The figures in the table are estimates. [The planner's page](../guides/planner.md) compares
estimates with measured memory. `dev/memory_table.py` generates this page.

"""
OUTRO = f"""
- A GPU needs about 0.9 GiB more than the figure. The allocator also loses 2 % of the GPU's memory.
- Full fine-tuning keeps fp32 master weights and two fp32 optimizer states per parameter. With
  [offloading](../guides/offload.md) (`--offload.fraction 1`), these are in host memory, and a step
  takes longer.
- With ZeRO-3, weights, gradients and states are sharded over several GPUs:
  [two GPUs](../howto/two_gpus.md).
- More and longer sequences need more memory for activations and logits.

Plan your own case:

<!-- not run: tracing a model of this size takes half a minute -->
```bash
bmforge plan llama-3.1-8b --gpus 1 --gpu 4090 --seq {ROW_TOKENS} --batch 1 \\
    --adapter lora --base-dtype int4
```

The line "least memory" of the output shows the figure in the table. `--json` prints it in bytes as
`least_memory`.
"""


def least_memory(preset: str, options: dict[str, str], offloaded: float) -> float:
    """Return the planned peak memory of one GPU in GiB, with one row per micro-batch."""
    command = PlanCommand(model=preset, gpu="h200", seq=ROW_TOKENS, batch=1, **options)
    estimator = Estimator(make_request(command), store=TraceStore(default_directory()))
    setup = TrainingSetup(Layout(zero=0), 1, recompute=True, offloaded=offloaded)
    return estimator.estimate(setup).memory.total / 2**30


def render_row(size: str, preset: str) -> str:
    """Return the row of a model, with one figure per method."""
    figures = [f"{least_memory(preset, *method):.1f}" for method in METHODS.values()]
    return f"| {size} (`{preset}`) | {' | '.join(figures)} |\n"


def render_head() -> str:
    """Return the table's first two lines."""
    return f"| model | {' | '.join(METHODS)} |\n|{'---|' * (len(METHODS) + 1)}\n"


def render() -> str:
    """Return the page."""
    rows = "".join(render_row(size, preset) for size, preset in MODELS.items())
    return INTRO + render_head() + rows + OUTRO


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
