"""A tiny run of every family's recipe: it learns, is evaluated, and its export opens and works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from small_runs import (
    ANT_HEAD,
    CHARACTERS,
    HEAD,
    SIZES,
    examples,
    settings,
    train_cpm1_tokenizer,
    write_counting,
    write_jsonl,
    write_vocabulary,
)

from bmforge.cli.main import main
from bmforge.errors import ConfigError, DataError
from bmforge.infer.score import choose_text
from bmforge.models import AutoModel
from bmforge.models.cpm1 import CPM1Config
from bmforge.models.cpm2 import CPM2Config
from bmforge.models.cpm_ant import CPMAntConfig
from bmforge.models.eva import EVAConfig
from bmforge.models.t5 import T5Config
from bmforge.recipes.cpm1 import ChIDConfig, STCConfig, tune_chid, tune_stc
from bmforge.recipes.cpm_ant import CPMAntTrainConfig, train_ant
from bmforge.recipes.dialogue import EVADialogueConfig, train_dialogue
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.pretrain import CPM1PretrainConfig, pretrain
from bmforge.recipes.run import RunResult
from bmforge.recipes.spans import CPM2SpansConfig, T5SpansConfig, train_spans
from bmforge.tokenizers import AutoTokenizer
from bmforge.train import read_metrics

DIALOGUES = ["你好\t我好", "你好\t我好\t天上\t地下", "一二\t三四", "五六\t七八"]


def check_run(run_dir: Path, result: RunResult, factor: float) -> Any:
    """The loss fell to a part of what it was, held-out data too; returns the opened export."""
    losses = [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl")]
    assert losses[-1] < factor * losses[0], losses
    assert result.evaluation is not None
    assert result.evaluation.loss < factor * losses[0]
    model = AutoModel.from_pretrained(run_dir / "export")
    assert type(model) is type(result.model)
    return model


def test_cpm1_pretraining(tmp_path: Path) -> None:
    """The family follows from the config; counting is learned, and goes on from the export."""
    store = write_counting(tmp_path / "tokens", 11, end=7)
    data = CorpusConfig(
        paths=(str(store),), validation=str(store), seq_len=16, global_batch_size=8, eos_id=7
    )
    model = CPM1Config(vocab_size=40, max_seq_len=32, **SIZES)
    run_dir = tmp_path / "run"
    config = CPM1PretrainConfig(run_dir=run_dir, model=model, data=data, train=settings(60))
    opened = check_run(run_dir, pretrain(config), 0.4)
    assert opened.config.raw["eos_token_id"] == 7


def test_ant_learns_both_tasks(tmp_path: Path) -> None:
    pytest.importorskip("jieba", reason="needs the extra zh")
    folder = write_vocabulary(tmp_path / "vocabulary", ANT_HEAD)
    store = write_counting(tmp_path / "tokens", 10, end=7)
    model = CPMAntConfig(
        vocab_size=40, intermediate_size=48, head_dim=16, num_buckets=16, max_seq_len=32,
        prompt_types=4, prompt_length=3, segment_types=4, **SIZES,
    )  # fmt: skip
    config = CPMAntTrainConfig(
        run_dir=tmp_path / "run",
        model=model,
        data=examples([store], folder),
        train=settings(60, lr=0.05),
        shortest=8,
    )
    result = train_ant(config)
    check_run(tmp_path / "run", result, 0.6)
    gradients = result.model.embed_prompt.weight  # the prompts of tasks 1 and 2 alone are trained
    drawn = type(result.model).from_config(model).embed_prompt.weight
    moved = (gradients != drawn).any(1).tolist()
    assert moved == [False] * 3 + [True] * 6 + [False] * 3
    assert type(AutoTokenizer.from_pretrained(tmp_path / "run" / "export")).__name__ == (
        "CPMAntTokenizer"
    )


def test_cpm2_fills_spans(tmp_path: Path) -> None:
    pytest.importorskip("jieba", reason="needs the extra zh")
    sentinels = [f"<s_{i}>" for i in range(8)]
    folder = write_vocabulary(tmp_path / "vocabulary", [*HEAD, "▁"], *sentinels)
    store = write_counting(tmp_path / "tokens", 10, end=7)
    model = CPM2Config(
        vocab_size=48, intermediate_size=48, head_dim=16, init_std=0.05, eos_token_id=7, **SIZES
    )
    config = CPM2SpansConfig(
        run_dir=tmp_path / "run",
        model=model,
        data=examples([store], folder),
        train=settings(40),
    )
    check_run(tmp_path / "run", train_spans(config), 0.7)


def test_t5_fills_spans(tmp_path: Path) -> None:
    """The same recipe finds T5's sentinels, which count down from the vocabulary's end."""
    names = [
        "<pad>",
        "</s>",
        "<unk>",
        *CHARACTERS,
        *(f"<extra_id_{i}>" for i in reversed(range(8))),
    ]
    vocabulary = {name: id for id, name in enumerate(names)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    (tmp_path / "vocabulary").mkdir()
    fast.save(str(tmp_path / "vocabulary" / "tokenizer.json"))
    roles = {"eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "vocabulary" / "tokenizer_config.json").write_text(json.dumps(roles))
    store = write_counting(tmp_path / "tokens", 3, end=1)
    config = T5SpansConfig(
        run_dir=tmp_path / "run",
        model=T5Config(vocab_size=48, intermediate_size=48, head_dim=16, dropout=0.0, **SIZES),
        data=examples([store], tmp_path / "vocabulary"),
        train=settings(40),
    )
    check_run(tmp_path / "run", train_spans(config), 0.7)


def test_eva_learns_dialogues_and_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was learned is said in the terminal, by what came before it."""
    pytest.importorskip("jieba", reason="needs the extra zh")
    folder = write_vocabulary(tmp_path / "vocabulary", HEAD, "<s_0>", "<s_1>")
    file = tmp_path / "dialogues.txt"
    file.write_text("\n".join([*DIALOGUES, ""]), encoding="utf-8")
    start = AutoTokenizer.from_pretrained(folder).sentinel_id(0)
    model = EVAConfig(
        vocab_size=40, intermediate_size=48, head_dim=16, decoder_start_token_id=start,
        attn_scale=True, init_std=0.3, **SIZES,
    )  # fmt: skip
    config = EVADialogueConfig(
        run_dir=tmp_path / "run",
        model=model,
        data=examples([file], folder, seq_len=20),
        target_len=8,
        train=settings(90),
    )
    check_run(tmp_path / "run", train_dialogue(config), 0.3)
    typed = iter(["一二\n", "\n", "/clear\n", "五六\n", "/exit\n", "你好\n"])
    monkeypatch.setattr("sys.stdin.readline", lambda: next(typed), raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    capsys.readouterr()
    assert main(["chat", str(tmp_path / "run" / "export"), "--num-beams", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == ["三四", "七八"]


def test_bad_dialogues(tmp_path: Path) -> None:
    pytest.importorskip("jieba", reason="needs the extra zh")
    folder = write_vocabulary(tmp_path / "vocabulary", HEAD, "<s_0>")
    file = tmp_path / "dialogues.txt"
    file.write_text("你好\t我好\n一个人\n", encoding="utf-8")
    config = EVADialogueConfig(run_dir=tmp_path / "run", data=examples([file], folder))
    with pytest.raises(DataError, match=r"line 2 .*one utterance"):
        train_dialogue(config)
    ant = write_vocabulary(tmp_path / "ant", ANT_HEAD)
    with pytest.raises(ConfigError, match=r"CPMAntTokenizer \(needed: EVATokenizer\)"):
        train_dialogue(EVADialogueConfig(run_dir=tmp_path / "run", data=examples([file], ant)))


@pytest.fixture
def cpm1_folder(tmp_path: Path) -> Path:
    train_cpm1_tokenizer().save_pretrained(tmp_path / "vocabulary")
    return tmp_path / "vocabulary"


def cpm1_model(folder: Path) -> CPM1Config:
    size = len(AutoTokenizer.from_pretrained(folder))
    return CPM1Config(vocab_size=size, max_seq_len=96, **SIZES)


def write_chid(folder: Path) -> Path:
    """Questions whose answer follows from the first character."""
    rows = [
        {"content": f"{c}#idiom{i}#。", "candidates": ["一人", "上下"]}
        for i, c in enumerate("天地人你我他好不")
    ]
    answers = {f"#idiom{i}#": i % 2 for i in range(len(rows))}
    (folder / "train_answer.json").write_text(json.dumps(answers))
    return write_jsonl(folder / "train.json", rows)


def test_chid(tmp_path: Path, cpm1_folder: Path) -> None:
    file = write_chid(tmp_path)
    config = ChIDConfig(
        run_dir=tmp_path / "run",
        model=cpm1_model(cpm1_folder),
        data=examples([file], cpm1_folder, seq_len=64),
        train=settings(90, lr=0.003),
    )
    result = tune_chid(config)
    check_run(tmp_path / "run", result, 0.5)
    assert result.evaluation is not None
    assert result.evaluation.tokens == 8  # only the numbers are learned
    told = json.loads((tmp_path / "run" / "results.json").read_text())
    assert told["accuracy"]["model"] >= 0.75
    (tmp_path / "train_answer.json").write_text('{"#idiom0#": 7}')
    with pytest.raises(DataError, match=r"line 1: the answer to #idiom0# .* is 7.*0 to 1"):
        tune_chid(ChIDConfig(run_dir=tmp_path / "bad", model=config.model, data=config.data))


def test_stc_and_choosing_by_loss(tmp_path: Path, cpm1_folder: Path) -> None:
    """After fine-tuning, the answer that was learned is the likelier one; all of a line counts."""
    pairs = [("天 上", "地下"), ("一二", "三四"), ("你好", "我好")]
    file = tmp_path / "stc.txt"
    file.write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    config = STCConfig(
        run_dir=tmp_path / "run",
        model=cpm1_model(cpm1_folder),
        data=examples([file], cpm1_folder, seq_len=32),
        train=settings(80),
    )
    result = tune_stc(config)
    model = check_run(tmp_path / "run", result, 0.3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    lines = [tokenizer.encode(f"对话上文:{a.replace(' ', '')} 回复:{b}") for a, b in pairs]
    assert result.evaluation is not None
    assert result.evaluation.tokens == sum(map(len, lines))  # each has its end, and no first one
    for post, answer in pairs:
        prompt = f"对话上文:{post.replace(' ', '')} 回复:"
        options = [(prompt, other) for _, other in pairs]
        assert options[choose_text(model, tokenizer, options).option][1] == answer
    file.write_text("天上地下\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1 must be a post and an answer"):
        tune_stc(STCConfig(run_dir=tmp_path / "bad", model=config.model, data=config.data))
