"""`adapter_names` as an argument of a model and of `generate`; soft prompts in generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import generate
from bmforge.memory.recompute import apply_recompute_
from bmforge.models import GPT2, T5, GPT2Config, Llama, LlamaConfig, T5Config, init_weights_
from bmforge.parallel import Layout, parallelize, run_step
from bmforge.testing import assert_close, run_distributed
from bmforge.tune.delta import Adapter, Delta, Lora, Prefix, SoftPrompt, list_deltas, use_deltas

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
IDS = torch.arange(24).view(3, 8) % 64


def stir_(delta: Delta, seed: int) -> Delta:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in delta.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.5)
    return delta


def llama() -> Llama:
    config = LlamaConfig(**SIZES, intermediate_size=48, num_kv_heads=2, max_seq_len=64)
    return Llama.from_config(config).eval()


def t5() -> T5:
    return T5.from_config(T5Config(**SIZES, intermediate_size=48)).eval()


def with_two(model: Any) -> Any:
    stir_(Lora(model, ["attn.q", "attn.v", "mlp.down"], name="a", rank=2), 1)
    stir_(Adapter(model, name="b", width=4), 2)
    return model


def alone(model: Any, rows: list[str | None], run: Any) -> torch.Tensor:
    """Return each row of what a model makes with its delta alone."""
    found = []
    for number, name in enumerate(rows):
        use_deltas(model, [] if name is None else [name])
        found.append(run()[number])
    use_deltas(model, ["a", "b"])
    return torch.stack(found)


@pytest.mark.parametrize("recomputes", [False, True])
def test_an_argument_of_a_call(recomputes: bool) -> None:
    """Logits are those of each row's delta alone, gradients too; the next call has all again."""
    model = with_two(llama())
    rows: list[str | None] = ["b", None, "a"]
    both = model(IDS).logits
    want = alone(model, rows, lambda: model(IDS).logits)
    grads = {}
    for number, name in ((0, "b"), (2, "a")):
        use_deltas(model, [name])
        model.zero_grad()
        model(IDS).logits[number].square().sum().backward()
        grads |= {n: p.grad for n, p in model.named_parameters() if f".{name}." in n}
    use_deltas(model, ["a", "b"])
    model.zero_grad()
    if recomputes:
        apply_recompute_(model.layers.values())
    out = model(IDS, adapter_names=rows).logits
    assert_close(out, want, rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert_close({name: parameter.grad}, {name: grads[name]}, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(IDS).logits, both)
    with pytest.raises(ShapeError, match="adapter_names has 2 entries, but the batch has 3"):
        model(IDS, adapter_names=["a", "b"])
    with pytest.raises(ConfigError, match="no adapter 'c'"):
        model(IDS, adapter_names=["a", "b", "c"])
    assert torch.equal(model(IDS).logits, both)
    assert torch.equal(copy.deepcopy(model)(IDS, adapter_names=rows).logits, out)


def test_recomputing_has_the_choice_of_its_call() -> None:
    """Also where another call, or none, chose since."""
    found = {}
    for recomputes in (False, True):
        model: Any = with_two(llama())
        if recomputes:
            apply_recompute_(model.layers.values())
        losses = [model(IDS, adapter_names=rows).logits.square().sum() for rows in CHOICES]
        plain = model(IDS).logits
        sum(losses).backward()
        found[recomputes] = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert torch.equal(model(IDS).logits, plain)
    assert_close(found[True], found[False], rtol=1e-6, atol=1e-6)


CHOICES: list[list[str | None]] = [["a", "b", None], ["b", None, "a"], [None, None, "b"]]


def train_rows(layout: Layout, recomputes: bool, family: str) -> dict[str, torch.Tensor]:
    """Losses and gradients, micro-batches choosing each for itself; logits without gradients."""
    base: Any = llama() if family == "llama" else t5()
    sizes = base.config
    model: Any = type(base).from_config(sizes, device="meta", dtype=torch.float64)
    Lora(model, ["attn.q", "attn.v", "mlp.down"], name="a", rank=2)
    Adapter(model, name="b", width=4)
    parallelize(model, layout, recompute=recomputes)
    init_weights_(model, 0)
    for seed, delta in enumerate(list_deltas(model).values()):
        delta.init_(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view(parameter.shape))
    batches = [
        {"input_ids": IDS + n, "labels": IDS + n, "number": torch.tensor(n)} for n in range(3)
    ]

    def run(batch: Any) -> Any:
        told = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        return model(**told, adapter_names=CHOICES[int(batch["number"])]).loss

    losses = run_step(model, run, batches)
    found = {f"loss {number}": loss for number, loss in enumerate(losses)}
    found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        told = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if family == "t5" else {})
        found["logits"] = model(**told, adapter_names=CHOICES[0]).logits
        found["all"] = model(**told).logits
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_pipeline_takes_them(recomputes: bool, family: str) -> None:
    """Each micro-batch with its own, as in one process."""
    (want,) = run_distributed(train_rows, 1, Layout(), False, family)
    parts = run_distributed(train_rows, 2, Layout(pp=2), recomputes, family)
    got = {name: tensor for part in parts for name, tensor in part.items()}
    assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert not torch.equal(want["logits"], want["all"])


