"""CPM-Ant against the original code's vectors (both branches) and against transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import KVCache, generate
from bmforge.models import AutoModel, Model
from bmforge.models.cpm_ant import CPMAnt, CPMAntConfig, fold_scales, unfold_scales
from bmforge.recipes.start import find_start
from bmforge.testing.batches import Batch
from bmforge.testing.capability import capability
from bmforge.testing.family_suite import FamilySuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.golden import Golden
from bmforge.testing.model_suite import ModelSuite
from bmforge.testing.presets import check_preset_shapes, count_preset
from bmforge.testing.reference_pair import Twin
from bmforge.testing.tolerance import assert_close, assert_equal_trees

GOLDEN = Path(__file__).parents[1] / "golden"
# How each branch of the original treats the residual; config files do not say.
BRANCHES = {"cpm_ant": 1.0, "cpm_ant_master": 1 / 1.05}
TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "dim_head": 6,
    "dim_ff": 48,
    "num_hidden_layers": 3,
    "position_bias_num_buckets": 16,
    "position_bias_max_distance": 32,
    "prompt_types": 4,
    "prompt_length": 5,
    "segment_types": 4,
    # The default 1.0 belongs to weights with the scales beside them; here it would only add noise.
    "init_std": 0.2,
    "pad_token_id": 0,
}


def make_text(model: Model, batch: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    """Return token ids without the padding ids 0 and `vocab_size` - 1, which no text has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, model.config.vocab_size - 1, (batch, length), generator=generator)


