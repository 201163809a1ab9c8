"""CPM-Bee against the original code's vectors, and its plain text against plain attention."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import KVCache, generate
from bmforge.models import Model
from bmforge.models.cpm_bee import CPMBee, CPMBeeConfig
from bmforge.nn.relative import find_buckets
from bmforge.testing.batches import Batch, make_batch
from bmforge.testing.capability import capability
from bmforge.testing.decoder_suite import DecoderOwnSuite
from bmforge.testing.family_suite import FamilySuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.golden import Golden
from bmforge.testing.presets import count_preset
from bmforge.testing.tolerance import assert_close, assert_equal_trees

GOLDEN = Path(__file__).parents[1] / "golden" / "cpm_bee.npz"
TABLES = ("segment_rel", "ext_table_ids", "ext_table_sub")


def open_original(directory: Path) -> tuple[CPMBee, Golden]:
    """Open the original weights; config files of CPM-Bee say nothing of the residual."""
    golden = Golden(GOLDEN, atol=1e-5)
    golden.write(directory)
    return CPMBee.from_pretrained(directory), golden


def given(golden: Golden, stage: str = "") -> tuple[Tensor, dict[str, Tensor]]:
    """Return the ids and the other inputs of a stage; forward has no prefix."""
    stages = ("prefill_", "step_")
    found = {
        name.removeprefix(stage): tensor
        for name, tensor in golden.inputs.items()
        if (name.startswith(stage) if stage else not name.startswith(stages)) or name in TABLES
    }
    return found.pop("input"), found


class TestCPMBee(DecoderOwnSuite, FamilySuite, FileSuite):
    """CPM-Bee; a plain text is written from left to right."""

    model_class = CPMBee
    # Four blocks of which some move: what is missing makes all of them as large as two slots else.
    deep_options = {"mask_modules": ((False, False), (False, False), (True, True), (False, True))}  # noqa: RUF012

    def tiny_config(self) -> CPMBeeConfig:
        """Return a tiny config; one layer has nothing, and the last one no attention."""
        return CPMBeeConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4,
            head_dim=6, num_buckets=16, num_relations=20, max_seq_len=32,
            mask_modules=((False, False), (True, True), (False, True), (True, False)),
        )  # fmt: skip

    @capability("logits")
    def test_original_forward(self, tmp_path: Path) -> None:
        """Logits with the extension's rows, and hidden states, of all tokens but padding."""
        model, golden = open_original(tmp_path)
        ids, inputs = given(golden)
        del inputs["labels"]
        real = torch.arange(20) < inputs["length"][:, None]
        out = model(ids, **inputs)
        golden.check("logits", out.logits, real)
        golden.check("hidden_states", out.last_hidden_state, real)

    @capability("gradients")
    def test_original_loss_and_gradients(self, tmp_path: Path) -> None:
        """The loss, with labels among the extension's rows, and every gradient."""
        model, golden = open_original(tmp_path)
        ids, inputs = given(golden)
        assert (inputs["labels"] >= 61).any()
        loss = model(ids, **inputs).loss
        golden.check("loss", loss)
        loss.backward()
        golden.check_gradients(model)

    def test_original_inference(self, tmp_path: Path) -> None:
        """A prompt padded on the left into a cache, what is in it, and a step."""
        model, golden = open_original(tmp_path)
        ids, inputs = given(golden, "prefill_")
        real = inputs["num_segments"] != 0
        cache = KVCache(2, 11)
        with torch.no_grad():
            out = model(ids, cache=cache, **inputs)
            golden.check("prefill_logits", out.logits, real)
            golden.check("prefill_hidden", out.last_hidden_state, real)
            nothing = torch.empty(2, 4, 0, 6)
            for part, layer, name in ((0, 0, "key"), (1, 1, "value")):
                stored = cache.append(layer, nothing, nothing)[part].transpose(1, 2)
                want = golden.outputs[f"prefill_{name}_layer{layer}"].transpose(1, 2)
                assert_close(stored[real], want[real], atol=1e-5)
            ids, more = given(golden, "step_")
            own = {name: more[name] for name in (*TABLES, "input_sub")}
            seen = {n: torch.cat((inputs[n], more[n]), 1) for n in more if n not in own}
            step = model(ids, cache=cache, **own, **seen)
        golden.check("step_logits", step.logits)
        golden.check("step_hidden", step.last_hidden_state)

    @capability("conversion")
    def test_names_and_config_come_back(self, tmp_path: Path) -> None:
        """Written by us: the same tensors under the same names, and every field of the config."""
        model, golden = open_original(tmp_path / "original")
        model.save_pretrained(tmp_path / "ours")
        assert_equal_trees(load_file(tmp_path / "ours" / "model.safetensors"), golden.weights)
        written = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert golden.config.items() <= written.items()
        again = CPMBee.from_pretrained(tmp_path / "ours")
        assert again.config == model.config
        assert_equal_trees(again.state_dict(), model.state_dict())

    def test_hub_and_live_files(self, tmp_path: Path) -> None:
        """The hub's names, with the head beside the embedding it is, and CPM-Live's .pt."""
        model, golden = open_original(tmp_path)
        file = tmp_path / "model.safetensors"
        hub = {f"cpmbee.{name}": tensor for name, tensor in golden.weights.items()}
        head = golden.weights["input_embedding.weight"].clone()
        save_file({**hub, "lm_head.weight": head}, file)
        assert_equal_trees(CPMBee.from_pretrained(tmp_path).state_dict(), model.state_dict())
        file.unlink()
        torch.save(golden.weights, tmp_path / "cpm-bee-1b-ckpt.pt")
        assert_equal_trees(CPMBee.from_pretrained(tmp_path).state_dict(), model.state_dict())

    @capability("generate")
    @pytest.mark.parametrize("beams", [1, 3])
    @torch.no_grad()
    def test_generates_step_by_step(self, tiny: CPMBee, beams: int) -> None:
        """Ids through the cache are those of a search that computes every prefix anew."""
        ids = make_batch(tiny, length=6)
        got = generate(tiny, ids, num_beams=beams, max_new_tokens=5)
        for row, want in zip(ids, got, strict=True):
            paths = [(0.0, row)]
            for _ in range(5):
                grown = [
                    (total + score, torch.cat((path, token[None])))
                    for total, path in paths
                    for score, token in zip(
                        *tiny(path[None]).logits[0, -1].log_softmax(-1).topk(beams), strict=True
                    )
                ]
                paths = sorted(grown, key=lambda pair: float(pair[0]), reverse=True)[:beams]
            assert torch.equal(want, paths[0][1])

    def test_padded_prompts(self, tiny: CPMBee) -> None:
        """Padding on the left changes nothing."""
        ids = make_batch(tiny, length=6)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        together = generate(tiny, ids, mask, max_new_tokens=4)
        alone = generate(tiny, ids[:1, 2:], max_new_tokens=4)
        assert torch.equal(together[:1, 2:], alone)

    def test_plain_text_is_one_segment(self, tiny: CPMBee) -> None:
        """A text alone is a document of one segment that is all written."""
        ids = make_batch(tiny)
        zeros = torch.zeros_like(ids)
        out = tiny(
            ids,
            segment=zeros,
            context=zeros.bool(),
            sample_ids=zeros,
            num_segments=zeros + 1,
            segment_rel_offset=zeros,
            segment_rel=zeros[:, :1],
        )
        assert_close(tiny(ids).logits, out.logits)

    def test_plain_text_by_hand(self) -> None:
        """One layer of attention written out, muP's divisions where the original has them."""
        config = CPMBeeConfig(
            vocab_size=31, hidden_size=12, intermediate_size=20, num_layers=1, num_heads=2,
            head_dim=4, num_buckets=8, num_relations=3, max_seq_len=16,
        )  # fmt: skip
        model = CPMBee.from_config(config, dtype=torch.float64).eval()
        ids = make_batch(model, length=9)
        weight = dict(model.named_parameters())
        layer = {n.removeprefix("layers.0."): w for n, w in weight.items() if "layers" in n}

        def norm(x: Tensor) -> Tensor:
            return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, layer[f"{name}.weight"]) / math.sqrt(x.shape[-1])

        x = weight["embed.weight"][ids] / math.sqrt(12)
        distance = torch.arange(9)[None] - torch.arange(9)[:, None]
        bias = weight["rel_bias.weight"][find_buckets(distance, True, 8, 16)].permute(2, 0, 1)
        q, k, v = (
            linear(norm(x), f"attn.{p}_proj").view(2, 9, 2, 4).transpose(1, 2) for p in "qkv"
        )
        scores = (q @ k.transpose(2, 3) / 2 + bias).masked_fill(distance > 0, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = (x + linear(mixed, "attn.o_proj")) / 1.05
        inner = F.gelu(linear(norm(x), "mlp.gate_proj")) * linear(norm(x), "mlp.up_proj")
        x = norm((x + linear(inner, "mlp.down_proj")) / 1.05)
        logits = x @ weight["embed.weight"].t() / math.sqrt(12)
        assert_close(model(ids).logits, logits)

    def test_what_is_given_must_fit(self, tiny: CPMBee) -> None:
        """Inputs that are missing, of another width, or outside the vocabulary are refused."""
        ids = make_batch(tiny)
        with pytest.raises(ShapeError, match="needs context"):
            tiny(ids, segment=ids)
        described = dict.fromkeys(
            ("segment", "context", "sample_ids", "num_segments", "segment_rel_offset"),
            torch.zeros_like(ids),
        )
        with pytest.raises(ShapeError, match="segment_rel"):
            tiny(ids, **described)
        with pytest.raises(ShapeError, match=r"num_segments has the shape \(2, 3\)"):
            tiny(ids, **{**described, "num_segments": ids[:, :3]})
        with pytest.raises(ShapeError, match="vocab_size=61"):
            tiny(ids + 60)


class TestCPMBeeDocuments(FamilySuite):
    """The same battery on documents: segments, relations, spans, padding."""

    model_class = CPMBee
    takes_prompts = False  # segments, spans: more is said of every token
    # Four blocks of which some move: what is missing makes all of them as large as two slots else.
    deep_options = {"mask_modules": ((False, False), (False, False), (True, True), (False, True))}  # noqa: RUF012

    def tiny_config(self) -> CPMBeeConfig:
        """Return a tiny config."""
        return TestCPMBee().tiny_config()

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return rows of two spans: a document with an example, and one alone."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(60, (batch, 14), generator=generator)
        row = {
            "input_sub": [0, 0, 1, 0, 2, 0, 0, 1, 0, 0, 3, 0, 0, 0],
            "segment": [0, 0, 1, 1, 2, 2, 0, 1, 1, 0, 0, 1, 1, 0],
            "num_segments": [3] * 6 + [2] * 7 + [0],
            "sample_ids": [0] * 6 + [1] * 3 + [0] * 5,
            "segment_rel_offset": [0] * 6 + [9] * 3 + [13] * 4 + [0],
            "context": [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0],
            "span": [0] * 9 + [1] * 5,
        }
        inputs = {name: torch.tensor(values).expand(batch, -1) for name, values in row.items()}
        relations = torch.randint(2, 20, (17,), generator=generator)
        relations[[0, 4, 8, 9, 12, 13, 16]] = 0
        return {"input_ids": ids, **inputs, "segment_rel": relations.expand(batch, -1)}


# openbmb/cpm-bee-1b's config.json, but for its masks.
PUBLISHED: dict[str, Any] = {
    "_from_model_config": True, "_name_or_path": "openbmb/cpm-bee-1b",
    "architectures": ["CpmBeeForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_cpmbee.CpmBeeConfig"}, "vocab_size": 86583,
    "hidden_size": 4096, "dim_ff": 1024, "num_hidden_layers": 48, "num_attention_heads": 32,
    "dim_head": 40, "dropout_p": 0.0, "position_bias_num_buckets": 256,
    "position_bias_num_segment_buckets": 256, "position_bias_max_distance": 2048, "eps": 1e-6,
    "half": True, "model_type": "cpmbee",
}  # fmt: skip


def test_published_configs() -> None:
    """The hub's fields and CPM-Live's are the presets, and what we write reads the same."""
    preset = CPMBeeConfig.preset("cpm-bee-1b")
    masks = [list(pair) for pair in preset.mask_modules]
    config = CPMBeeConfig.from_hf({**PUBLISHED, "mask_modules": masks})
    assert config == preset
    assert json.loads(json.dumps(config.to_hf()))["dim_model"] == 4096
    assert CPMBeeConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    changed = config.replace(hidden_size=2048)
    assert CPMBeeConfig.from_hf(changed.to_hf()) == changed
    live = {
        "vocab_size": 86580, "dim_model": 2560, "dim_ff": 3072, "num_layers": 32, "num_heads": 32,
        "dim_head": 80, "dropout_p": 0.0, "position_bias_num_buckets": 256,
        "position_bias_num_segment_buckets": 256, "position_bias_max_distance": 2048, "eps": 1e-6,
        "half": True,
    }  # fmt: skip
    assert CPMBeeConfig.from_hf(live) == CPMBeeConfig.preset("cpm-bee-3b")
    assert CPMBeeConfig.opens(live)
    assert CPMBeeConfig.opens(PUBLISHED)
    assert not CPMBeeConfig.opens({**live, "model_type": "cpmant"})
    with pytest.raises(ConfigError, match="distance_scale=8"):
        CPMBeeConfig.from_hf({**live, "distance_scale": 8})
    with pytest.raises(ConfigError, match="mask_modules removes the attention of all layers"):
        CPMBeeConfig.from_hf({**live, "mask_modules": [[True, False]] * 32})


# From CPM-Bee's README: layers with attention and with an MLP, N x H, F; D and V of the configs.
SIZES = {
    "cpm-bee-10b": (48, 48, 4096, 10240, 4096, 86583, 9.62e9),
    "cpm-bee-5b": (19, 24, 4096, 10240, 4096, 86583, 4.65e9),
    "cpm-bee-2b": (19, 24, 2048, 5120, 4096, 86583, 2.50e9),
    "cpm-bee-1b": (19, 24, 1280, 1024, 4096, 86583, 1.06e9),
    "cpm-bee-3b": (32, 32, 2560, 3072, 2560, 86580, 1.82e9),
}


@pytest.mark.parametrize("name", list(CPMBeeConfig.presets))
def test_preset_sizes(name: str) -> None:
    """Counted on meta, and added up from the published numbers."""
    attns, mlps, inner, size, width, tokens, about = SIZES[name]
    want = attns * (4 * width * inner + width) + mlps * (3 * width * size + width) + width
    want += tokens * width + 512 * 32
    assert count_preset(CPMBee, name) == want
    assert abs(want / about - 1) < 0.005
