"""Conversations: what a template writes, what of it is learned, how it is packed, going on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from small_runs import settings, wait_for_all, write_jsonl

from bmforge.cli import main
from bmforge.data.sources.conversations import read_conversations
from bmforge.errors import ConfigError, DataError
from bmforge.models import AutoModel
from bmforge.models.llama import LlamaConfig
from bmforge.parallel import Layout
from bmforge.recipes.inputs.conversation_rows import encode_turns, pack_rows
from bmforge.recipes.sft import ConversationData, LlamaSFTConfig, train_sft
from bmforge.testing import run_distributed
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate, find_template
from bmforge.tokenizers.chat_turns import render_answers
from bmforge.train import read_metrics

# ChatML, as many published models have it.
CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyzUA:, \n."
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


def write_letters(folder: Path, **config: Any) -> Path:
    """A tokenizer of letters with ChatML's marks; returns its directory."""
    marks = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>"]
    vocabulary = {token: id for id, token in enumerate([*marks, *LETTERS])}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    every = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    fast.pre_tokenizer = every
    fast.decoder = tokenizers.decoders.Fuse()
    fast.add_special_tokens(marks)
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**roles, **config}))
    return folder


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    return write_letters(tmp_path / "letters", chat_template=CHATML)


def test_a_dry_run_reads_all_data(letters: Path, tmp_path: Path, capsys, caplog) -> None:
    """What a run would refuse is refused; nothing is written."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 2}
    options = [f"--model.{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    options += ["--data.tokenizer", str(letters), "--run-dir", str(tmp_path / "run"), "--dry-run"]
    file = write_jsonl(tmp_path / "chats.jsonl", [{"messages": TALK}] * 3)
    command = ["train", "conversations", "--model", "llama", "--data", str(file), *options]
    assert main(command) == 0
    assert "3 conversations with 6 answers" in caplog.text + capsys.readouterr().err
    with file.open("a") as more:
        more.write(json.dumps({"messages": TALK, "category": "x"}) + "\n")
    assert main(command) == 2
    assert "line 4 has the fields category" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_templates_write_as_transformers_does(letters: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(letters)
    tokenizer = AutoTokenizer.from_pretrained(letters)
    sources = [
        CHATML,
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} "
        "[/INST]{% elif m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ eos_token }}{% else %}{{ m | tojson }}{% endif %}{% endfor %}",
        "{% for m in messages %}\n  {% if loop.index > 3 %}{% break %}{% endif %}\n"
        "{{ m.content | trim }}\n{% endfor %}",
    ]
    for source in sources:
        mine = ChatTemplate(source, tokenizer)
        for asks in (False, True):
            for count in (2, 5):
                want = theirs.apply_chat_template(
                    TALK[:count],
                    chat_template=source,
                    tokenize=False,
                    add_generation_prompt=asks,
                )
                assert mine.render(TALK[:count], asks) == want


@pytest.mark.parametrize("source", [CHATML, None])
def test_only_answers_are_learned(source: str | None, letters: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(letters)
    template = ChatTemplate(source, tokenizer)
    turns = render_answers(template, TALK)
    end = "<|im_end|>\n" if source else "</s>\n"
    space = "" if source else " "
    answers = [f"{space}hello{end}", f"{space}ciao{end}"]
    assert [turn.answer for turn in turns] == answers
    assert template.end_mark() == end
    assert turns[-1].prompt + turns[-1].answer == template.render(TALK)
    if source is None:
        assert turns[0].prompt == "<s>System: be kind\nUser: hi\nAssistant:"
    ((ids, labels),) = encode_turns(turns, tokenizer)
    assert ids == tokenizer.encode(template.render(TALK))
    learned = [id for id, label in zip(ids, labels, strict=True) if label != -100]
    assert tokenizer.decode(learned) == "".join(answers)
    assert all(label in (id, -100) for id, label in zip(ids, labels, strict=True))


def test_a_template_cannot_reach_out(letters: Path) -> None:
    """It runs in a sandbox: attributes of Python's own are out of reach, nothing is changed."""
    tokenizer = AutoTokenizer.from_pretrained(letters)
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception('roles must alternate') }}",
    ):
        with pytest.raises(DataError, match="cannot render the conversation"):
            ChatTemplate(source, tokenizer).render(list(TALK))
    with pytest.raises(ConfigError, match="not valid"):
        ChatTemplate("{% for %}", tokenizer)


def test_where_templates_are(tmp_path: Path) -> None:
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    assert find_template(write_letters(tmp_path / "a")) is None
    assert find_template(write_letters(tmp_path / "b", chat_template=several)) == "y"
    (tmp_path / "b" / "chat_template.jinja").write_text("z")
    assert find_template(tmp_path / "b") == "z"
    with pytest.raises(ConfigError, match="damaged chat template"):
        find_template(write_letters(tmp_path / "c", chat_template=several[:1]))


def test_a_template_that_looks_ahead_is_refused(letters: Path) -> None:
    """One that writes earlier answers otherwise once there are later ones."""
    source = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, AutoTokenizer.from_pretrained(letters))
    with pytest.raises(DataError, match="cannot be separated from its prompt"):
        render_answers(template, TALK)