def make_segments(model: Model, batch: int = 2, seed: int = 1) -> Batch:
    """Return CPM-Live's inputs: prompt, two segments, a part to be written, spans, padding."""
    text = make_text(model, batch, 16, seed)
    own = model.config.prompt_length
    text[:, :own] = torch.arange(own)
    segment = torch.tensor([0] * own + [1] * 5 + [2] * (11 - own))
    context = torch.arange(16) < own + 5
    span = torch.zeros(batch, 16, dtype=torch.long)
    span[-1, 12:] = 1
    return {
        "input_ids": text,
        "length": torch.tensor([16, 14] * (batch // 2)),
        "context": context.expand(batch, -1).clone(),
        "segment": segment.expand(batch, -1).clone(),
        "span": span,
    }


class TestCPMAnt(ModelSuite, FileSuite):
    """CPM-Ant in transformers' form."""

    model_class = CPMAnt
    hf_class = transformers.CpmAntForCausalLM
    cases: ClassVar[dict[str, Any]] = {
        "default": TINY,
        "wide": {**TINY, "dim_head": 10, "prompt_length": 3, "eps": 1e-5, "segment_types": 6},
    }
    hf_heads: ClassVar[dict[str, Any]] = {"none": transformers.CpmAntModel}

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return a text."""
        return {"input_ids": make_text(model, batch, 20, seed)}

    @pytest.mark.parametrize("given", [False, True])
    def test_padding(self, twin: Twin, given: bool) -> None:
        """transformers takes id 0 for padding; so do we, or what the mask says."""
        ids = make_text(twin.model)
        ids[0, :5] = 0
        real = ids != 0
        ours = twin.model(ids, attention_mask=real.long() if given else None).logits
        assert ours.isfinite().all()
        assert_close(ours[real], twin.reference(ids).logits[real], atol=5e-6)
        other = torch.where(real, ids, 7)
        assert_close(twin.model(other, attention_mask=real).logits[real], ours[real])

    def test_padded_gradients_are_finite(self, twin: Twin) -> None:
        """Rows that are nearly all padding give finite gradients."""
        ids = make_text(twin.model)
        ids[0, :-1] = 0
        twin.model.zero_grad()
        twin.model(ids, labels=ids.masked_fill(ids == 0, -100)).loss.backward()
        assert all(p.grad.isfinite().all() for p in twin.model.parameters() if p.grad is not None)

    def test_last_logits(self, twin: Twin) -> None:
        """`logits_to_keep` gives the last of all logits."""
        ids = make_text(twin.model)
        assert_close(twin.model(ids, logits_to_keep=2).logits, twin.model(ids).logits[:, -2:])

    @capability("generate")
    @pytest.mark.parametrize("beams", [1, 3])
    @pytest.mark.parametrize("padding", [0, 3])
    def test_generates_the_same_ids(self, twin: Twin, beams: int, padding: int) -> None:
        """Greedy and beam search through the cache give transformers' ids, padded prompts too."""
        ids = make_text(twin.model, length=7, seed=8)
        ids[0, :padding] = 0
        options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 8, "do_sample": False}
        theirs = twin.reference.generate(ids, attention_mask=(ids != 0).long(), **options)
        assert (theirs[:, 7:] != 0).all()  # else it goes on as if the text were shorter
        assert torch.equal(generate(twin.model, ids, **options), theirs)

    def test_one_scale_is_one_model(self, twin: Twin, tmp_path: Path) -> None:
        """A tied model written with the scales beside the weights computes transformers' logits."""
        theirs = twin.reference
        with torch.no_grad():
            theirs.lm_head.weight.copy_(theirs.cpmant.input_embedding.weight[:61])
        theirs.save_pretrained(tmp_path)
        folded = CPMAnt.from_pretrained(tmp_path)
        plain = unfold_scales(folded)
        assert not plain.config.folded
        ids = make_text(folded)
        want = theirs(ids).logits
        scale = want.abs().max().item()
        assert_close(plain(ids).logits, want, atol=2e-6 * scale)
        again = fold_scales(plain)
        assert again.config == folded.config
        assert_close(again.state_dict(), folded.state_dict(), rtol=2e-7, atol=0.0)


class TestCPMAntSegments(FamilySuite, FileSuite):
    """CPM-Ant as CPM-Live has it: segments, parts missing, the residual divided."""

    model_class = CPMAnt
    takes_prompts = False  # segments, spans: more is said of every token
    # Four blocks of which some move: what is missing makes all of them as large as two slots else.
    deep_options = {"mask_modules": ((False, False), (False, False), (True, True), (False, True))}  # noqa: RUF012

    def tiny_config(self) -> CPMAntConfig:
        """Return a tiny config; one layer has nothing, and the last one no attention."""
        return CPMAntConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4,
            head_dim=6, num_buckets=16, max_seq_len=32, prompt_types=3, prompt_length=4,
            segment_types=5, sum_scale=1 / 1.05,
            mask_modules=((False, True), (True, True), (False, False), (True, False)),
        )  # fmt: skip

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return segments."""
        return make_segments(model, batch, seed)

    def test_missing_parts(self, tiny: CPMAnt) -> None:
        """A part that is left out has no weights, and no norm."""
        parts = {
            i: {n.split(".")[2] for n, _ in tiny.named_parameters() if n.startswith(f"layers.{i}.")}
            for i in range(4)
        }
        attn, mlp = {"attn_norm", "attn"}, {"mlp_norm", "mlp"}
        assert parts == {0: attn, 1: set(), 2: attn | mlp, 3: mlp}
        assert tiny.config.kv_bytes_per_token(2) == 2 * 2 * 4 * 6 * 2

    def test_cached_steps(self, tiny: CPMAnt) -> None:
        """What is written piece by piece through a cache is what one call gives."""
        inputs = make_segments(tiny)
        del inputs["length"]
        whole = tiny(**inputs).logits
        ids = inputs.pop("input_ids")
        cache = KVCache(tiny.config.num_layers, 16)
        pieces = []
        for start, end in ((0, 9), (9, 10), (10, 14), (14, 16)):
            seen = {name: tensor[:, :end] for name, tensor in inputs.items()}
            pieces.append(tiny(ids[:, start:end], cache=cache, **seen).logits)
            assert cache.length == end
        assert_close(torch.cat(pieces, 1), whole)

    def test_text_is_its_segments(self, tiny: CPMAnt) -> None:
        """A text alone is the task's prompt and one segment of kind 2, all context."""
        ids = make_text(tiny)
        prompt = torch.arange(8, 12).expand(2, -1)
        rows = torch.cat((prompt, ids), 1)
        segment = torch.tensor([0] * 4 + [2] * 12).expand(2, -1)
        context = torch.ones(2, 16, dtype=torch.bool)
        want = tiny(rows, segment=segment, context=context).logits[:, 4:]
        assert_close(tiny(ids).logits, want)
        other = CPMAnt.from_config(tiny.config.replace(task_id=1)).eval()
        assert not torch.allclose(other(ids).logits, want)

    @pytest.mark.parametrize("beams", [1, 3])
    def test_generate_goes_step_by_step(self, tiny: CPMAnt, beams: int) -> None:
        """With layers that store nothing, ids are those found with CPM-Live's inputs."""
        ids = make_text(tiny, length=6)
        out = generate(tiny, ids, num_beams=beams, max_new_tokens=5)
        assert out.shape == (2, 11)
        if beams > 1:
            return
        cache = KVCache(4, 15)
        tokens = torch.cat((torch.arange(8, 12).expand(2, -1), ids), 1)
        width = tokens.shape[1]
        for column in range(6, 11):
            segment = torch.tensor([0] * 4 + [2] * (width - 4)).expand(2, -1)
            context = torch.ones(2, width, dtype=torch.bool)
            tokens = tiny(tokens, segment=segment, context=context, cache=cache).logits[:, -1:]
            tokens = tokens.argmax(-1)
            width += 1
            assert torch.equal(tokens[:, 0], out[:, column])

    def test_what_is_given_must_fit(self, tiny: CPMAnt) -> None:
        """Half of the inputs, widths that differ and ids outside are refused."""
        inputs = make_segments(tiny)
        with pytest.raises(ShapeError, match="without segment"):
            tiny(inputs["input_ids"], context=inputs["context"])
        with pytest.raises(ShapeError, match="needs context"):
            tiny(inputs["input_ids"], segment=inputs["segment"])
        with pytest.raises(ShapeError, match=r"\(2, 15\)"):
            tiny(**{**inputs, "span": inputs["span"][:, :15]})
        with pytest.raises(ShapeError, match="vocab_size=61"):
            tiny(**{**inputs, "input_ids": inputs["input_ids"] + 20})

    def test_compiled_cached_steps(self, tiny: CPMAnt) -> None:
        """Decoding a text is one graph without breaks."""
        torch.compiler.reset()
        ids = make_text(tiny)
        caches = [KVCache(4, 12), KVCache(4, 12)]
        compiled = torch.compile(tiny, fullgraph=True, backend="eager")
        with torch.no_grad():
            for start, end in ((0, 8), (8, 9), (9, 10), (10, 11)):
                got = compiled(ids[:, start:end], cache=caches[0]).logits
                assert_close(got, tiny(ids[:, start:end], cache=caches[1]).logits)
        torch.compiler.reset()


