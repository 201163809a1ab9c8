"""BMInf's models under their old arguments, against plain loops without a cache."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bminf_programs as programs
import pytest
import torch
from torch import Tensor

import bmforge.compat.bminf as bminf
from bmforge.errors import ConfigError
from bmforge.models import CPM1, CPM2, EVA, AutoModel, CPM1Config, CPM2Config, EVAConfig
from bmforge.models.quantize import quantize_directory
from bmforge.testing import assert_close
from bmforge.tokenizers import CPM1Tokenizer, CPM2Tokenizer, EVATokenizer

CHARACTERS = "一二三四五六七八九十天地人你我他好不上下"
HEAD = ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<eod>", "▂", "▁"]
SMALL: dict[str, Any] = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "init_std": 0.4}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where models lie under BMInf's names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_cpm1() -> None:
    trainer = pytest.importorskip("sentencepiece", reason="needs the extra zh")
    model = io.BytesIO()
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([*CHARACTERS] * 4), model_writer=model, model_type="char",
        vocab_size=40, hard_vocab_limit=False, user_defined_symbols=["<eod>", "▂", "▃"],
        control_symbols=["<sep>", "<pad>", "<mask>"], character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    tokenizer = CPM1Tokenizer(model.getvalue())
    config = CPM1Config(vocab_size=len(tokenizer), max_seq_len=40, **SMALL)
    CPM1.from_config(config, seed=2).save_pretrained("cpm1-new")
    tokenizer.save_pretrained("cpm1-new")


def save_apart(kind: Any, tokens: Any, config_class: Any, name: str, **more: Any) -> None:
    pytest.importorskip("jieba", reason="needs the extra zh")
    vocabulary = [*HEAD, *CHARACTERS, *(f"<s_{number}>" for number in range(20))]
    tokenizer = tokens("\n".join(vocabulary).encode(), Path("vocab.txt"))
    config = config_class(
        vocab_size=len(tokenizer), intermediate_size=48, head_dim=8, eos_token_id=7, **more, **SMALL
    )
    model = kind.from_config(config, seed=6).eval()
    with torch.no_grad():
        model.lm_head.weight *= 2
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)


def save_cpm2() -> None:
    save_apart(CPM2, CPM2Tokenizer, CPM2Config, "cpm2.1-new")


def save_eva() -> None:
    first = len(HEAD) + len(CHARACTERS)
    save_apart(EVA, EVATokenizer, EVAConfig, "eva-int8-new", decoder_start_token_id=first)


class Draw:
    """BMInf's sampler, one number after the other.

    Args:
        seen: ids that are there already.
        options: its own arguments.
        never: ids that are not written.
        free: ids that are not counted when they are written.
    """

    def __init__(
        self,
        seen: Sequence[int],
        top_n: int | None,
        temperature: float,
        frequency: float,
        presence: float,
        never: Sequence[int] = (),
        free: Sequence[int] = (),
    ) -> None:
        self.counts = Counter(seen)
        self.top_n, self.temperature = top_n, temperature
        self.frequency, self.presence = frequency, presence
        self.never, self.free = never, free

    def __call__(self, scores: Tensor) -> int:
        scores = scores.clone() / self.temperature
        for token, count in self.counts.items():
            scores[token] -= self.frequency * count + self.presence
        scores[list(self.never)] = -torch.inf
        if self.top_n is not None:
            scores[scores < scores.sort(descending=True).values[self.top_n - 1]] = -torch.inf
        token = int(torch.multinomial(scores.softmax(-1), 1))
        if token not in self.free:
            self.counts[token] += 1
        return token


def write(score: Any, row: list[int], draw: Draw, most: int, ends: set[int]) -> list[int]:
    """Go on with a row, reading all of it anew for every token; the end is written too."""
    new: list[int] = []
    while len(new) < most and not (new and new[-1] in ends):
        with torch.no_grad():
            new.append(draw(score([*row, *new])))
    return new


def open_reference(name: str) -> tuple[Any, Any]:
    """The model as int8, and its tokenizer."""
    tokenizers = {"cpm1": CPM1Tokenizer, "cpm2": CPM2Tokenizer, "eva-": EVATokenizer}
    model = AutoModel.from_pretrained(name, quantize="int8-dynamic")
    return model, tokenizers[name[:4]].from_pretrained(name)


PENALTIES = [(0.0, 0.0), (0.3, 0.0), (0.2, 1.0)]


@pytest.mark.parametrize(("frequency", "presence"), PENALTIES)
def test_cpm1_goes_on(frequency: float, presence: float) -> None:
    save_cpm1()
    model, tokenizer = open_reference("cpm1-new")
    row, eod = tokenizer.encode("天地人你我他"), tokenizer.eos_id
    stop = tokenizer.token_to_id("好")
    word = tokenizer.token_to_id("▁")
    draw = Draw(row, 8, 0.8, frequency, presence, free=[] if word is None else [word])
    torch.manual_seed(5)
    new = write(lambda ids: model(torch.tensor([ids])).logits[0, -1], row, draw, 12, {eod, stop})
    has_ended = new[-1] in (eod, stop)
    torch.manual_seed(5)
    got = bminf.models.CPM1().generate(
        "天地人你我他", max_tokens=12, top_n=8, temperature=0.8, frequency_penalty=frequency,
        presence_penalty=presence, stop_tokens=["好"],
    )  # fmt: skip
    assert got == (tokenizer.decode_written(new[:-1] if has_ended else new), has_ended)
    assert len(new) > 2


@pytest.mark.parametrize(("frequency", "presence"), PENALTIES)
def test_cpm2_goes_on(frequency: float, presence: float) -> None:
    """With the vocabulary's last blank behind the text; any blank ends it."""
    save_cpm2()
    model, tokenizer = open_reference("cpm2.1-new")
    source = [*tokenizer.encode("天地人"), tokenizer.sentinel_ids[-1]]
    row = [model.config.decoder_start_token_id, tokenizer.sentinel_ids[-1]]
    draw = Draw([*source, *row], 6, 0.9, frequency, presence, never=[tokenizer.unk_id])
    ends = {tokenizer.eos_id, *tokenizer.sentinel_ids}
    torch.manual_seed(1)
    new = write(read_apart(model, source), row, draw, 10, ends)
    has_ended = new[-1] in ends
    torch.manual_seed(1)
    got = bminf.models.CPM2().generate(
        "天地人", max_tokens=10, top_n=6, frequency_penalty=frequency, presence_penalty=presence
    )
    assert got == (tokenizer.decode_written(new[:-1] if has_ended else new), has_ended)


