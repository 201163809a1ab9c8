"""Where the time of every family's training step and forward pass goes, besides the products.

Run: python benchmarks/profile_families.py [--families gpt2 t5] [--precision fp32]

One size for all: width 512, 4 layers (encoder-decoders 4 and 4), 8 heads, MLP 2048, a vocabulary
of 8192, random weights, dropout 0, 4 x 256 tokens (ViT: 4 images of 224). A step is forward with
labels, backward and torch's fused AdamW; a pass is forward without gradients, to the logits. Times
are the operations' own, of torch.profiler; the first run is not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import header, table  # noqa: E402

from bmforge import models  # noqa: E402
from bmforge.device import default_device  # noqa: E402
from bmforge.host_tuning import tuned_host  # noqa: E402
from bmforge.parallel import parallelize  # noqa: E402

ROWS, LENGTH, VOCAB, COUNTED = 4, 256, 8192, 2
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 512, "num_layers": 4, "num_heads": 8}
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 2048}
LONG: dict[str, Any] = {**WIDE, "max_seq_len": 512}
GROUPED: dict[str, Any] = {**LONG, "num_kv_heads": 2}
# Family -> the model's name and its config.
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
    """Return a family's model, laid out for one process."""
    class_name, fields = CASES[name]
    kind = getattr(models, class_name)
    off = {key: 0.0 for key in vars(kind.config_class()) if key.endswith("dropout")}
    model = kind.from_config(kind.config_class(**{**fields, **off}), seed=0)
    return parallelize(model, precision=precision)


def make_inputs(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what forward takes, and what besides it for a loss."""
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
    """Return the products' share of the time, and every other operation's, the largest first."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(COUNTED):
            run()
    times = {event.key: event.self_cpu_time_total for event in seen.key_averages()}
    whole = sum(times.values())
    products = sum(took for name, took in times.items() if name in PRODUCTS)
    others = [(n, took / whole) for n, took in times.items() if n not in PRODUCTS]
    return products / whole, sorted(others, key=lambda item: -item[1])


def measure(name: str, precision: str) -> list[list[str]]:
    """Return the rows of a family's step and pass."""
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
    """Return a name of the profiler that fits a table."""
    name = name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("aten::")
    name = name.replace("GeneratedBackwardFor_bmforge_host_attention_default", "host_attention")
    return f"`{name.removeprefix('bmforge::')}`"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    command = " ".join(["python benchmarks/profile_families.py", *sys.argv[1:]])
    print(header(command, given.threads, ["torch"]) + "\n", flush=True)
    rows = []
    with tuned_host(default_device()):
        for name in given.families:
            rows += measure(name, given.precision)
            print(
                f"# {' | '.join(rows[-2])}\n# {' | '.join(rows[-1])}", file=sys.stderr, flush=True
            )
    print(table(["family", "run", "products", "largest others"], rows))


if __name__ == "__main__":
    main()
