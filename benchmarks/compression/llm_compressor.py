"""Quality of GPTQ and SparseGPT compared with llm-compressor, on the same model.

    python -m benchmarks.compression.llm_compressor DATA --out DIR --peer PYTHON [--seed 0]

DATA and DIR are those of `quality.py`, whose decoder (11.5M parameters) is trained unless DIR has
it. PYTHON is an interpreter with `llmcompressor`. Both sides calibrate on the same 64 rows of 256
tokens. GPTQ uses symmetric int4 weights in groups of 32, SparseGPT the pattern 2:4. The quality is
the bits per byte of the dequantized weights of each side.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.compression.quality import Bench, Text
from benchmarks.harness import header, make_parser, table
from bmforge.compress import prune, quantize
from bmforge.compress.prune import PruneConfig
from bmforge.models import AutoModel
from bmforge.nn.packing import QuantSpec

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


def compress_with_peer(
    python: str, directory: Path, rows: torch.Tensor, what: str, folder: Path
) -> Any:
    """Return the model with the weights of llm-compressor."""
    script, out = folder / "peer.py", folder / f"{what}.safetensors"
    script.write_text(PEER)
    save_file({"rows": rows.contiguous()}, folder / "rows.safetensors")
    command = [
        python,
        str(script),
        str(directory),
        str(folder / "rows.safetensors"),
        what,
        str(out),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=folder)
    model: Any = AutoModel.from_pretrained(directory)
    model.save_pretrained(folder / what)
    whole = load_file(folder / what / "model.safetensors")
    weights = load_file(out)
    names = {n: n if n in whole else n.removeprefix("model.") for n in weights}
    assert all(name in whole for name in names.values()), "the names of the tensors differ"
    save_file(
        whole | {names[n]: t for n, t in weights.items()}, folder / what / "model.safetensors"
    )
    return AutoModel.from_pretrained(folder / what).eval()


@torch.no_grad()
def compress_with_bmforge(directory: Path, rows: torch.Tensor, what: str) -> Any:
    """Return the model with the weights of bmforge, dequantized."""
    model: Any = AutoModel.from_pretrained(directory).eval()
    batches = list(rows.split(8))
    if what == "sparsegpt":
        prune(model, PruneConfig(method="sparsegpt", pattern="2:4"), batches=batches)
        return model
    spec = QuantSpec(bits=4, group_size=32, symmetric=True, activations="float")
    return quantize(model, spec, method="gptq", batches=batches)


def main() -> None:
    """Print the bits per byte of both sides."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    task = Text(options.data, options.out)
    directory = Bench(task, options.out, 120).dense(options.seed)
    rows = task.rows["train"][:ROWS]
    print(header(torch.get_num_threads(), ["torch", "transformers"]))
    dense = task.measure(AutoModel.from_pretrained(directory).eval())
    lines = []
    for what in ("gptq", "sparsegpt"):
        with tempfile.TemporaryDirectory() as folder:
            peer = task.measure(
                compress_with_peer(options.peer, directory, rows, what, Path(folder))
            )
        bmforge = task.measure(compress_with_bmforge(directory, rows, what))
        losses = [f"{bits:.5f}" for bits in (dense, bmforge, peer)]
        lines.append([what, *losses, f"{(bmforge - dense) / (peer - dense):.3f}"])
    increase = "increase over dense, bmforge / llm-compressor"
    print(table(["method", "dense", "bmforge", "llm-compressor", increase], lines))


if __name__ == "__main__":
    main()