@pytest.mark.parametrize("make", [llama, t5])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_what_each_row_writes(make: Any, num_beams: int) -> None:
    """Every prompt is continued by its own delta, with beams too."""
    model = with_two(make())
    rows: list[str | None] = ["a", None, "b"]
    told: dict[str, Any] = {"max_new_tokens": 6, "num_beams": num_beams, "eos_token_id": 63}
    want = alone(model, rows, lambda: generate(model, IDS, **told, min_new_tokens=6))
    got = generate(model, IDS, adapter_names=rows, **told, min_new_tokens=6)
    assert torch.equal(got, want)
    assert len({tuple(row) for row in want[:, -6:].tolist()}) > 1
    with pytest.raises(ConfigError, match="no adapter 'c'"):
        generate(model, IDS, adapter_names=["a", "c", "b"])
    bare = make()
    none = generate(bare, IDS, adapter_names=[None, None, None], **told)
    assert torch.equal(none, generate(bare, IDS, **told))


def test_a_prompt_stands_in_front_of_what_is_written() -> None:
    """As the rows put into the embeddings by hand; what comes back has them no more."""
    model = llama()
    prompt = stir_(SoftPrompt(model, length=3), 1)
    table = prompt.held[0].part.weight.detach()
    text = IDS[:, :5].clone()
    got = generate(model, text, max_new_tokens=4, do_sample=False)
    assert torch.equal(got[:, :5], text)
    prompt.detach()
    ids = text
    for _ in range(4):
        rows = torch.cat((table.expand(3, -1, -1), model.embed(ids)), 1)
        ids = torch.cat((ids, model(inputs_embeds=rows).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(got, ids)
    prompt.attach()
    padded = torch.cat((torch.zeros(3, 2, dtype=torch.long), text), 1)
    mask = (torch.arange(7) >= 2).long().expand(3, -1)
    again = generate(model, padded, mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(again[:, 2:], got)


def test_a_prompt_is_in_front_of_the_source() -> None:
    model = t5()
    prompt = stir_(SoftPrompt(model, length=3), 1)
    before = generate(model, IDS, max_new_tokens=4)
    rows = torch.arange(64, 67).expand(3, -1)
    assert torch.equal(generate(model, torch.cat((rows, IDS), 1), max_new_tokens=4), before)
    use_deltas(model, [])
    plain = generate(model, IDS, max_new_tokens=4)
    prompt.detach()
    assert torch.equal(generate(model, IDS, max_new_tokens=4), plain)


def test_a_prompt_needs_room() -> None:
    config = GPT2Config(**SIZES, max_seq_len=16)
    model = GPT2.from_config(config).eval()
    SoftPrompt(model, length=6)
    with pytest.raises(ConfigError, match="14 prompt tokens"):
        generate(model, IDS, max_new_tokens=4)
    Prefix(model, name="front", length=2, shift_positions=False)
    assert generate(model, IDS, max_new_tokens=2).shape == (3, 10)


@pytest.mark.long
def test_a_model_with_deltas_is_one_graph() -> None:
    """Compiled without breaks it computes the same, the hook that reads rows in front of it."""
    torch.compiler.reset()
    model = with_two(llama())
    want = model(IDS).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(IDS).logits, want)
    torch.compiler.reset()
