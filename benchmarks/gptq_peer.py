"""GPTQ and SparseGPT beside llm-compressor's: what each costs in bits per byte, from one model.

    python benchmarks/gptq_peer.py DATA --out DIR --peer PYTHON [--seed 0]

DIR is that of `compress_quality.py`, whose decoder (11.5M) is trained where it is not there yet;
PYTHON is an interpreter with `llmcompressor`. Both see the same 64 rows of 256 tokens; int4 in
symmetric groups of 32, of weights alone, and zeros in 2 of 4. Quality is that of floats with the
values that each side found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from compress_quality import Bench, Text  # noqa: E402
from harness import header, table  # noqa: E402

from bmforge.compress import prune, quantize  # noqa: E402
from bmforge.compress.prune import PruneConfig  # noqa: E402
from bmforge.models import AutoModel  # noqa: E402
from bmforge.nn.packing import QuantSpec  # noqa: E402

ROWS = 64
PEER = """
import sys
import datasets
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

place, file, what, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(place, dtype="float32")
rows = load_file(file)["rows"].tolist()
data = datasets.Dataset.from_dict(
    {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
)
weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
scheme = QuantizationScheme(targets=["Linear"], weights=weights)
recipe = (
    GPTQModifier(config_groups={"all": scheme}, ignore=["lm_head"], dampening_frac=0.01)
    if what == "gptq"
    else SparseGPTModifier(sparsity=0.5, mask_structure="2:4", dampening_frac=0.01)
)
oneshot(
    model=model, dataset=data, recipe=recipe, num_calibration_samples=len(rows),
    max_seq_length=len(rows[0]), shuffle_calibration_samples=False,
)
linears = {n: m for n, m in model.named_modules() if hasattr(m, "weight") and ".layers." in n}
save_file({f"{n}.weight": m.weight.detach().clone().contiguous() for n, m in linears.items()}, out)
"""


def by_peer(python: str, place: Path, rows: torch.Tensor, what: str, folder: Path) -> Any:
    """Return the model with the weights that llm-compressor found."""
    script, out = folder / "peer.py", folder / f"{what}.safetensors"
    script.write_text(PEER)
    save_file({"rows": rows.contiguous()}, folder / "rows.safetensors")
    command = [python, str(script), str(place), str(folder / "rows.safetensors"), what, str(out)]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=folder)
    model: Any = AutoModel.from_pretrained(place)
    model.save_pretrained(folder / what)
    whole = load_file(folder / what / "model.safetensors")
    found = load_file(out)
    names = {n: n if n in whole else n.removeprefix("model.") for n in found}
    assert all(name in whole for name in names.values()), "other names of tensors"
    save_file(whole | {names[n]: t for n, t in found.items()}, folder / what / "model.safetensors")
    return AutoModel.from_pretrained(folder / what).eval()


@torch.no_grad()
def by_us(place: Path, rows: torch.Tensor, what: str) -> Any:
    """Return the model with the weights that we found, as floats."""
    model: Any = AutoModel.from_pretrained(place).eval()
    batches = list(rows.split(8))
    if what == "sparsegpt":
        prune(model, PruneConfig(method="sparsegpt", pattern="2:4"), batches=batches)
        return model
    spec = QuantSpec(bits=4, group_size=32, symmetric=True, activations="float")
    return quantize(model, spec, method="gptq", batches=batches)


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    task = Text(given.data, given.out)
    place = Bench(task, given.out, 120).dense(given.seed)
    rows = task.rows["train"][:ROWS]
    command = "python benchmarks/gptq_peer.py DATA --out DIR --peer PYTHON"
    print(header(command, torch.get_num_threads(), ["torch", "transformers"]))
    dense = task.measure(AutoModel.from_pretrained(place).eval())
    lines = []
    for what in ("gptq", "sparsegpt"):
        with tempfile.TemporaryDirectory() as folder:
            theirs = task.measure(by_peer(given.peer, place, rows, what, Path(folder)))
        ours = task.measure(by_us(place, rows, what))
        share = (ours - dense) / (theirs - dense)
        lines.append([what, f"{dense:.5f}", f"{ours:.5f}", f"{theirs:.5f}", f"{share:.3f}"])
    print(table(["method", "dense", "bmforge", "llm-compressor", "our gap / its"], lines))


if __name__ == "__main__":
    main()
