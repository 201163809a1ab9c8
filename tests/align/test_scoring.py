"""Log-probabilities of tokens by whole models: against logits, and on layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bmforge.align.scoring import score_tokens
from bmforge.models import (
    GPT2,
    T5,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
    init_weights_,
)
from bmforge.parallel import (
    Layout,
    data_parallel_rank,
    data_parallel_size,
    gradient_ranks,
    init_distributed,
    mesh_of,
    parallelize,
    run_step,
    sum_over_axes,
)
from bmforge.testing import assert_close, run_distributed

VOCAB = 29
COMMON = {"vocab_size": VOCAB, "hidden_size": 20, "num_layers": 2, "num_heads": 2}
BUILD: dict[str, Any] = {
    "gpt2": (GPT2, GPT2Config(**COMMON, max_seq_len=16)),
    "llama": (
        Llama,
        LlamaConfig(**COMMON, intermediate_size=27, num_kv_heads=1, tie_word_embeddings=True),
    ),
    "mixtral": (
        Mixtral,
        MixtralConfig(**COMMON, intermediate_size=24, num_kv_heads=1, num_experts=4),
    ),
    "t5": (T5, T5Config(**COMMON, intermediate_size=27)),
}


def make_model(family: str) -> Any:
    """A model in float64 with random weights."""
    kind, config = BUILD[family]
    model = kind.from_config(config, dtype=torch.float64)
    init_weights_(model, seed=1)
    return model.eval()


def make_batch(rows: int = 4, width: int = 10) -> tuple[Tensor, Tensor]:
    """Random ids, and labels of the last tokens of every row."""
    ids = torch.randint(4, VOCAB, (rows, width), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row + 2] = -100
    labels[0, -2:] = -100
    return ids, labels


@pytest.mark.parametrize("family", BUILD)
def test_equals_logits(family: str) -> None:
    """Scores are those of the logits, one position before each label, with their gradients."""
    model, (ids, labels) = make_model(family), make_batch()
    inputs: dict[str, Tensor] = {"input_ids": ids}
    shift = 1
    if family == "t5":
        inputs["decoder_input_ids"], shift = ids.roll(1, 1), 0
    weights = torch.randn(labels.shape, generator=torch.Generator().manual_seed(3)).double()
    results = []
    for is_plain in (True, False):
        model.zero_grad()
        if is_plain:
            logprobs = (model(**inputs).logits / 0.7).log_softmax(-1)
            if shift:
                logprobs = torch.cat((logprobs[:, :1], logprobs[:, :-1]), 1)
            kept = labels != -100
            picked = logprobs.gather(2, labels.clamp(min=0)[..., None])[..., 0].where(kept, 0)
            entropy = -(logprobs.exp() * logprobs).sum(-1).where(kept, 0)
            best = (logprobs.argmax(-1) == labels).double()
        else:
            scores = score_tokens(model, inputs, labels, temperature=0.7, with_entropy=True)
            assert scores is not None
            picked, entropy, best = scores
        ((picked + 0.3 * entropy) * weights).sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results.append({"lp": picked, "entropy": entropy, "best": best, **grads})
    assert_close(results[1], results[0])


def test_first_token_has_no_score() -> None:
    """Nothing predicts the first token of a row, so its label scores 0."""
    ids, _ = make_batch()
    scores = score_tokens(make_model("gpt2"), {"input_ids": ids}, ids)
    assert scores is not None
    assert (scores.logprobs[:, 0] == 0).all()
    assert (scores.logprobs[:, 1:] < 0).all()


@pytest.mark.parametrize("extra", [1, 5])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_changes_no_bit(family: str, extra: int) -> None:
    """Padding on the right, whatever its token, changes no bit of a score in fp32."""
    model, (ids, labels) = make_model(family).float(), make_batch()
    wide = torch.nn.functional.pad(ids, (0, extra), value=0)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, extra))
    wide_labels = torch.nn.functional.pad(labels, (0, extra), value=-100)
    with torch.no_grad():
        short = score_tokens(model, {"input_ids": ids}, labels)
        for filling in (0, 7):
            padded = wide.masked_fill(mask == 0, filling)
            for given in ({}, {"attention_mask": mask}):
                long = score_tokens(model, {"input_ids": padded, **given}, wide_labels)
                assert short is not None
                assert long is not None
                assert_close(long.logprobs[:, : ids.shape[1]], short.logprobs, rtol=0, atol=2e-6)
                assert (long.logprobs[:, ids.shape[1] :] == 0).all()


def score_step(family: str, layout: Layout, micro: int) -> dict[str, Tensor]:
    """Loss and gradients of a nonlinear function of row sums, on this process's rows."""
    init_distributed()
    kind, config = BUILD[family]
    model = kind.from_config(config, device="meta", dtype=torch.float64)
    parallelize(model, layout)
    init_weights_(model, seed=1)
    mesh = mesh_of(model)
    ids, labels = make_batch(rows=8)
    size, rank = data_parallel_size(mesh), data_parallel_rank(mesh)
    ids, labels = (t.chunk(size)[rank] for t in (ids, labels))
    batches = [
        {"input_ids": part, "labels": goal}
        for part, goal in zip(ids.chunk(micro), labels.chunk(micro), strict=True)
    ]

    def loss_of(batch: Any) -> Any:
        scores = score_tokens(
            model, {"input_ids": batch["input_ids"]}, batch["labels"], with_entropy=True
        )
        if scores is None:
            return None
        rows = scores.logprobs.sum(1) + 0.1 * scores.entropy.sum(1)
        return torch.nn.functional.softplus(rows / 4).sum() / (8 / size)

    losses = run_step(model, loss_of, batches)
    loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
    total = sum_over_axes(loss, mesh, "dp_replicate", "dp_shard", "cp", "pp")
    out = {"loss": total / gradient_ranks(mesh)}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            out[f"grad/{name}"] = whole.clone()
    return out


LAYOUTS = [
    pytest.param(2, Layout(zero=3), 1, id="zero3"),
    pytest.param(2, Layout(tp=2), 1, id="tp"),
    pytest.param(2, Layout(pp=2), 2, id="pp"),
    pytest.param(2, Layout(cp=2), 1, id="cp"),
    pytest.param(2, Layout(tp=2, sequence_parallel=True), 1, id="sequence"),
    pytest.param(2, Layout(zero=2), 2, id="zero2-acc", marks=pytest.mark.long),
    pytest.param(4, Layout(tp=2, cp=2), 1, id="tp-cp", marks=pytest.mark.long),
    pytest.param(4, Layout(cp=2, pp=2), 2, id="cp-pp", marks=pytest.mark.long),
    pytest.param(2, Layout(cp=2, cp_method="ring", zero=3), 2, id="ring", marks=pytest.mark.long),
]


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
@pytest.mark.parametrize(("world", "layout", "micro"), LAYOUTS)
def test_layouts_equal_one_process(family: str, world: int, layout: Layout, micro: int) -> None:
    """A loss of row sums, in which every token counts, has one value and gradient everywhere."""
    want = run_distributed(score_step, 1, family, Layout(), 1)[0]
    for got in run_distributed(score_step, world, family, layout, micro):
        assert_close(got, {name: want[name] for name in got})
