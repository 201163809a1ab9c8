"""A trained model as GGUF files, ours beside llama.cpp: greedy tokens and their scores.

    python benchmarks/gguf_logits.py MODEL PREPARED --peer PYTHON [--prompts 8] [--tokens 64]

MODEL is the export of a run, PREPARED the corpus it was trained on: prompts of 16 tokens are the
beginnings of documents that were held out. PYTHON is an interpreter with llama-cpp-python. What
llama.cpp chose is read by ours, so that scores are compared behind equal tokens. `floats` opens the
file as numbers, `keep` keeps its integers, whose inputs are rounded to 8 bits on both sides.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from harness import header, table  # noqa: E402

from bmforge.data import TokenStore  # noqa: E402
from bmforge.infer import generate  # noqa: E402
from bmforge.models import AutoModel  # noqa: E402
from bmforge.models.formats.gguf_export import export_gguf  # noqa: E402

LENGTH = 16
KINDS = ("f32", "f16", "q8_0", "q4_0")


def read_prompts(prepared: Path, count: int) -> torch.Tensor:
    """Return the beginnings of held-out documents: (count, LENGTH)."""
    store = TokenStore(prepared / "validation" / "tokens")
    rows = (torch.from_numpy(store[i].astype("int64")) for i in range(len(store)))
    return torch.stack([row[:LENGTH] for row in rows if len(row) >= LENGTH][:count])


def compare(model: Any, prompts: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> Any:
    """Return how many rows are alike to the end, and how far scores are from each other."""
    count = ids.shape[1]
    written = generate(model, prompts, max_new_tokens=count, eos_token_id=())[:, -count:]
    alike = int((written == ids).all(1).sum())
    with torch.no_grad():
        read = torch.cat((prompts, ids[:, :-1]), 1)
        ours = model(read, logits_to_keep=count).logits.float()
    off = (ours - scores).abs()
    return alike, float(off.max() / scores.std()), float(off.mean() / scores.std())


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    prompts = read_prompts(given.prepared, given.prompts)
    print(header(" ".join(["python", *sys.argv]), torch.get_num_threads(), ("torch",)), flush=True)
    found = []
    with tempfile.TemporaryDirectory() as place:
        np.save(f"{place}/prompts.npy", prompts.numpy())
        for kind in KINDS:
            path, out = Path(place) / f"{kind}.gguf", f"{place}/{kind}.npz"
            export_gguf(given.model, path, kind)
            peer = str(Path(__file__).with_name("gguf_logits_peer.py"))
            command = [given.peer, peer, str(path), f"{place}/prompts.npy", str(given.tokens), out]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"the peer failed at {kind}:\n{done.stderr[-2000:]}")
            said = np.load(out)
            ids, scores = torch.from_numpy(said["ids"]), torch.from_numpy(said["scores"])
            for way in ("floats", "keep") if kind.startswith("q") else ("floats",):
                options = {"quantize": "keep"} if way == "keep" else {}
                model = AutoModel.from_pretrained(path, **options).eval()
                alike, most, mean = compare(model, prompts, ids, scores)
                cells = [kind, way, f"{alike} of {len(ids)}", f"{most:.2e}", f"{mean:.2e}"]
                found.append(cells)
    titles = ["file", "ours", "rows alike", "largest difference", "mean difference"]
    print(table(titles, found))


if __name__ == "__main__":
    main()
