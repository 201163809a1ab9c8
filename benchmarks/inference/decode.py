"""Decoding and prefill of one request compared with llama.cpp and CTranslate2, on the same weights.

    python -m benchmarks.inference.decode prepare FOLDER
    python -m benchmarks.inference.decode ctranslate2 FOLDER --peer PYTHON
    python -m benchmarks.inference.decode run FOLDER --peer PYTHON [--only q8_0] [--threads 1 2]
        [--rounds 15] [--tokens 6] [--prefill] [--products] [--flash 0]

`prepare` writes a model with TinyLlama's shape and a GPT-2 small, both with random weights, as GGUF
files, and as packed models with the same integers; `pack` writes the packed models alone.
`ctranslate2` converts the Llama for CTranslate2 in int8, whose prefill `run --prefill` compares
with `int8-dynamic`. `--products` also compares the matrix products of a token with the whole token.
PYTHON is an interpreter with llama-cpp-python and ctranslate2. The two sides alternate in every
round. The last column relates bmforge's best decoding speed to a plain read of the weights.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import header, make_parser, paired_ratio, table, table_row
from benchmarks.inference.decode_peer import IDS, now, since
from bmforge.infer.decoder import Decoder
from bmforge.models import GPT2, AutoModel, GPT2Config, Llama, LlamaConfig
from bmforge.models.formats.gguf_export import export_gguf
from bmforge.models.pack import find_targets, quantize_
from bmforge.native import load_native
from bmforge.nn import product_kernels
from bmforge.nn.packing import PackedMatrix
from bmforge.nn.products import load_kernels
from bmforge.nn.quantized import QuantizedHead, QuantizedLinear
from bmforge.surgery import persistent_tensors

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_layers": 22,
    "num_heads": 32,
    "num_kv_heads": 4,
    "max_seq_len": 2048,
}
CASES = {
    "q4_0": "llama-q4_0.gguf",
    "q8_0": "llama-q8_0.gguf",
    "f16": "llama-f16.gguf",
    "gpt2": "gpt2-q8_0.gguf",
}
CTRANSLATE2 = "llama-ctranslate2"
PROMPT, LONGEST = 32, 128
# Wall time and CPU time.
Seconds = tuple[float, float]
READ = r"""
#include <cstdint>
extern "C" int64_t read_ahead(const int64_t* from, int64_t count, int threads) {
  int64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum)
  for (int64_t i = 0; i < count; i += 8) {
    __builtin_prefetch(from + i + 256);
    for (int64_t j = i; j < i + 8; j++) sum += from[j];
  }
  return sum;
}
"""


def prepare(folder: Path) -> None:
    """Write the GGUF files and the packed models."""
    folder.mkdir(parents=True, exist_ok=True)
    llama = Llama.from_config(LlamaConfig(**SHAPE), dtype=torch.float16)
    for kind in ("q4_0", "q8_0", "f16"):
        export_gguf(llama, folder / f"llama-{kind}.gguf", kind, overwrite=True)
    gpt2 = GPT2.from_config(GPT2Config.preset("gpt2-small"))
    export_gguf(gpt2, folder / "gpt2-q8_0.gguf", "q8_0", overwrite=True)
    pack(folder)


def pack(folder: Path) -> None:
    """Write the integers of the quantized GGUF files as packed models."""
    for name in ("llama-q8_0", "gpt2-q8_0"):
        quantize_(AutoModel.from_pretrained(folder / f"{name}.gguf"), "int8").save_pretrained(
            folder / name
        )
    model = AutoModel.from_pretrained(folder / "llama-q4_0.gguf")
    rules = [name for name in find_targets(model) if name != "lm_head"]
    quantize_(model, "int4", where=rules)
    quantize_(model, "int8", where=["lm_head"])  # as in the file
    model.save_pretrained(folder / "llama-q4_0")


def write_ctranslate2(folder: Path, python: str) -> None:
    """Convert the model with the peer; its tokens are numbers in angle brackets."""
    from tokenizers import Tokenizer, models

    size = SHAPE["vocab_size"]
    with tempfile.TemporaryDirectory(dir=folder) as plain:
        model = AutoModel.from_pretrained(folder / CASES["f16"], dtype=torch.float16)
        model.save_pretrained(plain)
        words = models.WordLevel({f"<{n}>": n for n in range(size)}, unk_token="<0>")
        Tokenizer(words).save(str(Path(plain) / "tokenizer.json"))
        names = {"unk_token": "<0>", "bos_token": "<1>", "eos_token": "<2>"}
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (Path(plain) / "tokenizer_config.json").write_text(json.dumps(names | kind))
        peer = Path(__file__).with_name("decode_peer.py")
        command = [python, str(peer), "convert", plain, str(folder / CTRANSLATE2)]
        subprocess.run(command, check=True)


class BmforgeModel:
    """Times the decoding and the prefill of a model.

    Args:
        path: GGUF file; a packed model next to it is opened instead, if the file is quantized.
        scheme: scheme that quantizes the file while it is loaded; "" for none.

    Attributes:
        bytes: bytes of the weights that a token reads.
    """

    def __init__(self, path: Path, scheme: str = "") -> None:
        if scheme:
            self.model: Any = AutoModel.from_pretrained(path, quantize=scheme).eval()
        elif "f16" in path.name:
            self.model = AutoModel.from_pretrained(path, dtype=torch.float16).eval()
        else:
            self.model = AutoModel.from_pretrained(path.with_suffix("")).eval()
        self._decoder: Decoder | None = None
        self._kept: list[Any] = []
        self._at, self._ids = 0, torch.tensor([IDS[:LONGEST]])
        self.bytes = sum(t.nbytes for n, t in persistent_tensors(self.model).items())
        embed = {n: t for n, t in persistent_tensors(self.model).items() if n.startswith("embed")}
        if not self.model.config.tie_word_embeddings:
            self.bytes -= sum(t.nbytes for t in embed.values())  # a token reads one row

    @torch.no_grad()
    def decode(self, count: int) -> Seconds:
        """Return the time of `count` tokens that continue the last sequence, or a new one."""
        if self._decoder is None or self._at + count > LONGEST:
            self._decoder, self._at = Decoder(self.model, None, LONGEST), PROMPT
            self._decoder.run(self._ids[:, :PROMPT])
            self._decoder.run(self._ids[:, PROMPT : PROMPT + 1])
            self._at += 1
        first, self._at = self._at, self._at + count
        start = now()
        with self._decoder.undisturbed():  # as in `generate`
            for n in range(first, first + count):
                self._decoder.run(self._ids[:, n : n + 1])
        return since(start)

    def prepare_products(self) -> list[Any]:
        """Return the descriptors of all products of a token with packed weights."""
        kernels = load_kernels()
        assert kernels is not None
        products = []
        for module in self.model.modules():
            if isinstance(module, (QuantizedLinear, QuantizedHead)):
                matrix, x = PackedMatrix(*module._tensors()), torch.randn(1, module.columns)
                out, room = torch.empty(1, module.rows), torch.empty(1 << 16, dtype=torch.uint8)
                product = product_kernels._describe(
                    matrix, module.rows, module.columns, module.spec, out
                )
                product.x, product.room, product.tokens = x.data_ptr(), room.data_ptr(), 1
                self._kept += [matrix, x, out, room]
                products.append(ctypes.byref(product))
        return products

    def multiply(self, products: list[Any], count: int) -> Seconds:
        """Return the time of the products of `count` tokens."""
        kernels: Any = load_kernels()
        start = now()
        for product in products * count:
            kernels._quantized(product)
        return since(start)

    @torch.no_grad()
    def prefill(self, count: int) -> Seconds:
        """Return the time until the logits after a prompt of `count` tokens."""
        decoder, ids = Decoder(self.model, None, count), torch.tensor([IDS[:count]])
        start = now()
        decoder.run(ids)
        return since(start)


class Peer:
    """A peer that runs in another interpreter.

    Args:
        python: the interpreter.
        arguments: arguments of `decode_peer.py`.
    """

    def __init__(self, python: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("decode_peer.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._read() != "ready":
            command = " ".join([python, "benchmarks/inference/decode_peer.py", *arguments])
            sys.exit(f"The peer did not start. Run `{command}` to see its error.")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, *words: object) -> Seconds:
        """Send a line; return the wall time and the CPU time of the answer."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        wall, cores = map(float, self._read().split())
        return wall, cores

    def close(self) -> None:
        """Stop the peer."""
        self._process.communicate()


