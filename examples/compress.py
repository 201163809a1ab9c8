"""Halve a model's MLPs, prune half of its weights, quantize it; the original is the teacher.

    python examples/compress.py MODEL TEXT OUT [STEPS]

MODEL is a directory or hub id of a decoder, TEXT a text file, OUT the output directory.
"""

import sys
from pathlib import Path

import torch

from bmforge.compress import (
    CompressConfig,
    DistillConfig,
    PruneConfig,
    QuantizeConfig,
    StructureConfig,
    compress,
)
from bmforge.models import AutoModel
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import causal_lm

source, text, out, *steps = sys.argv[1:]
model, teacher = AutoModel.from_pretrained(source).train(), AutoModel.from_pretrained(source)
ids = torch.tensor(AutoTokenizer.from_pretrained(source).encode(Path(text).read_text("utf-8")))
batches = ids[: len(ids) // 256 * 256].view(-1, 4, 64)
config = CompressConfig(
    structure=StructureConfig(intermediate_size=model.config.intermediate_size // 2),
    prune=PruneConfig(pattern="2:4"),
    quantize=QuantizeConfig(scheme="int8", training="fake"),
    distill=DistillConfig(),
)
job = compress(model, config, teacher=teacher)
objective, optimizer = job.objective(causal_lm), torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(int(steps[0]) if steps else 200):
    rows = batches[step % len(batches)]
    loss = objective(model, {"input_ids": rows, "labels": rows}, rows[:, 1:].numel())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    job.after_step_()
    print(f"step {step + 1}  loss {loss.item():.4f}")
report = job.finish_()
job.model.save_pretrained(out)
print(report.format(), report.save(out), sep="\n")
