"""Process reward models: rows of steps and their loss, against plain loops and TRL's PRMTrainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))

from test_preferences import THINKING, make_tokenizer

from bmforge.align.reward import ProcessRewardObjective
from bmforge.data.sources.step_labels import StepExample, read_step_labels
from bmforge.errors import ConfigError, DataError
from bmforge.models import GPT2, GPT2Config, Llama, LlamaConfig, init_weights_
from bmforge.recipes.inputs.conversation_rows import EncodedRow
from bmforge.recipes.inputs.step_rows import LabeledSteps, encode_steps, split_steps
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.train.objective import count_items
from bmforge.tune.delta import SoftPrompt

VOCAB = 19
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 2,
    "head": "token_classification",
    "num_labels": 2,
}
MODELS: dict[str, Any] = {
    "llama": (Llama, LlamaConfig(**COMMON, intermediate_size=20, num_kv_heads=1)),
    "gpt2": (GPT2, GPT2Config(**COMMON, max_seq_len=16)),
}
TEXTS = st.text("ab \n.", min_size=1, max_size=6).filter(lambda text: bool(text.strip()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps") / "t"
    make_tokenizer(folder, add_bos_token=True)
    return folder


def make_model(family: str) -> Any:
    kind, config = MODELS[family]
    model = kind.from_config(config, dtype=torch.float64)
    init_weights_(model, seed=1)
    return model.eval()


def make_source(rows: list[tuple[list[int], dict[int, int]]]) -> LabeledSteps:
    """Rows of ids with the classes at some positions."""
    encoded = [
        EncodedRow(ids, [classes.get(position, -100) for position in range(len(ids))])
        for ids, classes in rows
    ]
    return LabeledSteps(encoded, 16)


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=14),
        st.dictionaries(st.integers(0, 2), st.integers(0, 1), min_size=1),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("family", MODELS)
@given(rows=ROWS, micro=st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_loss_and_gradients_are_those_of_a_plain_loop(
    family: str, rows: list[tuple[list[int], dict[int, int]]], micro: int
) -> None:
    """Rows one at a time without padding, in any micro-batches; padding examples count nothing."""
    model, source = make_model(family), make_source(rows)
    terms, rewards = [], []
    for ids, classes in rows:
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        for position, label in classes.items():
            a, b = logits[position]
            terms.append(torch.logsumexp(torch.stack((a, b)), 0) - (a, b)[label])
            rewards.append((float(torch.sigmoid((b - a).detach())), label))
    expected = torch.stack(terms).mean()
    wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)

    objective, examples = ProcessRewardObjective(), [source.make(n, (n,)) for n in range(len(rows))]
    examples += [{**examples[0], "labels": [-100]}] * (-len(rows) % micro)
    batches = [
        source.collate(examples[start : start + micro]) for start in range(0, len(examples), micro)
    ]
    total = sum(objective.count(batch) for batch in batches)
    assert total == len(terms) == sum(count_items(objective, batch, model) for batch in batches)
    loss, correct = torch.zeros(()), 0.0
    for batch in batches:
        result = objective(model, batch, float(total))
        assert result is not None
        result.loss.backward()
        loss = loss + result.loss.detach()
        correct += float(result.metrics["accuracy"][0])
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0, check_dtype=False)
    assert correct == sum((reward > 0.5) == bool(label) for reward, label in rewards)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13)


def test_soft_prompts_keep_the_positions_of_steps() -> None:
    model = make_model("llama")
    prompt = SoftPrompt(model, length=3).init_(seed=5)
    source = make_source([([4, 5, 6, 7], {1: 1, 3: 0})])
    batch = source.collate([source.make(0, (0,))])
    result = ProcessRewardObjective()(model, batch, 2.0)
    assert result is not None
    rows = prompt.held[0].part.weight.detach()
    prompt.detach()
    x = torch.cat((rows[None], model.embed(torch.tensor([[4, 5, 6, 7]]))), 1)
    logprobs = model(inputs_embeds=x).logits[0, 3:].log_softmax(-1)
    torch.testing.assert_close(result.loss, -(logprobs[1, 1] + logprobs[3, 0]) / 2)


@given(
    prompt=TEXTS,
    steps=st.lists(st.tuples(TEXTS, st.booleans()), min_size=1, max_size=4),
    separator=st.sampled_from(["\n", "\n\n", " ", "ab"]),
)
@settings(max_examples=60, deadline=None)
def test_rows_have_the_ids_and_labels_of_trl(
    folder: Path, prompt: str, steps: list[tuple[str, bool]], separator: str
) -> None:
    """TRL: begin token and prompt; each step, then the separator with the label on its end."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts, labels = zip(*steps, strict=True)
    row = encode_steps(StepExample("x", prompt, texts, labels), None, tokenizer, separator)
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    marks = [-100] * len(ids)
    for text, label in steps:
        piece = [*tokenizer.encode(text), *tokenizer.encode(separator)]
        ids += piece
        marks += [-100] * (len(piece) - 1) + [int(label)]
    assert (row.ids, row.labels) == (ids, marks)
    trl = pytest.importorskip("trl.experimental.prm", reason="needs a TRL with PRMTrainer")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    record = {"prompt": prompt, "completions": list(texts), "labels": list(labels)}
    options: dict[str, Any] = dict.fromkeys(("max_length", "max_completion_length"))
    options |= {"train_on_last_step_only": False, "is_eval": False}
    out = trl.PRMTrainer.tokenize_row(record, theirs, separator, **options)
    assert (row.ids, row.labels) == (out["input_ids"], out["labels"])