def test_packing() -> None:
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 20, 200).tolist()
    rows = pack_rows(sizes, 20, seed=3)
    assert sorted(n for row in rows for n in row) == list(range(200))
    filled = [sum(sizes[n] for n in row) for row in rows]
    assert max(filled) <= 20
    assert len(rows) <= 1.15 * sum(sizes) / 20  # almost nothing but text
    assert pack_rows(sizes, 20, seed=3) == rows != pack_rows(sizes, 20, seed=4)


def write_talks(path: Path) -> Path:
    """What is said is repeated."""
    words = ["hi", "yes", "no", "abc", "well", "ok", "so", "bye"]
    return write_jsonl(
        path,
        [
            {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w}]}
            for w in words
        ],
    )


FORMS = {
    "alpaca": {"instruction": "say", "input": "hi", "output": "hello"},
    "alpaca alone": {"instruction": "say", "input": "", "output": "hello"},
    "alpaca in rounds": {
        "instruction": "c", "output": "d", "history": [["a", "b"]], "system": "be kind",
    },
    "sharegpt": {
        "system": "be kind",
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "hello"},
        ],
    },
    "sharegpt with roles": {"conversations": TALK},
}  # fmt: skip
MEANT = {
    "alpaca": "user: say\nhi|assistant: hello",
    "alpaca alone": "user: say|assistant: hello",
    "alpaca in rounds": "system: be kind|user: a|assistant: b|user: c|assistant: d",
    "sharegpt": "system: be kind|user: hi|assistant: hello",
    "sharegpt with roles": "|".join(f"{m['role']}: {m['content']}" for m in TALK),
}


@pytest.mark.parametrize("is_list", [False, True])
def test_published_forms_are_read(is_list: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(list(FORMS.values()), indent=1))
    if not is_list:
        write_jsonl(file, list(FORMS.values()))
    found = read_conversations(file)
    assert [conversation.place.partition(", ")[2] for conversation in found] == [
        f"{'entry' if is_list else 'line'} {n}" for n in range(1, len(FORMS) + 1)
    ]
    for conversation, wanted in zip(found, MEANT.values(), strict=True):
        messages = conversation.messages
        assert "|".join(f"{m['role']}: {m['content']}" for m in messages) == wanted


def sft_config(folder: Path, letters: Path, steps: int, **changes: Any) -> LlamaSFTConfig:
    file = str(write_talks(folder / "talks.jsonl"))
    data = ConversationData(
        paths=(file,),
        validation=(file,),
        tokenizer=str(letters),
        seq_len=64,
        global_batch_size=4,
        micro_batch_size=2,
    )
    model = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        max_seq_len=64,
    )
    train = settings(steps, lr=0.01)
    return LlamaSFTConfig(run_dir=folder / "run", model=model, data=data, train=train, **changes)


def run(config: LlamaSFTConfig) -> list[float]:
    train_sft(config)
    wait_for_all()
    return [row["loss"] for row in read_metrics(config.run_dir / "metrics.jsonl")]


