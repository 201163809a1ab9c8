"""BMTrain, ModelCenter, OpenPrompt and OpenDelta in one program, against plain PyTorch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import four_tools_program as program
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmforge.parallel import shutdown_distributed
from bmforge.testing import assert_close, run_distributed

NOISE = ["bad", "good", "wonderful", "great", "film"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *NOISE, "it", "was", "dull", "bright"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG = {
    "vocab_size": len(WORDS), "type_size": 2, "dim_model": 32, "num_heads": 4, "dim_head": 8,
    "dim_ff": 64, "num_layers": 2, "position_size": 64, "half": False,
}  # fmt: skip


def plain_bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        vocab_size=len(WORDS), num_attention_heads=4, max_position_embeddings=64, **SIZES, **off
    )
    torch.manual_seed(0)
    model = BertForMaskedLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def model_center_tensors(model: Any) -> dict[str, Tensor]:
    """Rename BERT's tensors as ModelCenter's converters do; an unused decoder is random."""
    state, tensors = model.state_dict(), {}
    blocks, last = "bert.encoder.layer", SIZES["num_hidden_layers"]
    pairs = {
        "input_embedding": "bert.embeddings.word_embeddings",
        "position_embedding": "bert.embeddings.position_embeddings",
        "token_type_embedding": "bert.embeddings.token_type_embeddings",
        "encoder.output_layernorm": f"{blocks}.{last - 1}.output.LayerNorm",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    }
    for i in range(last):
        old, attention = f"encoder.layers.{i}", f"{blocks}.{i}.attention"
        before = f"{blocks}.{i - 1}.output.LayerNorm" if i else "bert.embeddings.LayerNorm"
        pairs |= {
            f"{old}.self_att.layernorm_before_attention": before,
            f"{old}.self_att.self_attention.project_q": f"{attention}.self.query",
            f"{old}.self_att.self_attention.project_k": f"{attention}.self.key",
            f"{old}.self_att.self_attention.project_v": f"{attention}.self.value",
            f"{old}.self_att.self_attention.attention_out": f"{attention}.output.dense",
            f"{old}.ffn.layernorm_before_ffn": f"{attention}.output.LayerNorm",
            f"{old}.ffn.ffn.w_in.w": f"{blocks}.{i}.intermediate.dense",
            f"{old}.ffn.ffn.w_out": f"{blocks}.{i}.output.dense",
        }
    for old, name in pairs.items():
        parts = ("weight", "bias") if f"{name}.bias" in state else ("weight",)
        tensors |= {f"{old}.{part}": state[f"{name}.{part}"].clone() for part in parts}
    tensors["lm_head.decoder.bias"] = state["cls.predictions.bias"].clone()
    tensors["lm_head.decoder.weight"] = torch.randn(len(WORDS), 32)
    pooler = {"pooler.dense.weight": torch.randn(32, 32), "pooler.dense.bias": torch.randn(32)}
    return tensors | pooler


def write_inputs(folder: Path) -> None:
    """Write a model in both forms, and sentences whose last word decides their label."""
    model, draw = plain_bert(), random.Random(0)
    model.save_pretrained(folder / "hf")
    (folder / "hf" / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "mc").mkdir()
    (folder / "mc" / "config.json").write_text(json.dumps(CONFIG))
    torch.save(model_center_tensors(model), folder / "mc" / "pytorch_model.pt")
    for split, count in (("train", 32), ("dev", 16)):
        rows = []
        for _ in range(count):
            label, length = draw.randrange(2), draw.randrange(1, 6)
            text = " ".join([*draw.choices(NOISE, k=length), ("dull", "bright")[label]])
            rows.append(json.dumps({"text": text, "label": label}) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(rows))


class Plain(nn.Module):
    """The same model, written with transformers' BERT and torch alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.bert = plain_bert().requires_grad_(False)
        saved = torch.load(folder / "start" / "pytorch_model.bin", weights_only=True)
        self.names = list(saved)
        self.lora = nn.ParameterList(nn.Parameter(saved[name]) for name in self.names)
        blocks = torch.load(folder / "blocks.pt", weights_only=True)
        self.block_names = list(blocks)
        self.heads = nn.ParameterList([nn.Parameter(torch.zeros(2))])
        self.heads.extend(nn.Parameter(value) for value in blocks.values())
        for i, layer in enumerate(self.bert.bert.encoder.layer):
            for letter, part in (("q", "query"), ("v", "value")):
                linear = getattr(layer.attention.self, part)
                linear.register_forward_hook(self.low_rank(i, letter))

    def low_rank(self, layer: int, letter: str) -> Any:
        old = f"encoder.layers.{layer}.self_att.self_attention.project_{letter}.lora.lora_"
        down, up = (self.lora[self.names.index(old + part)] for part in "AB")
        return lambda module, inputs, out: out + 16 / 4 * (inputs[0] @ down.T @ up.T)

    def forward(self, texts: list[str]) -> Tensor:
        rows = [f"[CLS] {text} it was [MASK] [SEP]".split() for text in texts]
        ids = torch.zeros(len(rows), 32, dtype=torch.long)
        for row, words in zip(ids, rows, strict=True):
            row[: len(words)] = torch.tensor([WORDS.index(word) for word in words])
        logits = self.bert(ids, (ids > 0).long()).logits[ids == WORDS.index("[MASK]")]
        words = [WORDS.index(word) for word in ("bad", "good", "wonderful", "great")]
        scores = logits[:, words].log_softmax(-1)
        out = torch.stack([scores[:, 0], scores[:, 1:].mean(-1)], -1) + self.heads[0]
        blocks = dict(zip(self.block_names, self.heads[1:], strict=True))
        for n in (0, 1):
            product = F.linear(out, blocks[f"{n}.dense.weight"], blocks[f"{n}.dense.bias"])
            out = out + 0.1 * blocks[f"{n}.scale"] * product.tanh()
        return out


