"""What an engine is asked besides text: embeddings, masks, classes, scores, blanks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bmforge.errors import ConfigError, DataError
from bmforge.infer import Engine, EngineConfig
from bmforge.infer.decoder import Seq2SeqDecoder
from bmforge.infer.engine.span_filling import fill_blanks
from bmforge.infer.score import score_texts
from bmforge.models import CPM2, T5, Bert, BertConfig, CPM2Config, Llama, LlamaConfig, T5Config
from bmforge.tune.delta import SoftPrompt

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_heads": 4, "num_layers": 3}
CONFIG = EngineConfig(max_tokens=32, max_rows=4)
ROLES = {"cls": 1, "sep": 2, "mask": 3, "eos": 4, "pad": 0}


class Letters:
    """A tokenizer of letters: each is one token from 10 on; sentinels stand at 40 and above."""

    eos_id, pad_id, bos_id, mask_id, unk_id = 4, 0, None, 3, None
    sentinel_ids = tuple(range(40, 58))

    def __len__(self) -> int:
        return 60

    def encode(self, text: str) -> list[int]:
        return [3 if letter == "_" else 10 + ord(letter) - ord("a") for letter in text]

    encode_prompt = encode
    prompt_prefix = ()

    def encode_batch(self, texts: Any) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode_written(self, ids: Any) -> str:
        return "".join(chr(id - 10 + ord("a")) if 10 <= id < 36 else f"<{id}>" for id in ids)

    def token_to_id(self, token: str) -> int | None:
        number = token.strip("<>").rpartition("_")[2]
        return 40 + int(number) if number.isdigit() and int(number) < 18 else None

    def role_id(self, role: str) -> int | None:
        return ROLES.get(role)


def opened(model: Any, directory: Path) -> Engine:
    """The model from its directory with the smallest budget."""
    model.eval().save_pretrained(directory)
    with pytest.raises(ConfigError) as caught:
        Engine(directory, device_budget_bytes=1, config=CONFIG)
    least = int(str(caught.value).split("too small: ")[1].split()[0])
    return Engine(directory, device_budget_bytes=least, config=CONFIG, tokenizer=Letters())


def make_bert(head: str) -> Any:
    return Bert.from_config(BertConfig(**SIZES, head=head, num_labels=3, max_seq_len=32), seed=1)


def test_embeddings(tmp_path: Path) -> None:
    model = make_bert("none")
    texts = ["hello", "abc", "world", "a", "other", "xyz", "large", "small", "green"]
    with opened(model, tmp_path) as engine, torch.no_grad():
        rows = [torch.tensor([[1, *Letters().encode(text), 2]]) for text in texts]
        for pooling, theirs in (("mean", "mean"), ("first", "cls")):
            for normalize in (True, False):
                got = engine.embed(texts, pooling=pooling, normalize=normalize)
                want = [model.encode(ids, pooling=theirs, normalize=normalize) for ids in rows]
                torch.testing.assert_close(got, torch.cat(want), rtol=1e-6, atol=1e-6)
        with pytest.raises(ConfigError, match="unknown pooling: pooling='max'"):
            engine.embed(texts, pooling="max")
        with pytest.raises(ConfigError, match="an empty string"):
            engine.embed(["a", " "])
        with pytest.raises(ConfigError, match="allowed: 1 to 32"):
            engine.embed("a" * 31)


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_embeddings_of_models_that_write(tmp_path: Path, family: str) -> None:
    """The encoder's states, or the decoder's last ones."""
    model: Any = T5.from_config(T5Config(**SIZES), seed=1)
    if family == "llama":
        model = Llama.from_config(LlamaConfig(**SIZES), seed=1)
    with opened(model, tmp_path) as engine, torch.no_grad():
        ids = torch.tensor([[*Letters().encode("hello"), *([4] if family == "t5" else [])]])
        states = model.encode(ids) if family == "t5" else model(ids)
        want = states.last_hidden_state.mean(1)
        torch.testing.assert_close(engine.embed("hello", normalize=False), want)


def test_masks(tmp_path: Path) -> None:
    model = make_bert("masked_lm")
    with opened(model, tmp_path) as engine, torch.no_grad():
        ids = torch.tensor([[1, *Letters().encode("he_l_"), 2]])
        likely = model(ids).logits.softmax(-1)[0]
        first, second = engine.fill_mask("he_l_", top=3)
        for place, found in ((3, first), (5, second)):
            best = likely[place].argsort(descending=True)[:3].tolist()
            assert [one.token for one in found] == [Letters().decode_written([i]) for i in best]
            got = torch.tensor([one.probability for one in found])
            torch.testing.assert_close(got, likely[place][best])
        assert engine.fill_mask(["he_l_"], top=3) == [[first, second]]
        with pytest.raises(ConfigError, match="no mask token"):
            engine.fill_mask("hello")
        with pytest.raises(ConfigError, match="does not predict classes"):
            engine.classify("hello")


def test_classes(tmp_path: Path) -> None:
    model = make_bert("sequence_classification")
    with opened(model, tmp_path) as engine, torch.no_grad():
        rows = [torch.tensor([[1, *Letters().encode(text), 2]]) for text in ("abc", "hello")]
        want = torch.cat([model(ids).logits.softmax(-1) for ids in rows])
        torch.testing.assert_close(engine.classify(["abc", "hello"]), want)
        with pytest.raises(ConfigError, match="cannot fill masks"):
            engine.fill_mask("he_")
        with pytest.raises(ConfigError, match="needs a model that generates"):
            engine.score([("a", "b")])


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_scores(tmp_path: Path, family: str) -> None:
    """The loss in pieces is what all scores at once give."""
    model: Any = T5.from_config(T5Config(**SIZES), seed=1)
    if family == "llama":
        model = Llama.from_config(LlamaConfig(**SIZES), seed=1)
    pairs = [("abc", "def"), ("hello", "z"), ("q", "goodbye")]
    with opened(model, tmp_path) as engine:
        encode = Letters().encode
        want = score_texts(model, [(encode(a), encode(b)) for a, b in pairs])
        assert engine.score(pairs) == pytest.approx(want, rel=1e-5)
        with pytest.raises(ConfigError, match="pairs is empty"):
            engine.score([])
        with pytest.raises(DataError, match="pair 0 has 0 prompt tokens"):
            engine.score([("", "a")])


def fill_plainly(model: Any, source: list[int], marks: list[int], ends: set[int], most: int) -> Any:
    """One token after the other, the whole target read anew for each."""
    target, texts = [model.config.decoder_start_token_id], []
    for mark in marks:
        target.append(mark)
        text: list[int] = []
        while len(text) < most:
            ids = torch.tensor([source]), torch.tensor([target])
            token = int(model(input_ids=ids[0], decoder_input_ids=ids[1]).logits[0, -1].argmax())
            if token in ends:
                break
            text.append(token)
            target.append(token)
        texts.append(Letters().decode_written(text))
    return texts


@pytest.mark.parametrize("family", ["t5", "cpm2"])
@pytest.mark.parametrize("text", ["ab<span>cd", "<span>", "a<span><span>b<span>"])
def test_blanks(tmp_path: Path, family: str, text: str) -> None:
    """Each blank begins with its sentinel and ends at the next mark."""
    model: Any = T5.from_config(T5Config(**SIZES), seed=1)
    if family == "cpm2":
        model = CPM2.from_config(CPM2Config(**SIZES), seed=1)
    with opened(model, tmp_path) as engine, torch.no_grad():
        source, pieces = Letters().encode(text.split("<span>")[0]), text.split("<span>")[1:]
        for number, piece in enumerate(pieces):
            source += [40 + number, *Letters().encode(piece)]
        source += [4] if family == "t5" else []
        marks = [40 + number for number in range(len(pieces))]
        eos = model.config.raw.get("eos_token_id", getattr(model.config, "eos_token_id", None))
        ends = {*marks, 40 + len(pieces), eos}
        got = engine.fill_blanks(text, max_new_tokens=5)
        assert got == fill_plainly(model, source, marks, ends, 5)
        for wrong in ("abc", "<span>" * 17):
            with pytest.raises(ConfigError, match="allowed: 1 to 16"):
                engine.fill_blanks(wrong)
        with pytest.raises(ConfigError, match="num_beams=2 and num_return_sequences=1 must be 1"):
            engine.fill_blanks(text, num_beams=2)


def test_blanks_behind_a_soft_prompt() -> None:
    """Its rows are read in front of the text, as when the model is called."""
    model: Any = T5.from_config(T5Config(**SIZES), seed=1).eval()
    source = [*Letters().encode("a"), 40, *Letters().encode("b"), 4]
    eos = model.config.raw.get("eos_token_id", getattr(model.config, "eos_token_id", None))
    prompt = SoftPrompt(model, length=3)
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        torch.nn.init.normal_(prompt.held[0].part.weight, std=20.0, generator=draw)
        with torch.no_grad():
            want = fill_plainly(model, source, [40], {40, 41, eos}, 5)
        assert fill_blanks(model, Letters(), "a<span>b", max_new_tokens=5) == want
        read: list[Any] = []

        def remember(model: Any, source: Any, *given: Any, to: Any = read) -> Any:
            to.append(source)
            return Seq2SeqDecoder(model, source, *given)

        fill_blanks(model, Letters(), "a<span>b", make_decoder=remember, max_new_tokens=5)
        size = model.config.vocab_size
        assert read[0].tolist() == [[size, size + 1, size + 2, *source]]


def test_blanks_need_sentinels(tmp_path: Path) -> None:
    model = Llama.from_config(LlamaConfig(**SIZES), seed=1)
    with (
        opened(model, tmp_path) as engine,
        pytest.raises(ConfigError, match="has sentinel tokens for 0 blanks"),
    ):
        engine.fill_blanks("a<span>b")


def behind(ids: list[int]) -> Any:
    """A row of ids with those of a soft prompt of four in front."""
    return torch.tensor([[*range(60, 64), *ids]])


def put_prompt(model: Any) -> Any:
    SoftPrompt(model, length=4, std=1.0)
    return model.eval()


def test_embeddings_behind_a_soft_prompt() -> None:
    """Of the text's tokens alone, which see the prompt."""
    for made in (make_bert("none"), T5.from_config(T5Config(**SIZES), seed=1)):
        plain = Engine(made, config=CONFIG, tokenizer=Letters()).embed("hello", normalize=False)
        model = put_prompt(made)
        ids = [1, *Letters().encode("hello"), 2]
        if isinstance(model, T5):
            ids = [*Letters().encode("hello"), 4]
        with Engine(model, config=CONFIG, tokenizer=Letters()) as engine, torch.no_grad():
            read = model.encode if isinstance(model, T5) else model
            states = read(behind(ids)).last_hidden_state[:, 4:]
            for pooling, want in (("mean", states.mean(1)), ("first", states[:, 0])):
                got = engine.embed("hello", pooling=pooling, normalize=False)
                torch.testing.assert_close(got, want)
                asked = engine.submit_embed("hello", pooling=pooling, normalize=False)
                torch.testing.assert_close(asked.result(60), want)
            assert not torch.allclose(engine.embed("hello", normalize=False), plain)
        if isinstance(model, Bert):
            row, segments = torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.long)
            mask = torch.ones_like(row)
            got = model.encode(row, mask, token_type_ids=segments)
            torch.testing.assert_close(got, states.mean(1))
            with pytest.raises(ConfigError, match="4 soft prompt tokens"):
                model.encode(row, position_ids=segments)


def test_masks_and_classes_behind_a_soft_prompt() -> None:
    ids = [1, *Letters().encode("he_lo"), 2]
    with torch.no_grad():
        model = put_prompt(make_bert("masked_lm"))
        (found,) = Engine(model, config=CONFIG, tokenizer=Letters()).fill_mask("he_lo", top=2)
        likely = model(behind(ids)).logits[0, 4 + 3].softmax(-1)
        torch.testing.assert_close(torch.tensor([f.probability for f in found]), likely.topk(2)[0])
        model = put_prompt(make_bert("token_classification"))
        got = Engine(model, config=CONFIG).classify([ids])
        torch.testing.assert_close(got, model(behind(ids)).logits[:, 4:].softmax(-1))
        model = put_prompt(make_bert("sequence_classification"))
        got = Engine(model, config=CONFIG).classify([ids])
        torch.testing.assert_close(got, model(behind(ids)).logits.softmax(-1))
