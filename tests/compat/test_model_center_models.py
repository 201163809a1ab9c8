"""The old model classes: old names in and out, numbers of transformers, caches, files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from bmforge.compat.model_center import model as old
from bmforge.errors import CheckpointError, ConfigError
from bmforge.models import AutoModel

SIZES = {"vocab_size": 99, "dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 128}
LAYERS = {"num_layers": 2}
IDS = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(0))
LENGTH = torch.tensor([12, 7])
MASK = (torch.arange(12)[None] < LENGTH[:, None]).long()

# class -> the old fields of a small one
SMALL: dict[str, dict[str, Any]] = {
    "Bert": {**SIZES, **LAYERS, "position_size": 40},
    "Roberta": {**SIZES, **LAYERS, "position_size": 42},
    "Longformer": {**SIZES, **LAYERS, "position_size": 42, "attention_window": 4},
    "GPT2": {**SIZES, **LAYERS, "position_size": 40},
    "GPTj": {**SIZES, **LAYERS, "pos_rotary_dim": 4},
    "OPT": {**SIZES, **LAYERS, "position_size": 40},
    "Llama": {**SIZES, **LAYERS, "num_heads_kv": 2},
    "GLM": {**SIZES, **LAYERS, "position_size": 41, "sop_tok_id": 97, "mask_tok_id": 98},
    "T5": {**SIZES, "num_encoder_layers": 2, "num_decoder_layers": 1},
    "CPM1": {**SIZES, **LAYERS},
    "CPM2": {**SIZES, **LAYERS},
    "CPM3": {**SIZES, **LAYERS, "prompt_types": 3, "prompt_length": 2, "segment_types": 4},
}
DECODERS = ("GPT2", "GPTj", "OPT", "Llama")


def small(name: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(old, f"{name}Config")(**{**SMALL[name], "dropout_p": 0.0, **fields})
    return getattr(old, name)(config).eval()


@pytest.mark.parametrize("name", SMALL)
def test_fields_answer_under_both_names(name: str, tmp_path: Path) -> None:
    """As given, also after a way through JSON; the model has these sizes."""
    config = getattr(old, f"{name}Config")(**SMALL[name])
    config.to_json_file(tmp_path / "config.json")
    again = getattr(old, f"{name}Config").from_json_file(tmp_path / "config.json")
    for one in (config, again):
        assert (one.dim_model, one.hidden_size, one.num_heads) == (32, 32, 4)
        assert (one.dim_head, one.vocab_size) == (8, 99)
        for field, value in SMALL[name].items():
            found = getattr(one, field)
            assert found == value or found == (value,) * 2, field
    model = getattr(old, name).from_json_file(tmp_path / "config.json")
    assert model.input_embedding.dim_model == 32
    assert model.input_embedding.weight.shape == (99, 32)


def test_fields_are_checked() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'dim_model'"):
        old.BertConfig(dim_modle=32)
    with pytest.raises(ConfigError, match="post_layer_norm=False"):
        old.BertConfig(post_layer_norm=False)
    config = old.BertConfig(**SMALL["Bert"])
    with pytest.raises(ConfigError, match="length_scale=True"):
        config.length_scale = True
    with pytest.raises(ConfigError, match="Llama has no dropout"):
        old.LlamaConfig(dropout_p=0.1)
    config.num_layers = 1
    assert len(old.Bert(config).model.layers) == 1
    assert (config.tied, config.type_size, config.cls_head, config.half) == (True, 2, None, False)


@pytest.mark.parametrize("half", [True, False])
def test_parameters_have_the_wanted_precision(half: bool) -> None:
    model = small("GPT2", half=half)
    assert model.config.dtype is (torch.half if half else torch.float32)
    assert {p.dtype for p in model.parameters()} == {model.config.dtype}
    found = model(IDS, LENGTH, output_logits=True).logits
    wanted = small("GPT2")(IDS, LENGTH, output_logits=True).logits
    assert found.dtype is model.config.dtype
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_one_after_the_other_are_as_all_at_once(name: str) -> None:
    model = small(name)
    whole = model(IDS, LENGTH, output_logits=True)
    assert whole.logits.shape == (2, 12, 99)
    assert whole[0] is whole.last_hidden_state
    found = model(IDS[:, :5], use_cache=True)
    rows = [found[0]]
    for at in range(5, 12):
        past = found.past_key_values
        mask = MASK[:, : at + 1]
        found = model(
            IDS[:, at : at + 1], attention_mask=mask, use_cache=True, past_key_values=past
        )
        rows.append(found[0])
    shown = MASK.bool()
    torch.testing.assert_close(
        torch.cat(rows, 1)[shown], whole.last_hidden_state[shown], rtol=1e-5, atol=1e-5
    )
    assert torch.equal(model(IDS, LENGTH, return_logits=True), whole.logits)
    assert torch.equal(model(IDS, None, MASK, output_logits=True, return_dict=False)[2], whole[2])


def save_theirs(folder: Path, model: Any) -> Any:
    torch.manual_seed(1)
    model.init_weights()
    model.save_pretrained(folder)
    return model.eval()


def their_sizes(**more: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    return {**dict(zip(names, (32, 4, 2, 64), strict=True)), "vocab_size": 99, **more}


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_encoders_have_transformers_numbers(kind: str, tmp_path: Path) -> None:
    """Pooler and masked-token head of one checkpoint, from two of their models."""
    stem = {"bert": "Bert", "roberta": "Roberta"}[kind]
    padding = {"roberta": 1, "bert": 0}[kind]
    config = getattr(hf, f"{stem}Config")(
        **their_sizes(max_position_embeddings=42, pad_token_id=padding)
    )
    bare = save_theirs(tmp_path / "bare", getattr(hf, f"{stem}Model")(config))
    words = save_theirs(tmp_path / "words", getattr(hf, f"{stem}ForMaskedLM")(config))
    with torch.no_grad():
        wanted = bare(IDS, MASK)
        model = getattr(old, stem).from_pretrained(tmp_path / "bare")
        assert model.training
        found = model.eval()(IDS, attention_mask=MASK)
        shown = MASK.bool()
        torch.testing.assert_close(
            found.last_hidden_state[shown], wanted[0][shown], rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(found.pooler_output, wanted[1], rtol=1e-5, atol=1e-6)
        assert found[1] is found.pooler_output
        with pytest.raises(ConfigError, match="no head for tokens"):
            model(IDS, LENGTH, output_logits=True)
        model = getattr(old, stem).from_pretrained(tmp_path / "words").eval()
        logits = model(IDS, LENGTH, output_logits=True).logits
        torch.testing.assert_close(
            logits[shown], words(IDS, MASK).logits[shown], rtol=1e-5, atol=1e-5
        )


def test_half_a_head_is_no_encoder_alone(tmp_path: Path) -> None:
    """What is wrong with a head for words is said, not taken for its absence."""
    save_theirs(tmp_path, hf.BertForMaskedLM(hf.BertConfig(**their_sizes())))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["cls.predictions.transform.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: cls\.predictions\.transform"):
        old.Bert.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "T5"])
def test_writers_have_transformers_numbers(kind: str, tmp_path: Path) -> None:
    """Opened under the old names, with sizes read and a dropout changed; and saved again."""
    configs = {
        "GPT2": lambda: hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4),
        "Llama": lambda: hf.LlamaConfig(**their_sizes(num_key_value_heads=2)),
        "T5": lambda: hf.T5Config(
            vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
        ),
    }
    heads = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}
    heads["T5"] = "T5ForConditionalGeneration"
    theirs = save_theirs(tmp_path / "in", getattr(hf, heads[kind])(configs[kind]()))
    config = getattr(old, f"{kind}Config").from_pretrained(tmp_path / "in")
    assert (config.dim_model, config.num_heads, config.num_layers, config.dim_head) == (32, 4, 2, 8)
    config.dropout_p = 0.0
    model = getattr(old, kind).from_pretrained(tmp_path / "in", config=config)
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    if kind == "T5":
        inputs |= {"decoder_input_ids": IDS.flip(1), "decoder_attention_mask": MASK}
    with torch.no_grad():
        wanted = theirs(**inputs).logits[MASK.bool()]
        found = model(**inputs, output_logits=True).logits[MASK.bool()]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        model.save_pretrained(tmp_path / "out")
        again = AutoModel.from_pretrained(tmp_path / "out")(**inputs).logits[MASK.bool()]
        torch.testing.assert_close(again, wanted, rtol=1e-5, atol=1e-5)


def test_classes_of_tokens_take_the_place_of_words() -> None:
    model = small("GPT2", cls_head=3)
    out = model(IDS, LENGTH, output_logits=True)
    assert out.logits.shape == (2, 12, 3)
    wanted = torch.nn.functional.linear(
        out.last_hidden_state, model.cls_projection.weight, model.cls_projection.bias
    )
    torch.testing.assert_close(out.logits, wanted)


def test_sources_and_targets_by_length_and_by_mask() -> None:
    model = small("T5")
    target = IDS.flip(1)
    one = model(IDS, LENGTH, target, LENGTH, output_logits=True)
    masks = {"attention_mask": MASK, "decoder_attention_mask": MASK}
    two = model(input_ids=IDS, decoder_input_ids=target, **masks, output_logits=True)
    assert torch.equal(one.logits, two.logits)
    known = one.encoder_last_hidden_state
    three = model(encoder_outputs=known, decoder_input_ids=target, **masks, return_logits=True)
    torch.testing.assert_close(three, one.logits)
    logits = small("CPM2")(IDS, LENGTH, target, LENGTH)
    assert logits.shape == (2, 12, 99)


def test_glm_derives_the_positions_that_can_be_given() -> None:
    """A blank (98) in part A, its contents behind the start (97); ids in int32, as in programs."""
    ids = torch.tensor([[5, 6, 98, 7, 97, 11, 12]]).int()
    model = small("GLM")
    positions = torch.tensor([[0, 1, 2, 3, 2, 2, 2]])
    places = torch.tensor([[0, 0, 0, 0, 1, 2, 3]])
    derived = model(ids, output_logits=True)
    given = model(ids, position_ids=positions, block_position_ids=places, output_logits=True)
    torch.testing.assert_close(derived.logits, given.logits)


def test_published_cpm1_is_called_as_it_was() -> None:
    torch.manual_seed(0)
    span = torch.zeros(2, 12, dtype=torch.long)
    sizes = {"vocab_size": 99, "dim_model": 32, "num_heads": 4, **LAYERS}
    cpm1 = old.CPM1(old.CPM1Config(pos_bias_type="none", **sizes)).eval()
    context = torch.zeros(2, 12, dtype=torch.bool)
    logits = cpm1(IDS, LENGTH, context, span)
    wanted = cpm1.to_zoo()(IDS, MASK).logits
    torch.testing.assert_close(logits[MASK.bool()], wanted[MASK.bool()])
    with pytest.raises(ConfigError, match="context"):
        cpm1(IDS, LENGTH, ~context, span)


def test_cpm3_is_called_as_it_was() -> None:
    cpm3 = small("CPM3")
    ids = torch.cat((torch.tensor([[0, 1]] * 2), IDS), 1)
    wide = torch.zeros(2, 14, dtype=torch.long)
    inputs = {"position": wide, "segment": wide + 2, "span": wide}
    shown = torch.ones(2, 14, dtype=torch.bool)
    logits, hidden = cpm3(ids, LENGTH + 2, shown, **inputs)
    assert (logits.shape, hidden.shape) == ((2, 14, 99), (2, 14, 32))
    named = {"token_type_ids": wide + 2, "context": shown, "span": wide}
    out = cpm3(input_ids=ids, length=LENGTH + 2, **named)
    assert torch.equal(out.logits, logits)
    mask = (torch.arange(14)[None] < LENGTH[:, None] + 2).long()
    out = cpm3(input_ids=ids, attention_mask=mask, **named)
    assert torch.equal(out.logits, logits)


def test_images() -> None:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "hidden_size": 32, "num_layers": 1}
    config = old.ViTConfig(**sizes, num_heads=4, mlp_size=64, num_classes=5)
    images = torch.randn(2, 3, 16, 16)
    model = old.ViT(config).eval()
    assert torch.equal(model(images), model.model(images).logits)
    assert model(images).shape == (2, 5)


@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama", "T5"])
def test_embeddings_instead_of_ids(name: str) -> None:
    """They are taken where both are given, as in the old models; lengths are those of the rows."""
    model = small(name).eval()
    more = {"decoder_input_ids": IDS[:, :5]} if name == "T5" else {}
    embeds = model.input_embedding(IDS)
    want = model(IDS, LENGTH, **more).last_hidden_state
    other = torch.zeros_like(IDS)
    assert torch.equal(model(other, LENGTH, inputs_embeds=embeds, **more).last_hidden_state, want)
    alone = model(length=LENGTH, inputs_embeds=embeds, **more).last_hidden_state
    assert torch.equal(alone, want)
    if more:
        begun = model.input_embedding(more["decoder_input_ids"])
        got = model(IDS, LENGTH, decoder_inputs_embeds=begun).last_hidden_state
        assert torch.equal(got, want)


def test_inputs_that_are_not_taken() -> None:
    model = small("Bert")
    with pytest.raises(TypeError, match="lenght"):
        model(IDS, lenght=LENGTH)
    assert model(IDS, LENGTH, head_mask=None, output_attentions=True).attentions is None


def checkpoints() -> Any:
    """What writes ModelCenter's own files; it lies with the tests of the zoo."""
    path = Path(__file__).parents[1] / "models" / "modelcenter_checkpoints.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bert_of_modelcenters_own_files(tmp_path: Path) -> None:
    """With pooler and head, which lie in one file there."""
    config = hf.BertConfig(**their_sizes(max_position_embeddings=42))
    theirs = save_theirs(tmp_path / "theirs", hf.BertForPreTraining(config))
    writer, source = checkpoints(), theirs.state_dict()
    tensors = writer.encoder(source, "bert")
    pooler = {f"pooler.dense.{k}": source[f"bert.pooler.dense.{k}"] for k in ("weight", "bias")}
    sizes = {**SIZES, "dim_ff": 64, **LAYERS, "position_size": 42}
    writer.save_model_center(tmp_path / "old", sizes, {**tensors, **pooler}, torch.float32)
    model = old.Bert.from_pretrained(tmp_path / "old").eval()
    assert (model.config.dim_model, model.config.position_size) == (32, 42)
    with torch.no_grad():
        found = model(IDS, LENGTH, output_logits=True)
        wanted = theirs(IDS, MASK)
        inner = theirs.bert(IDS, MASK)
    shown = MASK.bool()
    torch.testing.assert_close(found.pooler_output, inner[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        found.logits[shown], wanted.prediction_logits[shown], rtol=1e-5, atol=1e-5
    )


def test_classifier_of_modelcenters_own_files(tmp_path: Path) -> None:
    """What was trained to classify tokens is kept."""
    writer, config = checkpoints(), hf.BertConfig(**their_sizes(max_position_embeddings=42))
    theirs = save_theirs(tmp_path / "theirs", hf.BertForTokenClassification(config))
    tensors = writer.encoder({**theirs.state_dict(), "lm_head.bias": torch.zeros(99)}, "bert")
    tensors = {n: v for n, v in tensors.items() if not n.startswith("lm_head")}
    tensors |= {f"cls_projection.{n}": v for n, v in theirs.classifier.state_dict().items()}
    tensors |= {"pooler.dense.weight": torch.eye(32), "pooler.dense.bias": torch.zeros(32)}
    sizes = {**SIZES, "dim_ff": 64, **LAYERS, "position_size": 42, "cls_head": 2}
    writer.save_model_center(tmp_path / "old", sizes, tensors, torch.float32)
    model = old.Bert.from_pretrained(tmp_path / "old").eval()
    with torch.no_grad():
        found = model(IDS, LENGTH, output_logits=True)
        wanted = theirs(IDS, MASK).logits
    torch.testing.assert_close(found.logits[MASK.bool()], wanted[MASK.bool()], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.pooler_output, found.last_hidden_state[:, 0].tanh())


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_dropout_of_a_checkpoint_is_changed(rate: float, tmp_path: Path) -> None:
    """With its head and its tie; what was read is the same."""
    config = hf.BertConfig(**their_sizes(max_position_embeddings=42))
    theirs = save_theirs(tmp_path / "in", hf.BertForMaskedLM(config))
    model = old.Bert.from_pretrained(tmp_path / "in", dropout_p=rate)
    one, two = (model(IDS, LENGTH)[0] for _ in range(2))
    assert torch.equal(one, two) is (rate == 0.0)
    assert model.head.decoder.weight is model.model.embed.weight
    with torch.no_grad():
        found = model.eval()(IDS, LENGTH, output_logits=True).logits[MASK.bool()]
        wanted = theirs(IDS, MASK).logits[MASK.bool()]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_writers_of_modelcenters_own_files(kind: str, tmp_path: Path) -> None:
    """A padded vocabulary is cut, and divided weights are multiplied again."""
    writer = checkpoints()
    if kind == "gpt2":
        config = hf.GPT2Config(vocab_size=49, n_embd=32, n_layer=2, n_head=4, n_inner=128)
        theirs: Any = hf.GPT2LMHeadModel(config)
        sizes = {**SIZES, "vocab_size": 50, **LAYERS, "position_size": 1024}
    else:
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        theirs = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=50, **shape))
        sizes = {**SIZES, "vocab_size": 50, "num_encoder_layers": 2, "num_decoder_layers": 2}
    theirs = save_theirs(tmp_path / "in", theirs)
    source = writer.read_disk(theirs, tmp_path / "theirs")
    tensors = getattr(writer, kind)(source)
    writer.save_model_center(tmp_path / "old", sizes, tensors, torch.float32)
    inputs = {"input_ids": IDS % 49, "attention_mask": MASK}
    if kind == "t5":
        inputs |= {"decoder_input_ids": IDS.flip(1) % 49}
    model = {"gpt2": old.GPT2, "t5": old.T5}[kind].from_pretrained(tmp_path / "old").eval()
    with torch.no_grad():
        wanted = theirs(**inputs).logits[MASK.bool()]
        found = model(**inputs, output_logits=True).logits[MASK.bool()]
    noise = 3e-6 * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=noise)
