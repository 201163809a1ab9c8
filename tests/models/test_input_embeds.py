"""Input embeddings instead of token ids, compared with transformers and with the ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import TINY, build, family_of, make_inputs
from torch import Tensor

from bmforge.errors import ShapeError
from bmforge.nn.prompt import ExtraEmbeddings
from bmforge.testing import assert_close

READERS = [name for name in TINY if name != "vit"]
SEQ2SEQ = ["t5", "cpm2", "eva"]
TWINS = ["bert", "roberta", "longformer", "gpt2", "gptj", "opt", "llama", "qwen", "mixtral", "t5"]


def answer(out: Any) -> Tensor:
    found: Tensor = out.logits if out.logits is not None else out.last_hidden_state
    return found


@pytest.mark.parametrize("name", READERS)
def test_embeddings_of_ids_are_the_ids(name: str) -> None:
    """What the table returns for ids gives what the ids give, in results and in its gradient."""
    model, inputs = build(name), make_inputs(name)
    given = {k: v for k, v in inputs.items() if k == "input_ids"}
    if name in SEQ2SEQ:
        given["decoder_input_ids"] = inputs["decoder_input_ids"]
    want = answer(model(**inputs))
    embeds = {k.replace("input_ids", "inputs_embeds"): model.embed(v) for k, v in given.items()}
    got = answer(model(**embeds))
    assert_close(got, want)
    weight = model.embed.weight
    grads = [torch.autograd.grad(y.pow(2).sum(), weight, retain_graph=True)[0] for y in (got, want)]
    assert_close(*grads)


def test_one_text_of_two_can_be_embeddings() -> None:
    """Source and target are given each in its own form."""
    model, inputs = build("t5"), make_inputs("t5")
    ids, target = inputs["input_ids"], inputs["decoder_input_ids"]
    want = model(ids, decoder_input_ids=target).logits
    assert_close(model(inputs_embeds=model.embed(ids), decoder_input_ids=target).logits, want)
    assert_close(model(ids, decoder_inputs_embeds=model.embed(target)).logits, want)
    source = model.encode(ids)
    embeds = model.embed(target)
    assert_close(model(encoder_outputs=source, decoder_inputs_embeds=embeds).logits, want)


@pytest.mark.parametrize("name", TWINS)
def test_as_transformers_means_them(name: str, tmp_path: Path) -> None:
    """Logits and the gradient of the embeddings, with padding."""
    model = build(name, torch.float32)
    model.save_pretrained(tmp_path)
    architecture = model.config.to_hf()["architectures"][0]
    twin = getattr(transformers, architecture).from_pretrained(tmp_path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(4)
    width = model.embed.embedding_dim
    inputs = {"inputs_embeds": torch.randn(2, 9, width, generator=generator)}
    if name == "t5":
        inputs["decoder_inputs_embeds"] = torch.randn(2, 5, width, generator=generator)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, -2:] = 0
    grads = []
    logits = []
    for each in (model, twin):
        leaves = {k: v.clone().requires_grad_() for k, v in inputs.items()}
        out = each(**leaves, attention_mask=mask).logits
        out = out if name == "t5" else out * mask[..., None]
        out.pow(2).mean().backward()
        logits.append(out.detach())
        grads.append({k: v.grad for k, v in leaves.items()})
    assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", READERS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    """Both, neither, and another width."""
    model, inputs = build(name), make_inputs(name)
    embeds = model.embed(inputs["input_ids"])
    with pytest.raises(ShapeError, match="both were passed"):
        model(**inputs, inputs_embeds=embeds)
    with pytest.raises(ShapeError, match=r"input_ids[ ,]"):
        model()
    with pytest.raises(ShapeError, match="the shape of the token embeddings"):
        model(
            **{k: v for k, v in inputs.items() if k != "input_ids"}, inputs_embeds=embeds[..., 1:]
        )


def test_what_only_ids_say() -> None:
    """Where a question ends, where blanks are, where a text ends."""
    config = TINY["longformer"].replace(head="question_answering")
    model = family_of("longformer").from_config(config, dtype=torch.float64)
    embeds = model.embed(make_inputs("longformer")["input_ids"])
    with pytest.raises(ShapeError, match="global_attention_mask"):
        model(inputs_embeds=embeds)
    blanks = family_of("glm").from_config(
        TINY["glm"].replace(sop_token_id=3, mask_token_id=4), dtype=torch.float64
    )
    with pytest.raises(ShapeError, match="position_ids"):
        blanks(inputs_embeds=blanks.embed(make_inputs("glm")["input_ids"]))
    ends = family_of("t5").from_config(TINY["t5"].replace(head="sequence_classification"))
    embeds = ends.embed(make_inputs("t5")["input_ids"])
    with pytest.raises(ShapeError, match="needs input_ids"):
        ends(inputs_embeds=embeds, decoder_inputs_embeds=embeds)


@pytest.mark.parametrize("name", READERS)
def test_prompts_behind_the_vocabulary(name: str) -> None:
    """Ids from the table's rows on are the prompt's; without one and beyond it they are refused."""
    model, inputs = build(name), make_inputs(name)
    rows = model.embed.num_embeddings
    ids = inputs["input_ids"].clone()
    ids[:, :2] = torch.tensor([rows, rows + 1])
    with pytest.raises(ShapeError, match="vocab_size"):
        model(**(inputs | {"input_ids": ids}))
    model.embed.prompt = ExtraEmbeddings(2, model.embed.embedding_dim).double()
    torch.nn.init.normal_(model.embed.prompt.weight)
    embeds = model.embed(inputs["input_ids"])
    embeds = torch.cat((model.embed.prompt.weight.expand(2, -1, -1), embeds[:, 2:]), 1)
    rest = {k: v for k, v in inputs.items() if k != "input_ids"}
    got = answer(model(input_ids=ids, **rest))
    assert_close(got, answer(model(inputs_embeds=embeds, **rest)))
    got.sum().backward()
    assert model.embed.prompt.weight.grad.abs().sum() > 0
    with pytest.raises(ShapeError, match="vocab_size"):
        model(**(inputs | {"input_ids": ids + 2}))