def test_conversations_are_learned(tmp_path: Path, letters: Path) -> None:
    """The loss is over answers alone, and the same as of each conversation by itself."""
    config = sft_config(tmp_path, letters, 60)
    result = train_sft(config)
    assert result.evaluation is not None
    losses = [row["loss"] for row in read_metrics(config.run_dir / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    model = AutoModel.from_pretrained(tmp_path / "run" / "export")
    template = ChatTemplate(find_template(tmp_path / "run" / "export"), tokenizer)
    total = count = 0
    for conversation in read_conversations(config.data.paths[0]):
        (row,) = encode_turns(render_answers(template, conversation.messages), tokenizer)
        ids, labels = (torch.tensor([part]) for part in row)
        total += float(model(ids, labels=labels, num_items_in_batch=1.0).loss.detach())
        count += int((labels != -100).sum())
    assert result.evaluation.tokens == count
    assert result.evaluation.loss == pytest.approx(total / count, rel=1e-5)


ODD = "{{ eos_token }}{% for m in messages %}{{ m.content | trim }}{{ bos_token }}{% endfor %}\n"


@pytest.mark.parametrize("where", ["tokenizer", "file", "nowhere"])
def test_the_template_is_exported(where: str, tmp_path: Path) -> None:
    """transformers writes a conversation with the export as it was written to learn from."""
    transformers = pytest.importorskip("transformers")
    own = {} if where == "nowhere" else {"chat_template": CHATML}
    letters, changes = write_letters(tmp_path / "letters", **own), {}
    if where == "file":
        (tmp_path / "odd.jinja").write_text(ODD)
        changes = {"template": tmp_path / "odd.jinja"}
    config = sft_config(tmp_path, letters, 1, **changes)
    train_sft(config)
    theirs = transformers.AutoTokenizer.from_pretrained(config.run_dir / "export")
    want = {
        "tokenizer": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n",
        "file": "</s>hi<s>hi<s>",
        "nowhere": "<s>User: hi\nAssistant: hi</s>\n",
    }[where]
    talk = read_conversations(config.data.paths[0])[0].messages
    assert theirs.apply_chat_template(talk, tokenize=False) == want
    source = {"tokenizer": CHATML, "file": ODD, "nowhere": None}[where]
    tokenizer = AutoTokenizer.from_pretrained(letters)
    turns = render_answers(ChatTemplate(source, tokenizer), talk)
    ((learned, _),) = encode_turns(turns, tokenizer)
    assert theirs.apply_chat_template(talk)["input_ids"] == learned
    asked = theirs.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True)
    assert want.startswith(asked)


def test_the_plain_template_is_the_same_program(letters: Path) -> None:
    """What is exported writes what is learned from, whatever roles others give to tokens."""
    tokenizer = AutoTokenizer.from_pretrained(letters)
    plain = ChatTemplate(None, tokenizer)
    exported = ChatTemplate(plain.source, tokenizer)
    talk = [*TALK, {"role": "user", "content": ' {{ 1 }} "quoted" \\ \n\n{% if %}\n'}]
    for asks in (False, True):
        assert exported.render(talk, asks) == plain.render(talk, asks)
    exported._marks.update(bos_token="?", eos_token="?")
    assert exported.render(talk) == plain.render(talk)


def test_goes_on_bit_for_bit(tmp_path: Path, letters: Path) -> None:
    whole = sft_config(tmp_path, letters, 6)
    want = run(whole)
    parts = dataclasses.replace(whole, run_dir=tmp_path / "parts")
    run(dataclasses.replace(parts, train=settings(3, lr=0.01)))
    assert run(parts) == want
    files = [d / "export" / "model.safetensors" for d in (whole.run_dir, parts.run_dir)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "layout"), [(2, Layout(zero=3)), (2, Layout(tp=2)), (2, Layout(cp=2))]
)
def test_layouts(world: int, layout: Layout, tmp_path: Path, letters: Path) -> None:
    config = sft_config(tmp_path, letters, 3)
    want = run_distributed(run, 1, config)[0]
    other = dataclasses.replace(config, run_dir=tmp_path / "other", layout=layout)
    for found in run_distributed(run, world, other):
        assert found == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", r"line 2 is not JSON"),
        ('{"text": "a"}', r"line 2 has the fields 'text' \(needed: 'messages'"),
        ('{"messages": [{"role": "user"}]}', "line 2 has a message without 'content'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2 has no assistant message"),
        ('{"instruction": "a", "input": "b"}', "line 2 has the fields 'instruction', 'input'"),
        ('{"instruction": 1, "output": "b"}', "line 2 has the fields 'instruction', 'output'"),
        ('{"conversations": [{"from": "cat", "value": "b"}]}', "line 2: from='cat' is unknown"),
    ],
)
def test_bad_records(line: str, text: str, tmp_path: Path, letters: Path) -> None:
    config = sft_config(tmp_path, letters, 2)
    file = Path(config.data.paths[0])
    file.write_text(file.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(DataError, match=text):
        train_sft(config)


def test_conversations_without_room(tmp_path: Path, letters: Path) -> None:
    config = sft_config(tmp_path, letters, 2)
    config.data = dataclasses.replace(config.data, seq_len=6)
    with pytest.raises(DataError, match="no training example"):
        train_sft(config)
    config.data = dataclasses.replace(config.data, split=(9.0, 1.0))
    with pytest.raises(ConfigError, match="divides token stores"):
        train_sft(config)
    config.data = dataclasses.replace(config.data, seq_len=65, split=())
    with pytest.raises(ConfigError, match=r"data\.seq_len=65 is more than"):
        train_sft(config)


# LLaVA's reads only parts; Qwen's also reads a text.
PARTS = "{% for p in message['content'] %}{{ p['text'] if p['type'] == 'text' else '[image]' }}"
LLAVA = (
    "{% for message in messages %}{{ message['role'] }}: " + PARTS + "{% endfor %}\n{% endfor %}"
)
QWEN = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}" + PARTS + "{% endfor %}{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize(("source", "reads_parts"), [(LLAVA, True), (QWEN, False), (CHATML, False)])
def test_texts_are_parts_for_a_template_that_reads_only_parts(
    tmp_path: Path, source: str, reads_parts: bool
) -> None:
    pytest.importorskip("jinja2")
    template = ChatTemplate(source, AutoTokenizer.from_pretrained(write_letters(tmp_path / "t")))
    assert template.reads_parts is reads_parts
    rendered = template.render(TALK[:3])
    for message in TALK[:3]:
        assert f"{message['role']}: {message['content']}" in rendered.replace("\n", ": ")
    if source is not CHATML:
        content = [{"type": "image"}, {"type": "text", "text": "what"}]
        assert template.render([{"role": "user", "content": content}]) == "user: [image]what"


def test_a_template_in_the_file_of_older_vision_models(tmp_path: Path) -> None:
    folder = write_letters(tmp_path / "letters", chat_template="old")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": LLAVA}))
    assert find_template(folder) == LLAVA
    (folder / "chat_template.jinja").write_text(QWEN)
    assert find_template(folder) == QWEN