def read(folder: Path, split: str) -> tuple[list[str], Tensor]:
    rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
    return [row["text"] for row in rows], torch.tensor([row["label"] for row in rows])


def plain_training(folder: Path) -> tuple[Plain, list[float], list[float], float]:
    """Train on the whole batch of 8 in each step: AdamW with Noam's rate, and SGD."""
    model, (texts, labels) = Plain(folder), read(folder, "train")
    adam = torch.optim.AdamW(model.lora.parameters(), weight_decay=1e-2)
    sgd = torch.optim.SGD(model.heads.parameters(), lr=0.1)
    losses, norms, step = [], [], 0
    for _ in range(3):
        for at in range(0, len(texts), 8):
            adam.param_groups[0]["lr"] = 0.02 * (step / 4**1.5 if step < 4 else step**-0.5)
            loss = F.cross_entropy(model(texts[at : at + 8]), labels[at : at + 8])
            model.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.lora.parameters(), 1.0)
            adam.step()
            sgd.step()
            losses.append(loss.item())
            norms.append(norm.item())
            step += 1
    texts, labels = read(folder, "dev")
    return model, losses, norms, (model(texts).argmax(-1) == labels).float().mean().item()


def run_program(world: int, folder: str) -> list[Any]:
    if world > 1:
        return run_distributed(program.main, world, folder)
    try:
        return [program.main(folder)]
    finally:
        shutdown_distributed()


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_numbers_are_those_of_plain_pytorch(world: int, tmp_path: Path) -> None:
    """Losses, norms of gradients, and all trained weights, which SGD moves by gradients alone."""
    write_inputs(tmp_path)
    results = run_program(world, str(tmp_path))
    model, want, want_norms, accuracy = plain_training(tmp_path)
    for losses, norms, before, after in results:
        assert losses == pytest.approx(want, rel=1e-5, abs=1e-6)
        assert norms == pytest.approx(want_norms, rel=1e-4, abs=1e-6)
        assert before == after == pytest.approx(accuracy)
    assert len({round(loss, 4) for loss in want}) > 6
    saved = torch.load(tmp_path / "delta" / "pytorch_model.bin", weights_only=True)
    for name, parameter in zip(model.names, model.lora, strict=True):
        assert_close(saved[name], parameter.detach(), rtol=1e-5, atol=1e-5)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    names = ["bias", *(f"blocks.{name}" for name in model.block_names)]
    for name, parameter in zip(names, model.heads, strict=True):
        assert_close(saved[name], parameter.detach(), rtol=1e-5, atol=1e-6)
