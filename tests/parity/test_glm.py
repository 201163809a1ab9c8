"""GLM-10B against vectors that the original code made, and against ModelCenter's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bmforge.errors import ConfigError, ShapeError
from bmforge.infer import KVCache, generate
from bmforge.models.glm import GLM, GLMConfig, is_glm10b
from bmforge.nn.glm_positions import blank_positions
from bmforge.testing.batches import make_batch
from bmforge.testing.capability import capability
from bmforge.testing.decoder_suite import DecoderOwnSuite
from bmforge.testing.family_suite import FamilySuite
from bmforge.testing.file_suite import FileSuite
from bmforge.testing.presets import count_preset
from bmforge.testing.reference_pair import to_reference_names
from bmforge.testing.tolerance import assert_close

GOLDEN = Path(__file__).parents[1] / "golden"
VECTORS = ("glm10b", "glm10b_attnscale")
START, MASK = 90, 91
TINY: dict[str, Any] = {
    "model_type": "glm",
    "block_position_encoding": True,
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_sequence_length": 32,
    "output_dropout_prob": 0.0,
    "attention_dropout_prob": 0.0,
    "embedding_dropout_prob": 0.0,
}


def read(name: str, kind: str) -> dict[str, Tensor]:
    """Return the vectors of one kind."""
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as arrays:
        names = [n for n in arrays.files if n.startswith(f"{kind}:")]
        return {n.removeprefix(f"{kind}:"): torch.from_numpy(arrays[n]) for n in names}


def open_original(name: str, directory: Path) -> GLM:
    """Open the original weights and config."""
    weights = read(name, "weight")
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as arrays:
        config = json.loads(str(arrays["config"]))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "glm", **config}))
    return GLM.from_pretrained(directory)


def near(actual: Tensor, expected: Tensor) -> None:
    """The README's tolerance for logits up to 11."""
    assert_close(actual, expected, rtol=0.0, atol=2e-5)