@pytest.mark.parametrize("name", list(BRANCHES))
class TestGolden:
    """The vectors that the original code produced; see ../golden/README.md.

    Padding is left out: nothing sees it, and the original gives it no attention at all.
    """

    def open(self, name: str, directory: Path) -> tuple[CPMAnt, Golden]:
        """Open the original weights."""
        golden = Golden(GOLDEN / f"{name}.npz", atol=1e-5)
        golden.write(directory, sum_scale=BRANCHES[name])
        return CPMAnt.from_pretrained(directory), golden

    def test_forward(self, name: str, tmp_path: Path) -> None:
        """Logits, hidden states, loss and every gradient."""
        model, golden = self.open(name, tmp_path)
        given = {n: t for n, t in golden.inputs.items() if "_" not in n}
        ids, labels = given.pop("input"), given.pop("labels")
        real = torch.arange(24) < given["length"][:, None]
        out = model(ids, **given)
        golden.check("logits", out.logits, real)
        golden.check("hidden_states", out.last_hidden_state, real)
        loss = model(ids, labels=labels, **given).loss
        golden.check("loss", loss)
        loss.backward()
        golden.check_gradients(model)

    def test_inference(self, name: str, tmp_path: Path) -> None:
        """The prompt into a cache, what is in it, and a step.

        The master branch takes padding for prompt ids in its second row, so only the first counts.
        """
        model, golden = self.open(name, tmp_path)
        given = {n.removeprefix("infer_"): t for n, t in golden.inputs.items() if "infer_" in n}
        place, length = torch.arange(13), given["length"][:, None]
        real = (place >= 13 - length) | ((place < 4) if name == "cpm_ant" else torch.tensor(False))
        rows = slice(2 if name == "cpm_ant" else 1)
        known = {n: given[n] for n in ("context", "segment", "span")} | {"attention_mask": real}
        cache = KVCache(2, 14)
        with torch.no_grad():
            out = model(given["input"], cache=cache, **known)
            golden.check("infer_logits", out.logits, _only(real, rows))
            golden.check("infer_hidden", out.last_hidden_state, _only(real, rows))
            keys, values = (_stored(cache, layer)[layer] for layer in (0, 1))
            want = golden.outputs
            for got, key in ((keys, "infer_key_layer0"), (values, "infer_value_layer1")):
                mine, theirs = got.transpose(1, 2), want[key].transpose(1, 2)
                assert_close(mine[_only(real, rows)], theirs[_only(real, rows)], atol=1e-5)
            longer = {n: torch.cat((t, t[:, -1:]), 1) for n, t in known.items()}
            step = model(golden.inputs["step_input"], cache=cache, **longer)
        golden.check("step_logits", step.logits, rows)

    def test_names_and_config_come_back(self, name: str, tmp_path: Path) -> None:
        """Written by us: the same tensors under the same names, and every field of the config."""
        model, golden = self.open(name, tmp_path / "original")
        model.save_pretrained(tmp_path / "ours")
        assert_equal_trees(load_file(tmp_path / "ours" / "model.safetensors"), golden.weights)
        written = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert golden.config.items() <= written.items()
        assert written["model_type"] == "cpm_ant"
        assert CPMAntConfig.opens(golden.config)
        assert CPMAntConfig.from_pretrained(tmp_path / "ours") == model.config

    def test_live_pt_file(self, name: str, tmp_path: Path) -> None:
        """CPM-Live's own files: a .pt under any name beside its config."""
        model, golden = self.open(name, tmp_path)
        (tmp_path / "model.safetensors").unlink()
        torch.save(golden.weights, tmp_path / "cpm-ant-10b.pt")
        assert_equal_trees(CPMAnt.from_pretrained(tmp_path).state_dict(), model.state_dict())