def read_apart(model: Any, source: list[int]) -> Any:
    def score(target: list[int]) -> Tensor:
        ids = torch.tensor([source])
        scores: Tensor = model(ids, decoder_input_ids=torch.tensor([target])).logits[0, -1]
        return scores

    return score


def test_cpm2_fills_blanks() -> None:
    """Those that are asked for, in their order, each begun by its mark."""
    save_cpm2()
    model, tokenizer = open_reference("cpm2.1-new")
    text = "天<span>地<span>人<span>好"
    for given, wanted in ((None, [1, 8, 15]), ([1, 15], [1, 15])):
        pieces, first, row = [], 0, [model.config.decoder_start_token_id]
        for number, place in enumerate(wanted):
            pieces += [*tokenizer.encode(text[first:place]), tokenizer.sentinel_id(number)]
            first = place + 6
        source = [*pieces, *tokenizer.encode(text[first:])]
        found, ends = [], {tokenizer.eos_id, *tokenizer.sentinel_ids[: len(wanted) + 1]}
        draw = Draw([*source, *row], 5, 0.5, 0.1, 0.2, never=[tokenizer.unk_id])
        torch.manual_seed(3)
        for number in range(len(wanted)):
            row.append(tokenizer.sentinel_id(number))
            draw.counts[row[-1]] += 1
            new = write(read_apart(model, source), row, draw, 6, ends)
            if new[-1] in ends:
                draw.counts[new.pop()] -= 1
            row += new
            found.append(tokenizer.decode_written(new))
        torch.manual_seed(3)
        got = bminf.models.CPM2().fill_blank(
            text, given, max_tokens=6, top_n=5, temperature=0.5, frequency_penalty=0.1,
            presence_penalty=0.2,
        )  # fmt: skip
        assert [one["position"] for one in got] == wanted
        assert [one["text"] for one in got] == found
        assert any(found)


def test_eva_answers() -> None:
    save_eva()
    model, tokenizer = open_reference("eva-int8-new")
    context = ["你好", "天上人", "我"]
    sep = tokenizer.sep_id
    for truncation in (256, 6):
        said = context if truncation == 256 else context[1:]
        source = [id for text in said for id in (*tokenizer.encode(text), sep)]
        source = [*source, tokenizer.sentinel_id(0)][-truncation:]
        row = [model.config.decoder_start_token_id]
        draw = Draw([*source, *row], 10, 0.85, 0, 0.5, never=[tokenizer.unk_id])
        torch.manual_seed(2)
        if truncation == 6:  # an utterance that does not fit is left out whole
            source = [*tokenizer.encode("我"), sep, tokenizer.sentinel_id(0)]
            draw.counts = Counter([*source, *row])
        new = write(read_apart(model, source), row, draw, 9, {sep})
        has_ended = new[-1] == sep
        torch.manual_seed(2)
        got = bminf.models.EVA().dialogue(
            context, max_tokens=9, presence_penalty=0.5, truncation_length=truncation
        )
        assert got == (tokenizer.decode_written(new[:-1] if has_ended else new), has_ended)


def test_published_examples() -> None:
    save_cpm1()
    save_cpm2()
    save_eva()
    torch.manual_seed(0)
    text = "天<span>地<span>人"
    assert re.fullmatch(r"天\[.*\]地\[.*\]人", programs.fill_blanks(text), re.DOTALL)
    written = programs.go_on(
        bminf.models.CPM1(), "天空"
    )  # ends at the last position, if not before
    assert written.startswith("天空")
    assert programs.go_on_cpm2("天地", 2).startswith("天地")
    assert len(list(programs.talk(["你好", "天上人"]))) == 2


