"""ViT against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from bmforge.cli.info import describe_model
from bmforge.errors import ConfigError, ShapeError
from bmforge.models import Model
from bmforge.models.vit import PatchEmbedding, ViT, ViTConfig
from bmforge.parallel import Layout
from bmforge.testing.batches import Batch, make_labels
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.model_suite import ModelSuite
from bmforge.testing.reference_pair import Twin, make_twin
from bmforge.testing.tolerance import assert_close, assert_equal_trees

VIT_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
# transformers' counts of the published configs: ViTForImageClassification with 1000 classes, and
# ViTModel with its pooler.
PUBLISHED = {
    "vit-base-patch16-224": 86_567_656,
    "vit-large-patch16-224": 304_326_632,
    "vit-base-patch16-224-in21k": 86_389_248,
    "vit-large-patch16-224-in21k": 304_351_232,
}


def make_images(config: Any, batch: int = 2, seed: int = 1, size: int = 0) -> Tensor:
    """Return random images for a config."""
    generator = torch.Generator().manual_seed(seed)
    size = size or config.image_size
    return torch.randn(batch, config.num_channels, size, size, generator=generator)


class TestViT(ModelSuite, FileSuite):
    """ViT."""

    model_class = ViT
    hf_class = transformers.ViTForImageClassification
    hf_heads = {"none": transformers.ViTModel}  # noqa: RUF012
    not_applicable = {  # noqa: RUF012
        "generate": "does not generate text",
        "native step": "does not generate text",
        "soft-prompt": "takes no token ids",
        "prompt": "takes images, not text",
    }
    takes_prompts = False
    test_prompt = None
    cases = {  # noqa: RUF012
        "default": VIT_TINY,
        "no_bias": {**VIT_TINY, "qkv_bias": False, "hidden_act": "gelu_new"},
        "leftover_pixels": {**VIT_TINY, "image_size": 18, "num_channels": 2},
        "one_number": {**VIT_TINY, "num_labels": 1, "layer_norm_eps": 1e-3},
    }

    def make_inputs(self, model: Model, batch: int = 2, seed: int = 1) -> Batch:
        """Return images."""
        dtype = next(model.parameters()).dtype
        return {"pixel_values": make_images(model.config, batch, seed).to(dtype)}

    def reference_gradients(self, model: Any) -> dict[str, Tensor]:
        """Name them as transformers writes them; in memory it has other names."""
        gradients = super().reference_gradients(model)
        return {_name_on_disk(name): gradient for name, gradient in gradients.items()}

    def check_gradients(self, twin: Twin) -> None:
        """As for all; what transformers' forward writes into its config is taken out again."""
        before = twin.reference.config.problem_type
        super().check_gradients(twin)
        twin.reference.config.problem_type = before

    def check_outputs(self, twin: Twin) -> None:
        """Compare all outputs; a ViT's last hidden state is normed and its hidden states not."""
        images = make_images(twin.model.config)
        theirs = twin.reference(images, output_hidden_states=True)
        ours = twin.model(images, output_hidden_states=True)
        assert len(ours.hidden_states) == len(theirs.hidden_states)
        for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            assert_close(mine, other)
        assert_close(twin.model.norm(ours.hidden_states[-1]), ours.last_hidden_state)
        for name in ("logits", "last_hidden_state", "pooler_output"):
            if theirs.get(name) is not None:
                assert_close(getattr(ours, name), theirs[name])

    def test_images_of_another_size(self, twin: Twin) -> None:
        """Stretched positions are transformers', for squares and rectangles."""
        for size in ((16, 16), (18, 18), (24, 24), (9, 33), (4, 4)):
            images = torch.randn(2, twin.model.config.num_channels, *size)
            theirs = twin.reference(images, interpolate_pos_encoding=True).logits
            assert_close(twin.model(images, interpolate_pos_encoding=True).logits, theirs)

    def test_single_images_accumulate(self, tiny: Model) -> None:
        """Cut, one image at a time: positions get the very gradient that goes on to others."""
        self.check_layout(tiny, world=2, layout=Layout(tp=2), micro_batches=4)