def _only(real: Tensor, rows: slice) -> Tensor:
    """Return `real` with False outside of `rows`."""
    out = torch.zeros_like(real)
    out[rows] = real[rows]
    return out


def _stored(cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """Return what a layer has stored."""
    nothing = torch.empty(2, 4, 0, 6)
    return cache.append(layer, nothing, nothing)


def test_golden_is_transformers_too(tmp_path: Path) -> None:
    """The original's weights, folded and opened by transformers, give the same logits."""
    golden = Golden(GOLDEN / "cpm_ant.npz", atol=1e-5)
    golden.write(tmp_path / "live")
    model = CPMAnt.from_pretrained(tmp_path / "live")
    fold_scales(model).save_pretrained(tmp_path / "hf")
    theirs = transformers.CpmAntForCausalLM.from_pretrained(tmp_path / "hf")
    ids = make_text(model)
    assert_close(model(ids).logits, theirs(ids).logits, atol=1e-5)


def test_folding_is_exact_for_powers_of_two() -> None:
    """Where every width is a power of 4, as 4096 is, folding and unfolding lose no bit."""
    config = CPMAntConfig(
        vocab_size=61, hidden_size=64, intermediate_size=256, num_layers=2, num_heads=4,
        head_dim=4, num_buckets=16, prompt_types=3, prompt_length=4,
    )  # fmt: skip
    model = CPMAnt.from_config(config)
    back = unfold_scales(fold_scales(model))
    assert_equal_trees(back.state_dict(), model.state_dict())
    assert back.config == model.config


def test_what_cannot_be_folded() -> None:
    """transformers' form has no missing parts, no divided residual and no joint vocabulary."""
    config = TestCPMAntSegments().tiny_config()
    with pytest.raises(ConfigError, match=r"sum_scale.*mask_modules"):
        fold_scales(CPMAnt.from_config(config))
    own = config.replace(mask_modules=(), sum_scale=1.0)
    folded = fold_scales(CPMAnt.from_config(own))
    with torch.no_grad():
        folded.lm_head.weight.add_(1.0)
    with pytest.raises(ConfigError, match="head differs"):
        unfold_scales(folded)


def test_head_that_transformers_tied(tmp_path: Path) -> None:
    """A folded checkpoint without a head has the embedding's, as a parameter of its own."""
    theirs = transformers.CpmAntForCausalLM(transformers.CpmAntConfig(**TINY))
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != "lm_head.weight"}, file)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = CPMAnt.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, model.embed.weight)
    assert model.lm_head.weight is not model.embed.weight
    assert not model.config.tie_word_embeddings


