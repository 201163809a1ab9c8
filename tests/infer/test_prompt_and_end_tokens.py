"""One prompt rule, one end-token rule and one text rule in every way to generate.

The reference is transformers: its tokenizer's ids of a prompt, its `generate` with the files'
generation_config.json, and its decoding of all ids.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmforge.errors import ConfigError
from bmforge.infer import Engine, EngineConfig, GenerationConfig, Request, generate
from bmforge.infer.chat import encode_messages
from bmforge.infer.generation import complete_config
from bmforge.infer.openbmb.texts import write_text
from bmforge.models import AutoModel, Llama
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate

transformers = pytest.importorskip("transformers")
BEGIN, END, TURN = "<|begin|>", "<|end|>", "<|turn|>"
WORDS = "the quick brown fox jumps over the lazy dog "
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
TEXTS = st.text(st.sampled_from("the quick br<|>endéß漢 \n"), min_size=1, max_size=20)


def _byte_level(post: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[BEGIN, END, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator([WORDS] * 50, trainer)
    if post == "template":
        tok.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]
        )
    return tok


def _sentence_piece(post: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    letters = dict.fromkeys("▁" + WORDS.replace(" ", "") + "<|>")
    names = [BEGIN, END, TURN, "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *letters]
    vocab = {name: id for id, name in enumerate([*names, "▁t", "he", "▁the", "qu"])}
    pairs = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("q", "u")]
    tok = Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tok.add_special_tokens([BEGIN, END, TURN])
    if post == "template":
        tok.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]
        )
    return tok


KINDS = {
    f"{kind}-{post}": (make, post)
    for (kind, make), post in itertools.product(
        {"bytes": _byte_level, "pieces": _sentence_piece}.items(), ("none", "template", "flags")
    )
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of transformers with a tokenizer of one kind."""
    return _save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of these, where the tokenizer does not matter."""
    return _save("bytes-none", tmp_path_factory.mktemp("plain"))


@cache
def _theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@cache
def _ours(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@cache
def _model(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder).eval()


def _save(kind: str, out: Path) -> Path:
    make, post = KINDS[kind]
    flags = {"add_bos_token": True, "add_eos_token": False} if post == "flags" else {}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make(post), bos_token=BEGIN, eos_token=END, **flags
    )
    fast.save_pretrained(out)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.4,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=[1, 50],
    )
    model = transformers.LlamaForCausalLM(config)
    # One wrong byte makes the tokenizers library's byte fallback decode its whole run as broken,
    # the prompt's bytes too, which no stream can follow: the model writes pieces alone.
    pieces = {} if make is _byte_level else {"suppress_tokens": list(range(4, 260))}
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[1, 2, 50, *range(90, 100)],
        pad_token_id=1,
        repetition_penalty=1.2,
        **pieces,
    )
    model.save_pretrained(out)
    return out


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=TEXTS)
def test_prompt_ids_are_those_of_transformers(folder: Path, text: str) -> None:
    ours = _ours(folder)
    theirs = _theirs(folder)
    assert ours.encode_prompt(text) == theirs(text).input_ids


@pytest.mark.parametrize("prompt", ["the quick", "fox é", "dog "])
def test_every_path_writes_what_transformers_writes(folder: Path, prompt: str) -> None:
    tokenizer = _theirs(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = reference.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
    ends = set(reference.generation_config.eos_token_id)
    shown = out[:-1] if out[-1] in ends else out
    text = tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    model, ours = _model(folder), _ours(folder)
    assert write_text(model, ours, prompt, max_new_tokens=20) == text
    assert generate(model, ids, max_new_tokens=20)[0].tolist() == out
    with Engine(folder, config=EngineConfig(max_tokens=64)) as engine:
        assert engine.generate(prompt, max_new_tokens=20) == text
        assert engine.generate(ids[0].tolist(), max_new_tokens=20) == out
        streamed = "".join(engine.stream(prompt, max_new_tokens=20))
        handle = engine.submit(Request(prompt, GenerationConfig(max_new_tokens=20)))
        pieces = [piece.text for piece in handle]
        answer = handle.wait()[0]
    begin = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert [*ids[0].tolist(), *answer.ids] == out
    assert begin + answer.text == begin + "".join(pieces) == begin + streamed == text


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_stop_strings_end_the_text_in_front_of_them(folder: Path, data: st.DataObject) -> None:
    """A stop string found in the free continuation cuts it there, in each way to generate."""
    model, tokenizer = (
        _model(folder),
        _ours(folder),
    )
    options: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": ()}
    free = write_text(model, tokenizer, "the quick", **options).removeprefix("the quick")
    start = data.draw(st.integers(0, max(0, len(free) - 1)))
    stop = free[start : start + data.draw(st.integers(1, 4))]
    if not stop or "\ufffd" in stop:
        return
    want = free[: free.index(stop)]
    cut = write_text(model, tokenizer, "the quick", **options, stop_strings=(stop,))
    assert cut == "the quick" + want
    with Engine(model, tokenizer=tokenizer, config=EngineConfig(max_tokens=64)) as engine:
        given = GenerationConfig(**options, stop_strings=(stop,))
        assert engine.submit(Request("the quick", given)).wait()[0].text == want
        assert "".join(engine.stream("the quick", **options, stop_strings=(stop,))) == want


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(said=TEXTS.filter(lambda text: text.strip() != ""))
def test_chat_ids_are_those_of_transformers(folder: Path, said: str) -> None:
    """The template's special tokens are tokens; their names in a message are characters."""
    theirs = _theirs(folder)
    ours = _ours(folder)
    template, model = ChatTemplate(TEMPLATE, ours), _shell(folder)
    for text in (said, f"{said}{END}{TURN}system"):
        messages = [{"role": "user", "content": text}]
        ids = encode_messages(template, messages, model, ours)
        special = [id for id in ids if id < 3]
        assert special == [0, 2, 1, 2]
        if text == said and not any(name in said for name in (BEGIN, END, TURN)):
            written = theirs.apply_chat_template(
                messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
            )
            assert ids == theirs(written, add_special_tokens=False).input_ids
        plain = ours.decode([id for id in ids if id > 2]).replace(" ", "")
        assert text.replace(" ", "") in plain


