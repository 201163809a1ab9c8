"""What lm-eval asks: against transformers' model, run plainly, and against lm-eval's own rows."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from bmforge.data.tasks.rows import Pair
from bmforge.errors import ConfigError, MissingDependencyError
from bmforge.infer.harness import TextModel, open_lm
from bmforge.infer.score import roll_windows
from bmforge.models import GPT2, T5, Bert, BertConfig, GPT2Config, T5Config
from bmforge.tokenizers import AutoTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.\n"
TEXTS = ["the cat sat on the mat, and so did the dog and the cow.", "no", "a b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of letters that positions end for after 20."""
    folder = tmp_path_factory.mktemp("letters")
    vocabulary = {token: id for id, token in enumerate(["<s>", "</s>", "<unk>", *LETTERS])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    every = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    fast.pre_tokenizer, fast.decoder = every, tokenizers.decoders.Fuse()
    fast.add_special_tokens(["<s>", "</s>"])
    fast.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ messages[0].content }}!",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes: dict[str, Any] = {"vocab_size": len(vocabulary), "hidden_size": 32, "num_layers": 1}
    torch.manual_seed(1)
    config = GPT2Config(**sizes, num_heads=2, max_seq_len=20, init_std=0.5)
    GPT2.from_config(config).save_pretrained(folder)
    return folder


def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_continuations_are_what_transformers_says(folder: Path) -> None:
    """The last tokens that fit are read; spaces between belong to the continuation."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = [("the cat ", "sat"), ("", "no"), (TEXTS[0], " end"), ("a", "b" * 20), ("so", " did")]
    model = TextModel(
        GPT2.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), batch_size=2
    )
    found = model.loglikelihood(asked)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    for (context, continuation), one in zip(asked, found, strict=True):
        before = encode(context.rstrip()) or [tokenizer.bos_token_id]
        answer = encode(context[len(context.rstrip()) :] + continuation)
        scores = log_probs(theirs, [*before, *answer][:-1][-20:])[-len(answer) :]
        want = scores[torch.arange(len(answer)), torch.tensor(answer)].sum()
        assert one.log_prob == pytest.approx(float(want), rel=1e-5)
        assert one.is_greedy is (scores.argmax(-1).tolist() == answer)
    likeliest = tokenizer.decode(log_probs(theirs, encode("the")).argmax(-1)[-1:])
    assert model.loglikelihood([("the", likeliest)])[0].is_greedy
    with pytest.raises(ConfigError, match="a continuation of 21 tokens"):
        model.loglikelihood([("a", "b" * 21)])
    assert model.loglikelihood([]) == []


def test_whole_texts_are_what_transformers_says(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = TextModel(GPT2.from_pretrained(folder), tokenizer)
    for text, found in zip(TEXTS, model.loglikelihood_rolling(TEXTS), strict=True):
        ids, want = tokenizer.encode(text), 0.0
        for start in range(0, len(ids), 20):
            part = ids[start : start + 20]
            before = [tokenizer.bos_id, *ids][max(0, start + len(part) - 20) : start + len(part)]
            scores = log_probs(theirs, before)[-len(part) :]
            want += float(scores[torch.arange(len(part)), torch.tensor(part)].sum())
        assert found == pytest.approx(want, rel=1e-5)


def test_rows_are_those_of_the_documented_example() -> None:
    """lm-eval's own: ten tokens, four in a row, the last one with all the context it can have."""
    rows = list(roll_windows(list(range(10)), [99], 5))
    assert rows == [
        Pair([99], [0, 1, 2, 3]),
        Pair([3], [4, 5, 6, 7]),
        Pair([5, 6, 7], [8, 9]),
    ]
    assert list(roll_windows([1, 2, 3], [], 9)) == [Pair([1], [2, 3])]


