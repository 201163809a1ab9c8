"""`bmforge train rl` and `train distill`: learning, resuming, refusals, and layouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from bmforge.align.policy import PolicyConfig
from bmforge.align.rollout_config import RolloutConfig
from bmforge.errors import ConfigError, DataError
from bmforge.models import AutoModel, Llama, LlamaConfig
from bmforge.parallel import Layout
from bmforge.recipes.adapters import AdapterConfig
from bmforge.recipes.distill import OnPolicyDistillationConfig
from bmforge.recipes.inputs.prompt_rows import PromptConfig, encode_prompts, make_decoder, read_all
from bmforge.recipes.registry import Recipe, find_recipe
from bmforge.recipes.rl import ReinforcementConfig
from bmforge.surgery import persistent_tensors
from bmforge.testing import run_distributed
from bmforge.tokenizers import AutoTokenizer
from bmforge.tokenizers.chat_template import ChatTemplate
from bmforge.train import OptimConfig, ScheduleConfig, TrainConfig, read_metrics

LETTERS = "0123456789+=abcdefgh"
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4},
    **{"num_kv_heads": 2, "max_seq_len": 32, "init_std": 0.1},
}
REWARD = """
def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""


def write_model(folder: Path, seed: int = 0, more: str = "", **changes: Any) -> Path:
    marks = ["<pad>", "</s>", "<unk>"]
    vocabulary = {token: id for id, token in enumerate([*marks, *LETTERS, *more])}
    config = LlamaConfig(vocab_size=len(vocabulary), **{**SIZES, **changes})
    Llama.from_config(config, seed=seed).save_pretrained(folder)
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    every = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    fast.pre_tokenizer, fast.decoder = every, tokenizers.decoders.Fuse()
    fast.add_special_tokens(marks)
    fast.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    write_model(folder / "model")
    write_model(folder / "teacher", seed=3, hidden_size=16)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(REWARD)
    return folder


def recipe_of(place: Path, task: str = "rl") -> Recipe:
    return find_recipe(task, str(place / "model"), None, None)


def make_config(place: Path, name: str, steps: int, **changes: Any) -> Any:
    loop = TrainConfig(
        steps=steps,
        save_every_steps=1,
        disable_dropout=True,
        optim=OptimConfig(lr=1e-2, weight_decay=0.0),
        schedule=ScheduleConfig(kind="constant"),
    )
    given = {
        "run_dir": place / name,
        "train": loop,
        "data": PromptConfig(
            paths=(str(place / "prompts.jsonl"),),
            seq_len=6,
            global_batch_size=16,
            micro_batch_size=8,
        ),
        "rollout": RolloutConfig(num_generations=4, max_new_tokens=5),
        "reward": (f"{place / 'mine.py'}:digits",),
    }
    return recipe_of(place).config(**{**given, **changes})


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in persistent_tensors(model).items()}


def test_the_share_of_digits_rises_and_the_export_writes_them(place: Path) -> None:
    config = make_config(place, "learn", 12)
    result = recipe_of(place).run(config)
    rows = read_metrics(place / "learn" / "metrics.jsonl")
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:2]) / 2 < 0.6 < 0.8 < sum(rewards[-2:]) / 2
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 5e-6
        assert row["clip_ratio/region_mean"] == 0.0  # one update per rollout: the ratio is 1
        assert row["rewards/digits/failures"] == 0
    lines = (place / "learn" / "completions.jsonl").read_text().splitlines()
    table = [json.loads(line) for line in lines]
    assert [row["step"] for row in table] == [step for step in range(1, 13) for _ in range(16)]
    assert table[0].keys() >= {"prompt", "completion", "rewards", "reward", "advantage"}
    exported = AutoModel.from_pretrained(place / "learn" / "export")
    for name, tensor in weights(exported).items():
        assert torch.equal(tensor, weights(result.model)[name])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("plain", {}),
        (
            "several",
            {
                "method": "dapo",
                "rl": PolicyConfig(beta=0.05),
                "rollout": RolloutConfig(
                    num_generations=4, max_new_tokens=5, num_iterations=2, steps_per_generation=2
                ),
                "adapter": AdapterConfig(kind="lora", rank=2),
            },
        ),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(place: Path, name: str, changes: Any) -> None:
    run = recipe_of(place).run
    whole = run(make_config(place, f"{name}-whole", 5, **changes))
    for steps in (2, 3, 5):
        config = make_config(place, f"{name}-parts", steps, **changes)
        config.export = steps == 5
        parts = run(config)
    for tensor, other in zip(
        weights(whole.model).values(), weights(parts.model).values(), strict=True
    ):
        assert torch.equal(tensor, other)
    files = [place / f"{name}-{kind}" / "completions.jsonl" for kind in ("whole", "parts")]
    assert files[0].read_text() == files[1].read_text()
    rows = [read_metrics(file.parent / "metrics.jsonl") for file in files]
    for one, other in zip(*rows, strict=True):
        assert (one["loss"], one["reward"]) == (other["loss"], other["reward"])


