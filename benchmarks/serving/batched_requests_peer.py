"""Decoding of many sequences with llama.cpp for `batched_requests.py`, run by its interpreter.

    python benchmarks/serving/batched_requests_peer.py MODEL.gguf THREADS SEQUENCES

Reads lines ``SEQUENCES PROMPT TOKENS``; prints the seconds of the tokens after the prompts.
"""

from __future__ import annotations

import sys
import time
from typing import Any


def main(path: str, threads: int, most: int) -> None:
    """Answer the lines of the input."""
    import llama_cpp as c

    c.llama_backend_init()
    model: Any = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = most * 512, 2048, 512, most
    params.n_threads = params.n_threads_batch = threads
    context = c.llama_init_from_model(model, params)
    batch = c.llama_batch_init(2048, 0, 1)

    def run(tokens: list[tuple[int, int, int]]) -> None:
        """Decode a batch of (token, position, sequence)."""
        batch.n_tokens = len(tokens)
        for n, (token, position, sequence) in enumerate(tokens):
            batch.token[n], batch.pos[n] = token, position
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
            batch.logits[n] = 1
        assert c.llama_decode(context, batch) == 0
        c.llama_synchronize(context)

    for line in sys.stdin:
        count, prompt, new = map(int, line.split())
        c.llama_memory_clear(c.llama_get_memory(context), True)
        for sequence in range(count):
            ids = [(7 * n + 13 * sequence) % 30000 + 5 for n in range(prompt + 1)]
            run([(id, n, sequence) for n, id in enumerate(ids)])
        begin = time.perf_counter()
        for step in range(1, new):
            run([((31 * step + s) % 30000, prompt + step, s) for s in range(count)])
        print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