def _shell(folder: Path) -> Llama:
    model = AutoModel.describe_pretrained(folder)[0]
    assert isinstance(model, Llama)
    return model


def _with_generation(folder: Path, **fields: Any) -> Any:
    model = AutoModel.from_pretrained(folder).eval()
    model.config.raw["generation_config"] = {"eos_token_id": 1, "pad_token_id": 1, **fields}
    return model


# transformers' field -> a value that changes its tokens.
FIELDS: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "num_beams": 3,
    "bad_words_ids": [[40], [41, 42]],
    "suppress_tokens": list(range(30, 60)),
    "min_new_tokens": 6,
    "max_new_tokens": 7,
    "begin_suppress_tokens": [30, 38, 60],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 61,
    "min_length": 9,
    "encoder_repetition_penalty": 1.5,
    "exponential_decay_length_penalty": [2, 1.5],
    "sequence_bias": [[[30], 2.0]],
    "guidance_scale": 1.5,
    "typical_p": 0.4,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "penalty_alpha": 0.6,
    "diversity_penalty": 0.5,
    "renormalize_logits": True,
    "remove_invalid_values": True,
}

UNSUPPORTED = list(FIELDS)[10:]


@pytest.mark.parametrize("name", FIELDS)
def test_a_published_field_gives_transformers_tokens_or_is_refused(plain: Path, name: str) -> None:
    model = _with_generation(plain, **{name: FIELDS[name]})
    ids = torch.tensor([[0, 60, 70, 80]])
    given = {} if name == "max_new_tokens" else {"max_new_tokens": 12}
    if name in UNSUPPORTED:
        with pytest.raises(ConfigError, match=name):
            generate(model, ids, **given)
        return
    ours = generate(model, ids, **given)
    reference = transformers.AutoModelForCausalLM.from_pretrained(plain).eval()
    reference.generation_config = transformers.GenerationConfig(
        eos_token_id=1, pad_token_id=1, **{name: FIELDS[name]}
    )
    assert ours.tolist() == reference.generate(ids, **given).tolist()


def test_published_sampling_is_the_default_and_gives_way(plain: Path) -> None:
    published = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    model = _with_generation(plain, **published)
    config = complete_config(model, GenerationConfig())
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (
        True,
        0.6,
        0.9,
        20,
    )
    greedy = complete_config(model, GenerationConfig(do_sample=False))
    assert (greedy.do_sample, greedy.temperature, greedy.top_p) == (False, 1.0, None)
    beams = complete_config(model, GenerationConfig(num_beams=2))
    assert (beams.do_sample, beams.num_beams) == (False, 2)
    assert complete_config(model, GenerationConfig(temperature=0.3)).temperature == 0.3


def test_generation_config_is_written_back(plain: Path, tmp_path: Path) -> None:
    _model(plain).save_pretrained(tmp_path / "export")
    names = [plain / "generation_config.json", tmp_path / "export" / "generation_config.json"]
    old, new = (json.loads(name.read_text()) for name in names)
    assert old == new
    assert "generation_config" not in json.loads((tmp_path / "export/config.json").read_text())
