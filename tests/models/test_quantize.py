"""Quantised models: against dequantised ones, saved and opened, packed while they are read."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bmforge.errors import CheckpointError, ConfigError
from bmforge.infer import generate
from bmforge.logging import ProgressBar
from bmforge.memory.streaming import stream_blocks_
from bmforge.models import (
    GPT2,
    T5,
    AutoModel,
    Change,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
    init_weights_,
)
from bmforge.models.formats.hf_format import WeightFiles
from bmforge.models.quantize import quantize_, quantize_directory
from bmforge.nn.packing import PRESETS, QuantSpec
from bmforge.nn.quantized import PackedStore, QuantizedExperts
from bmforge.parallel import Layout, parallelize
from bmforge.surgery import persistent_tensors
from bmforge.testing import assert_close, assert_equal_trees, run_distributed
from bmforge.testing.changed_models import run_step_of
from bmforge.testing.layouts import check_layout

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "max_seq_len": 16,
}
IDS = torch.arange(16).view(2, 8)
EXACT = replace(PRESETS["int4"], activations="float")


def llama(**more: Any) -> Llama:
    return Llama.from_config(LlamaConfig(**SIZES, intermediate_size=128, **more)).eval()


MODELS = {
    "gpt2": lambda: GPT2.from_config(GPT2Config(**SIZES)).eval(),
    "llama": llama,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "mixtral": lambda: Mixtral.from_config(
        MixtralConfig(
            **SIZES, num_kv_heads=2, intermediate_size=96, num_experts=4, experts_per_token=2
        )
    ).eval(),
    "t5": lambda: T5.from_config(
        T5Config(
            vocab_size=90,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            intermediate_size=96,
            head_dim=16,
        )
    ).eval(),
}


def run(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": IDS} if isinstance(model, T5) else {}
    return model(input_ids=IDS, **more).logits


def dequantised(plain: Any, model: Any) -> Any:
    """Return the plain model with the weights that the quantised one stands for."""
    twin = copy.deepcopy(plain)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, QuantizedExperts):
                for key in module.stack_sizes():
                    twin.get_parameter(f"{name}.{key}").copy_(module.dense(key, torch.float32))
            elif isinstance(module, PackedStore):
                twin.get_submodule(name).weight.copy_(module.dense(torch.float32))
    return twin


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_dequantised_model(build: Any) -> None:
    plain = build()
    model = quantize_(copy.deepcopy(plain), EXACT)
    packed = {n for n, m in model.named_modules() if isinstance(m, PackedStore)}
    assert {n.rpartition(".")[2] for n in packed} >= {"q_proj", "o_proj", "embed", "lm_head"}
    assert not any("router" in n or "norm" in n or "position" in n for n in packed)
    assert_close(run(model), run(dequantised(plain, model)), rtol=1e-4, atol=1e-5)
    usual = quantize_(copy.deepcopy(plain), "int8")
    assert (run(usual) - run(plain)).abs().max() < 0.1 * run(plain).abs().max()


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("scheme", ["int4", QuantSpec(8, 0, scale_dtype="float32")])
def test_saved_and_opened(build: Any, scheme: Any, tmp_path: Path) -> None:
    """The same tensors and bits, whether packed before saving, while reading, or drawn so."""
    plain = build()
    model = quantize_(copy.deepcopy(plain), scheme)
    meta = type(plain).from_config(model.config, device="meta")
    assert_equal_trees(persistent_tensors(init_weights_(meta, 0)), persistent_tensors(model))
    model.save_pretrained(tmp_path / "packed")
    again = AutoModel.from_pretrained(tmp_path / "packed")
    assert again.config == model.config
    assert_equal_trees(persistent_tensors(again), persistent_tensors(model))
    assert torch.equal(run(again), run(model))
    plain.save_pretrained(tmp_path / "plain")
    read = AutoModel.from_pretrained(tmp_path / "plain", quantize=scheme)
    assert not any(t.is_meta for t in (*read.parameters(), *read.buffers()))
    assert read.config.changes == model.config.changes
    assert_equal_trees(persistent_tensors(read), persistent_tensors(model))
    assert torch.equal(run(read), run(model))
    read.save_pretrained(tmp_path / "again")
    written = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("again", "packed")]
    assert written[0] == written[1]


def test_columns_that_stay_in_16_bits(tmp_path: Path) -> None:
    """Chosen from the weights, in memory and while reading; a drawn model has the first ones."""
    spec = replace(EXACT, outlier_ratio=0.05)
    plain = llama()
    with torch.no_grad():
        plain.layers["0"].attn.q_proj.weight[:, [7, 30, 41]] *= 50
    model = quantize_(copy.deepcopy(plain), spec)
    q_proj = model.layers["0"].attn.q_proj
    assert q_proj.outlier_columns.tolist() == [7, 30, 41]
    kept = plain.layers["0"].attn.q_proj.weight[:, [7, 30, 41]]
    assert torch.equal(q_proj.dense(torch.float32)[:, [7, 30, 41]], kept.half().float())
    assert_close(run(model), run(dequantised(plain, model)), rtol=1e-4, atol=1e-5)
    plain.save_pretrained(tmp_path / "plain")
    read = AutoModel.from_pretrained(tmp_path / "plain", quantize=spec)
    assert_equal_trees(persistent_tensors(read), persistent_tensors(model))
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(run(AutoModel.from_pretrained(tmp_path / "packed")), run(model))
    drawn = Llama.from_config(model.config).eval()
    assert_close(run(drawn), run(dequantised(llama(), drawn)), rtol=1e-4, atol=1e-5)
    off = (run(drawn) - run(llama())).abs().max()
    assert off < 0.5 * run(llama()).abs().max()


def test_what_files_say(tmp_path: Path) -> None:
    """Names as published, `.packed` behind them; another's way of packing is refused."""
    quantize_(llama(), "int4").save_pretrained(tmp_path)
    files = WeightFiles(tmp_path)
    stem = "model.layers.1.self_attn.k_proj"
    assert {n for n in files.shapes if n.startswith(stem)} == {f"{stem}.packed", f"{stem}.scales"}
    assert files.shapes[f"{stem}.packed"] == (4, 8, 64)
    assert {"model.embed_tokens.packed", "lm_head.packed", "model.norm.weight"} <= set(files.shapes)
    raw = json.loads((tmp_path / "config.json").read_text())
    said = raw["quantization_config"]
    assert said == {"quant_method": "bmforge", "schemes": [asdict(PRESETS["int4"])]}
    assert raw["bmforge"]["changes"][0]["options"] == asdict(PRESETS["int4"])
    raw["quantization_config"] = {"quant_method": "exl9"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="quantization_config"):
        AutoModel.from_pretrained(tmp_path)


