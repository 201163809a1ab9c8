"""What quantising and pruning cost and save: int8 products, decoding, calibration, training steps.

    python benchmarks/compress_speed.py [--part linear decode ...] [--threads 1] [--rounds 9]

All contenders of a row run once in every round, in turns, each round beginning with another one;
ratios are medians over the rounds. With one thread it is the CPU's time that counts, not the
clock's. `memory` starts processes of their own, in which a small library counts what torch's
allocator gives out (`allocator_peak.c`, which needs a C compiler).
`--small` tries the script with sizes that say nothing.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import build_counter, header, table

from bmforge.compress import (
    CompressConfig,
    DistillConfig,
    PruneConfig,
    QuantizeConfig,
    StructureConfig,
    compress,
    quantize,
    shrink_,
)
from bmforge.compress.quantize.int8_product import int8_linear
from bmforge.host_memory import peak_resident_bytes, resident_bytes
from bmforge.host_tuning import give_back_memory, return_freed_memory
from bmforge.infer.decoder import Decoder
from bmforge.models import Llama, LlamaConfig
from bmforge.nn.packing import PRESETS
from bmforge.nn.products import multiply_packed, pack_weights
from bmforge.train import causal_lm

SHAPES = ((512, 2048), (1024, 4096), (2048, 8192))
TOKENS = (1, 64, 512)
MODEL = {
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_layers": 8,
    "num_heads": 16,
    "num_kv_heads": 4,
    "max_seq_len": 512,
}
SMALL = {**MODEL, "hidden_size": 128, "intermediate_size": 256, "num_layers": 2, "vocab_size": 100}
# The last is a block of a model of 1.1B.
GPTQ_SHAPES = {
    "narrow": {"hidden_size": 512, "intermediate_size": 1408, "num_heads": 8, "num_kv_heads": 2}
    | {"num_layers": 20, "texts": 6},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_heads": 32, "num_kv_heads": 4}
    | {"num_layers": 4, "texts": 24},
}
Run = Callable[[], Any]


def in_turns(contenders: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round of every contender; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        first = number % len(contenders)
        for name, run in (*list(contenders.items())[first:], *list(contenders.items())[:first]):
            start = time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
            run()
            end = time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
            if number:
                found[name].append(end - start)
    return found


def ratio(of: list[float], to: list[float]) -> float:
    """How many times as fast `of` is as `to`."""
    return statistics.median(b / a for a, b in zip(of, to, strict=True))


def linear(rounds: int, small: bool) -> None:
    """Linear layers of the runtime against fp32, in eager mode."""
    rows = []
    for inner, outer in SHAPES[:1] if small else SHAPES:
        weight = torch.randn(outer, inner) * 0.02
        packed = {name: pack_weights(weight, spec) for name, spec in PRESETS.items()}
        for tokens in TOKENS:
            x = torch.randn(tokens, inner)
            repeats = max(1, 512 // tokens)

            def many(run: Run, repeats: int = repeats) -> Run:
                return lambda: [run() for _ in range(repeats)]

            contenders = {"fp32": many(lambda x=x, w=weight: F.linear(x, w))}
            for name, matrix in packed.items():
                contenders[name] = many(
                    lambda x=x, m=matrix, s=PRESETS[name], o=outer: multiply_packed(x, m, o, s)
                )
            with torch.inference_mode():
                times = in_turns(contenders, rounds)
            found = [f"{ratio(times[name], times['fp32']):.2f}x" for name in packed]
            rows.append([f"{inner} x {outer}", tokens, *found])
    print("\nLinear layers, times as fast as fp32\n")
    print(table(["layer", "tokens", *PRESETS], rows))


def write(model: Any, tokens: int) -> Run:
    """Return what writes so many tokens after 64."""

    def run() -> None:
        decoder = Decoder(model, None, 64 + tokens)
        scores = decoder.run(torch.arange(64)[None])
        for _ in range(tokens):
            scores = decoder.run(scores.argmax(-1, keepdim=True))

    return run


def read(model: Any) -> Run:
    """Return what reads a prompt of 512 tokens."""
    prompt = torch.arange(512)[None] % 100
    return lambda: model(input_ids=prompt, logits_to_keep=1)


def decode(rounds: int, small: bool) -> None:
    """A model's decoding and prompt, quantised and not."""
    plain = Llama.from_config(LlamaConfig(**(SMALL if small else MODEL))).eval()
    models: dict[str, Any] = {"fp32": plain}
    for scheme in PRESETS:
        models[scheme] = quantize(copy.deepcopy(plain), scheme)
    tokens = 4 if small else 32
    rows = []
    with torch.inference_mode():
        both = {
            f"{tokens} tokens": {name: write(model, tokens) for name, model in models.items()},
            "512 at once": {name: read(model) for name, model in models.items()},
        }
        for what, contenders in both.items():
            times = in_turns(contenders, rounds)
            rows.append([what, *(f"{ratio(times[n], times['fp32']):.2f}x" for n in PRESETS)])
    print("\nA whole model, times as fast as fp32\n")
    print(table(["what", *PRESETS], rows))


