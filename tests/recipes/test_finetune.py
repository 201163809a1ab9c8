"""Fine-tuning on tasks: they are learned, and scored as another way of reading the model does."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import losses_of_answers
from task_folders import (
    MODELS,
    run_task,
    task_config,
    write_boolq,
    write_copa,
    write_record,
    write_squad,
    write_words,
)

from bmforge.data.tasks import TASKS, read_task
from bmforge.data.tasks.metrics import score_task
from bmforge.data.tasks.rows import Pair, continue_prompt
from bmforge.data.tasks.wording import word_task
from bmforge.errors import ConfigError, DataError
from bmforge.infer import generate
from bmforge.infer.score import score_answers
from bmforge.models import AutoModel, Bert
from bmforge.models.hub import FAMILIES
from bmforge.parallel import Layout, World, init_distributed
from bmforge.testing import run_distributed
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.segments import encode_segments
from bmforge.tokenizers.sentinels import encode_answers, fill_prompt

WORLD = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("words") / "vocabulary")


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        ("bert-superglue", 30),
        pytest.param("gpt2-superglue", 40, marks=pytest.mark.long),
        ("llama-superglue", 40),
        ("t5-superglue", 20),
    ],
)
def test_boolq_is_learned(recipe: str, steps: int, words: Path, tmp_path: Path) -> None:
    """The accuracy is that of the exported model, which reads one row at a time."""
    folder = write_boolq(tmp_path)
    config = task_config(recipe, "BoolQ", folder, words, tmp_path / "run", steps)
    metrics = run_task(recipe, config)[1]
    model = AutoModel.from_pretrained(tmp_path / "run" / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    right = [read_alone(model, tokenizer, e) == e.label for e in read_task("BoolQ", folder, "dev")]
    assert len(right) == 7
    assert metrics == {"accuracy": sum(right) / 7}
    if recipe != "t5-superglue":  # which takes longer to learn it
        assert all(right)


def read_alone(model: Any, tokenizer: Any, example: Any) -> int:
    """What a model answers when it reads one row, without padding."""
    wording = word_task(TASKS["BoolQ"], example)
    if isinstance(model, Bert):
        assert model.config.head == "sequence_classification"
        ids, segments = encode_segments(wording.write_segments(example), tokenizer, 64)
        out = model(torch.tensor([ids]), token_type_ids=torch.tensor([segments]))
        return int(out.logits.argmax())
    prompt = wording.write_prompt(example)
    if model.config.family == "t5":
        source = fill_prompt(prompt, "", tokenizer, 64)
        pairs = [(source, a) for a in encode_answers(("No", "Yes"), tokenizer)]
    else:
        pairs = [tuple(p) for p in continue_prompt(prompt, ("No", "Yes"), tokenizer, 64)]
    losses = losses_of_answers(model, pairs)
    return losses.index(min(losses))


@pytest.mark.parametrize(
    "recipe",
    [
        "bert-superglue",
        pytest.param("gpt2-superglue", marks=pytest.mark.long),
        pytest.param("t5-superglue", marks=pytest.mark.long),
    ],
)
def test_choices_are_scored(recipe: str, words: Path, tmp_path: Path) -> None:
    folder = write_copa(tmp_path)
    config = task_config(recipe, "COPA", folder, words, tmp_path / "run", 60)
    assert run_task(recipe, config)[1] == {"accuracy": 1.0}


@pytest.mark.parametrize(
    "recipe", ["llama-superglue", pytest.param("bert-superglue", marks=pytest.mark.long)]
)
def test_entities_are_chosen(recipe: str, words: Path, tmp_path: Path) -> None:
    """ReCoRD: the answer is a text, and scored as one."""
    folder = write_record(tmp_path)
    config = task_config(recipe, "ReCoRD", folder, words, tmp_path / "run", 40)
    assert run_task(recipe, config)[1] == {"f1": 1.0, "em": 1.0}


def test_squad_is_scored(words: Path, tmp_path: Path) -> None:
    """By what the exported model writes to one question at a time."""
    folder = write_squad(tmp_path)
    config = task_config("t5-squad", "SQuAD", folder, words, tmp_path / "run", 25)
    config.max_new_tokens = 5
    found = run_task("t5-squad", config)[1]
    model = AutoModel.from_pretrained(tmp_path / "run" / "export")
    tokenizer = AutoTokenizer.from_pretrained(words)
    written, examples = [], read_task("SQuAD", folder, "dev")
    for example in examples:
        asked = f"Question: {example.fields['question']} Answer:"
        source = fill_prompt(asked, f"Context: {example.fields['context']}", tokenizer, 32)
        out = generate(model, torch.tensor([source]), max_new_tokens=5, eos_token_id=6)
        text = tokenizer.decode(out[0, 1:].tolist())
        written.append(text.removeprefix("<extra_id_0>").partition("<extra_id_1>")[0].strip())
    assert found == score_task("SQuAD", written, examples)


@pytest.mark.long
def test_squad_is_learned(words: Path, tmp_path: Path) -> None:
    folder = write_squad(tmp_path)
    config = task_config("t5-squad", "SQuAD", folder, words, tmp_path / "run", 100)
    config.max_new_tokens = 5
    assert run_task("t5-squad", config)[1] == {"f1": 1.0, "em": 1.0}


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_batched_scores_are_those_of_single_rows(family: str) -> None:
    """Rows of different lengths, padded in batches, against one row at a time."""
    init_distributed()
    draw = torch.Generator().manual_seed(2)
    sizes = [(3, 1), (9, 4), (1, 2), (6, 1), (12, 3)]

    def ids(count: int) -> list[int]:
        return torch.randint(5, 64, (count,), generator=draw).tolist()

    pairs = [Pair(ids(a), ids(b)) for a, b in sizes]
    config = MODELS[family]
    kind = next(f for f in FAMILIES.values() if f.config_class is type(config))
    model = kind.from_config(config, seed=4, dtype=torch.float64).eval()
    want = [-loss for loss in losses_of_answers(model, pairs)]
    for size in (1, 2, 5):
        assert score_answers(model, pairs, size, WORLD, 20) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("recipe", "world", "layout"),
    [
        pytest.param("bert-superglue", 2, Layout(zero=3), id="bert-zero3"),
        pytest.param("t5-superglue", 2, Layout(zero=3), id="t5-zero3", marks=pytest.mark.long),
        pytest.param("gpt2-superglue", 4, Layout(tp=2), id="gpt2-tp2xdp2", marks=pytest.mark.long),
        pytest.param("llama-superglue", 2, Layout(tp=2), id="llama-tp2", marks=pytest.mark.long),
        pytest.param("gpt2-superglue", 2, Layout(pp=2), id="gpt2-pp2", marks=pytest.mark.long),
        pytest.param(
            "bert-superglue", 4, Layout(tp=2, pp=2), id="bert-tp2xpp2", marks=pytest.mark.long
        ),
        pytest.param("t5-squad", 2, Layout(zero=3), id="squad-zero3", marks=pytest.mark.long),
        pytest.param("t5-squad", 2, Layout(tp=2), id="squad-tp2", marks=pytest.mark.long),
    ],
)
def test_layouts_score_alike(
    recipe: str, world: int, layout: Layout, words: Path, tmp_path: Path
) -> None:
    """Seven examples on two processes, in batches of two: padding must not count."""
    is_squad = recipe == "t5-squad"
    folder = write_squad(tmp_path) if is_squad else write_boolq(tmp_path)
    task = "SQuAD" if is_squad else "BoolQ"
    config = task_config(recipe, task, folder, words, tmp_path / "alone", 6)
    config.data = dataclasses.replace(config.data, micro_batch_size=2)
    config.export = False
    if is_squad:
        config.max_new_tokens = 4
    want = run_distributed(run_task, 1, recipe, config)[0]
    if not is_squad:
        assert round(want[1]["accuracy"] * 7, 9) in range(8)
    config = dataclasses.replace(config, run_dir=tmp_path / "many", layout=layout)
    for loss, metrics in run_distributed(run_task, world, recipe, config):
        assert loss == pytest.approx(want[0], rel=1e-4)
        assert metrics == want[1]


def test_a_new_head_on_a_checkpoint(words: Path, tmp_path: Path) -> None:
    """From a masked language model: the sizes are its own, the classifier is drawn."""
    Bert.from_config(MODELS["bert"]).save_pretrained(tmp_path / "mlm")
    folder = write_boolq(tmp_path)
    config = task_config("bert-superglue", "BoolQ", folder, words, tmp_path / "run", 2)
    config.model, config.init_from = type(config)().model, str(tmp_path / "mlm")
    run_task("bert-superglue", config)
    opened = AutoModel.from_pretrained(tmp_path / "run" / "export")
    assert (opened.config.head, opened.config.hidden_size) == ("sequence_classification", 32)
    three = MODELS["bert"].replace(head="sequence_classification", num_labels=3)
    Bert.from_config(three).save_pretrained(tmp_path / "three")
    config.init_from, config.run_dir = str(tmp_path / "three"), tmp_path / "other"
    with pytest.raises(ConfigError, match=r"has 3 classes, but BoolQ has 2"):
        run_task("bert-superglue", config)


@pytest.mark.parametrize(
    ("recipe", "changes", "error", "text"),
    [
        ("bert-superglue", {"task": "BoolK"}, ConfigError, "Did you mean 'BoolQ'"),
        ("gpt2-superglue", {"task": "SQuAD"}, ConfigError, "train t5-squad"),
        ("t5-squad", {"task": "COPA"}, ConfigError, "has no questions about a context"),
        ("bert-superglue", {"dev_split": "exam"}, ConfigError, "exam"),
        ("bert-superglue", {"paths": ("/nowhere",)}, DataError, "nowhere"),
        ("bert-superglue", {"paths": ("a", "b")}, ConfigError, "must be one folder"),
        ("bert-superglue", {"validation": ("a",)}, ConfigError, "its own splits"),
        (
            "gpt2-superglue",
            {"seq_len": 65},
            ConfigError,
            r"seq_len=65 is more than model.max_seq_len=64",
        ),
        ("gpt2-superglue", {"seq_len": 2}, DataError, "do not fit into"),
    ],
)
def test_bad_input(
    recipe: str,
    changes: dict[str, Any],
    error: type[Exception],
    text: str,
    words: Path,
    tmp_path: Path,
) -> None:
    write_boolq(tmp_path)
    write_squad(tmp_path)
    write_copa(tmp_path)
    config = task_config(recipe, "BoolQ", tmp_path, words, tmp_path / "run", 2)
    config.data = dataclasses.replace(config.data, **changes)
    with pytest.raises(error, match=text):
        run_task(recipe, config)


def test_a_tokenizer_without_marks_is_refused_before_the_run_begins(
    words: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(words, plain)
    (plain / "tokenizer_config.json").write_text("{}")
    folder = write_boolq(tmp_path)
    config = task_config("bert-superglue", "BoolQ", folder, plain, tmp_path / "run", 2)
    with pytest.raises(
        ConfigError, match=r"no cls token or no sep token\. .*tokenizer_config.json"
    ):
        run_task("bert-superglue", config)
    assert not (tmp_path / "run").exists()


def test_long_texts_are_cut(words: Path) -> None:
    """Of two segments the longer is cut; of a prompt the beginning, so that the question stays."""
    tokenizer = AutoTokenizer.from_pretrained(words)
    long, short = "sky " * 20, "mud fire"
    ids, segments = encode_segments((long, short), tokenizer, 12)
    sky, mud, fire = tokenizer.encode("sky mud fire")
    assert ids == [2, *[sky] * 7, 3, mud, fire, 3]
    assert segments == [0] * 9 + [1] * 3
    pairs = continue_prompt(long + short, ("Yes", "No"), tokenizer, 6)
    assert [pair.prompt for pair in pairs] == [[sky, sky, mud, fire]] * 2
    assert [pair.answer for pair in pairs] == [[*tokenizer.encode(w), 4] for w in ("Yes", "No")]
    assert fill_prompt(long + short, "", tokenizer, 5) == [sky, mud, fire, 5, 4]
    assert fill_prompt(short, long, tokenizer, 6) == [mud, fire, 5, sky, sky, 4]
