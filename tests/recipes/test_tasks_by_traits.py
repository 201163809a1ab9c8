"""Tasks in the forms that families need: what is asked of each, against plain second ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import HEAD, losses_of_answers, settings, write_jsonl, write_vocabulary
from task_folders import write_boolq, write_squad, write_words
from test_train_all_families import TRIALS, write_glm

from bmforge.cli import main
from bmforge.data.tasks import TASKS, read_task
from bmforge.data.tasks.wording import word_task
from bmforge.infer import generate
from bmforge.models import GLM, AutoModel, GLMConfig
from bmforge.models.hub import FAMILIES
from bmforge.nn.glm_positions import blank_positions
from bmforge.recipes import find_recipe
from bmforge.recipes.blank_infilling import BlankConfig, cut_blanks
from bmforge.recipes.masked import mask_tokens
from bmforge.recipes.registry import RECIPES
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.segments import encode_segments
from bmforge.train import read_metrics


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("words") / "vocabulary")


def test_masks_are_as_published() -> None:
    """15 % are asked for: 80 % of these hidden, 10 % replaced, 10 % left, and only these."""
    ids = list(range(100, 300))
    kinds = np.zeros(3)
    for number in range(200):
        shown, labels = mask_tokens(ids, 4, 1000, 0.15, ("s", number))
        asked = [i for i, label in enumerate(labels) if label != -100]
        assert len(asked) == 30
        assert all(labels[i] == ids[i] for i in asked)
        assert all(shown[i] == ids[i] for i in range(200) if i not in set(asked))
        kinds += [
            sum(shown[i] == 4 for i in asked),
            sum(shown[i] not in (4, ids[i]) for i in asked),
            sum(shown[i] == ids[i] for i in asked),
        ]
    # 6,000 draws: four standard deviations of a share are 0.021 and 0.015.
    assert np.abs(kinds / kinds.sum() - [0.8, 0.1, 0.1]).max() < 0.021
    assert mask_tokens(ids, 4, 1000, 0.15, ("s", 1)) == mask_tokens(ids, 4, 1000, 0.15, ("s", 1))
    places = {
        i
        for n in range(200)
        for i, label in enumerate(mask_tokens(ids, 4, 1000, 0.15, ("s", n))[1])
        if label != -100
    }
    assert places == set(range(200))


def test_blanks_put_together_are_the_text() -> None:
    ids = list(range(50))
    long = 0
    for number in range(60):
        kept, cut = cut_blanks(ids, ("s", number), BlankConfig())
        assert [id for pair in zip(kept, cut, strict=True) for part in pair for id in part] == ids
        assert all(kept)
        assert all(cut)
        if len(cut) == 1:
            long += 1
            assert 25 <= len(cut[0]) < 50
        else:
            assert sum(map(len, cut)) == round(0.15 * 50)
    assert 15 < long < 45


def test_a_blanks_loss_is_that_of_its_tokens(tmp_path: Path) -> None:
    """Against log-probabilities by hand: of every span's tokens and its end, given all before."""
    (tmp_path / "glm").mkdir()
    options = write_glm(tmp_path)
    run_dir = tmp_path / "run"
    sizes = "--model.hidden-size 32 --model.num-layers 1 --model.num-heads 2 --data.seq-len 60"
    command = ["train", "pretrain", "--model", "glm", "--run-dir", str(run_dir), *options]
    command += [*sizes.split(), "--train.steps", "1", "--long-ratio", "0", "--noise-density", "0.3"]
    command += ["--data.global-batch-size", "1", "--data.micro-batch-size", "1"]
    command += ["--train.optim.lr", "0"]
    assert main([*command, "--data.validation", options[1], "--data.validation-batches", "1"]) == 0
    (told,) = (row["loss"] for row in read_metrics(run_dir / "metrics.jsonl"))
    model = AutoModel.from_pretrained(run_dir / "export")
    assert isinstance(model, GLM)
    row = first_row(run_dir, options)
    config: GLMConfig = model.config
    ids = torch.tensor(row["input_ids"])[None]
    start = int(config.sop_token_id or 0)
    spans = [i for i, id in enumerate(row["input_ids"]) if id == start]
    assert len(spans) > 1
    end = AutoTokenizer.from_pretrained(run_dir / "export").role_id("eop")
    positions, prefix = blank_positions(ids, start, int(config.mask_token_id or 0))
    with torch.no_grad():
        logits = model(ids, attention_mask=prefix, position_ids=positions).logits[0]
    scores = logits.log_softmax(-1)
    losses = []
    for first, stop in zip(spans, [*spans[1:], len(row["input_ids"]) - 1], strict=True):
        targets = [*row["input_ids"][first + 1 : stop], end]
        losses += [-float(scores[first + i, id]) for i, id in enumerate(targets)]
    assert told == pytest.approx(np.mean(losses), rel=1e-4)