def blank_rows(batch: int = 2) -> Tensor:
    """Return rows of a text with two blanks and the beginning of what fills them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(START, (batch, 14), generator=generator)
    ids[:, 2] = ids[:, 5] = MASK
    ids[:, 8] = ids[:, 11] = START
    return ids


class TestGLM(DecoderOwnSuite, FamilySuite, FileSuite):
    """GLM."""

    model_class = GLM

    def tiny_config(self) -> GLMConfig:
        """Return a config without special tokens: plain causal."""
        return GLMConfig.from_hf(TINY)

    @capability("logits")
    @pytest.mark.parametrize("name", VECTORS)
    def test_original_logits(self, name: str, tmp_path: Path) -> None:
        """Every form of the mask gives the original's logits and hidden states."""
        model, given, want = (
            open_original(name, tmp_path),
            read(name, "input"),
            read(name, "output"),
        )
        ids, positions = given["input_ids"], given["position_ids"]
        for mask in (given["attention_mask"], given["attention_mask_4d"]):
            out = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True)
            near(out.logits, want["logits"])
            near(out.last_hidden_state, want["last_hidden_states"])
            for mine, other in zip(out.hidden_states[:2], want["mems"], strict=False):
                near(mine[:, :15], other)
        for mask in (torch.tensor([0]), torch.tensor(0), None):
            out = model(ids, attention_mask=mask, position_ids=positions)
            near(out.logits, want["logits_causal_sep0"])

    @capability("gradients")
    @pytest.mark.parametrize("name", VECTORS)
    def test_original_gradients(self, name: str, tmp_path: Path) -> None:
        """The loss, and the gradients that the vectors have, under the original names."""
        model, given, want = (
            open_original(name, tmp_path),
            read(name, "input"),
            read(name, "output"),
        )
        loss = model(
            given["input_ids"],
            given["attention_mask"],
            given["position_ids"],
            labels=given["labels"],
        ).loss
        near(loss, want["loss"])
        loss.backward()
        got = to_reference_names(model, {n: p.grad for n, p in model.named_parameters()})
        expected = read(name, "grad")
        assert expected
        for weight, gradient in expected.items():
            bound = 1e-5 * gradient.abs().max().item() + 1e-7
            assert_close({weight: got[weight]}, {weight: gradient}, rtol=0.0, atol=bound)

    def test_gradients_are_slopes(self, tiny: GLM) -> None:
        """The gradient of every weight, which the vectors do not have, along a random direction."""
        model, ids = tiny.double(), make_batch(tiny)
        inputs = {"input_ids": ids, "attention_mask": torch.tensor([5, 3]), "labels": ids}
        model(**inputs).loss.backward()
        for name, parameter in model.named_parameters():
            direction = torch.randn_like(parameter)
            with torch.no_grad():
                losses = []
                for step in (1e-6, -2e-6):
                    parameter += step * direction
                    losses.append(model(**inputs).loss)
                parameter += 1e-6 * direction
            slope = (losses[0] - losses[1]) / 2e-6
            assert_close(
                {name: (parameter.grad * direction).sum()}, {name: slope}, rtol=1e-5, atol=1e-7
            )

    @pytest.mark.parametrize("name", VECTORS)
    def test_original_cached_step(self, name: str, tmp_path: Path) -> None:
        """Keys and values in the place of `mems` are the same function."""
        model, given, want = (
            open_original(name, tmp_path),
            read(name, "input"),
            read(name, "output"),
        )
        ids, positions = given["input_ids"], given["position_ids"]
        lengths, full = given["attention_mask"], given["attention_mask_4d"]
        for first, second in ((lengths, lengths), (full[..., :15, :15], full[..., 15:, :])):
            cache = KVCache(model.config.num_layers, 16)
            model(ids[:, :15], first, positions[..., :15], cache=cache)
            out = model(ids[:, 15:], second, positions[..., 15:], cache=cache)
            near(out.logits, want["cached_step_logits"])

    @capability("conversion")
    @pytest.mark.parametrize("name", VECTORS)
    def test_original_weights_come_back(self, name: str, tmp_path: Path) -> None:
        """What we save is bit for bit what the original saved, and the config means the same."""
        (tmp_path / "theirs").mkdir()
        model = open_original(name, tmp_path / "theirs")
        model.save_pretrained(tmp_path / "ours")
        saved, weights = load_file(tmp_path / "ours" / "model.safetensors"), read(name, "weight")
        assert set(saved) == set(weights)
        assert all(torch.equal(saved[n], weights[n]) for n in weights)
        again = json.loads((tmp_path / "ours" / "config.json").read_text())
        first = json.loads((tmp_path / "theirs" / "config.json").read_text())
        assert {n: again[n] for n in first} == first

    @capability("generate")
    @pytest.mark.parametrize("beams", [1, 3])
    def test_generates_what_whole_rows_say(self, beams: int) -> None:
        """Filling a blank through the cache gives the ids of running the whole row every time."""
        model = filling_model()
        ids = blank_rows()[:, :9]  # one start token: the last blank is to be filled
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        for padding in (None, mask):
            made = generate(model, ids, padding, max_new_tokens=5, num_beams=beams, do_sample=False)
            assert torch.equal(made[:, :9], ids)
            if beams > 1:
                continue
            row, seen = ids, padding
            for _ in range(5):
                last = model(row, attention_mask=seen).logits[:, -1].argmax(-1, keepdim=True)
                row = torch.cat((row, last), 1)
                seen = None if seen is None else torch.nn.functional.pad(seen, (0, 1), value=1)
            assert torch.equal(made, row)

    def test_sequence_classification(self) -> None:
        """The class is read from the first token, through two layers."""
        config = GLMConfig.from_hf({**TINY, "architectures": ["GLMForSequenceClassification"]})
        model = GLM.from_config(config.replace(num_labels=3)).eval()
        ids = make_batch(model)
        out, head = model(ids, labels=torch.tensor([0, 2])), model.classifier
        first = out.last_hidden_state[:, 0]
        want = torch.tanh(first @ head.dense.weight.T + head.dense.bias) @ head.out.weight.T
        assert_close(out.logits, want + head.out.bias)
        assert_close(out.loss, torch.nn.functional.cross_entropy(want, torch.tensor([0, 2])))


def filling_model() -> GLM:
    """Return a model that finds positions in the ids."""
    config = GLMConfig.from_hf({**TINY, "sop_tok_id": START, "mask_tok_id": MASK})
    return GLM.from_config(config.replace(init_std=0.3)).eval()


def model_center_positions(row: list[int]) -> tuple[list[int], list[int], int]:
    """The same of one row, as ModelCenter's GLM loops over it (model_center/model/glm.py)."""
    length = len(row)
    starts = [i for i, token in enumerate(row) if token == START]
    masks = [i for i, token in enumerate(row) if token == MASK]
    sep = starts[0] if starts else length
    positions, blocks = list(range(length)), [0] * length
    head = sep
    for number, tail in enumerate(starts[1:]):
        positions[head:tail] = [masks[number]] * (tail - head)
        head = tail
    if head != length and masks:
        positions[head:] = [masks[-1]] * (length - head)
    head = sep
    for tail in [*starts[1:], length]:
        if head != length:
            blocks[head:tail] = list(range(1, 1 + tail - head))
        head = tail
    return positions, blocks, sep