def _run_sharded(place: Path, name: str, layout: Layout) -> None:
    recipe_of(place).run(make_config(place, name, 2, layout=layout))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("zero", Layout(zero=3)),
        ("tp", Layout(tp=2)),
        ("pp", Layout(pp=2)),
        pytest.param("cp", Layout(cp=2), marks=pytest.mark.long),
    ],
)
def test_layouts_write_the_same_answers_and_learn_the_same(
    place: Path, name: str, layout: Layout
) -> None:
    alone = recipe_of(place).run(make_config(place, f"alone_{name}", 2))
    run_distributed(_run_sharded, 2, place, name, layout)
    found: Any = AutoModel.from_pretrained(place / name / "export")
    for key, tensor in weights(alone.model).items():
        # AdamW's first steps of 1e-2 divide the gradient's rounding by its size.
        torch.testing.assert_close(weights(found)[key], tensor, rtol=0, atol=1e-3)
    rows = [read_metrics(place / run / "metrics.jsonl") for run in (f"alone_{name}", name)]
    for one, other in zip(*rows, strict=True):
        assert other["reward"] == one["reward"]
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        length = 4 + one["completions/mean_length"]  # prompts have four tokens
        assert one["tokens"] == other["tokens"] == pytest.approx(16 * length)
    files = [place / run / "completions.jsonl" for run in (f"alone_{name}", name)]
    tables = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    texts = [[row["completion"] for row in table if row["step"] == 1] for table in tables]
    assert texts[0] == texts[1]


