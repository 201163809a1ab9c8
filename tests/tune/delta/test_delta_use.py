"""Attaching, freezing, merging, switching, combining, choosing by row; and everything wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor, nn

from bmforge.errors import CheckpointError, ConfigError, ShapeError
from bmforge.models import (
    GPT2,
    T5,
    AutoModel,
    GPT2Config,
    Llama,
    LlamaConfig,
    T5Config,
    load_weights_,
)
from bmforge.models.changes import Change
from bmforge.models.quantize import quantize_
from bmforge.testing.tolerance import assert_close, assert_equal_trees
from bmforge.tune.delta import (
    IA3,
    Adapter,
    BitFit,
    Compacter,
    Delta,
    Lora,
    LowRankAdapter,
    ParallelAdapter,
    Prefix,
    SoftPrompt,
    combine_deltas,
    fingerprint_of,
    init_deltas_,
    list_deltas,
    load_delta,
    select_adapters,
    use_deltas,
)

IDS = torch.arange(2, 26).view(3, 8)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 32,
}
TYPES: dict[str, Callable[..., Delta]] = {
    "lora": Lora,
    "adapter": lambda m, **k: Adapter(m, width=4, **k),
    "low-rank": lambda m, **k: LowRankAdapter(m, reduction=4, rank=2, **k),
    "compacter": lambda m, **k: Compacter(m, reduction=4, **k),
    "parallel": lambda m, **k: ParallelAdapter(m, width=4, **k),
    "far parallel": lambda m, **k: ParallelAdapter(m, [("attn_norm", "attn")], width=4, **k),
    "bitfit": BitFit,
    "ia3": IA3,
    "prefix": lambda m, **k: Prefix(m, length=3, **k),
    "deep prefix": lambda m, **k: Prefix(m, length=3, inner=5, **k),
    "prompt": lambda m, **k: SoftPrompt(m, length=3, **k),
}
MERGED = ("lora", "ia3", "bitfit")


def gpt2(**fields: Any) -> GPT2:
    return GPT2.from_config(GPT2Config(**{**SIZES, **fields})).eval()


def llama() -> Llama:
    config = LlamaConfig(**SIZES, intermediate_size=48, num_kv_heads=2)
    return Llama.from_config(config).eval()


def stir_(delta: Delta, seed: int = 1, std: float = 0.2) -> Delta:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in delta.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=std)
    return delta


def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits[:, -ids.shape[1] :].detach()


@pytest.mark.parametrize("name", TYPES)
def test_starts_detaches_copies_saves(name: str, tmp_path: Path) -> None:
    model = gpt2()
    before, names = logits(model), list(model.state_dict())
    delta = TYPES[name](model)
    if "pr" not in name or name == "parallel":
        assert_close(logits(model), before)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in delta.named_parameters()}
    stir_(delta)
    changed = logits(model)
    assert not torch.allclose(changed, before)
    assert torch.equal(logits(copy.deepcopy(model)), changed)
    delta.save(tmp_path)
    delta.detach()
    assert torch.equal(logits(model), before)
    assert list(model.state_dict()) == names
    assert not model.config.changes
    delta.attach()
    assert torch.equal(logits(model), changed)
    again = gpt2()
    loaded = load_delta(again, tmp_path, name="other")
    assert type(loaded) is type(delta)
    assert_close(logits(again), changed, rtol=1e-6, atol=1e-7)
    assert fingerprint_of(again) == fingerprint_of(model) == fingerprint_of(gpt2().bfloat16())


def test_three_lines_are_enough() -> None:
    """From full tuning to a delta: an import, a line after building, a line to save."""
    program = """
    model = GPT2.from_config(GPT2Config(**SIZES))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    """
    changed = program.replace("**SIZES))", "**SIZES))\n    delta = Lora(model)")
    changed = "    from bmforge.tune.delta import Lora" + changed + "delta.save(folder)\n"
    added = set(changed.split("\n")) - set(program.split("\n"))
    assert len({line for line in added if line.strip()}) == 3


@pytest.mark.parametrize("name", MERGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_is_unmerged(name: str, dtype: torch.dtype) -> None:
    model = gpt2(tie_word_embeddings=False).to(dtype)
    exclude = {"exclude": ["lm_head"]} if name == "bitfit" else {}
    delta = stir_(TYPES[name](model, **exclude))
    assert {p.dtype for p in delta.parameters()} == {torch.float32}
    weights = {n: t.clone() for n, t in model.state_dict().items() if ".default." not in n}
    before = logits(model)
    delta.merge()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    assert_close(logits(model), before, **close)
    merged = model.state_dict()
    wide = copy.deepcopy(delta)
    assert wide.merged
    with pytest.raises(ConfigError, match="already merged"):
        delta.merge()
    assert fingerprint_of(model) != fingerprint_of(gpt2(tie_word_embeddings=False))
    assert set(merged) == set(weights)
    delta.unmerge()
    assert torch.equal(logits(model), before)
    delta.detach()
    assert_equal_trees(model.state_dict(), weights)


def test_half_weights_are_rounded_once() -> None:
    model = gpt2()
    wide, half = copy.deepcopy(model).bfloat16().float(), model.bfloat16()
    for one in (wide, half):
        stir_(Lora(one, ["attn.q"])).merge()
    want = wide.layers["0"].attn.q_proj.weight.bfloat16()
    assert torch.equal(half.layers["0"].attn.q_proj.weight, want)


def test_embedding_head_and_experts_of_lora() -> None:
    from bmforge.models import Mixtral, MixtralConfig

    config = MixtralConfig(**SIZES, intermediate_size=48, num_kv_heads=2)
    model = Mixtral.from_config(config).eval()
    delta = stir_(Lora(model, ["embed", "lm_head", "mlp.down", "attn.o"], rank=2), std=0.05)
    before, loss = logits(model), model(IDS, labels=IDS).loss
    delta.merge()
    assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    assert_close(model(IDS, labels=IDS).loss, loss, rtol=1e-5, atol=1e-6)


def test_several_stack_switch_and_weigh() -> None:
    model = llama()
    start = logits(model)
    first = stir_(Lora(model, name="first"))
    one = logits(model)
    second = stir_(Adapter(model, name="second", width=4), 2)
    stir_(IA3(model, name="third"), 3)
    both = logits(model)
    assert list(list_deltas(model)) == ["first", "second", "third"]
    use_deltas(model, ["first"])
    assert torch.equal(logits(model), one)
    use_deltas(model, [])
    assert torch.equal(logits(model), start)
    use_deltas(model, ["first", "second", "third"])
    assert torch.equal(logits(model), both)
    use_deltas(model, ["first"], {"first": 0.5})
    half = logits(model)
    plain = llama()
    other = Lora(plain, alpha=8.0)
    for mine, theirs in zip(other.parameters(), first.parameters(), strict=True):
        mine.data.copy_(theirs)
    assert_close(logits(plain), half, rtol=1e-5, atol=1e-6)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for d in list_deltas(model).values() for n in d.names()}
    second.requires_grad_(False)
    assert not any(p.requires_grad for p in second.parameters())
    with pytest.raises(ConfigError, match="Did you mean 'first'"):
        use_deltas(model, ["frist"])


def test_combined_is_the_weighed_sum() -> None:
    model = llama()
    for seed, (name, rank) in enumerate({"a": 2, "b": 3}.items()):
        stir_(Lora(model, name=name, rank=rank, targets=["attn.q", "attn.v"]), seed)
    use_deltas(model, ["a", "b"], [0.5, 2.0])
    want = logits(model)
    made = combine_deltas(model, {"a": 0.5, "b": 2.0}, into="sum")
    assert made.held[0].part.down.shape[0] == 5
    assert_close(logits(model), want, rtol=1e-5, atol=1e-5)
    made.remove()
    least = combine_deltas(model, {"a": 0.5, "b": 2.0}, into="svd", how="svd", rank=5)
    assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    least.remove()
    with pytest.raises(ConfigError, match="Pass a rank with how='svd'"):
        combine_deltas(model, {"a": 1.0}, into="x", rank=2)
    with pytest.raises(ConfigError, match="one type"):
        combine_deltas(model, {"a": 1.0, "b": 1.0}, into="x", how="sum")


@pytest.mark.parametrize("kind", ["lora", "adapter", "bitfit", "ia3"])
def test_rows_have_their_own(kind: str) -> None:
    """Each row's logits are those of its delta alone; gradients stay with the rows' deltas."""
    model = llama()
    if kind == "bitfit":
        make: Callable[..., Delta] = lambda m, **k: BitFit(m, exclude=["lm_head"], **k)  # noqa: E731
    else:
        make = TYPES[kind]
    deltas = {name: stir_(make(model, name=name), seed) for seed, name in enumerate("ab")}
    want = []
    for number, name in enumerate(("a", None, "b")):
        use_deltas(model, [] if name is None else [name])
        want.append(logits(model)[number])
    use_deltas(model, ["a", "b"])
    with select_adapters(model, ["a", None, "b"]):
        out = model(IDS).logits
        assert_close(out.detach(), torch.stack(want), rtol=1e-5, atol=1e-6)
        with pytest.raises(ShapeError, match="2 samples"):
            model(IDS[:2])
    out[2].square().sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in deltas["a"].parameters())
    assert any(p.grad is not None and p.grad.any() for p in deltas["b"].parameters())
    with (
        pytest.raises(ConfigError, match="no adapter 'c'"),
        select_adapters(model, ["c", None, "a"]),
    ):
        raise AssertionError("not reached")


def test_transformers_models_have_them_too(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(config).eval()
    for name in ("lora", "adapter", "low-rank", "compacter", "parallel", "bitfit", "ia3"):
        model = copy.deepcopy(base)
        before = logits(model)
        more = {"exclude": ["lm_head"]} if name == "bitfit" else {}
        delta = TYPES[name](model, **more)
        assert_close(logits(model), before)
        stir_(delta)
        changed = logits(model)
        assert not torch.allclose(changed, before)
        delta.save(tmp_path / name)
        again = copy.deepcopy(base)
        load_delta(again, tmp_path / name)
        assert_close(logits(again), changed, rtol=1e-6, atol=1e-6)
        if name in MERGED:
            delta.merge()
            assert_close(logits(model), changed, rtol=1e-4, atol=1e-5)
            delta.unmerge()
        delta.detach()
        assert torch.equal(logits(model), before)


def test_source_of_an_encoder_decoder_has_the_prompt() -> None:
    config = T5Config(
        vocab_size=64, hidden_size=32, num_layers=1, num_heads=4, intermediate_size=48
    )
    model = T5.from_config(config).eval()
    ids = IDS[:, :6]
    SoftPrompt(model, words=[7, 9], length=4)
    by_hand = torch.cat((torch.tensor([[7, 9, 7, 9]]).expand(3, -1), ids), 1)
    plain = T5.from_config(config).eval()
    got = model(input_ids=ids, decoder_input_ids=ids).logits
    assert_close(got, plain(input_ids=by_hand, decoder_input_ids=ids).logits)


def test_on_meta_then_loaded_then_drawn(tmp_path: Path) -> None:
    """The order of a layout: attach on meta, load the base, draw by name: the same bits."""
    base = gpt2()
    base.save_pretrained(tmp_path)
    want = Lora(copy.deepcopy(base), seed=3)
    model = GPT2.from_config(base.config, device="meta")
    delta = Lora(model, use_dora=True)
    load_weights_(model, tmp_path)
    assert_equal_trees(
        {n: t for n, t in model.state_dict().items() if ".default." not in n}, base.state_dict()
    )
    init_deltas_(model, seed=3)
    got = dict(delta.named_parameters())
    assert_equal_trees(
        {n: got[n].detach() for n, _ in want.named_parameters()},
        {n: t.detach() for n, t in want.named_parameters()},
    )
    assert_close(logits(model.eval()), logits(base), rtol=1e-5, atol=1e-6)


def test_saving_the_model_loses_nothing(tmp_path: Path) -> None:
    model = gpt2()
    stir_(Lora(model, name="mine"))
    model.save_pretrained(tmp_path)
    again = GPT2.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.config.changes[0].name == "mine"


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda m: Lora(m, ["norm"]), "needs a linear layer, but the target is a LayerNorm"),
        (lambda m: Lora(m, rank=0), "rank=0 is out of range"),
        (lambda m: Lora(m, rank=33), "rank=33 is out of range"),
        (lambda m: Lora(m, rnak=3), "Did you mean 'rank'"),
        (lambda m: Lora(m, ["nothing"]), "matches no module"),
        (lambda m: Lora(m, name="not a word"), "not a valid Python identifier"),
        (lambda m: Compacter(m, division=5), "division=5 does not divide"),
        (lambda m: Prefix(m, ["mlp"]), "does not support a prefix adapter"),
        (lambda m: SoftPrompt(m, length=32), "leaves no positions"),
        (lambda m: ParallelAdapter(m, [("attn", "norm")]), "match the same number"),
        (lambda m: Adapter(m, activation="glue"), "activation='glue'"),
        (lambda m: IA3(m, ["mlp"]), "IA3 supports only linear layers"),
    ],
)
def test_what_cannot_be(build: Callable[[GPT2], Delta], said: str) -> None:
    model = gpt2()
    before, names = logits(model), list(model.state_dict())
    with pytest.raises(ConfigError) as caught:
        build(model)
    assert said in str(caught.value)
    assert torch.equal(logits(model), before)
    assert list(model.state_dict()) == names
    assert not list_deltas(model)


def test_what_cannot_be_done_with_one() -> None:
    model = gpt2()
    delta = Lora(model, ["lm_head", "attn.q"])
    with pytest.raises(ConfigError, match="already has an adapter 'default'"):
        Lora(model, ["attn.k"])
    with pytest.raises(ConfigError, match="tie_word_embeddings=False"):
        delta.merge()
    with pytest.raises(ConfigError, match="already attached"):
        delta.attach()
    delta.remove()
    adapter = Adapter(model, width=4)
    with pytest.raises(ConfigError, match="cannot be merged"):
        adapter.merge()
    adapter.remove()
    model.change_(Change("int8", ("layers.*.attn.q_proj",)))
    stored = Lora(model)
    with pytest.raises(ConfigError, match="integer weight"):
        stored.merge()
    with pytest.raises(ConfigError, match="not supported by the Prefix"):
        Prefix(model, name="prefix").weigh_(0.5)


@pytest.mark.parametrize("backend", ["transformers", "native"])
def test_an_adapter_fits_the_base_of_the_other_library(
    backend: Literal["transformers", "native"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The parameters of one model have two names, so the fingerprints are not compared."""
    config = LlamaConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4)
    Llama.from_config(config, seed=3).save_pretrained(tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    own = AutoModel.from_pretrained(tmp_path / "base", backend=backend).eval()
    ids = torch.arange(3, 11)[None]
    for number, (trained, other) in enumerate([(own, theirs), (theirs, own)]):
        place = tmp_path / str(number)
        delta = stir_(Lora(trained))
        delta.save(place)
        want = trained(ids).logits
        delta.remove()
        with caplog.at_level("WARNING"):
            again = load_delta(other, place)
        is_same = backend == "transformers"
        assert ("are not compared" in caplog.text) != is_same
        torch.testing.assert_close(other(ids).logits, want, atol=2e-5, rtol=0)
        again.remove()


def test_files_that_do_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    model = gpt2()
    stir_(Lora(model)).save(tmp_path)
    other = GPT2.from_config(GPT2Config(**SIZES), seed=5)
    names = list(other.state_dict())
    with pytest.raises(CheckpointError, match="trained on another base"):
        load_delta(other, tmp_path)
    assert list(other.state_dict()) == names
    load_delta(other, tmp_path, allow_other_base=True).remove()
    packed = quantize_(gpt2(), "int8")
    with caplog.at_level("WARNING"):
        load_delta(packed, tmp_path)
    assert "cannot be compared" in caplog.text
    with pytest.raises(ConfigError, match="contains a Lora, not a IA3"):
        IA3.load(gpt2(), tmp_path)
    with pytest.raises(CheckpointError, match="is not an adapter directory"):
        load_delta(gpt2(), tmp_path / "nowhere")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    first = next(iter(tensors))
    for broken, said in (
        ({n: t for n, t in tensors.items() if n != first}, "missing"),
        ({**tensors, first: tensors[first][:, :-1].contiguous()}, "wrong shape"),
        ({**tensors, first: tensors[first] * torch.nan}, "not finite"),
    ):
        save_file(broken, tmp_path / "adapter_model.safetensors")
        model = gpt2()
        with pytest.raises(CheckpointError, match=said):
            load_delta(model, tmp_path)
        assert list(model.state_dict()) == names
        assert all(p.requires_grad for p in model.parameters())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "VERA"}))
    with pytest.raises(ConfigError, match="'VERA', which this version of bmforge does not support"):
        load_delta(gpt2(), tmp_path)


