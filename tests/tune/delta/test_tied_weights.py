"""Tied embeddings and heads with adapters: open, train, merge, save, and reopen elsewhere.

Also trained rows of single tokens (`trainable_token_indices`), which follow a tie, and adapters of
a base whose vocabulary was resized.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
import peft
import transformers as tf
from peft_cases import inputs_of, make_base, open_base

from bmforge.errors import BmforgeError, ConfigError
from bmforge.models import AutoModel, init_weights_, load_weights_
from bmforge.parallel import Layout, parallelize
from bmforge.testing import run_distributed
from bmforge.tune.delta import Lora, init_deltas_, load_delta, merge_deltas, unmerge_deltas

BASES = ("tied", "llama", "gpt2", "opt", "bert-mlm")
HEADS = {"bert-mlm": "mlm_head.decoder"}
OPTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"trainable_token_indices": [12, 7, 9]},
    "modules_to_save": {"modules_to_save": ["embed"]},
    "adapter on the embedding": {"targets": ["embed", "attn.q"]},
    "adapter on the head": {"targets": ["HEAD", "attn.q"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def logits_of(model: Any, base: str) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**inputs_of(base)).logits
    return logits


def train_(model: Any, base: str) -> None:
    """Move every trained parameter by a step of its gradient, so that each one matters."""
    inputs = inputs_of(base)
    model.train()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    with torch.no_grad():
        for name, parameter in trained:
            assert parameter.grad is not None, name
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


def attach(base: str, directory: Path, option: str, **more: Any) -> tuple[Any, Any]:
    model: Any = AutoModel.from_pretrained(directory, **more)
    options = dict(OPTIONS[option])
    options.setdefault("targets", ["attn.q"])
    head = HEADS.get(base, "lm_head")
    options["targets"] = [head if t == "HEAD" else t for t in options["targets"]]
    torch.manual_seed(5)
    return model, Lora(model, rank=3, alpha=6, **options)


def reopened(base: str, directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_base(base, directory)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("base", BASES)
def test_train_save_merge_and_reopen(base: str, option: str, folder: Path, tmp_path: Path) -> None:
    """The adapter in PEFT, and the merged model in transformers, have the logits of training."""
    directory = make_base(base, folder)
    model, delta = attach(base, directory, option)
    train_(model, base)
    want = logits_of(model, base)
    assert (want - logits_of(reopened(base, directory), base)).abs().max() > 1e-3
    delta.save(tmp_path / "adapter")
    ours: Any = AutoModel.from_pretrained(directory)
    load_delta(ours, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(ours, base), want, rtol=0, atol=0)
    if (base, option) == ("bert-mlm", "tokens"):
        # PEFT 0.21 drops the bias of a head with trained rows, so it is not given such a file.
        assert "BMFORGE" in (tmp_path / "adapter" / "adapter_config.json").read_text()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = peft.PeftModel.from_pretrained(reopened(base, directory), tmp_path / "adapter")
        torch.testing.assert_close(logits_of(theirs, base), want, rtol=1e-4, atol=2e-5)
    if "adapter on" in option and base != "llama":
        # A tied weight cannot hold the adapter of one of its layers.
        with pytest.raises(ConfigError, match="tie_word_embeddings=False"):
            delta.merge()
        return
    delta.merge()
    torch.testing.assert_close(logits_of(model, base), want, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        logits_of(reopened(base, tmp_path / "merged"), base), want, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("where", ["embed", "lm_head"])
def test_untied_merge(where: str, folder: Path, tmp_path: Path) -> None:
    """A tied model opened untied takes an adapter on either side, merged, and stays untied."""
    directory = make_base("tied", folder)
    model: Any = AutoModel.from_pretrained(directory, tie_word_embeddings=False)
    assert model.lm_head.weight is not model.embed.weight
    assert torch.equal(model.lm_head.weight, model.embed.weight)
    delta = Lora(model, [where], rank=3, alpha=6)
    train_(model, "tied")
    want = logits_of(model, "tied")
    delta.merge()
    torch.testing.assert_close(logits_of(model, "tied"), want, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "merged")
    theirs = reopened("tied", tmp_path / "merged")
    torch.testing.assert_close(logits_of(theirs, "tied"), want, rtol=1e-4, atol=1e-5)
    assert theirs.lm_head.weight is not theirs.model.embed_tokens.weight
    again = AutoModel.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(again, "tied"), want, rtol=1e-4, atol=1e-5)


def test_rows_of_tokens_train_only_these_rows(folder: Path) -> None:
    """The gradient of the rows is the embedding's and the head's; other rows stay the base's."""
    directory = make_base("tied", folder)
    model, delta = attach("tied", directory, "tokens")
    plain: Any = AutoModel.from_pretrained(directory)
    inputs = inputs_of("tied")
    for each in (model, plain):
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
    part = model.embed.default_tokens
    assert part.weight is model.lm_head.default_tokens.weight
    wanted = plain.embed.weight.grad[[12, 7, 9]]
    torch.testing.assert_close(part.weight.grad, wanted, rtol=1e-4, atol=1e-6)
    assert model.embed.weight.grad is None
    before = model.embed.weight.detach().clone()
    with torch.no_grad():
        part.weight.add_(0.5)
    delta.merge()
    changed = (model.embed.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [7, 9, 12]
    delta.unmerge()
    assert torch.equal(model.embed.weight, before)
    merge_deltas(model)
    unmerge_deltas(model)
    assert torch.equal(model.embed.weight, before)


def test_rows_of_tokens_in_another_library(folder: Path) -> None:
    """transformers' own modules take them too, with the logits of PEFT."""
    directory = make_base("tied", folder)
    model = open_base("tied", directory)
    Lora(model, rank=3, trainable_token_indices=[12, 7, 9])
    rows = model.model.embed_tokens.default_tokens.weight
    with torch.no_grad():
        rows.add_(0.3)
        table = open_base("tied", directory)
        table.model.embed_tokens.weight[[12, 7, 9]] += 0.3
    got, want = logits_of(model, "tied"), logits_of(table, "tied")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "indices", [[3, 3], [64], [-1], [True], "3", {"attn.q": [3]}, {"embed": [3], "lm_head": [4]}]
)
def test_wrong_indices_are_refused(indices: Any, folder: Path) -> None:
    model: Any = AutoModel.from_pretrained(make_base("tied", folder))
    before = {name for name, _ in model.named_modules()}
    with pytest.raises(ConfigError, match="trainable_token_indices"):
        Lora(model, rank=2, trainable_token_indices=indices)
    assert {name for name, _ in model.named_modules()} == before