def _run_with_reference(place: Path, name: str, method: str, layout: Layout) -> None:
    rl = PolicyConfig(beta=0.2)
    config = make_config(place, name, 3, layout=layout, method=method, rl=rl, export=False)
    recipe_of(place).run(config)


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("rloo", Layout(zero=0)),
        ("grpo", Layout(zero=3)),
        ("grpo", Layout(tp=2)),
        pytest.param("rloo", Layout(pp=2), marks=pytest.mark.long),
        pytest.param("grpo", Layout(cp=2), marks=pytest.mark.long),
    ],
)
def test_a_copied_reference_has_the_initial_weights_on_every_layout(
    place: Path, method: str, layout: Layout, tmp_path: Path
) -> None:
    """The KL is 0 in the first step, and that of one process in the next ones."""
    _run_with_reference(place, str(tmp_path / "alone"), method, Layout())
    run_distributed(_run_with_reference, 2, place, str(tmp_path / "two"), method, layout)
    alone, two = (read_metrics(tmp_path / run / "metrics.jsonl") for run in ("alone", "two"))
    assert abs(two[0]["kl"]) < 1e-6 < 1e-3 < abs(two[1]["kl"])
    for one, other in zip(alone, two, strict=True):
        assert other["kl"] == pytest.approx(one["kl"], rel=1e-3, abs=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_distillation_comes_closer_to_the_teacher(place: Path) -> None:
    recipe = find_recipe("distill", str(place / "model"), None, None)
    base = make_config(place, "distill", 12)
    config = recipe.config(
        run_dir=base.run_dir,
        train=base.train,
        data=base.data,
        teacher=str(place / "teacher"),
        rollout=RolloutConfig(num_generations=1, max_new_tokens=5, num_iterations=2),
        export=False,
    )
    recipe.run(config)
    rows = read_metrics(place / "distill" / "metrics.jsonl")
    assert rows[-1]["kl"] < 0.5 * rows[0]["kl"]
    assert rows[0]["loss"] == pytest.approx(rows[0]["kl"], rel=1e-5)


def _distill(place: Path, name: str, **changes: Any) -> None:
    base = make_config(place, name, 2)
    given = {"run_dir": base.run_dir, "train": base.train, "data": base.data}
    rollout = RolloutConfig(num_generations=1, max_new_tokens=5)
    teacher = str(place / "teacher")
    recipe = recipe_of(place, "distill")
    recipe.run(recipe.config(**given, rollout=rollout, teacher=teacher, **changes))


def test_distillation_of_all_top_tokens_is_that_of_the_vocabulary(
    place: Path, tmp_path: Path
) -> None:
    for name, top_k in (("whole", 0), ("top", 23)):
        _distill(place, str(tmp_path / name), distill_top_k=top_k, export=False)
    whole, top = (read_metrics(tmp_path / run / "metrics.jsonl") for run in ("whole", "top"))
    for one, other in zip(whole, top, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(zero=3),
        Layout(tp=2),
        Layout(pp=2),
        pytest.param(Layout(cp=2), marks=pytest.mark.long),
        pytest.param(Layout(tp=2, sequence_parallel=True), marks=pytest.mark.long),
    ],
)
def test_top_k_distillation_is_the_same_on_every_layout(
    place: Path, layout: Layout, tmp_path: Path
) -> None:
    """The teacher has the student's layout, and the loss is smaller than over the vocabulary."""
    names = [str(tmp_path / name) for name in ("alone", "two", "whole")]
    _distill(place, names[0], distill_top_k=4)
    run_distributed(_distill, 2, place, names[1], layout=layout, distill_top_k=4)
    _distill(place, names[2], export=False)
    alone, two, whole = (read_metrics(Path(name) / "metrics.jsonl") for name in names)
    assert 0 < alone[0]["loss"] < whole[0]["loss"]
    for one, other in zip(alone, two, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["kl"] == pytest.approx(one["kl"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    found, wanted = (AutoModel.from_pretrained(Path(name) / "export") for name in names[1::-1])
    for key, tensor in weights(wanted).items():
        torch.testing.assert_close(weights(found)[key], tensor, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distill_top_k": -1}, "distill_top_k=-1 must be at least 0"),
        ({"distill_temperature": math.inf}, "distill_temperature=inf"),
        ({"jsd_beta": 1.5}, "jsd_beta=1.5"),
    ],
)
def test_numbers_of_distillation_are_checked(place: Path, changes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _distill(place, "refused", **changes)
    assert not (place / "refused").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "trpo"}, "method='trpo'"),
        ({"reward": ()}, "no reward is set"),
        ({"reward": ("json:no_such",)}, "has no function"),
        ({"reward": ("exact:solution=2",)}, r"no column 'solution' \(columns: answer\)"),
        ({"adapter": AdapterConfig(kind="lora", dropout=0.1)}, "adapter.dropout=0.1 has no effect"),
        ({"rollout": RolloutConfig(max_new_tokens=64)}, "max_seq_len=32"),
        ({"rollout": RolloutConfig(max_turns=3)}, "max_turns=3 has no effect"),
        ({"rollout": RolloutConfig(tool_timeout_s=3.0)}, "tool_timeout_s=3.0 has no effect"),
        ({"train": TrainConfig()}, "disable_dropout"),
        (
            {"train": TrainConfig(disable_dropout=True, eval_every_steps=1)},
            "eval_every_steps=1 has no effect",
        ),
        ({"rl": PolicyConfig(beta=math.nan)}, "rl.beta=nan must be at least 0, and finite"),
        (
            {
                "rl": PolicyConfig(correction="mask"),
                "rollout": RolloutConfig(max_new_tokens=5, exact_logprobs=True),
            },
            "rl.correction=mask has no effect",
        ),
        ({"rl": PolicyConfig(clip_low=2.0)}, "clip_low=2.0"),
        ({"rollout": RolloutConfig(num_generations=5, max_new_tokens=5)}, "num_generations=5"),
        ({"rollout": RolloutConfig(num_generations=1, max_new_tokens=5)}, "least 2 answers"),
        ({"template": Path("chatml")}, "template='chatml' has no effect"),
    ],
)
def test_what_cannot_run_is_refused_before_the_run(place: Path, changes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe_of(place).run(make_config(place, "refused", 2, **changes))
    assert not (place / "refused").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": [{"role": "user", "content": "1", "name": "a"}]}, "line 1: .* field 'name'"),
        ({"prompt": [{"role": "User", "content": "1"}]}, "line 1: message 1 has the role 'User'"),
        (
            {"prompt": [{"role": "user", "content": "1"}], "tools": "{"},
            "line 1: 'tools' is not JSON",
        ),
        ({"prompt": "1+", "tools": [{"name": "f"}]}, "line 1: 'tools' has no effect"),
        ({"prompt": "1+", "chat_template_kwargs": {"a": 1}}, "'chat_template_kwargs' has no"),
        ({"prompt": "1+", "chat_template_kwargs": "a"}, "'chat_template_kwargs' must be"),
    ],
)
def test_fields_without_effect_are_refused(place: Path, fields: Any, words: str) -> None:
    file = place / "fields.jsonl"
    file.write_text(json.dumps(fields) + "\n")
    with pytest.raises(DataError, match=words):
        recipe_of(place).run(
            make_config(place, "refused", 2, data=PromptConfig(paths=(str(file),), seq_len=6))
        )