@pytest.mark.parametrize(("dora", "rslora", "whole"), list(product((False, True), repeat=3)))
def test_options_have_the_names_of_peft(
    dora: bool, rslora: bool, whole: bool, tmp_path: Path
) -> None:
    """PEFT's names are accepted, and the scale in PEFT's config is the one that is computed."""
    model = llama()
    modules = ["lm_head"] if whole else []
    options = {"use_dora": dora, "use_rslora": rslora, "modules_to_save": modules}
    delta = Lora(model, ["layers.0.attn.o_proj"], rank=4, alpha=6, **options)
    assert len(delta.fully_trained_parameters()) == whole
    delta.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["use_dora"], config["use_rslora"]) == (dora, rslora)
    part = model.get_submodule("layers.0.attn.o_proj")
    if not dora:
        before, x = part.weight.detach().clone(), torch.randn(3, part.weight.shape[1])
        stir_(delta)
        a, b = (p.detach() for p in delta.parameters())
        a, b = (a, b) if a.shape[0] == 4 else (b, a)
        scale = 6 / (2 if rslora else 4)
        want = x @ (before + scale * b @ a).t()
        assert_close(part(x).detach(), want.detach(), rtol=1e-5, atol=1e-5)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="Lora has no option 'root_scale'"):
        Lora(gpt2(), root_scale=True)
    with pytest.raises(ConfigError, match="IA3 has no option 'use_dora'"):
        IA3(gpt2(), use_dora=True)