@pytest.mark.parametrize("kind", ["cpm1", "cpm2"])
def test_differentiable_models(kind: str) -> None:
    """Within a limit, with the logits and gradients of the int8 model."""
    name = "cpm1-new" if kind == "cpm1" else "cpm2.1-new"
    (save_cpm1 if kind == "cpm1" else save_cpm2)()
    quantize_directory(name, "packed", "int8-dynamic")
    Path(name).rename("plain")
    Path("packed").rename(name)
    run = programs.score_cpm1 if kind == "cpm1" else programs.score_cpm2
    with pytest.raises(ConfigError, match="is the smallest that works") as caught:
        run(1)
    found = re.search(r"too small: (\d+)", str(caught.value))
    assert found is not None
    model, logits = run(int(found[1]))
    assert model.engine.plan.on_disk
    plain = AutoModel.from_pretrained(name).requires_grad_(False)
    ids, target = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[3, 4, 5, 6]])
    more = {"decoder_input_ids": target} if kind == "cpm2" else {}
    with torch.no_grad():
        table = model.get_input_embeddings()(ids)
        assert_close(logits[:, :3], plain(ids, **more).logits[:, :3])
    grads = []
    for one in (model, plain):
        inputs = table.clone().requires_grad_()
        one(inputs_embeds=inputs, **more).logits.square().sum().backward()
        grads.append(inputs.grad)
    assert torch.equal(grads[0], grads[1])


def test_soft_tokens_before_a_differentiable_model() -> None:
    """OpenPrompt's tutorial 5.1: only the soft tokens of a streamed int8 model are trained."""
    import bmforge.compat.bminf.torch as bt
    from bmforge.compat.openprompt import PromptDataLoader, PromptForClassification
    from bmforge.compat.openprompt.data_utils import InputExample
    from bmforge.compat.openprompt.plms.seq2seq import CPM2TokenizerWrapper
    from bmforge.compat.openprompt.prompts import ManualVerbalizer, SoftTemplate

    save_cpm2()
    plm = bt.models.CPM2()
    assert bt.models.CPM2 is bt.CPM2
    text = '{"placeholder":"text_a"} 好不{"mask"}'
    template = SoftTemplate(model=plm, tokenizer=plm.tokenizer, text=text, num_tokens=3)
    words = ["上", "下"]
    verbalizer = ManualVerbalizer(plm.tokenizer, num_classes=2, label_words=words, prefix="")
    model = PromptForClassification(plm=plm, template=template, verbalizer=verbalizer)
    examples = [InputExample("0", "天地人", label=0)]
    loader = PromptDataLoader(
        examples, template, tokenizer=plm.tokenizer, tokenizer_wrapper_class=CPM2TokenizerWrapper
    )
    logits = model(next(iter(loader)))
    logits.sum().backward()
    (rows,) = template.parameters()
    assert rows.grad is not None
    assert rows.grad.abs().sum() > 0
    tokenizer = plm.tokenizer
    blank = tokenizer.sentinel_id(0)
    ids = torch.tensor([[*tokenizer.encode("天地人 好不"), blank, tokenizer.eos_id]])
    with torch.no_grad():
        embeds = torch.cat((rows[None], plm.embed(ids)), 1)
        start = torch.tensor([[plm.config.decoder_start_token_id, blank]])
        scores = plm(inputs_embeds=embeds, decoder_input_ids=start).logits[:, 1]
        chosen = [tokenizer.encode(word)[0] for word in words]
        want = scores.log_softmax(-1)[:, chosen]
    assert_close(logits, want.log_softmax(-1))


def test_what_cannot_be() -> None:
    save_cpm1()
    with pytest.raises(ConfigError, match="contains a CPM1, not a CPM2"):
        bminf.models.CPM2(version="file://cpm1-new")
    with pytest.raises(ConfigError, match="is the smallest that works"):
        bminf.models.CPM1(memory_limit=1 << 10, dynamic_memory=0)
    with pytest.raises(ConfigError, match="device_idx=3"):
        bminf.models.CPM1(device_idx=3)
    model = bminf.models.CPM1(memory_limit=100 << 20)
    with pytest.raises(ConfigError, match="stop_tokens"):
        model.generate("天", stop_tokens=["never"])
    with pytest.raises(ConfigError, match="is empty"):
        model.generate("")
    assert model.generate("天" * 60) == ("", True)
    save_cpm2()
    cpm2 = bminf.models.CPM2()
    with pytest.raises(ConfigError, match=r"spans_position=\[0\]"):
        cpm2.fill_blank("天<span>", [0])
    with pytest.raises(ConfigError, match="has 0 blanks"):
        cpm2.fill_blank("天")
    save_eva()
    with pytest.raises(ConfigError, match="context is empty"):
        bminf.models.EVA().dialogue([])