def test_a_model_saved_with_its_rows_opens_again(folder: Path, tmp_path: Path) -> None:
    model, _ = attach("tied", make_base("tied", folder), "tokens")
    train_(model, "tied")
    model.save_pretrained(tmp_path / "whole")
    again = AutoModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(logits_of(again, "tied"), logits_of(model, "tied"))
    init_weights_(again)


@pytest.mark.parametrize("base", ["llama", "tied"])
def test_adapters_of_a_resized_base(base: str, folder: Path, tmp_path: Path) -> None:
    """PEFT writes a resized embedding into the adapter's file; it opens on a resized model."""
    directory = make_base(base, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        resized = reopened(base, directory)
        resized.resize_token_embeddings(72)
        config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
        theirs = peft.get_peft_model(resized, config).eval()
        theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    model: Any = AutoModel.from_pretrained(directory)
    with pytest.raises(BmforgeError, match="resize_token_embeddings"):
        load_delta(model, tmp_path / "theirs")
    model.resize_token_embeddings(72)
    load_delta(model, tmp_path / "theirs")
    ids = torch.tensor([[3, 70, 5, 71, 9]])
    with torch.no_grad():
        want, got = theirs(input_ids=ids).logits, model.eval()(input_ids=ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def test_tie_is_transformers_word() -> None:
    """The option's name is the field of transformers' config."""
    assert hasattr(tf.LlamaConfig(), "tie_word_embeddings")


def gradients(directory: Path, layout: Layout | None) -> dict[str, torch.Tensor] | str:
    """Return the gradients of an adapter with rows of tokens, or the text of a refusal."""
    model: Any
    model, files = AutoModel.describe_pretrained(directory)
    Lora(model, rank=3, trainable_token_indices=[12, 7, 9])
    if layout is not None:
        try:
            parallelize(model, layout)
        except ConfigError as error:
            return str(error)
    load_weights_(model, files)
    init_deltas_(model, seed=0)
    inputs = inputs_of("tied")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("base", ["llama", "tied"])
@pytest.mark.parametrize("layout", [Layout(zero=3), Layout(tp=2)], ids=["zero", "tp"])
def test_rows_of_tokens_on_layouts(base: str, layout: Layout, folder: Path) -> None:
    directory = make_base(base, folder)
    want = gradients(directory, None)
    assert isinstance(want, dict)
    assert want["embed.default_tokens.weight"].abs().max() > 0
    for got in run_distributed(gradients, 2, directory, layout):
        if isinstance(got, str):  # the rows of a head that is sharded over the vocabulary
            assert (base, layout.tp) == ("tied", 2)
            assert "lm_head" in got
            continue
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