def first_row(run_dir: Path, options: list[str]) -> Any:
    """The first example that the run has read."""
    from bmforge.config import load_toml
    from bmforge.parallel import World
    from bmforge.recipes.blank_infilling import _open_data

    config = load_toml(find_recipe("pretrain", "glm").config, run_dir / "run.toml")
    loader = _open_data(config, World(0, 1, torch.device("cpu"))).loader
    (batch,) = next(iter(loader))
    length = int(batch["attention_mask"][0].sum())
    return {"input_ids": batch["input_ids"][0, : length + 1].tolist()}


def task_options(name: str, folder: Path, words: Path, run_dir: Path, steps: int) -> list[str]:
    loop = "--train.optim.lr 0.003 --train.save-every-steps None --train.schedule.kind constant"
    batch = "--data.seq-len 32 --data.global-batch-size 8 --data.micro-batch-size 4"
    return [
        *("train", name, "--run-dir", str(run_dir), "--data.paths", str(folder)),
        *("--data.tokenizer", str(words), "--train.steps", str(steps), *loop.split()),
        *("--train.optim.weight-decay", "0", *batch.split()),
        *("--model.vocab-size", "64", "--model.hidden-size", "32", "--model.num-layers", "2"),
        *("--model.num-heads", "2"),
    ]


@pytest.mark.parametrize(
    ("family", "steps", "options"),
    [
        ("roberta", 40, "--model.max-seq-len 64 --model.num-segments 1 --model.dropout 0"),
        ("opt", 40, "--model.max-seq-len 64 --model.dropout 0"),
        ("cpm2", 40, "--model.intermediate-size 64 --model.head-dim 16 --model.init-std 0.05"),
    ],
)
def test_boolq_is_learned_by_its_name(
    family: str, steps: int, options: str, words: Path, tmp_path: Path
) -> None:
    """The accuracy is that of the exported model, reading row by row."""
    folder = write_boolq(tmp_path)
    command = task_options("boolq", folder, words, tmp_path / "run", steps)
    assert main([*command, "--model", family, *options.split()]) == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    told = json.loads((tmp_path / "run" / "results.json").read_text())["accuracy"]["model"]
    model = AutoModel.from_pretrained(tmp_path / "run" / "export")
    right = 0
    for example in read_task("BoolQ", folder, "dev"):
        right += answer_alone(model, words, example) == example.label
    assert told == right / 7


def answer_alone(model: Any, words: Path, example: Any) -> int:
    tokenizer = AutoTokenizer.from_pretrained(words)
    wording = word_task(TASKS["BoolQ"], example)
    if model.traits.attention == "bidirectional":
        texts = [tokenizer.encode(text) for text in wording.write_segments(example)]
        begin, end = tokenizer.role_id("cls"), tokenizer.role_id("sep")
        ids = [begin, *texts[0], end, end, *texts[1], end]  # RoBERTa's form
        assert encode_segments(wording.write_segments(example), tokenizer, 32, 2)[0] == ids
        return int(model(torch.tensor([ids])).logits.argmax())
    prompt, end = wording.write_prompt(example), tokenizer.eos_id
    pairs = []
    for option in ("No", "Yes"):
        if (
            model.traits.attention == "encoder-decoder"
        ):  # the tokenizer has none of CPM-2's sentinels
            pairs.append(([*tokenizer.encode(prompt), end], [*tokenizer.encode(option), end]))
        else:
            pairs.append((tokenizer.encode(prompt), [*tokenizer.encode(option), end]))
    losses = losses_of_answers(model, pairs)
    return losses.index(min(losses))


def test_a_decoder_answers_questions(words: Path, tmp_path: Path) -> None:
    """What is scored is what the export writes behind one prompt at a time."""
    folder = write_squad(tmp_path)
    command = task_options("squad", folder, words, tmp_path / "run", 30)
    sizes = "--model.intermediate-size 64 --model.max-seq-len 64 --max-new-tokens 4"
    assert main([*command, "--model", "llama", "--model.num-kv-heads", "2", *sizes.split()]) == 0
    told = json.loads((tmp_path / "run" / "results.json").read_text())
    model = AutoModel.from_pretrained(tmp_path / "run" / "export")
    tokenizer = AutoTokenizer.from_pretrained(words)
    examples = read_task("SQuAD", folder, "dev")
    exact = 0
    for example in examples:
        context, question = (example.fields[n].strip() for n in ("context", "question"))
        ids = tokenizer.encode(f"Context: {context} Question: {question} Answer:")
        out = generate(model, torch.tensor([ids]), max_new_tokens=4, eos_token_id=())
        written = out[0, len(ids) :].tolist()
        stop = written.index(tokenizer.eos_id) if tokenizer.eos_id in written else len(written)
        exact += tokenizer.decode(written[:stop]).strip() in example.answers
    assert told["em"]["model"] == pytest.approx(exact / len(examples))