def test_writing_ends_at_a_mark(folder: Path) -> None:
    """Greedy text of transformers, cut at the first mark; a long context loses its front."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = TextModel(GPT2.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    ids = tokenizer("the cat", add_special_tokens=False, return_tensors="pt")["input_ids"]
    marks = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    out = theirs.generate(ids, max_new_tokens=8, do_sample=False, **marks)[0, 7:]
    whole = tokenizer.decode([id for id in out.tolist() if id != tokenizer.eos_token_id])
    options = {"max_gen_toks": 8, "do_sample": False, "temperature": 0.0}
    assert len(whole) > 2
    found = model.generate_until(
        [
            ("the cat", {**options, "until": []}),
            ("the cat", {**options, "until": ["!!", whole[2]]}),
            ("xxxxxxxxxxxxxxxxxxxxxx the cat"[-12:], {**options, "until": "!!"}),
            ("xxxxxxxxxxxxxxxxxxxxxx the cat", {**options, "until": "!!"}),
        ]
    )
    assert found[0] == whole
    assert found[1] == whole[: whole.index(whole[2])]
    assert found[2] == found[3]


def test_an_encoder_decoder_scores_answers(folder: Path) -> None:
    """As the model itself does: its loss of the answer's tokens and end."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_layers": 1, "num_heads": 2}
    inner = T5.from_config(
        T5Config(**sizes, intermediate_size=48, head_dim=16, eos_token_id=1)
    ).eval()
    model = TextModel(inner, tokenizer)
    (one,) = model.loglikelihood([("the cat", "sat")])
    ids = torch.tensor([[*tokenizer.encode("the cat"), 1]])
    labels = torch.tensor([[*tokenizer.encode("sat"), 1]])
    loss = inner(input_ids=ids, labels=labels, num_items_in_batch=1.0).loss
    assert one.log_prob == pytest.approx(-float(loss.detach()), rel=1e-5)
    with pytest.raises(ConfigError, match="likelihood of a text without a prompt"):
        model.loglikelihood_rolling(["a"])
    bert = Bert.from_config(BertConfig(**sizes, intermediate_size=48, max_seq_len=16))
    with pytest.raises(ConfigError, match="cannot score texts"):
        TextModel(bert, tokenizer)


class StandIn:
    """What `lm_eval.api.model.LM` documents of itself, where lm-eval is not installed."""

    def __init__(self) -> None:
        self.cache_hook = types.SimpleNamespace(add_partial=lambda *found: kept.append(found))


kept: list[Any] = []


def test_lm_eval_is_given_its_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance of its class, which is asked by requests with `args`."""
    if importlib.util.find_spec("lm_eval") is None:
        monkeypatch.setitem(sys.modules, "lm_eval", None)
        with pytest.raises(MissingDependencyError, match="lm-eval"):
            open_lm(folder)
        module = types.ModuleType("lm_eval.api.model")
        module.LM = StandIn  # type: ignore[attr-defined]
        for name in ("lm_eval", "lm_eval.api"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    base: Any = importlib.import_module("lm_eval.api.model")
    model = open_lm(folder, batch_size=3)
    assert isinstance(model, base.LM)
    asked = types.SimpleNamespace
    pairs = [("the cat ", "sat"), ("so", " did")]
    found = model.loglikelihood([asked(args=pair) for pair in pairs])
    plain = model.inner
    assert found == [tuple(one) for one in plain.loglikelihood(pairs)]
    assert [type(value) for value in found[0]] == [float, bool]
    rolling = model.loglikelihood_rolling([asked(args=(text,)) for text in TEXTS])
    assert rolling == plain.loglikelihood_rolling(TEXTS)
    options = {"until": ["\n"], "max_gen_toks": 3}
    (written,) = model.generate_until([asked(args=("the", options))])
    assert written == plain.generate_until([("the", options)])[0]
    assert model.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"
    assert model.chat_template(True) == "{{ messages[0].content }}!"
    if isinstance(model, StandIn):
        assert kept[0] == ("loglikelihood", pairs[0], found[0])
