"""Opening corpora for a run: what fits together, and what is refused before training starts."""

from __future__ import annotations

import pytest

from bmforge.data import PrepareConfig, TokenStoreWriter, prepare
from bmforge.errors import ConfigError, DataError
from bmforge.parallel import World
from bmforge.recipes.corpus import CorpusConfig, open_corpus

WORLD = World(rank=0, size=1, device=None)  # type: ignore[arg-type]


def write_texts(folder, words):
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"{words} number {number}. " * 30, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three corpora: the second has a tokenizer of its own, the third the first one's."""
    root = tmp_path_factory.mktemp("corpora")
    first, second, third = (root / name for name in ("first", "second", "third"))
    small = PrepareConfig(vocab_size=280, validation_fraction=0.2)
    prepare(str(write_texts(root / "a", "The quick brown fox")), first, small)
    prepare(str(write_texts(root / "b", "Vom Eise befreit sind")), second, small)
    shared = PrepareConfig(tokenizer=str(first / "tokenizer"), validation_fraction=0.2)
    prepare(str(write_texts(root / "c", "Strom und Bäche")), third, shared)
    return str(first), str(second), str(third)


def config(*paths, **changes):
    return CorpusConfig(paths=paths, seq_len=16, global_batch_size=2, micro_batch_size=2, **changes)


def test_corpora_of_one_tokenizer_are_mixed(corpora):
    first, _, third = corpora
    corpus = open_corpus(config(first, third, weights=(1.0, 3.0)), 280, WORLD)
    with corpus.loader:
        (batch,) = next(corpus.loader)
    assert batch["input_ids"].shape == (2, 16)
    assert corpus.validation is not None


def test_corpora_of_different_tokenizers_are_refused(corpora):
    first, second, _ = corpora
    with pytest.raises(ConfigError, match=r"different tokenizers.*--tokenizer"):
        open_corpus(config(first, second), 280, WORLD)


@pytest.mark.parametrize(
    ("paths", "changes", "words"),
    [
        ((), {}, "data.paths is empty"),
        ((0, 0), {}, "names a path twice"),
        ((0, 2), {"weights": (1.0,)}, "several paths need one each"),
        ((0,), {"weights": (1.0,)}, "a single path none"),
    ],
)
def test_paths_that_make_no_sense(corpora, paths, changes, words):
    with pytest.raises(ConfigError, match=words):
        open_corpus(config(*(corpora[i] for i in paths), **changes), 280, WORLD)


def test_a_validation_store_is_checked_before_training(corpora, tmp_path):
    writer = TokenStoreWriter(tmp_path / "big", vocab_size=1000)
    writer.add_item([1, 2, 999])
    writer.end_document()
    writer.finalize()
    with pytest.raises(DataError, match="999"):
        open_corpus(config(corpora[0], validation=str(tmp_path / "big")), 280, WORLD)
    writer = TokenStoreWriter(tmp_path / "short", vocab_size=1000)
    writer.add_item([1])
    writer.end_document()
    writer.finalize()
    with pytest.raises(DataError, match="fewer than 2 tokens"):
        open_corpus(config(corpora[0], validation=str(tmp_path / "short")), 280, WORLD)


def test_a_vocabulary_larger_than_the_models(corpora):
    with pytest.raises(DataError, match="vocab"):
        open_corpus(config(corpora[0]), 100, WORLD)