def read_speed(threads: int) -> float:
    """Return the speed of a plain read of 512 MiB in bytes per second, the best of five."""
    library, memory = load_native("read", READ), torch.ones(512 << 17, dtype=torch.int64)
    assert library is not None
    library.read_ahead.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    speeds = []
    for _ in range(5):
        start = time.perf_counter()
        library.read_ahead(memory.data_ptr(), memory.numel(), threads)
        speeds.append(memory.nbytes / (time.perf_counter() - start))
    return max(speeds)


def compare(
    runs: dict[str, Callable[[], Seconds]], rounds: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Time two sides alternately.

    Returns:
        The wall times by side, and the ratios of the speeds by wall time and by CPU time.
    """
    times: dict[str, list[Seconds]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            seconds = run()
            if number:  # the first round is a warm-up
                times[name].append(seconds)
    wall, cpu = ({name: [each[n] for each in part] for name, part in times.items()} for n in (0, 1))
    return wall, [f"{paired_ratio(part, *runs):.2f}" for part in (wall, cpu)]


def print_row(
    name: str, count: int, model: BmforgeModel, runs: dict[str, Callable[[], Seconds]], rounds: int
) -> None:
    """Compare two sides and print their tokens per second.

    Args:
        name: first cell of the row.
        count: tokens of a run.
        model: model of the first side.
        runs: bmforge and the peer.
        rounds: number of rounds.
    """
    threads = torch.get_num_threads()
    wall, ratios = compare(runs, rounds)
    speeds = [count / statistics.median(seconds) for seconds in wall.values()]
    speeds += [count / min(seconds) for seconds in wall.values()]
    of_read = speeds[2] * model.bytes / read_speed(threads)
    cells = [name, "/".join(runs), threads, *(f"{speed:.1f}" for speed in speeds), *ratios]
    print(table_row([*cells, f"{of_read:.2f}"]), flush=True)


def run_case(name: str, options: argparse.Namespace) -> None:
    """Print the rows of one file."""
    path, count = options.folder / CASES[name], options.tokens
    model = BmforgeModel(path)
    for threads in options.threads:
        torch.set_num_threads(threads)
        peer = Peer(options.peer, "llama", str(path), str(threads), str(options.flash))
        runs: dict[str, Callable[[], Seconds]] = {
            "bmforge": lambda: model.decode(count),
            "llama.cpp": partial(peer.ask, "decode", PROMPT, count),
        }
        print_row(name, count, model, runs, options.rounds)
        if options.prefill:
            runs = {
                "bmforge": lambda: model.prefill(512),
                "llama.cpp": partial(peer.ask, "prefill", 512),
            }
            print_row(f"{name}, prefill of 512", 512, model, runs, options.rounds)
        peer.close()
        if options.prefill and name == "q8_0" and (options.folder / CTRANSLATE2).exists():
            compare_with_ctranslate2(options)
        products = model.prepare_products() if options.products else []
        if products:  # a model without packed weights has none
            runs = {
                "products": partial(model.multiply, products, count),
                "token": lambda: model.decode(count),
            }
            _, ratios = compare(runs, options.rounds)
            print(table_row([name, "products/token", threads, *[""] * 4, *ratios, ""]))


def compare_with_ctranslate2(options: argparse.Namespace) -> None:
    """Print the row of CTranslate2's prefill with int8 weights, with one scale per row."""
    threads = str(torch.get_num_threads())
    peer = Peer(options.peer, "ctranslate2", str(options.folder / CTRANSLATE2), threads)
    model = BmforgeModel(options.folder / CASES["f16"], "int8-dynamic")
    runs: dict[str, Callable[[], Seconds]] = {
        "bmforge": lambda: model.prefill(512),
        "CTranslate2": partial(peer.ask, "prefill", 512),
    }
    print_row("int8-dynamic, prefill of 512", 512, model, runs, options.rounds)
    peer.close()


def main() -> None:
    """Prepare the models, or measure."""
    parser = make_parser(__doc__)
    parser.add_argument("action", choices=["prepare", "pack", "ctranslate2", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--only", nargs="+", default=list(CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--flash", type=int, default=1)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--products", action="store_true")
    options = parser.parse_args()
    if options.action == "ctranslate2":
        write_ctranslate2(options.folder, options.peer)
        return
    if options.action != "run":
        {"prepare": prepare, "pack": pack}[options.action](options.folder)
        return
    kernels = load_kernels()
    print(header(max(options.threads), ("torch",)))
    print(f"- kernels: {kernels.name if kernels else 'none'}\n")
    speeds = ["first, tokens/s", "second, tokens/s", "first at best", "second at best"]
    ratios = ["speed by wall time, first / second", "by CPU time", "first / plain read"]
    print(table(["weights", "first/second", "threads", *speeds, *ratios], []))
    for name in options.only:
        run_case(name, options)


if __name__ == "__main__":
    main()
