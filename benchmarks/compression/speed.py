"""Speed and memory of quantization, pruning and distillation compared with the uncompressed model.

    python -m benchmarks.compression.speed [--part linear decode ...] [--threads 1] [--rounds 9]

- linear: linear layers with quantized weights.
- decode: decoding and prefill of a quantized model.
- structure: decoding and prefill after structured pruning.
- train: a training step with each method.
- products: int8 products of training, forward and backward.
- gptq: time and memory of GPTQ.
- memory: memory of GPTQ in a new process, counted by `allocator_peak.c` (needs a C compiler).

All rows of a table are measured once per round. With one thread, the CPU time is measured instead
of the wall time. `--small` uses tiny sizes, to test the script.
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import (
    build_counter,
    header,
    make_parser,
    paired_ratio,
    table,
    time_in_turns,
)
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
from bmforge.host_memory import peak_resident_bytes, resident_bytes, trim_memory
from bmforge.host_tuning import return_freed_memory
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
# The last entry has the blocks of a model with 1.1B parameters.
GPTQ_SHAPES = {
    "narrow": {"hidden_size": 512, "intermediate_size": 1408, "num_heads": 8, "num_kv_heads": 2}
    | {"num_layers": 20, "texts": 6},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_heads": 32, "num_kv_heads": 4}
    | {"num_layers": 4, "texts": 24},
}
Run = Callable[[], Any]


def time_runs(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every function and round; CPU time if torch has one thread."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return time_in_turns(runs, rounds, clock)


def linear(rounds: int, small: bool) -> None:
    """Compare linear layers with quantized weights with fp32."""
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
                times = time_runs(contenders, rounds)
            ratios = [f"{paired_ratio(times, name, 'fp32'):.2f}" for name in packed]
            rows.append([f"{inner} x {outer}", tokens, *ratios])
    print("\nLinear layers: speed, scheme / fp32\n")
    print(table(["layer", "tokens", *PRESETS], rows))


def decoding_of(model: Any, tokens: int) -> Run:
    """Return a function that decodes `tokens` tokens after a prompt of 64."""

    def run() -> None:
        decoder = Decoder(model, None, 64 + tokens)
        scores = decoder.run(torch.arange(64)[None])
        for _ in range(tokens):
            scores = decoder.run(scores.argmax(-1, keepdim=True))

    return run


def prefill_of(model: Any) -> Run:
    """Return a function that runs the prefill of 512 tokens."""
    prompt = torch.arange(512)[None] % 100
    return lambda: model(input_ids=prompt, logits_to_keep=1)


def decode(rounds: int, small: bool) -> None:
    """Compare the decoding and the prefill of quantized models with fp32."""
    plain = Llama.from_config(LlamaConfig(**(SMALL if small else MODEL))).eval()
    models: dict[str, Any] = {"fp32": plain}
    for scheme in PRESETS:
        models[scheme] = quantize(copy.deepcopy(plain), scheme)
    tokens = 4 if small else 32
    rows = []
    with torch.inference_mode():
        both = {
            f"{tokens} tokens": {
                name: decoding_of(model, tokens) for name, model in models.items()
            },
            "prefill of 512 tokens": {name: prefill_of(model) for name, model in models.items()},
        }
        for what, contenders in both.items():
            times = time_runs(contenders, rounds)
            rows.append([what, *(f"{paired_ratio(times, n, 'fp32'):.2f}" for n in PRESETS)])
    print("\nModel: speed, scheme / fp32\n")
    print(table(["task", *PRESETS], rows))


def structure(rounds: int, small: bool) -> None:
    """Compare models with half of the blocks' parameters with the dense model."""
    sizes = {**(SMALL if small else MODEL), "vocab_size": 100 if small else 4000}
    plain = Llama.from_config(LlamaConfig(**sizes)).eval()
    narrow, shallow = copy.deepcopy(plain), copy.deepcopy(plain)
    shrink_(narrow, StructureConfig(target="parameters", keep_ratio=0.5, multiple_of=16))
    shrink_(shallow, StructureConfig(num_layers=sizes["num_layers"] // 2))
    models = {"dense": plain, "narrower blocks": narrow, "half as many blocks": shallow}
    counts = {name: sum(p.numel() for p in m.layers.parameters()) for name, m in models.items()}
    tokens = 4 if small else 32
    with torch.inference_mode():
        decoding = time_runs({name: decoding_of(m, tokens) for name, m in models.items()}, rounds)
        prefill = time_runs({name: prefill_of(m) for name, m in models.items()}, rounds)
    rows = [
        [name, f"{100 * counts[name] / counts['dense']:.2f} %"]
        + [f"{paired_ratio(times, name, 'dense'):.2f}" for times in (decoding, prefill)]
        for name in models
    ]
    print("\nStructured pruning: speed, pruned / dense\n")
    columns = ["model", "blocks' parameters", f"decoding {tokens} tokens", "prefill of 512 tokens"]
    print(table(columns, rows))


def train(rounds: int, small: bool) -> None:
    """Compare training steps of 4 x 256 tokens with each method with the plain step."""
    sizes = {**SMALL} if small else {**MODEL, "num_layers": 2, "vocab_size": 2000}
    plain = Llama.from_config(LlamaConfig(**sizes)).train()
    ids = torch.randint(0, 100, (1 if small else 4, 256))
    batch = {"input_ids": ids, "labels": ids}
    gates = StructureConfig(target="parameters", gates=("heads", "features", "attn", "mlp"))
    jobs = {
        "plain": None,
        "2:4 sparsity": CompressConfig(prune=PruneConfig(pattern="2:4")),
        "fake int8": CompressConfig(quantize=QuantizeConfig(scheme="int8", training="fake")),
        "fake int4": CompressConfig(quantize=QuantizeConfig(scheme="int4", training="fake")),
        "int8": CompressConfig(quantize=QuantizeConfig(scheme="int8-dynamic", training="int8")),
        "int8, both": CompressConfig(
            quantize=QuantizeConfig(scheme="int8-dynamic", training="int8-both")
        ),
        "gates": CompressConfig(structure=gates),
        "distillation of logits": CompressConfig(distill=DistillConfig()),
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

    times = time_runs({name: step(config) for name, config in jobs.items()}, rounds)
    # The speed of the plain step over that of a method is the method's time over the plain time.
    rows = [[name, f"{paired_ratio(times, 'plain', name):.3f}"] for name in jobs]
    print("\nTraining step\n")
    print(table(["method", "time, method / plain"], rows))


def gptq(rounds: int, small: bool) -> None:
    """Measure the time and the memory of GPTQ."""
    model = Llama.from_config(LlamaConfig(**(SMALL if small else MODEL))).eval()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 100, (4, 256), generator=generator) for _ in range(8)]
    before, start = resident_bytes(), time.perf_counter()
    quantize(model, "int4", method="gptq", batches=batches)
    seconds = time.perf_counter() - start
    plain = Llama.from_config(model.config.replace(changes=()), device="meta").layers["0"]
    size = sum(p.numel() * 4 for p in plain.parameters())
    additional = peak_resident_bytes() - before
    print("\nGPTQ to int4\n")
    rows = [[f"{seconds:.1f}", f"{additional / 1e6:.0f}", f"{size / 1e6:.0f}"]]
    print(table(["seconds", "additional MB", "MB of a block in fp32"], rows))


def memory(rounds: int, small: bool) -> None:
    """Measure the memory of GPTQ above the model, in new processes."""
    rows = []
    shapes = {"narrow": GPTQ_SHAPES["narrow"]} if small else GPTQ_SHAPES
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LD_PRELOAD"] = build_counter(folder)
        for name, shape in shapes.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                sizes = pool.apply(_gptq_peak, (shape,))
            block = sizes["block"]
            above = [(sizes[way] - sizes["states"]) / block for way in ("allocated", "resident")]
            keys = ("model", "block", "states", "batch", "allocated")
            cells = [f"{sizes[key] / 1e6:.1f}" for key in keys]
            rows.append([name, *cells, *(f"{blocks:.2f}" for blocks in above)])
        del os.environ["LD_PRELOAD"]
    columns = ["shape", "model, MB", "block, MB", "hidden states, MB", "batch in a block, MB"]
    columns += ["additional peak, MB", "without hidden states, in blocks", "resident, in blocks"]
    print("\nMemory of GPTQ to int4\n")
    print(table(columns, rows))


def _gptq_peak(shape: dict[str, int]) -> dict[str, int]:
    """Return bytes: of the model, a block, the hidden states, a batch, and the additional peaks."""
    torch.set_num_threads(1)
    shape = dict(shape)
    texts = shape.pop("texts")
    model = Llama.from_config(LlamaConfig(**{**MODEL, **shape, "vocab_size": 100})).eval()
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 100, (1, 256), generator=generator) for _ in range(texts)]
    # Load libraries and kernels before the measurement.
    with torch.no_grad():
        model(input_ids=batches[0])
    quantize(Llama.from_config(LlamaConfig(**SMALL)), "int4", method="gptq", batches=batches[:2])
    counts = ctypes.CDLL(None)
    counts.allocator_live.restype = counts.allocator_peak.restype = ctypes.c_long
    return_freed_memory()  # as `bmforge compress` does
    trim_memory()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    counts.allocator_reset()
    resident, allocated = resident_bytes(), counts.allocator_live()
    block = sum(p.numel() * p.element_size() for p in model.layers["0"].parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    # The model shrinks during the quantization, so the peak is that of the first blocks.
    first = tuple(f"layers.{number}" for number in range(min(3, config.num_layers)))
    quantize(model, "int4", method="gptq", batches=batches, where=first)
    return {
        "model": whole,
        "block": block,
        "states": sum(ids.numel() for ids in batches) * config.hidden_size * 4,
        "batch": 256 * (4 * config.intermediate_size + 3 * config.hidden_size) * 4,
        "allocated": counts.allocator_peak() - allocated,
        "resident": peak_resident_bytes() - resident,
    }


def products(rounds: int, small: bool) -> None:
    """Compare the int8 products of training with fp32, forward and backward."""
    inner, outer = (64, 128) if small else (1024, 4096)
    weight = (torch.randn(outer, inner) * 0.02).requires_grad_()
    x = torch.randn(2048, inner).requires_grad_()
    contenders = {
        "fp32": lambda: F.linear(x, weight).sum().backward(),
        "int8": lambda: int8_linear(x, weight).sum().backward(),
        "int8, both": lambda: int8_linear(x, weight, in_both=True).sum().backward(),
    }
    times = time_runs(contenders, rounds)
    rows = [[name, f"{paired_ratio(times, name, 'fp32'):.2f}"] for name in contenders]
    print(f"\nForward and backward of 2048 tokens, {inner} x {outer}\n")
    print(table(["product", "speed, product / fp32"], rows))


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
    """Measure the parts."""
    parser = make_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(header(options.threads, ("torch",)))
    for part in options.part:
        PARTS[part](options.rounds, options.small)


if __name__ == "__main__":
    main()