LEFT = [n for n, f in FAMILIES.items() if f.family_traits.attention == "causal"]
QUICK = ("OPT", "Qwen2Moe")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.long)
        for name in LEFT
        if FAMILIES[name].family_traits.objective == "next token"
    ],
)
def test_decoders_learn_conversations(family: str, words: Path, tmp_path: Path) -> None:
    """Packed rows are read by every decoder; the loss falls to a half."""
    talks = (("sky", "sea"), ("mud", "fire"))
    rows = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in talks * 4
    ]
    file = write_jsonl(tmp_path / "talks.jsonl", rows)
    steps = 10 if family in QUICK else 30
    command = task_options("conversations", file, words, tmp_path / "run", steps)
    sizes = TRIALS[family].options.replace("--data.seq-len 40", "--train.optim.lr 0.01")
    assert main([*command, "--model", family, *sizes.split()]) == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]


def test_an_encoder_decoder_learns_conversations(words: Path, tmp_path: Path) -> None:
    """It writes what the assistant said, reading all that was said before."""
    talks = [("sky", "sea"), ("mud", "fire"), ("stone", "leaf"), ("fire", "mud")]
    rows = [
        {
            "messages": [
                {"role": "user", "content": a},
                {"role": "assistant", "content": b},
                {"role": "user", "content": b},
                {"role": "assistant", "content": a},
            ]
        }
        for a, b in talks
    ]
    file = write_jsonl(tmp_path / "talks.jsonl", rows)
    sizes = "--model.intermediate-size 64 --model.head-dim 16 --model.dropout 0"
    command = task_options("conversations", file, words, tmp_path / "run", 45)
    assert main([*command, "--model", "t5", *sizes.split()]) == 0
    model = AutoModel.from_pretrained(tmp_path / "run" / "export")
    tokenizer = AutoTokenizer.from_pretrained(words)
    blank, second = (tokenizer.token_to_id(f"<extra_id_{n}>") for n in (0, 1))
    for question, answer in talks:
        text = f"User: {question}\nAssistant: "
        ids = [*tokenizer.encode(text), blank, tokenizer.eos_id]
        out = generate(model, torch.tensor([ids]), max_new_tokens=4, eos_token_id=second)
        assert out[0, 1:4].tolist() == [blank, *tokenizer.encode(answer), second]


def test_an_eva_learns_conversations_in_its_own_form(tmp_path: Path) -> None:
    """As dialogues of the same words: every answer with all utterances before it."""
    pytest.importorskip("jieba", reason="needs the extra zh")
    folder = write_vocabulary(tmp_path / "vocabulary", HEAD, "<s_0>", "<s_1>")
    said = ["你好", "我好", "天上", "地下"]
    roles = ["user", "assistant"] * 2
    talk = [{"role": r, "content": t} for r, t in zip(roles, said, strict=True)]
    talks = write_jsonl(tmp_path / "talks.jsonl", [{"messages": talk}])
    lines = tmp_path / "lines.txt"
    lines.write_text("\t".join(said[:2]) + "\n" + "\t".join(said) + "\n", encoding="utf-8")
    losses = []
    for task, file in (("conversations", talks), ("dialogue", lines)):
        config = find_recipe(task, "eva").config(
            run_dir=tmp_path / task,
            model=find_recipe(task, "eva").config().model.replace(
                vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=1,
                num_heads=2, num_kv_heads=2, head_dim=16,
                decoder_start_token_id=AutoTokenizer.from_pretrained(folder).sentinel_id(0),
            ),
            train=settings(1),
            export=False,
        )  # fmt: skip
        for name, value in (
            ("paths", (str(file),)),
            ("tokenizer", str(folder)),
            ("seq_len", 24),
            ("global_batch_size", 2),
        ):
            setattr(config.data, name, value)
        find_recipe(task, "eva").run(config)
        losses += [row["loss"] for row in read_metrics(tmp_path / task / "metrics.jsonl")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_an_old_name_draws_its_head() -> None:
    """bert-superglue has always drawn a classifier; its settings say so now."""
    assert RECIPES["bert-superglue"].config().new_head
    assert not find_recipe("classify", "bert-base-uncased").config().new_head
