"""llama.cpp or CTranslate2 for `decode.py`, run by the interpreter that has these libraries.

    python benchmarks/inference/decode_peer.py llama MODEL.gguf THREADS FLASH
    python benchmarks/inference/decode_peer.py ctranslate2 MODEL_DIRECTORY THREADS
    python benchmarks/inference/decode_peer.py convert HUGGING_FACE_DIRECTORY MODEL_DIRECTORY

Reads lines ``decode PROMPT TOKENS`` (continues the last sequence, or starts a new one after a
prompt) and ``prefill TOKENS``; prints the wall time and the CPU time of these tokens in seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

IDS = [(7 * n) % 30000 + 5 for n in range(4096)]
LONGEST = 128  # tokens of a sequence; then decoding starts again
Ask = Callable[[str, int, int], tuple[float, float]]


def now() -> tuple[float, float]:
    """Return the wall time and the CPU time of this process in seconds."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    """Return the wall time and the CPU time since `start`."""
    return time.perf_counter() - start[0], time.process_time() - start[1]


def open_llama(path: str, threads: int, flash: str) -> Ask:
    """Return a function that times llama.cpp's C calls, without sampling or copies in Python."""
    import llama_cpp as c

    c.llama_backend_init()
    options = c.llama_model_default_params()
    model: Any = c.llama_model_load_from_file(path.encode(), options)
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, 1024, 512
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = (
        c.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash == "1" else c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    context = c.llama_init_from_model(model, params)

    def run(ids: list[int]) -> None:
        tokens = (c.llama_token * len(ids))(*ids)
        assert c.llama_decode(context, c.llama_batch_get_one(tokens, len(ids))) == 0
        c.llama_synchronize(context)

    at = LONGEST

    def ask(what: str, prompt: int, count: int) -> tuple[float, float]:
        nonlocal at
        if what == "prefill":
            c.llama_memory_clear(c.llama_get_memory(context), True)
            at, start = LONGEST, now()
            run(IDS[:count])
            return since(start)
        if at + count > LONGEST:
            c.llama_memory_clear(c.llama_get_memory(context), True)
            run(IDS[:prompt])
            run([IDS[prompt]])
            at = prompt + 1
        first, at = at, at + count
        start = now()
        for token in IDS[first : first + count]:
            run([token])
        return since(start)

    return ask


def open_ctranslate2(path: str, threads: int) -> Ask:
    """Return a function that times CTranslate2's prefill."""
    import ctranslate2

    options: dict[str, Any] = {"compute_type": "int8", "intra_threads": threads}
    generator = ctranslate2.Generator(path, inter_threads=1, **options)

    def ask(what: str, prompt: int, count: int) -> tuple[float, float]:
        start = now()
        if what == "prefill":
            # With one new token, only the logits of the last position are computed.
            generator.generate_batch(
                [[f"<{n}>" for n in IDS[:count]]], max_length=1, include_prompt_in_result=False
            )
            return since(start)
        raise ValueError(what)

    return ask


def convert(source: str, target: str) -> None:
    """Convert a model to CTranslate2 with int8 weights."""
    import ctranslate2

    converter = ctranslate2.converters.TransformersConverter(
        source, load_as_float16=True, low_cpu_mem_usage=True
    )
    converter.convert(target, quantization="int8", force=True)


def main() -> None:
    """Answer the lines of the input."""
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
        return
    kind, path, threads, *rest = sys.argv[1:]
    ask = (
        open_llama(path, int(threads), *rest)
        if kind == "llama"
        else open_ctranslate2(path, int(threads))
    )
    print("ready", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        prompt, count = (0, int(numbers[0])) if what == "prefill" else map(int, numbers)
        print(*ask(what, prompt, count), flush=True)


if __name__ == "__main__":
    main()
