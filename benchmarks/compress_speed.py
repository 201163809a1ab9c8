"""What quantising and pruning cost and save: int8 products, decoding, calibration, training steps.

    python benchmarks/compress_speed.py [--part linear decode train gptq] [--threads 1] [--rounds 9]

All contenders of a row run once in every round, in turns; ratios are medians over the rounds.
`--small` tries the script with sizes that say nothing.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import header, table

from bmforge.compress.prune import PruneConfig, Zeros
from bmforge.compress.quantize import FakeQuantize, QuantizeConfig, quantize
from bmforge.compress.quantize.int8_product import int8_linear
from bmforge.host_memory import peak_resident_bytes, resident_bytes
from bmforge.infer.decoder import Decoder
from bmforge.models import Llama, LlamaConfig
from bmforge.nn.packing import PRESETS
from bmforge.nn.products import multiply_packed, pack_weights

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
Run = Callable[[], Any]


def in_turns(contenders: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round of every contender; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
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


def decode(rounds: int, small: bool) -> None:
    """A model's decoding and prompt, quantised and not."""
    plain = Llama.from_config(LlamaConfig(**(SMALL if small else MODEL))).eval()
    models: dict[str, Any] = {"fp32": plain}
    for scheme in PRESETS:
        models[scheme] = quantize(copy.deepcopy(plain), scheme)
    prompt, tokens = torch.arange(64)[None], 4 if small else 32

    def write(model: Any) -> Run:
        def run() -> None:
            decoder = Decoder(model, None, 64 + tokens)
            scores = decoder.run(prompt)
            for _ in range(tokens):
                scores = decoder.run(scores.argmax(-1, keepdim=True))

        return run

    rows = []
    with torch.inference_mode():
        both = {
            f"{tokens} tokens": {name: write(model) for name, model in models.items()},
            "512 at once": {
                name: lambda m=model: m(input_ids=torch.arange(512)[None] % 100, logits_to_keep=1)
                for name, model in models.items()
            },
        }
        for what, contenders in both.items():
            times = in_turns(contenders, rounds)
            rows.append([what, *(f"{ratio(times[n], times['fp32']):.2f}x" for n in PRESETS)])
    print("\nA whole model, times as fast as fp32\n")
    print(table(["what", *PRESETS], rows))


def train(rounds: int, small: bool) -> None:
    """A training step of 8 rows of 256 tokens, with each method against none."""
    sizes = dict(SMALL if small else MODEL)
    sizes["num_layers"] = 2 if small else 4
    plain = Llama.from_config(LlamaConfig(**sizes))
    ids = torch.randint(0, 100, (1 if small else 8, 256))
    methods: dict[str, Any] = {
        "zeros": Zeros(PruneConfig(pattern="2:4")),
        "fake int8": FakeQuantize(QuantizeConfig(scheme="int8", training="fake")),
        "fake int4": FakeQuantize(QuantizeConfig(scheme="int4", training="fake")),
        "int8": FakeQuantize(QuantizeConfig(scheme="int8-dynamic", training="int8")),
        "int8, both": FakeQuantize(QuantizeConfig(scheme="int8-dynamic", training="int8-both")),
    }

    def step(model: Any, method: Any) -> Run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        count = iter(range(1, 10_000))

        def run() -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if method is not None:
                method.after_step_(model, next(count))

        return run

    contenders = {"none": step(copy.deepcopy(plain), None)}
    for name, method in methods.items():
        model = copy.deepcopy(plain)
        method.attach_(model)
        contenders[name] = step(model, method)
    times = in_turns(contenders, rounds)
    rows = [[name, f"{1 / ratio(times[name], times['none']):.3f}"] for name in methods]
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
    "train": train,
    "products": products,
    "gptq": gptq,
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
    print(header("python benchmarks/compress_speed.py", given.threads, ("torch",)))
    for part in given.part:
        PARTS[part](given.rounds, given.small)


if __name__ == "__main__":
    main()