def test_ignored_fields_and_tools_as_json_change_no_prompt(place: Path, tmp_path: Path) -> None:
    """A template reads neither an ignored field nor the text form of the tools."""
    source = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}</s>"
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    template = ChatTemplate(source, tokenizer)
    user = {"role": "user", "content": "1+"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [
        {"prompt": [user], "tools": tools},
        {"prompt": [{**user, "name": "a", "id": 7}], "tools": json.dumps(tools)},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PromptConfig(paths=(str(file),), ignore=("id", "name"))
    plain, other = encode_prompts(read_all(data), data, tokenizer, template)
    assert plain.ids == other.ids
    assert other.content[0]["name"] == "a"  # reward functions get the whole message


def test_teachers_of_other_vocabularies_are_refused(place: Path, tmp_path: Path) -> None:
    recipe = find_recipe("distill", str(place / "model"), None, None)
    base = make_config(place, "refused", 2)
    larger = write_model(tmp_path / "larger", more="xyz")
    given = {"run_dir": base.run_dir, "data": base.data, "rollout": base.rollout}
    with pytest.raises(ConfigError, match="vocab_size=23, but the teacher has vocab_size=26"):
        recipe.run(recipe.config(**given, teacher=str(larger)))
    with pytest.raises(ConfigError, match="needs a teacher"):
        recipe.run(recipe.config(**given))


@pytest.mark.parametrize("option", [{"mask_truncated_completions": True}, {"overlong_tokens": 2}])
def test_options_of_rewards_are_refused_in_distillation(place: Path, option: Any) -> None:
    recipe, base = recipe_of(place, "distill"), make_config(place, "refused", 2)
    config = recipe.config(
        run_dir=base.run_dir,
        data=base.data,
        rollout=RolloutConfig(max_new_tokens=5, **option),
        teacher=str(place / "teacher"),
    )
    with pytest.raises(ConfigError, match=f"{next(iter(option))} has no effect"):
        recipe.run(config)
    assert not base.run_dir.exists()


def test_the_configs_are_those_of_the_tasks(place: Path) -> None:
    assert issubclass(recipe_of(place).config, ReinforcementConfig)
    assert issubclass(recipe_of(place, "distill").config, OnPolicyDistillationConfig)


def test_reward_functions_get_text_without_special_tokens(tmp_path: Path) -> None:
    write_model(tmp_path)
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.add_special_tokens(["<think>", "</think>", "<call>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("<pad><think>1<unk></think><call>2</s>")
    assert len(ids) == 8
    assert make_decoder(tokenizer, [1])(ids) == "<think>1</think>2"
    special = make_decoder(tokenizer, [1], with_special=True)(ids)
    assert special == "<pad><think>1<unk></think><call>2"


def test_a_required_column_that_is_missing_is_an_error_before_the_run(place: Path) -> None:
    file = place / "needs.py"
    file.write_text("def needs(completions, solution, **columns):\n    return [0] * 16\n")
    config = make_config(place, "needs", 1, reward=(f"{file}:needs",))
    with pytest.raises(ConfigError, match=r"needs the column 'solution' \(columns: answer\)"):
        recipe_of(place).run(config)
    assert not (place / "needs" / "metrics.jsonl").exists()
