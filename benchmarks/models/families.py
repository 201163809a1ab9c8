"""Forward and backward pass of every model family compared with transformers.

    python -m benchmarks.models.families [--families Bert GPT2] [--rounds 8] [--precision bf16]
        [--compiled] [--peer tuned] [--budget-s 60]

Both sides load the same random weights of base-sized models, and compute the loss of 4 x 256 tokens
(ViT: 4 images) without dropout. transformers uses its default attention. `--compiled` also compares
both sides under `torch.compile`. bmforge has the host settings of a run; `--peer tuned` applies
them to the peer too.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.harness import Contender, header, make_parser, paired_ratio, run_in_turns, table
from bmforge.models import AutoModel

ROWS, LENGTH, TARGET = 4, 256, 1.15
LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
# Family -> transformers' class and the fields that differ from its defaults (base sizes).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertForMaskedLM", {}),
    "Roberta": ("RobertaForMaskedLM", {"vocab_size": 50265, "max_position_embeddings": 514}),
    "T5": ("T5ForConditionalGeneration", {"d_model": 512, "decoder_start_token_id": 0}),
    "GPT2": ("GPT2LMHeadModel", {}),
    "GPTJ": ("GPTJForCausalLM", {"n_embd": 768, "n_layer": 12, "n_head": 12, "rotary_dim": 32}),
    "OPT": ("OPTForCausalLM", {}),
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Qwen": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 64}),
    "MiniCPM": ("GraniteForCausalLM", {**LLAMA, "attention_multiplier": 64**-0.5}),
    "Mixtral": (
        "MixtralForCausalLM",
        {**LLAMA, "num_hidden_layers": 4, "num_local_experts": 8, "intermediate_size": 1024},
    ),
    "Longformer": ("LongformerForMaskedLM", {"vocab_size": 50265, "attention_window": 256}),
    "ViT": ("ViTForImageClassification", {}),
}
# Dropout fields; each config has some of them.
NO_DROPOUT = """
    resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob dropout
    attention_dropout activation_dropout dropout_rate
"""


def save_peer(family: str, directory: str) -> None:
    """Save the model of transformers with random weights."""
    name, fields = CASES[family]
    hf_class = getattr(transformers, name)
    config = hf_class.config_class()
    off = {field: 0.0 for field in NO_DROPOUT.split() if hasattr(config, field)}
    torch.manual_seed(0)
    hf_class(hf_class.config_class(**{**off, **fields})).save_pretrained(directory)
    if family == "MiniCPM":
        _rename_granite(Path(directory))


def _rename_granite(directory: Path) -> None:
    """Write the MiniCPM that equals a Granite into a subdirectory."""
    import json

    granite = json.loads((directory / "config.json").read_text())
    fields = {k: granite[k] for k in (*LLAMA, "max_position_embeddings", "rms_norm_eps")}
    scales = {"scale_emb": 1, "scale_depth": LLAMA["num_hidden_layers"] ** 0.5}
    own = {"model_type": "minicpm", "dim_model_base": LLAMA["hidden_size"], **scales}
    target = directory / "minicpm"
    target.mkdir()
    tied = {"tie_word_embeddings": granite.get("tie_word_embeddings", False)}
    (target / "config.json").write_text(json.dumps({**fields, **own, **tied}))
    (target / "model.safetensors").symlink_to(directory / "model.safetensors")


def make_batch(config: Any, family: str) -> dict[str, torch.Tensor]:
    """Return the same random inputs and labels in every process."""
    generator = torch.Generator().manual_seed(1)
    if family == "ViT":
        pixels = torch.randn(ROWS, 3, 224, 224, generator=generator)
        return {"pixel_values": pixels, "labels": torch.arange(ROWS) % config.num_labels}
    ids = torch.randint(5, config.vocab_size - 1, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    if family in ("Bert", "Roberta", "Longformer"):  # 15 % of the tokens, as in pretraining
        labels[torch.rand(ids.shape, generator=generator) > 0.15] = -100
    if family == "T5":
        labels = ids[:, : LENGTH // 2].contiguous()
    return {"input_ids": ids, "labels": labels}


def build(directory: str, family: str, side: str, precision: str) -> Callable[[], float]:
    """Return a function that runs forward and backward.

    Args:
        directory: directory of the weights.
        family: key of CASES.
        side: "bmforge" or "transformers"; " compiled" is appended for `torch.compile`.
        precision: fp32 or bf16.
    """
    if side.startswith("bmforge"):
        source = f"{directory}/minicpm" if family == "MiniCPM" else directory
        model: Any = AutoModel.from_pretrained(source)
    else:
        model = getattr(transformers, CASES[family][0]).from_pretrained(directory)
    if precision == "bf16":
        model = model.bfloat16()
    model.train()
    batch = make_batch(model.config, family)
    if precision == "bf16":
        batch = {n: t.bfloat16() if t.is_floating_point() else t for n, t in batch.items()}
    run = torch.compile(model) if side.endswith("compiled") else model

    def step() -> float:
        loss = run(**batch).loss
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.item()

    return step


def compare(family: str, arguments: argparse.Namespace) -> list[tuple[str, float, list[str]]]:
    """Return (kind, ratio, table row) of a family: eager, and compiled with `--compiled`."""
    kinds = ["", " compiled"] if arguments.compiled else [""]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        save_peer(family, directory)
        contenders = {}
        for side in (f"{side}{kind}" for kind in kinds for side in ("bmforge", "transformers")):
            options = (directory, family, side, arguments.precision)
            tuned = side.startswith("bmforge") or arguments.peer == "tuned"
            contenders[side] = Contender(build, arguments.threads, *options, tuned=tuned)
            stack.callback(contenders[side].close)
        first = {name: contender.step().loss for name, contender in contenders.items()}
        for contender in contenders.values():
            contender.step()
        steps = run_in_turns(contenders, arguments.rounds, arguments.budget_s)
    rows = []
    for kind in kinds:
        sides = f"bmforge{kind}", f"transformers{kind}"
        seconds = {side: [step.seconds for step in steps[side]] for side in sides}
        ratio = paired_ratio(seconds, *sides)
        medians = [f"{statistics.median(seconds[side]):.2f}" for side in sides]
        losses = [f"{first[side]:.4f}" for side in sides]
        rows.append((kind, ratio.median, [f"{family}{kind}", *medians, f"{ratio:.2f}", *losses]))
    return rows


def main() -> None:
    """Compare the families and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--budget-s", type=float, default=60.0, help="time of a family, s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--peer", choices=("as-used", "tuned"), default="as-used")
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    print(header(arguments.threads))
    results: dict[str, list[float]] = {}
    rows = []
    for family in arguments.families:
        for kind, ratio, row in compare(family, arguments):
            results.setdefault(kind or " eager", []).append(ratio)
            rows.append(row)
            print(f"# {' | '.join(row)}", file=sys.stderr, flush=True)
    columns = ["family", "bmforge, s", "transformers, s", "speed, bmforge / transformers"]
    columns += ["loss of bmforge", "loss of transformers"]
    print(f"\n{table(columns, rows)}\n")
    for kind, ratios in results.items():
        median, lowest = statistics.median(ratios), min(ratios)
        print(
            f"speed, bmforge / transformers, {kind.strip()}: median {median:.2f} (target {TARGET})"
        )
        print(f"lowest family: {lowest:.2f} (target 1.0)")


if __name__ == "__main__":
    main()