def structure(rounds: int, small: bool) -> None:
    """Half of the blocks' parameters taken away: size, decoding and prompt."""
    sizes = {**(SMALL if small else MODEL), "vocab_size": 100 if small else 4000}
    plain = Llama.from_config(LlamaConfig(**sizes)).eval()
    narrow, shallow = copy.deepcopy(plain), copy.deepcopy(plain)
    shrink_(narrow, StructureConfig(target="parameters", keep_ratio=0.5, multiple_of=16))
    shrink_(shallow, StructureConfig(num_layers=sizes["num_layers"] // 2))
    models = {"whole": plain, "narrower": narrow, "half of the blocks": shallow}
    counts = {name: sum(p.numel() for p in m.layers.parameters()) for name, m in models.items()}
    tokens = 4 if small else 32
    with torch.inference_mode():
        written = in_turns({name: write(m, tokens) for name, m in models.items()}, rounds)
        whole = in_turns({name: read(m) for name, m in models.items()}, rounds)
    rows = [
        [name, f"{100 * counts[name] / counts['whole']:.2f} %"]
        + [f"{ratio(times[name], times['whole']):.2f}x" for times in (written, whole)]
        for name in models
    ]
    print("\nStructure, times as fast as the whole model\n")
    print(table(["model", "blocks' parameters", f"{tokens} tokens", "512 at once"], rows))


def train(rounds: int, small: bool) -> None:
    """A training step of 4 rows of 256 tokens, with each method against none."""
    sizes = {**SMALL} if small else {**MODEL, "num_layers": 2, "vocab_size": 2000}
    plain = Llama.from_config(LlamaConfig(**sizes)).train()
    ids = torch.randint(0, 100, (1 if small else 4, 256))
    batch = {"input_ids": ids, "labels": ids}
    gates = StructureConfig(target="parameters", gates=("heads", "features", "attn", "mlp"))
    jobs = {
        "none": None,
        "zeros": CompressConfig(prune=PruneConfig(pattern="2:4")),
        "fake int8": CompressConfig(quantize=QuantizeConfig(scheme="int8", training="fake")),
        "fake int4": CompressConfig(quantize=QuantizeConfig(scheme="int4", training="fake")),
        "int8": CompressConfig(quantize=QuantizeConfig(scheme="int8-dynamic", training="int8")),
        "int8, both": CompressConfig(
            quantize=QuantizeConfig(scheme="int8-dynamic", training="int8-both")
        ),
        "gates": CompressConfig(structure=gates),
        "a teacher's logits": CompressConfig(distill=DistillConfig()),
    }

    def step(config: CompressConfig | None) -> Run:
        model, objective, job = copy.deepcopy(plain), causal_lm, None
        if config is not None:
            teacher = copy.deepcopy(plain) if config.distill else None
            job = compress(model, config, teacher=teacher)
            objective = job.objective(causal_lm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def run() -> None:
            objective(model, batch, ids[:, 1:].numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if job is not None:
                job.after_step_()

        return run

    times = in_turns({name: step(config) for name, config in jobs.items()}, rounds)
    rows = [[name, f"{1 / ratio(times[name], times['none']):.3f}"] for name in jobs]
    print("\nA training step, of the plain one's time\n")
    print(table(["method", "ratio"], rows))


def gptq(rounds: int, small: bool) -> None:
    """Calibrating a model: time, and memory beside the model's."""
    model = Llama.from_config(LlamaConfig(**(SMALL if small else MODEL))).eval()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 100, (4, 256), generator=generator) for _ in range(8)]
    before, start = resident_bytes(), time.perf_counter()
    quantize(model, "int4", method="gptq", batches=batches)
    seconds = time.perf_counter() - start
    plain = Llama.from_config(model.config.replace(changes=()), device="meta").layers["0"]
    size = sum(p.numel() * 4 for p in plain.parameters())
    more = peak_resident_bytes() - before
    print("\nGPTQ to int4\n")
    rows = [[f"{seconds:.1f}", f"{more / 1e6:.0f}", f"{size / 1e6:.0f}"]]
    print(table(["seconds", "MB more at most", "MB of a block in fp32"], rows))


def memory(rounds: int, small: bool) -> None:
    """What GPTQ takes above a model, in processes of their own."""
    rows = []
    shapes = {"narrow": GPTQ_SHAPES["narrow"]} if small else GPTQ_SHAPES
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LD_PRELOAD"] = build_counter(folder)
        for name, shape in shapes.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(_gptq_peak, (shape,))
            block = found["block"]
            above = [(found[way] - found["states"]) / block for way in ("allocated", "resident")]
            sizes = [found[key] / 1e6 for key in ("model", "block", "states", "batch", "allocated")]
            rows.append([name, *(f"{size:.1f}" for size in sizes), *(f"{n:.2f}" for n in above)])
        del os.environ["LD_PRELOAD"]
    heads = ["shape", "model, MB", "a block", "states of texts", "a batch in a block", "peak above"]
    print("\nMemory of GPTQ to int4\n")
    print(table([*heads, "without states, in blocks", "resident"], rows))


def _gptq_peak(shape: dict[str, int]) -> dict[str, int]:
    """Return bytes: of the model, a block, the texts' hidden states, and the peaks above."""
    torch.set_num_threads(1)
    shape = dict(shape)
    texts = shape.pop("texts")
    model = Llama.from_config(LlamaConfig(**{**MODEL, **shape, "vocab_size": 100})).eval()
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 100, (1, 256), generator=generator) for _ in range(texts)]
    # What the first calls bring, libraries and kernels, no other does.
    with torch.no_grad():
        model(input_ids=batches[0])
    quantize(Llama.from_config(LlamaConfig(**SMALL)), "int4", method="gptq", batches=batches[:2])
    counts = ctypes.CDLL(None)
    counts.allocator_live.restype = counts.allocator_peak.restype = ctypes.c_long
    return_freed_memory()  # as `bmforge compress` does
    give_back_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    counts.allocator_reset()
    before, given = resident_bytes(), counts.allocator_live()
    block = sum(p.numel() * p.element_size() for p in model.layers["0"].parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    # The model becomes smaller as it goes: the peak is that of the first blocks.
    first = tuple(f"layers.{number}" for number in range(min(3, config.num_layers)))
    quantize(model, "int4", method="gptq", batches=batches, where=first)
    return {
        "model": whole,
        "block": block,
        "states": sum(ids.numel() for ids in batches) * config.hidden_size * 4,
        "batch": 256 * (4 * config.intermediate_size + 3 * config.hidden_size) * 4,
        "allocated": counts.allocator_peak() - given,
        "resident": peak_resident_bytes() - before,
    }


def products(rounds: int, small: bool) -> None:
    """int8 products of training alone, forward and backward."""
    inner, outer = (64, 128) if small else (1024, 4096)
    weight = (torch.randn(outer, inner) * 0.02).requires_grad_()
    x = torch.randn(2048, inner).requires_grad_()
    contenders = {
        "fp32": lambda: F.linear(x, weight).sum().backward(),
        "int8": lambda: int8_linear(x, weight).sum().backward(),
        "int8, both": lambda: int8_linear(x, weight, in_both=True).sum().backward(),
    }
    times = in_turns(contenders, rounds)
    rows = [[name, f"{ratio(times[name], times['fp32']):.2f}x"] for name in contenders]
    print(f"\nForward and backward of 2048 tokens, {inner} x {outer}\n")
    print(table(["product", "times as fast"], rows))


PARTS = {
    "linear": linear,
    "decode": decode,
    "structure": structure,
    "train": train,
    "products": products,
    "gptq": gptq,
    "memory": memory,
}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(
        header(
            "python benchmarks/compress_speed.py " + " ".join(sys.argv[1:]),
            given.threads,
            ("torch",),
        )
    )
    for part in given.part:
        PARTS[part](given.rounds, given.small)


if __name__ == "__main__":
    main()