def test_plus_has_prompts_in_its_vocabulary(tmp_path: Path) -> None:
    """CPM-Ant+ looks prompts up behind the tokens, and its head covers them."""
    config = TestCPMAntSegments().tiny_config().replace(prompts_in_vocabulary=True)
    model = CPMAnt.from_config(config).eval()
    assert "embed_prompt" not in dict(model.named_children())
    ids = make_text(model)
    out = model(ids)
    assert out.logits.shape == (2, 12, 61 + 12)
    rows = torch.cat((torch.arange(61 + 8, 61 + 12).expand(2, -1), ids), 1)
    segment = torch.tensor([0] * 4 + [2] * 12).expand(2, -1)
    context = torch.ones(2, 16, dtype=torch.bool)
    assert_close(model(rows, segment=segment, context=context).logits[:, 4:], out.logits)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert names["input_embedding.weight"].shape == (73, 32)
    assert "prompt_embedding.weight" not in names
    again = CPMAnt.from_pretrained(tmp_path)
    assert again.config == config
    assert_equal_trees(again.state_dict(), model.state_dict())


def test_plus_and_master_form_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CPM-Live's own config says neither: the first is seen in the weights, the second is said."""
    config = TestCPMAntSegments().tiny_config().replace(prompts_in_vocabulary=True)
    model = CPMAnt.from_config(config).eval()
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for name in ("prompts_in_vocabulary", "sum_scale", "model_type", "task_id", "architectures"):
        raw.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    logger = logging.getLogger("bmforge")
    logger.addHandler(caplog.handler)
    try:
        opened = AutoModel.from_pretrained(tmp_path)
        assert "branch master" in caplog.text
        assert opened.config.prompts_in_vocabulary
        assert opened.config.sum_scale == 1.0
        started = find_start(str(tmp_path)).config
        assert started.prompts_in_vocabulary  # type: ignore[attr-defined]
        caplog.clear()
        (tmp_path / "config.json").write_text(json.dumps({**raw, "sum_scale": config.sum_scale}))
        assert_equal_trees(CPMAnt.from_pretrained(tmp_path).state_dict(), model.state_dict())
        ids = make_text(model)
        assert_close(CPMAnt.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
        assert "master" not in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


# openbmb/cpm-ant-10b's config.json.
PUBLISHED: dict[str, Any] = {
    "_from_model_config": True, "_name_or_path": "cpm-ant-10b",
    "architectures": ["CPMAntForCausalLM"], "bos_token_id": 6, "dim_ff": 10240, "dim_head": 128,
    "hidden_size": 4096, "dropout_p": 0.0, "eos_token_id": 7, "eps": 1e-06, "is_decoder": True,
    "mask_modules": None, "max_new_tokens": 50, "model_type": "cpmant", "num_beams": 3,
    "num_attention_heads": 32, "num_hidden_layers": 48, "pad_token_id": 0,
    "position_bias_max_distance": 2048, "position_bias_num_buckets": 512, "prompt_length": 32,
    "prompt_types": 32, "repetition_penalty": 1.2, "segment_types": 32,
    "tokenizer_class": "CPMAntTokenizer", "torch_dtype": "float32",
    "transformers_version": "4.26.0.dev0", "use_cache": True, "vocab_size": 30720,
}  # fmt: skip


def test_published_configs() -> None:
    """The hub's config, also with the names of its first revision, and CPM-Live's file."""
    config = CPMAntConfig.from_hf(PUBLISHED)
    assert config.replace(folded=False, tie_word_embeddings=True) == CPMAntConfig.preset(
        "cpm-ant-10b"
    )
    assert PUBLISHED.items() <= config.to_hf().items()
    names = {"hidden_size": "dim_model", "num_attention_heads": "num_heads"}
    first = {names.get(n, n): v for n, v in PUBLISHED.items() if n != "num_hidden_layers"}
    assert CPMAntConfig.from_hf({**first, "num_layers": 48}) == config
    live = {
        "vocab_size": 86579, "dim_model": 4096, "dim_ff": 10240, "num_layers": 48, "num_heads": 32,
        "dim_head": 128, "dropout_p": 0.0, "position_bias_num_buckets": 512,
        "position_bias_max_distance": 2048, "eps": 1e-6, "half": True, "prompt_types": 32,
        "prompt_length": 32, "segment_types": 32,
    }  # fmt: skip
    assert CPMAntConfig.opens(live)
    plus = CPMAntConfig.from_hf({**live, "prompts_in_vocabulary": True})
    assert plus == CPMAntConfig.preset("cpm-ant-plus-10b")
    assert not CPMAntConfig.opens({"model_type": "cpmbee", **live})
    with pytest.raises(ConfigError, match="48 layers"):
        CPMAntConfig.from_hf({**live, "mask_modules": [[False, True]]})


# From the READMEs of CPM-Live and BMCook: layers with attention and with an MLP, N x H, F, V; the
# published 300M are without the embedding.
SIZES = {
    "cpm-ant-10b": (48, 48, 4096, 10240, 30720, 9.39e9),
    "cpm-ant-7b": (37, 32, 4096, 10240, 30720, 6.64e9),
    "cpm-ant-3b": (37, 32, 2560, 3735, 30720, 3.15e9),
    "cpm-ant-1b": (25, 21, 2048, 700, 30720, 1.15e9),
    "cpm-ant-300m": (25, 21, 512, 350, 30720, 0.43e9),
    "cpm-ant-plus-10b": (48, 48, 4096, 10240, 86579, 9.62e9),
}


@pytest.mark.parametrize("name", list(CPMAntConfig.presets))
def test_preset_sizes(name: str) -> None:
    """Counted on meta, and added up from the published numbers."""
    attns, mlps, inner, size, tokens, about = SIZES[name]
    width, heads = 4096, inner // 128
    want = attns * (4 * width * inner + width) + mlps * (3 * width * size + width) + width
    want += (tokens + 32 * 32 + 32) * width + (512 + 32 * 32) * heads
    assert count_preset(CPMAnt, name) == want
    assert abs(want / about - 1) < 0.005


@pytest.mark.long
def test_preset_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 10B in transformers' form has transformers' shapes."""

    monkeypatch.setitem(
        CPMAntConfig.presets, "folded", {"folded": True, "tie_word_embeddings": False}
    )
    check_preset_shapes(CPMAnt, transformers.CpmAntForCausalLM, "folded")