def _name_on_disk(name: str) -> str:
    pairs = {
        "layers.": "encoder.layer.",
        ".attention.q_proj.": ".attention.attention.query.",
        ".attention.k_proj.": ".attention.attention.key.",
        ".attention.v_proj.": ".attention.attention.value.",
        ".attention.o_proj.": ".attention.output.dense.",
        ".mlp.fc1.": ".intermediate.dense.",
        ".mlp.fc2.": ".output.dense.",
    }
    for memory, disk in pairs.items():
        name = name.replace(memory, disk)
    return name


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("regression", torch.randn(2, 5)),
        ("multi_label_classification", torch.rand(2, 5).round()),
        ("single_label_classification", torch.tensor([3, 0])),
        (None, torch.rand(2, 5).round()),
    ],
)
def test_every_problem_type(problem: str | None, labels: Tensor, tmp_path: Path) -> None:
    fields = {**VIT_TINY, "problem_type": problem}
    twin = make_twin(ViT, transformers.ViTForImageClassification, fields, tmp_path)
    images = make_images(twin.model.config)
    assert_close(twin.model(images, labels=labels).loss, twin.reference(images, labels=labels).loss)


def test_patches_are_a_strided_convolution() -> None:
    """Values and gradients of the published form, on images with pixels left over."""
    ours, theirs = PatchEmbedding(3, 8, 4).double(), torch.nn.Conv2d(3, 8, 4, 4).double()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 14, 9, dtype=torch.float64)
    got, want = ours(images), theirs(images)
    assert_close(got, want)
    factor = torch.randn_like(want)
    (got * factor).sum().backward()
    (want * factor).sum().backward()
    assert_close(
        {n: p.grad for n, p in ours.named_parameters()},
        {n: p.grad for n, p in theirs.named_parameters()},
    )


def test_opening_without_the_pooler(tmp_path: Path) -> None:
    """A bare model may come without a pooler, and stays so when saved."""
    twin = make_twin(ViT, transformers.ViTModel, VIT_TINY, tmp_path / "theirs")
    config = twin.model.config.replace(add_pooling_layer=False)
    bare = ViT.from_config(config)
    bare.load_state_dict(twin.model.state_dict(), strict=False)
    images = make_images(config)
    theirs = twin.reference(images)
    assert bare(images).pooler_output is None
    assert_close(bare(images).last_hidden_state, theirs.last_hidden_state)
    bare.save_pretrained(tmp_path / "ours")
    again = ViT.from_pretrained(tmp_path / "ours")
    assert again.config == config
    assert_equal_trees(again.state_dict(), bare.state_dict())


def test_a_new_classifier_in_place_of_the_pooler(tmp_path: Path) -> None:
    """Published bare models have a pooler, which no classifier reads."""
    twin = make_twin(ViT, transformers.ViTModel, VIT_TINY, tmp_path / "theirs")
    head = {"head": "image_classification", "num_labels": 3, "new_head": True}
    tuned = ViT.from_pretrained(tmp_path / "theirs", **head)
    images = make_images(twin.model.config)
    out = tuned.eval()(images)
    assert out.logits.shape == (len(images), 3)
    assert_close(out.last_hidden_state, twin.reference(images).last_hidden_state)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 3, 20, 16), "20 x 16 pixels, but the model needs 16 x 16"),
        ((2, 1, 16, 16), "3 channels"),
        ((3, 16, 16), "3 channels"),
    ],
)
def test_wrong_images(shape: tuple[int, ...], words: str) -> None:
    model = ViT.from_config(ViTConfig.from_hf(VIT_TINY))
    with pytest.raises(ShapeError, match=words):
        model(torch.zeros(shape))
    with pytest.raises(ShapeError, match="fewer than one patch"):
        model(torch.zeros(1, 3, 3, 16), interpolate_pos_encoding=True)
    with pytest.raises(ShapeError, match="batch size 2"):
        model(torch.zeros(1, 3, 16, 16), labels=torch.zeros(2, dtype=torch.long))