def test_a_quantised_model_writes_and_learns_beside(tmp_path: Path) -> None:
    """Greedy tokens from a cache, and a low-rank part whose gradient is the twin's."""
    plain = llama()
    model = quantize_(copy.deepcopy(plain), EXACT)
    twin = dequantised(plain, model)
    assert torch.equal(
        generate(model, IDS, max_new_tokens=5), generate(twin, IDS, max_new_tokens=5)
    )
    change = Change("low_rank", "layers.*.attn.q_proj", {"rank": 2})
    found = []
    for one in (model, twin):
        one.change_(change)
        one(input_ids=IDS, labels=IDS).loss.backward()
        found.append(one.layers["0"].attn.q_proj.low_rank.up.grad)
    assert found[0].dtype == torch.float32
    assert_close(*found, rtol=1e-4, atol=1e-6)


def test_twice_and_again_while_reading(tmp_path: Path) -> None:
    model = quantize_(llama(), "int8")
    before = persistent_tensors(model)
    with pytest.raises(ConfigError, match=r"Llama.*already quantized"):
        quantize_(model, "int4")
    assert all(tensor is before[name] for name, tensor in persistent_tensors(model).items())
    assert len(model.config.changes) == 1
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="already quantized"):
        AutoModel.from_pretrained(tmp_path, quantize="int4")


def test_widths_that_no_group_divides() -> None:
    """All that do not fit are named, and nothing is changed."""
    model = Llama.from_config(LlamaConfig(**SIZES, intermediate_size=100))
    names = list(persistent_tensors(model))
    with pytest.raises(
        ConfigError, match=r"0\.mlp\.down_proj: the input size 100 .*96 or 128"
    ) as error:
        quantize_(model, "int4")
    assert "layers.1.mlp.down_proj" in str(error.value)
    assert "size is supported by 'int8-dynamic'" in str(error.value)
    assert list(persistent_tensors(model)) == names
    quantize_(model, "int4", where=["**.attn.*_proj"])
    quantize_(model, "int8-dynamic", where=["**.down_proj"])
    assert [change.kind for change in model.config.changes] == ["quantize"] * 2


def test_a_tied_head_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="shares its weight with"):
        quantize_(llama(tie_word_embeddings=True), "int8", where=["lm_head"])


def test_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    """What is missing is said before anything is read."""
    llama().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2"):
        AutoModel.from_pretrained(tmp_path, quantize="int4")


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.layers["1"].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ConfigError, match="not finite"):
        quantize_(model, "int4")
    assert not model.config.changes