def test_positions_are_model_centers() -> None:
    """Rows with as many fillings as blanks, fewer, none, and no blanks at all."""
    rows = [
        blank_rows(1)[0].tolist(),
        [1, MASK, 2, MASK, 3, START, 4, 5, START, 6],
        [1, MASK, 2, MASK, 3, START, 4, 5, 7, 6],
        [1, MASK, 2, 3, 4, 5, 6, 7, 8, 9],
        [1, 2, 3, START, 4, 5, 6, 7, 8, 9],
        [START, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        [1, 2, 3, 4, 5, 6, 7, 8, MASK, START],
    ]
    for row in rows:
        positions, blocks, sep = model_center_positions(row)
        got, lengths = blank_positions(torch.tensor([row]), START, MASK)
        assert got[0].tolist() == [positions, blocks], row
        assert lengths.tolist() == [sep], row


def test_padding_does_not_count() -> None:
    """A padded row has its own positions, and the same logits as alone."""
    # In float64: the padded row takes another kernel, which sums in another order.
    model, ids = filling_model().double(), blank_rows(1)
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), ids), 1)
    mask = (torch.arange(17) >= 3).long()[None]
    positions, lengths = blank_positions(padded, START, MASK, mask)
    alone, length = blank_positions(ids, START, MASK)
    assert torch.equal(positions[..., 3:], alone)
    assert lengths.item() == length.item() + 3
    assert_close(model(padded, attention_mask=mask).logits[:, 3:], model(ids).logits)


def test_ids_alone_say_what_masks_and_positions_say() -> None:
    """Without masks and positions the result is that of giving them."""
    model, ids = filling_model(), blank_rows()
    positions, lengths = model.derive_positions(ids)
    want = model(ids, attention_mask=lengths, position_ids=positions).logits
    assert torch.equal(model(ids).logits, want)
    changed = ids.clone()
    changed[:, 7] += 1  # part A sees all of itself, part B what is before it
    assert not torch.allclose(model(changed).logits[:, 0], want[:, 0])
    changed = ids.clone()
    changed[:, 12] += 1
    assert torch.equal(model(changed).logits[:, :12], want[:, :12])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids).logits, want)
    torch.compiler.reset()


def test_bad_input() -> None:
    """Positions that cannot be known, positions beyond the table, lengths for other rows."""
    model, ids = filling_model(), blank_rows()
    cache = KVCache(2, 16)
    model(ids[:, :13], cache=cache)
    with pytest.raises(ShapeError, match="position_ids"):
        model(ids[:, 13:], cache=cache)
    with pytest.raises(ShapeError, match="max_seq_len=32"):
        model(ids, position_ids=torch.full((1, 2, 14), 33))
    with pytest.raises(ShapeError, match="3 lengths"):
        model(ids, attention_mask=torch.tensor([1, 2, 3]))
    model(ids.repeat(1, 4), position_ids=torch.zeros(1, 2, 56, dtype=torch.long))


def test_glm4_is_told_apart() -> None:
    """By its fields: a GLM-4's config is refused by name, GLM-10B's is accepted."""
    glm4 = {"model_type": "glm", "num_hidden_layers": 40, "rms_norm_eps": 1e-5, "hidden_size": 32}
    assert is_glm10b(TINY)
    assert not is_glm10b(glm4)
    assert not is_glm10b({**TINY, "model_type": "glm4"})
    assert GLMConfig.opens(TINY)
    assert not GLMConfig.opens(glm4)
    with pytest.raises(ConfigError, match="rms_norm_eps, so the model is a GLM-4"):
        GLMConfig.from_hf(glm4)
    with pytest.raises(ConfigError, match="relative_encoding"):
        GLMConfig.from_hf({**TINY, "relative_encoding": True})
    with pytest.raises(ConfigError, match="sop_token_id and mask_token_id"):
        GLMConfig.from_hf({**TINY, "sop_tok_id": 3})
    published = {**TINY, "architectures": ["GLMModel"]}
    assert GLMConfig.from_hf({**published, "output_predict": True}).head == "language_model"
    assert GLMConfig.from_hf(published).head == "none"


@pytest.mark.parametrize("name", list(GLMConfig.presets))
def test_preset_sizes(name: str) -> None:
    """The sum of the original's tensor shapes (`modeling_glm.py`); glm-10b is 9.88 billion."""
    c = GLMConfig.preset(name)
    width, embeddings = c.hidden_size, c.vocab_size + 2 * (c.max_seq_len + 1)
    layer = 3 * width * (width + 1) + width * (width + 1)  # q, k, v and dense
    layer += 4 * width * (width + 1) + width * (4 * width + 1) + 4 * width  # MLP and two norms
    assert count_preset(GLM, name) == embeddings * width + c.num_layers * layer + 2 * width
    assert count_preset(GLM, "glm-10b") == 9_880_682_496
