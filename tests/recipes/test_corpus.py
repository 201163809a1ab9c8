"""Opening corpora for a run: what fits together, and what is refused before training starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bmforge.data import (
    PrepareConfig,
    TokenStoreWriter,
    prepare,
)
from bmforge.errors import ConfigError, DataError
from bmforge.parallel import World
from bmforge.recipes.inputs.corpus import CorpusConfig, open_corpus, train_prefix
from bmforge.recipes.inputs.document_segments import DocumentSegments, open_tokenizer
from bmforge.recipes.inputs.examples import ExampleConfig
from bmforge.recipes.spans import T5SpansConfig

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
        ((0, 0), {}, "contains a path twice"),
        ((0, 2), {"weights": (1.0,)}, "needed: one per path"),
        ((0,), {"weights": (1.0,)}, "none for a single path"),
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
    with pytest.raises(DataError, match=r"has 1 tokens \(needed: at least 2\)"):
        open_corpus(config(corpora[0], validation=str(tmp_path / "short")), 280, WORLD)


def test_a_vocabulary_larger_than_the_models(corpora):
    with pytest.raises(DataError, match="vocab"):
        open_corpus(config(corpora[0]), 100, WORLD)


def test_a_model_of_another_tokenizer_is_refused(corpora, tmp_path):
    """Its ids are compared with the corpus's; a file written anew, or with limits, is the same."""
    first, second, _ = corpora
    for path in (first, second):
        model = tmp_path / Path(path).name
        model.mkdir()
        tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer" / "tokenizer.json"))
        tokenizer.enable_truncation(8)
        tokenizer.add_special_tokens(["<one more>"])
        tokenizer.save(str(model / "tokenizer.json"))
    own, other = str(tmp_path / "first"), str(tmp_path / "second")
    open_corpus(config(first), 281, WORLD, own).loader.close()
    with pytest.raises(ConfigError, match=rf"init_from='{other}': .*--tokenizer {other}"):
        open_corpus(config(first), 281, WORLD, other)
    bare = train_prefix(first)
    open_corpus(config(str(bare)), 281, WORLD, other).loader.close()
    (tmp_path / "none").mkdir()
    open_corpus(config(first), 281, WORLD, str(tmp_path / "none")).loader.close()


def test_directories_that_are_not_prepared_are_named(corpora, tmp_path):
    with pytest.raises(DataError, match=rf"is inside a prepared directory. Pass '{corpora[0]}'"):
        train_prefix(str(Path(corpora[0]) / "train"))
    with pytest.raises(DataError, match="bmforge prepare"):
        train_prefix(str(tmp_path))


def resumed(paths, state=None, **changes):
    """The loader's state after two steps, and the rows of the third."""
    loader = open_corpus(config(*paths, prefetch_steps=0, **changes), 280, WORLD).loader
    if state is not None:
        loader.load_state_dict(state)
    else:
        next(loader), next(loader)
    state = loader.state_dict()
    return state, next(loader)[0]["input_ids"].tolist()


def write_store(prefix, first):
    with TokenStoreWriter(prefix, vocab_size=280) as writer:
        for _ in range(20):
            writer.add_item([(first + i) % 280 for i in range(50)])
            writer.end_document()


def test_moved_corpora_go_on_and_others_in_their_place_do_not(tmp_path, monkeypatch):
    """Neither the order nor the state depends on where a store lies; both on what is in it."""
    for folder, names in (("here", "ab"), ("there", "xy")):
        (tmp_path / folder).mkdir()
        for number, name in enumerate(names):
            write_store(tmp_path / folder / name, 100 * number)
    monkeypatch.chdir(tmp_path / "here")
    for count, weights in ((1, ()), (2, (3.0, 1.0))):
        kept = resumed(("a", "b")[:count], weights=weights)
        for moved in (("./a", "./b"), (str(tmp_path / "there/x"), str(tmp_path / "there/y"))):
            assert resumed(moved[:count], kept[0], weights=weights) == kept
            assert resumed(moved[:count], weights=weights) == kept
    write_store(tmp_path / "there" / "z", 5)
    with pytest.raises(ConfigError, match="the content of the corpus changed"):
        resumed(("a", "../there/z"), kept[0], weights=weights)
    with pytest.raises(ConfigError, match="the content of the corpus changed"):
        resumed(("b", "a"), kept[0], weights=weights)
    alone = resumed(("a",))
    earlier = {key: value for key, value in alone[0].items() if key != "content"}
    assert resumed(("./a",), earlier) == alone
    with pytest.raises(ConfigError, match="is from an earlier version"):
        resumed(("a", "b"), earlier)


def test_pieces_know_their_stores_by_content(tmp_path):
    contents = []
    for name, first in (("a", 0), ("b", 0), ("c", 5)):
        write_store(tmp_path / name, first)
        contents.append(DocumentSegments([tmp_path / name], 1, 20).content)
    assert contents[0] == contents[1] != contents[2]


def test_pieces_of_another_tokenizer_are_refused(corpora):
    first, second, _ = corpora
    settings = T5SpansConfig(data=ExampleConfig(paths=(first, second)))
    with pytest.raises(ConfigError, match=r"different tokenizers"):
        open_tokenizer(settings)
    folder = f"{second}/tokenizer"
    settings = T5SpansConfig(data=ExampleConfig(paths=(first,), tokenizer=folder))
    with pytest.raises(ConfigError, match=rf"data.tokenizer='{folder}': "):
        open_tokenizer(settings)
    settings = T5SpansConfig(data=ExampleConfig(paths=(first,)), init_from=folder)
    with pytest.raises(ConfigError, match=rf"init_from='{folder}': "):
        open_tokenizer(settings)
    settings.init_from = f"{first}/tokenizer"
    assert len(open_tokenizer(settings)) == 280