def test_a_hugging_face_model() -> None:
    """Conv1D too; nothing of ours remembers it."""
    config = transformers.GPT2Config(vocab_size=90, n_embd=64, n_layer=2, n_head=4, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    want = model(IDS).logits
    quantize_(model, "int8")
    stored = [m for m in model.modules() if isinstance(m, PackedStore)]
    assert len(stored) == 8
    assert (model(IDS).logits - want).abs().max() < 0.1 * want.abs().max()


@pytest.mark.parametrize("build", [MODELS["llama"], MODELS["mixtral"]], ids=["llama", "mixtral"])
def test_streamed_blocks(build: Any) -> None:
    """Packed weights come when a block runs, with the same bits forward and backward."""
    model = quantize_(build(), "int4")
    batch = {"input_ids": IDS, "labels": IDS}
    want, want_grads = run(model), run_step_of(model, batch)
    kept = {n: t.detach().clone() for n, t in persistent_tensors(model).items()}
    streamer = stream_blocks_(
        model,
        lambda name, out: out.copy_(kept[name]),
        device=torch.device("cpu"),
        blocks=["layers.0", "layers.1"],
    )
    assert torch.equal(run(model), want)
    assert_equal_trees(run_step_of(model, batch), want_grads)
    streamer.close()


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", Layout()), ("mixtral", Layout(ep=2)), ("llama", Layout(pp=2))]
)
def test_layouts(name: str, layout: Layout) -> None:
    """ZeRO-3, divided experts and a pipeline train what is beside packed weights as one process."""
    model = quantize_(MODELS[name](), EXACT)
    rows = torch.arange(32).view(4, 8)
    more = {"micro_batches": 2} if layout.pp > 1 else {}
    batch = {"input_ids": rows}, {"labels": rows}
    check_layout(type(model), model.config, *batch, world=2, layout=layout, **more)


def say_what_cannot_be_cut() -> str:
    model = quantize_(llama(), "int4")
    try:
        parallelize(model, Layout(tp=2))
    except ConfigError as error:
        return str(error)
    return ""


def test_tensor_parallelism_is_refused() -> None:
    for said in run_distributed(say_what_cannot_be_cut, 2):
        assert "packed weights are stored in panels" in said
        assert "tp=1" in said


def test_progress_counts_weights_also_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[tuple[int | None, int]] = []

    class Bar(ProgressBar):
        def __exit__(self, *exc: object) -> None:
            super().__exit__(*exc)
            counts.append((self._total, self._done))

    monkeypatch.setattr("bmforge.models.quantize.ProgressBar", Bar)
    model = GPT2.from_config(GPT2Config(**SIZES))
    model.save_pretrained(tmp_path / "plain")
    quantize_directory(tmp_path / "plain", tmp_path / "out", "int4")
    ((total, done),) = counts
    assert total == done
    assert done > 2 * 4  # two layers of at least four weights


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_directory_is_what_memory_is_saved_as(build: Any, tmp_path: Path) -> None:
    """The same bytes, though no more than one weight was ever there; several files too."""
    build().save_pretrained(tmp_path / "plain")
    read = AutoModel.from_pretrained(tmp_path / "plain", quantize="int4")
    read.save_pretrained(tmp_path / "memory")
    quantize_directory(tmp_path / "plain", tmp_path / "disk", "int4")
    names = {path.name for path in (tmp_path / "memory").iterdir()}
    assert names == {path.name for path in (tmp_path / "disk").iterdir()}
    for name in names:
        written = [(tmp_path / place / name).read_bytes() for place in ("memory", "disk")]
        assert written[0] == written[1]
    quantize_directory(tmp_path / "plain", tmp_path / "parts", "int4", max_file_bytes=20_000)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    parts = AutoModel.from_pretrained(tmp_path / "parts")
    assert_equal_trees(persistent_tensors(parts), persistent_tensors(read))


def test_a_directory_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizer files come along; a failed one leaves nothing that could be taken for a model."""
    plain = llama()
    plain.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    out = quantize_directory(tmp_path / "plain", tmp_path / "int8", "int8")
    assert (out / "tokenizer.json").exists()
    assert torch.equal(
        run(AutoModel.from_pretrained(out)), run(quantize_(copy.deepcopy(plain), "int8"))
    )
    with pytest.raises(CheckpointError, match="contains a model"):
        quantize_directory(tmp_path / "plain", out, "int8")

    def fill_the_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bmforge.models.quantize.write_file", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        quantize_directory(tmp_path / "plain", tmp_path / "full", "int4")
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "int8"}
    with pytest.raises(ConfigError, match="Did you mean 'int8'"):
        quantize_directory(tmp_path / "plain", tmp_path / "none", "int88")
