"""Decoding and prefill of one request against llama.cpp and CTranslate2, on the same weights.

    python benchmarks/decode.py prepare FOLDER
    python benchmarks/decode.py ctranslate2 FOLDER --peer PYTHON
    python benchmarks/decode.py run FOLDER --peer PYTHON [--only q8_0] [--threads 1 2] [--rounds 5]

`prepare` writes a model of TinyLlama's shape and a GPT-2 small, drawn at random, as GGUF files that
both sides open; `ctranslate2` one of them in that peer's form, in int8, which `run --prefill` then
times beside `int8-dynamic`, with Q8_0. PYTHON is an interpreter with llama-cpp-python and
ctranslate2. Every round times one side and then the other; ratios are medians over rounds of
theirs / ours in seconds.
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
from pathlib import Path
from typing import Any

import torch
from decode_peer import IDS, now, since
from harness import header, paired_ratio, table

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
# By the clock, and of all cores that a process had.
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
    """Write the models."""
    folder.mkdir(parents=True, exist_ok=True)
    llama = Llama.from_config(LlamaConfig(**SHAPE), dtype=torch.float16)
    for kind in ("q4_0", "q8_0", "f16"):
        export_gguf(llama, folder / f"llama-{kind}.gguf", kind, overwrite=True)
    gpt2 = GPT2.from_config(GPT2Config.preset("gpt2-small"))
    export_gguf(gpt2, folder / "gpt2-q8_0.gguf", "q8_0", overwrite=True)
    pack(folder)


def pack(folder: Path) -> None:
    """Write what the quantised files hold as packed models of ours: the same integers."""
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
    """Let the peer convert the model; its tokens are numbers in angle brackets."""
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


class Ours:
    """A model of ours, opened from the file.

    Args:
        path: of the file.
        scheme: packed so on the way; "" takes it as it is.
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
            self.bytes -= sum(t.nbytes for t in embed.values())  # one row of it is read

    @torch.no_grad()
    def decode(self, count: int) -> Seconds:
        """Return the seconds of so many tokens after those before, or a prompt."""
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
        """Describe every product of a token with packed weights, the head's too."""
        kernels = load_kernels()
        assert kernels is not None
        found = []
        for module in self.model.modules():
            if isinstance(module, (QuantizedLinear, QuantizedHead)):
                matrix, x = PackedMatrix(*module._tensors()), torch.randn(1, module.columns)
                out, room = torch.empty(1, module.rows), torch.empty(1 << 16, dtype=torch.uint8)
                product = product_kernels._describe(
                    matrix, module.rows, module.columns, module.spec, out
                )
                product.x, product.room, product.tokens = x.data_ptr(), room.data_ptr(), 1
                self._kept += [matrix, x, out, room]
                found.append(ctypes.byref(product))
        return found

    def multiply(self, products: list[Any], count: int) -> Seconds:
        """Return the seconds of the products of so many tokens alone."""
        kernels: Any = load_kernels()
        start = now()
        for product in products * count:
            kernels._quantized(product)
        return since(start)

    @torch.no_grad()
    def prefill(self, count: int) -> Seconds:
        """Return the seconds until the scores after a prompt."""
        decoder, ids = Decoder(self.model, None, count), torch.tensor([IDS[:count]])
        start = now()
        decoder.run(ids)
        return since(start)