def test_wrong_configs() -> None:
    for fields, words in (
        ({"patch_size": 0}, "patch_size=0"),
        ({"image_size": 8, "patch_size": 16}, "image_size=8"),
        ({"hidden_size": 30}, "hidden_size=30"),
    ):
        with pytest.raises(ConfigError, match=words):
            ViTConfig.from_hf({**VIT_TINY, **fields})
    with pytest.raises(ConfigError, match="two equal numbers"):
        ViTConfig.from_hf({**VIT_TINY, "image_size": [16, 20]})
    pair = ViTConfig.from_hf({**VIT_TINY, "image_size": [16, 16]})
    assert pair == ViTConfig.from_hf(VIT_TINY)
    assert pair.to_hf()["image_size"] == [16, 16]
    assert pair.replace(image_size=32).max_seq_len == 65


def test_dropout_is_in_training_only() -> None:
    config = ViTConfig.from_hf({**VIT_TINY, "hidden_dropout_prob": 0.5})
    model = ViT.from_config(config)
    images = make_images(config)
    assert not torch.equal(model(images).logits, model(images).logits)
    assert torch.equal(model.eval()(images).logits, model(images).logits)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_sizes(preset: str) -> None:
    model = ViT.from_config(ViTConfig.preset(preset), device="meta")
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[preset]


def test_old_short_name_and_hub_ids() -> None:
    assert ViTConfig.preset("vit-base_patch16_224") == ViTConfig.preset("vit-base-patch16-224")
    assert set(ViTConfig.hub_ids) <= set(ViTConfig.presets)


@pytest.mark.long
@pytest.mark.parametrize("preset", PUBLISHED)
def test_shapes_of_presets(preset: str) -> None:
    """Every preset has the shapes of transformers' model of its config."""
    config = ViTConfig.preset(preset)
    model = ViT.from_config(config, device="meta")
    hf_class = transformers.ViTModel if config.head == "none" else TestViT.hf_class
    with torch.device("meta"):
        theirs = hf_class(transformers.ViTConfig(**config.to_hf()))
    shapes = {
        rule.source: rule.source_shape(tuple(model.get_parameter(rule.parameter).shape))
        for rule in model.active_rules()
    }
    assert shapes == {_name_on_disk(n): tuple(p.shape) for n, p in theirs.named_parameters()}


def test_flops_and_cache_are_true() -> None:
    """FLOPs are six per multiplied weight and token, and attention's; nothing is cached."""
    config = ViTConfig.preset("vit-base-patch16-224-in21k", add_pooling_layer=False)
    model = ViT.from_config(config, device="meta")
    matrices = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() > 1 and n != "embed_positions"
    )
    matrices -= model.embed_class.numel()
    tokens = config.max_seq_len
    assert tokens == 14 * 14 + 1
    assert config.flops_per_token(tokens) == 6 * matrices + 12 * 12 * 768 * tokens
    assert config.kv_bytes_per_token() == 0


def test_what_info_says(tmp_path: Path) -> None:
    ViT.from_config(ViTConfig.from_hf(VIT_TINY)).save_pretrained(tmp_path)
    said = describe_model(str(tmp_path))
    assert "at 17 tokens" in said
    assert "KV-cache bytes per token    0" in said


def test_compiles_at_another_size() -> None:
    model = ViT.from_config(ViTConfig.from_hf(VIT_TINY)).eval()
    images = make_images(model.config, size=24)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    labels = make_labels(model, {"pixel_values": images})
    got = compiled(images, **labels, interpolate_pos_encoding=True)
    want = model(images, **labels, interpolate_pos_encoding=True)
    assert_close(got.loss, want.loss)
    torch.compiler.reset()
