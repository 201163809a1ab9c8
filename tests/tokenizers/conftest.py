"""Real vocabularies and texts where they are beside the project, and small made-up ones always."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
SharedData = Callable[[str], Path]

# Chinese words that jieba knows, single characters, and Latin pieces.
PIECES = """
    今天 天气 天 气 真 好 我们 我 走 吧 公园 去 人工 智能 人 工 中国 的 不错 不 错
    。 ， ！ , . ! hello he ll o world wor l d token 2020 20 A B C
""".split()  # noqa: SIM905
MARKED = ["##ization", "##s", "##o", "##ld", "##!", "##,", "##20"]
GLM_TEXT = "GLM fills blanks. A model of the world says hello to the whole world. " * 20
# In the order of THUDM/GLM for GPT-2's vocabulary.
GLM_TOKENS = ["<|startofpiece|>", "<|endofpiece|>", "[CLS]", "[MASK]", "[SEP]", "[UNK]"]
GLM_TOKENS += ["[gMASK]", "[sMASK]"]


@pytest.fixture(scope="session")
def shared_data() -> SharedData:
    def find(name: str) -> Path:
        path = ROOT.parent / "shared" / "data" / name
        if not path.exists():
            pytest.skip(f"needs {path}, which is not part of the project")
        return path

    return find


def read_lines(data: Path) -> list[str]:
    """10,000 different lines: poems, reviews, news, plays."""
    with (data / "tang_poetry.jsonl").open(encoding="utf-8") as file:
        poems = [json.loads(line)["text"] for line in file]
    lines = [*poems[:300], *[line for poem in poems[300:1500] for line in poem.split("\n")]]
    with (data / "eprstmt" / "test_public.json").open(encoding="utf-8") as file:
        lines += [json.loads(line)["sentence"] for line in file]
    lines += (data / "ag_news" / "test.csv").read_text("utf-8").splitlines()[:1200]
    lines += (data / "tinyshakespeare.txt").read_text("utf-8").splitlines()
    return list(dict.fromkeys(line for line in lines if line))[:10_000]


@pytest.fixture(scope="session")
def real_lines(shared_data: SharedData) -> list[str]:
    return read_lines(shared_data("tang_poetry.jsonl").parent)


@pytest.fixture(scope="session")
def train_byte_pairs() -> Callable[[str, int], Tokenizer]:
    """Return a function from a text and a size to byte-level byte pairs without special tokens."""

    def train(text: str, vocab_size: int) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator([text], trainer)
        return tokenizer

    return train


@pytest.fixture
def make_vocabulary(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the lines of a vocab.txt and returns its directory."""

    def make(*lines: str, name: str = "vocabulary") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "vocab.txt").write_text("\n".join(lines) + "\n", "utf-8")
        return folder

    return make


@pytest.fixture
def cpm2_folder(make_vocabulary: Callable[..., Path]) -> Path:
    head = ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<eod>", "▁", ",", "▂"]
    rest = [piece for piece in PIECES if piece not in head]
    return make_vocabulary(*head, *rest, "<s_0>", "<s_1>", name="cpm2")


@pytest.fixture
def cpm2_marked_folder(make_vocabulary: Callable[..., Path]) -> Path:
    head = ["<unk>", "<s>", "</s>", "▃", "<sep>", "<pad>", "<mask>", "<go>", "<eod>", "▁", ",", "▂"]
    rest = [piece for piece in PIECES if piece not in head]
    return make_vocabulary(*head, *rest, *MARKED, "<s_0>", name="cpm2_marked")


@pytest.fixture
def ant_folder(make_vocabulary: Callable[..., Path]) -> Path:
    head = ["<pad>", "<unk>", "<mask>", "<sep>", "</n>", "</_>", "<s>", "</s>", "<d>", "</d>"]
    return make_vocabulary(*head, *PIECES, name="ant")


@pytest.fixture(scope="session")
def small_sentence_piece() -> bytes:
    """A sentencepiece model with CPM-1's special pieces."""
    trainer = pytest.importorskip("sentencepiece", reason="needs the extra zh")
    words = [*PIECES, "▂", "▃", "今天 天气 不错", "hello world"] * 4
    model = io.BytesIO()
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter(words),
        model_writer=model,
        vocab_size=95,
        hard_vocab_limit=False,
        user_defined_symbols=["<eod>", "▂", "▃"],
        control_symbols=["<sep>", "<pad>", "<mask>"],
        character_coverage=1.0,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def english_folder(tmp_path_factory, train_byte_pairs) -> Path:
    """GPT-2's files, trained on the spot: <|endoftext|> is the last of the vocabulary."""
    folder = tmp_path_factory.mktemp("glm")
    tokenizer = train_byte_pairs(GLM_TEXT, 300)
    tokenizer.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text("utf-8"))
    vocabulary["<|endoftext|>"] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    added = {token: len(vocabulary) + number for number, token in enumerate(GLM_TOKENS)}
    (folder / "added_tokens.json").write_text(json.dumps(added), "utf-8")
    return folder


@pytest.fixture(scope="session")
def chinese_folder(tmp_path_factory) -> Path:
    """A sentencepiece model trained on the spot, and ids with a hole, as published."""
    trainer = pytest.importorskip("sentencepiece", reason="needs the extra zh")
    folder, model = tmp_path_factory.mktemp("glm-zh"), io.BytesIO()
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter(
            ["凯旋门位于意大利米兰市古城堡旁", "我们去公园玩", "今天天气很好"] * 5
        ),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "cog-pretrain.model").write_bytes(model.getvalue())
    size = trainer.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    tokens = ["<|endoftext|>", "[SEP]", "[CLS]", "[MASK]", "[UNK]", None, *GLM_TOKENS[:2]]
    tokens += ["[sMASK]", "[gMASK]"]
    added = {token: size + number for number, token in enumerate(tokens) if token}
    (folder / "added_tokens.json").write_text(json.dumps(added), "utf-8")
    return folder