def test_prompts_of_messages_are_rendered(folder: Path) -> None:
    """The ids of the prompt are those of generation, the thought's beginning included."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = ChatTemplate(THINKING, tokenizer)
    prompt = [{"role": "user", "content": "ab"}]
    row = encode_steps(StepExample("x", prompt, ("a", "b"), (True, None)), template, tokenizer, ".")
    before = template.encode(prompt)[1]
    end = tokenizer.encode(".")
    assert row.ids == [*before, *tokenizer.encode("a"), *end, *tokenizer.encode("b"), *end]
    assert [label for label in row.labels if label != -100] == [1]
    assert row.labels[len(before) + 1] == 1


def test_steps_are_the_texts_between_separators() -> None:
    assert split_steps("a\nb\n\nc\n", "\n") == ["a", "b", "c"]
    assert split_steps("a\n\nb\nc", "\n\n") == ["a", "b\nc"]
    assert split_steps("", "\n") == [""]


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"prompt": "a", "completions": ["b"]}, "no steps with labels"),
        ({"prompt": "a", "completions": [], "labels": []}, "list of non-empty strings"),
        ({"prompt": "a", "completions": ["b", " "], "labels": [1, 0]}, "list of non-empty strings"),
        ({"prompt": "a", "completions": ["b"], "labels": [1, 0]}, "2 entries for 1 steps"),
        ({"prompt": "a", "completions": ["b"], "labels": [-1]}, "labels contains -1"),
        ({"prompt": "a", "completions": ["b"], "labels": [0.5]}, "labels contains 0.5"),
        ({"prompt": 3, "completions": ["b"], "labels": [1]}, "'prompt' must be"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "no steps with labels"),
    ],
)
def test_wrong_records_are_refused(record: dict[str, Any], what: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(json.dumps(record))
    with pytest.raises(DataError, match=what):
        read_step_labels(file)


def test_unread_fields_are_refused_or_ignored(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    file = tmp_path / "steps.jsonl"
    record = {"prompt": "a", "completions": ["b", "a"], "labels": [True, None], "level": 3}
    file.write_text(json.dumps(record))
    (example,) = read_step_labels(file)
    assert example.labels == (True, None)
    with pytest.raises(DataError, match=r"--data\.ignore level"):
        encode_steps(example, None, tokenizer, "\n")
    assert encode_steps(example, None, tokenizer, "\n", ("level",)).labels.count(1) == 1
    with pytest.raises(ConfigError, match="no tokens"):
        encode_steps(example, None, tokenizer, "", ("level",))
    template = ChatTemplate(None, tokenizer)
    user = {"role": "user", "content": "a"}
    chat = StepExample("line 1", [{**user, "name": "b"}], ("b",), (True,))
    with pytest.raises(DataError, match="line 1: message 1 has the field 'name'"):
        encode_steps(chat, template, tokenizer, "\n")
    plain = StepExample("line 1", [user], ("b",), (True,))
    ignored = encode_steps(chat, template, tokenizer, "\n", ("name",))
    assert ignored == encode_steps(plain, template, tokenizer, "\n")


def test_truncated_answers_without_a_label_are_left_out() -> None:
    rows = [EncodedRow([1] * 5, [-100] * 4 + [1]), EncodedRow([2] * 3, [-100, -100, 0])]
    source = LabeledSteps(rows, 4)
    assert (len(source), source.dropped) == (1, 1)
    assert source.collate([source.make(0, (0,))])["input_ids"][0, :3].tolist() == [2, 2, 2]