class Peer:
    """A peer in an interpreter of its own."""

    def __init__(self, python: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("decode_peer.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._read() != "ready":
            told = " ".join([python, "benchmarks/decode_peer.py", *arguments])
            sys.exit(f"the peer did not open; `{told}` says why.")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, *words: object) -> Seconds:
        """Return the seconds that it says."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        wall, cores = map(float, self._read().split())
        return wall, cores

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def read_speed(threads: int) -> float:
    """Return bytes a second of a plain read of 512 MiB, the best of some."""
    library, memory = load_native("read", READ), torch.ones(512 << 17, dtype=torch.int64)
    assert library is not None
    library.read_ahead.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    found = []
    for _ in range(5):
        start = time.perf_counter()
        library.read_ahead(memory.data_ptr(), memory.numel(), threads)
        found.append(memory.nbytes / (time.perf_counter() - start))
    return max(found)


def compare(
    ours: Callable[[], Seconds], theirs: Callable[[], Seconds], rounds: int
) -> tuple[list[float], list[float], str, str]:
    """Return all seconds of both by the clock, and the ratios by the clock and by cores' time."""
    ours(), theirs()
    found: tuple[list[Seconds], list[Seconds]] = ([], [])
    for _ in range(rounds):
        found[0].append(ours())
        found[1].append(theirs())
    ratios = []
    for which in range(2):
        mine, other = ([seconds[which] for seconds in part] for part in found)
        ratios.append("{:.2f} ({:.2f} to {:.2f})".format(*paired_ratio(mine, other)))
    mine, other = ([seconds[0] for seconds in part] for part in found)
    return mine, other, *ratios  # type: ignore[return-value]


def run_case(name: str, options: argparse.Namespace) -> None:
    """Print the rows of one file."""
    path = options.folder / CASES[name]
    ours, count = Ours(path), options.tokens
    for threads in options.threads:
        torch.set_num_threads(threads)
        peer = Peer(options.peer, "llama", str(path), str(threads), str(options.flash))

        def row(what: str, number: int, mine: Any, theirs: Any, n: int = threads) -> None:
            first, second, wall, cores = compare(mine, theirs, options.rounds)
            speeds = [number / statistics.median(part) for part in (first, second)]
            speeds += [number / min(part) for part in (first, second)]
            cells = [what, n, *(f"{speed:.1f}" for speed in speeds), wall, cores]
            print(table_row([*cells, f"{speeds[2] * ours.bytes / read_speed(n):.2f}"]), flush=True)

        row(
            name,
            count,
            lambda: ours.decode(count),
            lambda peer=peer: peer.ask("decode", PROMPT, count),
        )
        if options.prefill:
            row(
                f"{name}, 512 at once",
                512,
                lambda: ours.prefill(512),
                lambda peer=peer: peer.ask("prefill", 512),
            )
        peer.close()
        if options.prefill and name == "q8_0" and (options.folder / CTRANSLATE2).exists():
            other = Peer(
                options.peer, "ctranslate2", str(options.folder / CTRANSLATE2), str(threads)
            )
            by_row = Ours(options.folder / CASES["f16"], "int8-dynamic")  # its own kind of scales
            row(
                "int8-dynamic, 512 at once, CTranslate2",
                512,
                lambda by_row=by_row: by_row.prefill(512),
                lambda other=other: other.ask("prefill", 512),
            )
            other.close()
        products = ours.prepare_products() if options.products else []
        if products:  # a plain model has none
            _, _, wall, cores = compare(
                lambda products=products: ours.multiply(products, options.tokens),
                lambda: ours.decode(options.tokens),
                options.rounds,
            )
            print(table_row([f"{name}: token / products", threads, *[""] * 4, wall, cores, ""]))


def table_row(cells: list[Any]) -> str:
    """Return a line of a markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["prepare", "pack", "ctranslate2", "run"])
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
    if options.what == "ctranslate2":
        write_ctranslate2(options.folder, options.peer)
        return
    if options.what != "run":
        {"prepare": prepare, "pack": pack}[options.what](options.folder)
        return
    kernels = load_kernels()
    print(header(" ".join(["python", *sys.argv]), max(options.threads), ("torch",)))
    print(f"- kernels: {kernels.name if kernels else 'none'}\n")
    speeds = ["ours, tokens/s", "theirs", "ours at best", "theirs"]
    columns = ["weights", "threads", *speeds, "by the clock", "by cores' time", "of a read"]
    print(table(columns, []))
    for name in options.only:
        run_case(name, options)


if __name__ == "__main__":
    main()
