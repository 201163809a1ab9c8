"""Greedy tokens and logits of a trained model as GGUF files compared with llama.cpp.

    python -m benchmarks.inference.gguf_logits MODEL PREPARED --peer PYTHON [--prompts 8]
        [--tokens 64]

MODEL is the export of a run, PREPARED its corpus. The prompts are the first 16 tokens of held-out
documents. PYTHON is an interpreter with llama-cpp-python. bmforge reads the tokens that llama.cpp
generated, so the logits are compared after equal tokens. `floats` dequantizes the file; `keep`
keeps its integers, whose inputs are rounded to 8 bits, as in llama.cpp.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import header, make_parser, table
from bmforge.data import TokenStore
from bmforge.infer import generate
from bmforge.models import AutoModel
from bmforge.models.formats.gguf_export import export_gguf

LENGTH = 16
KINDS = ("f32", "f16", "q8_0", "q4_0")


def read_prompts(prepared: Path, count: int) -> torch.Tensor:
    """Return the first tokens of held-out documents: (count, LENGTH)."""
    store = TokenStore(prepared / "validation" / "tokens")
    rows = (torch.from_numpy(store[i].astype("int64")) for i in range(len(store)))
    return torch.stack([row[:LENGTH] for row in rows if len(row) >= LENGTH][:count])


def compare(model: Any, prompts: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> Any:
    """Return the number of equal sequences, and the differences of the logits.

    Args:
        model: model to test.
        prompts: token ids: (rows, LENGTH).
        ids: tokens that llama.cpp generated: (rows, tokens).
        scores: logits of llama.cpp: (rows, tokens, vocabulary).

    Returns:
        Number of equal sequences, largest and mean difference over the standard deviation.
    """
    count = ids.shape[1]
    written = generate(model, prompts, max_new_tokens=count, eos_token_id=())[:, -count:]
    num_equal = int((written == ids).all(1).sum())
    with torch.no_grad():
        read = torch.cat((prompts, ids[:, :-1]), 1)
        logits = model(read, logits_to_keep=count).logits.float()
    off = (logits - scores).abs()
    return num_equal, float(off.max() / scores.std()), float(off.mean() / scores.std())


def main() -> None:
    """Print a row for every kind of file."""
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    prompts = read_prompts(given.prepared, given.prompts)
    print(header(torch.get_num_threads(), ("torch",)), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        np.save(f"{place}/prompts.npy", prompts.numpy())
        for kind in KINDS:
            path, out = Path(place) / f"{kind}.gguf", f"{place}/{kind}.npz"
            export_gguf(given.model, path, kind)
            peer = str(Path(__file__).with_name("gguf_logits_peer.py"))
            command = [given.peer, peer, str(path), f"{place}/prompts.npy", str(given.tokens), out]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"The peer failed at {kind}:\n{done.stderr[-2000:]}")
            answers = np.load(out)
            ids, scores = torch.from_numpy(answers["ids"]), torch.from_numpy(answers["scores"])
            for way in ("floats", "keep") if kind.startswith("q") else ("floats",):
                options = {"quantize": "keep"} if way == "keep" else {}
                model = AutoModel.from_pretrained(path, **options).eval()
                num_equal, largest, mean = compare(model, prompts, ids, scores)
                cells = [kind, way, f"{num_equal} of {len(ids)}", f"{largest:.2e}", f"{mean:.2e}"]
                rows.append(cells)
    titles = ["file", "opened as", "equal sequences", "largest difference", "mean difference"]
    print(table(titles, rows))


if __name__ == "__main__":
    main()
