"""Transformers models sharded over two processes: loss and gradients of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bmforge.errors import ConfigError
from bmforge.infer import generate
from bmforge.models import AutoModel, LayoutRules, load_weights_
from bmforge.models.changes import Change
from bmforge.models.pack import quantize_
from bmforge.models.transformers.small_copy import build_small_copy
from bmforge.parallel import Layout, parallelize
from bmforge.parallel.check import plan_pipeline
from bmforge.testing import run_distributed
from bmforge.testing.foreign_inputs import find_example
from bmforge.testing.foreign_layouts import (
    compare_layout,
    compare_stages,
    default_config,
    random_rows,
    save_small_model,
)

pytest.importorskip("transformers")
modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")

CAUSAL_TYPES = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYOUTS = {
    "zero=3": Layout(zero=3),
    "tp=2": Layout(tp=2),
    "pp=2": Layout(pp=2),
    "ep=2": Layout(zero=3, ep=2),
}
# Fused experts; norms around every part; a hybrid with recurrent layers; unshifted labels. Like
# Llama; latent attention; fused projections; learned positions; interleaved gates with biases;
# experts without a gate. BERT and Bamba have no plan in transformers, and Bamba's mixer reads the
# weight of its convolution.
HELD = {
    "zero=3": ("glm4_moe", "gemma2", "falcon_h1", "bart"),
    "tp=2": (
        "mistral", "gemma2", "glm4_moe", "deepseek_v3", "phi3", "bert", "bamba", "gpt2", "falcon",
    ),
    "pp=2": ("gemma2", "gpt2", "falcon_h1", "glm4_moe", "bart"),
    "ep=2": ("glm4_moe", "gpt_oss", "mixtral", "nemotron_h"),
}  # fmt: skip
CASES = [(layout, kind) for layout, kinds in HELD.items() for kind in kinds]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_gradients_are_those_of_one_process(layout: str, kind: str, tmp_path: Path) -> None:
    save_small_model(kind, tmp_path)
    assert compare_layout(tmp_path, LAYOUTS[layout]) == ""


# Column and row shards; a shared rotary key; gathered columns of a plan, and without a plan.
@pytest.mark.parametrize("kind", ["mistral", "deepseek_v3", "phi3", "bamba", "gpt2"])
def test_adapters_are_sharded_like_their_layers(kind: str, tmp_path: Path) -> None:
    save_small_model(kind, tmp_path)
    assert compare_layout(tmp_path, Layout(tp=2), adapter=True) == ""


@pytest.mark.parametrize("kind", ["mistral", "bamba"])
def test_adapters_on_int8_rows(kind: str, tmp_path: Path) -> None:
    """The base model has int8 rows, sharded by a plan or by outputs."""
    save_small_model(kind, tmp_path / "plain")
    model = AutoModel.from_pretrained(tmp_path / "plain", backend="transformers")
    model.change_(Change("int8", tuple(model.called_linear())))
    model.save_pretrained(tmp_path / "int8")
    assert compare_layout(tmp_path / "int8", Layout(tp=2), adapter=True) == ""


def save_running_model(kind: str, directory: Path) -> None:
    """Save a small model; skip the test if transformers alone cannot run it, or bmforge refuses it.

    Any other error of bmforge fails the test.
    """
    try:
        model = build_small_copy(default_config(kind), "language_model")
        model(**random_rows()).loss.backward()
    except Exception as error:  # any code of transformers may fail at small sizes
        pytest.skip(f"transformers cannot train a small model: {error}")
    model.save_pretrained(directory)
    try:
        AutoModel.from_pretrained(directory, backend="transformers")
    except ConfigError as error:
        pytest.skip(f"bmforge refuses the model: {error}")


@pytest.mark.long
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"pp=2"}))
@pytest.mark.parametrize("kind", sorted(CAUSAL_TYPES))
def test_every_layout_holds_or_is_refused(kind: str, layout: str, tmp_path: Path) -> None:
    """No architecture computes wrong gradients: what cannot be sharded says so."""
    save_running_model(kind, tmp_path)
    reason = compare_layout(tmp_path, LAYOUTS[layout])
    assert reason == "" or layout in reason


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(CAUSAL_TYPES))
def test_every_stack_is_cut_or_refused(kind: str, tmp_path: Path) -> None:
    """No architecture computes wrong gradients in two stages."""
    save_running_model(kind, tmp_path)
    compare_stages(tmp_path)


def run_pipeline(directory: Path) -> tuple[Tensor, Tensor]:
    """Return the logits and a reply of a model in two stages."""
    model, files = AutoModel.describe_pretrained(directory, backend="transformers")
    parallelize(model, Layout(pp=2))
    load_weights_(model, files)
    ids = random_rows()["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return logits, generate(model, ids, max_new_tokens=3, do_sample=False)


def test_calls_of_a_pipelined_model(tmp_path: Path) -> None:
    """A plain call and generation have the results of one process, on every rank."""
    save_small_model("gemma2", tmp_path)
    plain, ids = AutoModel.from_pretrained(tmp_path, backend="transformers"), random_rows()
    expected = plain(ids["input_ids"]).logits.detach()
    reply = generate(plain, ids["input_ids"], max_new_tokens=3, do_sample=False)
    for logits, got in run_distributed(run_pipeline, 2, tmp_path):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(got, reply)


def test_experts_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    save_small_model("gemma2", tmp_path)
    message = compare_layout(tmp_path, Layout(zero=3, ep=2))
    assert "TransformersModel has no experts" in message


def test_packed_layers_are_not_sharded(tmp_path: Path) -> None:
    """The message names the reason, and a format that can be sharded."""
    save_small_model("mistral", tmp_path / "plain")
    model = AutoModel.from_pretrained(tmp_path / "plain", backend="transformers")
    quantize_(model, "int8").save_pretrained(tmp_path / "int8")
    message = compare_layout(tmp_path / "int8", Layout(tp=2), adapter=True)
    assert "store these layers as int8 rows" in message


# Patches of images; sound; a list of experts, of which each process calls others.
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("qwen2_vl", "image_text_to_text"),
        ("whisper", "speech_to_text"),
        ("switch_transformers", "sequence_to_sequence"),
    ],
)
def test_other_heads_on_sharded_weights(kind: str, head: str, tmp_path: Path) -> None:
    plain = build_small_copy(default_config(kind), head)
    plain.save_pretrained(tmp_path)
    batch = find_example(plain, head).inputs
    assert compare_layout(tmp_path, Layout(zero=3), batch=batch) == ""


def test_an_architecture_that_cannot_be_cut_is_refused() -> None:
    """The message states what the test of the small copy found."""
    problems: list[str] = []
    rules = LayoutRules(pipeline_refusal="two tensors pass between its blocks")
    assert plan_pipeline(torch.nn.Linear(1, 1), Layout(pp=2), rules, problems) == (None, ())
    assert problems == [
        "pp=2: Linear cannot be split into stages: two tensors pass between its blocks"
    ]
