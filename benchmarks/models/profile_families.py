"""Operators that take the most time in the training step and the forward pass of every family.

    python -m benchmarks.models.profile_families [--families gpt2 t5] [--precision bf16]
        [--threads 2]

All models have random weights, hidden size 512, 4 layers (4 and 4 in encoder-decoders), 8 heads,
an MLP of 2,048 features and a vocabulary of 8,192. The batch is 4 x 256 tokens (ViT: 4 images),
without dropout. A step is forward with labels, backward and fused AdamW. A pass is forward without
gradients. Times are the self times of torch.profiler after one run of warm-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import header, make_parser, table
from bmforge import models
from bmforge.device import default_device
from bmforge.host_tuning import tune_host
from bmforge.parallel import parallelize

ROWS, LENGTH, VOCAB, COUNTED = 4, 256, 8192, 2
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 512, "num_layers": 4, "num_heads": 8}
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 2048}
LONG: dict[str, Any] = {**WIDE, "max_seq_len": 512}
GROUPED: dict[str, Any] = {**LONG, "num_kv_heads": 2}
# Family -> name of the model class, fields of its config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", LONG),
    "roberta": ("Roberta", {**LONG, "max_seq_len": 514}),
    "longformer": ("Longformer", {**LONG, "max_seq_len": 514, "windows": (64,) * 4}),
    "gpt2": ("GPT2", LONG),
    "gptj": ("GPTJ", {**LONG, "rotary_dim": 32}),
    "opt": ("OPT", LONG),
    "llama": ("Llama", GROUPED),
    "qwen": ("Qwen", GROUPED),
    "minicpm": ("MiniCPM", GROUPED),
    "mixtral": ("Mixtral", {**GROUPED, "intermediate_size": 1024, "num_experts": 4}),
    "cpm1": ("CPM1", {**SIZES, "max_seq_len": 512}),
    "glm": ("GLM", {**SIZES, "max_seq_len": 512}),
    "cpm_ant": ("CPMAnt", {**WIDE, "head_dim": 64}),
    "cpm_bee": ("CPMBee", {**WIDE, "head_dim": 64}),
    "t5": ("T5", {**WIDE, "head_dim": 64}),
    "cpm2": ("CPM2", {**WIDE, "head_dim": 64}),
    "eva": ("EVA", {**WIDE, "head_dim": 64}),
    "vit": ("ViT", {"hidden_size": 512, "num_layers": 4, "num_heads": 8}),
}
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}
PRODUCTS |= {"aten::mkldnn_convolution", "aten::convolution_backward"}


def build(name: str, precision: str) -> Any:
    """Return a model of a family, parallelized for one process."""
    class_name, fields = CASES[name]
    kind = getattr(models, class_name)
    off = {key: 0.0 for key in vars(kind.config_class()) if key.endswith("dropout")}
    model = kind.from_config(kind.config_class(**{**fields, **off}), seed=0)
    return parallelize(model, precision=precision)


def make_inputs(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the inputs of a forward pass, and the labels."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(ROWS, 3, 224, 224, generator=generator)
        return {"pixel_values": pixels}, {"labels": torch.arange(ROWS) % 2}
    ids = torch.randint(8, VOCAB, (ROWS, LENGTH), generator=generator)
    if name in ("t5", "cpm2", "eva"):
        target = ids.flip(1)[:, : LENGTH // 2].contiguous()
        return {"input_ids": ids, "decoder_input_ids": target}, {"labels": target}
    return {"input_ids": ids}, {"labels": ids}


def split(run: Callable[[], object]) -> tuple[float, list[tuple[str, float]]]:
    """Return the shares of the time: of matrix products, and of the other operators, sorted."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(COUNTED):
            run()
    times = {event.key: event.self_cpu_time_total for event in seen.key_averages()}
    total = sum(times.values())
    products = sum(took for name, took in times.items() if name in PRODUCTS)
    others = [(n, took / total) for n, took in times.items() if n not in PRODUCTS]
    return products / total, sorted(others, key=lambda item: -item[1])


def measure(name: str, precision: str) -> list[list[str]]:
    """Return the rows of a step and a pass of a family."""
    model = build(name, precision)
    inputs, labels = make_inputs(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(**inputs, **labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)

    rows = []
    for kind, run in (("step", step), ("pass", forward)):
        model.train(kind == "step")
        products, others = split(run)
        largest = ", ".join(f"{_short(n)} {share:.1%}" for n, share in others[:3])
        rows.append([CASES[name][0], kind, f"{products:.0%}", largest])
    return rows


def _short(name: str) -> str:
    """Shorten an operator name of the profiler."""
    name = name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("aten::")
    name = name.replace("GeneratedBackwardFor_bmforge_host_attention_default", "host_attention")
    return f"`{name.removeprefix('bmforge::')}`"


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(header(options.threads, ["torch"]) + "\n", flush=True)
    rows = []
    with tune_host(default_device()):
        for name in options.families:
            rows += measure(name, options.precision)
            print(
                f"# {' | '.join(rows[-2])}\n# {' | '.join(rows[-1])}", file=sys.stderr, flush=True
            )
    print(table(["family", "run", "matrix products", "largest other operators"], rows))


if __name__ == "__main__":
    main()
