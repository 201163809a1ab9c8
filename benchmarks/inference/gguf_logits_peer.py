"""Greedy tokens and logits of llama.cpp for `gguf_logits.py`, run by the interpreter that has it.

python benchmarks/inference/gguf_logits_peer.py MODEL.gguf PROMPTS.npy COUNT OUT.npz
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def open_llama(path: str, length: int) -> tuple[Any, int]:
    """Return a context of `length` tokens with one thread, and the size of the vocabulary."""
    import llama_cpp as c

    c.llama_backend_init()
    model: Any = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = length, 1, 1
    size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    return c.llama_init_from_model(model, params), size


def write_greedily(context: Any, size: int, prompt: list[int], count: int) -> Any:
    """Return the greedy tokens and their logits: (count, vocabulary)."""
    import llama_cpp as c

    c.llama_memory_clear(c.llama_get_memory(context), True)
    chosen, scores, ids = [], [], prompt
    for _ in range(count):
        tokens = (c.llama_token * len(ids))(*ids)  # must outlive the batch, which points to it
        status = c.llama_decode(context, c.llama_batch_get_one(tokens, len(ids)))
        if status != 0:
            raise RuntimeError(f"llama_decode failed: status={status}.")
        scores.append(np.ctypeslib.as_array(c.llama_get_logits(context), (size,)).copy())
        ids = [int(scores[-1].argmax())]
        chosen += ids
    return chosen, np.stack(scores)


def main() -> None:
    """Generate after all prompts and write the results."""
    path, prompts, count, out = sys.argv[1:]
    rows = np.load(prompts)
    context, size = open_llama(path, rows.shape[1] + int(count))
    results = [write_greedily(context, size, row.tolist(), int(count)) for row in rows]
    np.savez(out, ids=[ids for ids, _ in results], scores=np.stack([part for _, part in results]))


if __name__ == "__main__":
    main()
