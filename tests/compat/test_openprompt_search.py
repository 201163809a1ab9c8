"""OpenPrompt's search of templates and label words, and its runner, on tiny models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bmforge.compat.openprompt.examples import InputFeatures
from bmforge.compat.openprompt.prompts.prompt_generator import (
    RobertaVerbalizerGenerator,
    T5TemplateGenerator,
)
from bmforge.compat.openprompt.trainer import ClassificationRunner
from bmforge.errors import ConfigError


def test_generated_texts_replace_the_masks_of_the_original_template() -> None:
    generator = T5TemplateGenerator(nn.Linear(1, 1), None)
    original = '{"placeholder":"text_a"} {"mask"} {"meta":"labelword"} {"mask"}.'
    converted = generator.convert_template(("It was", "indeed"), original)
    assert converted == '{"placeholder":"text_a"} It was {"mask"} indeed.'
    with pytest.raises(ConfigError, match="target_number=3 is not supported"):
        T5TemplateGenerator(nn.Linear(1, 1), None, target_number=3)


def test_label_words_are_the_tokens_that_separate_the_classes() -> None:
    tokens = ["Ġgood", "Ġbad", "x", "Ġ", "Ġb"]

    class Vocabulary:
        def get_vocab(self) -> dict[str, int]:
            return {token: id for id, token in enumerate(tokens)}

        def decode(self, ids: list[int]) -> str:
            return "".join(tokens[id] for id in ids).replace("Ġ", " ")

    generator = RobertaVerbalizerGenerator(nn.Linear(1, 1), Vocabulary(), 3, 2)
    # Token 2 does not begin with a space, and token 3 is only a space.
    scores = torch.tensor([[3.0, 0, 9, 8, 1], [3.0, 1, 9, 8, 1], [0.0, 3, 9, 9, 1]])
    generator._logits, generator._labels = [scores], [torch.tensor([0, 0, 1])]
    sets = generator.generate()
    assert sets[0] == ["good", "bad"]
    assert not any("" in words for words in sets)


class Scores(nn.Module):
    """A model of one number per class."""

    def __init__(self) -> None:
        super().__init__()
        self.plm = nn.Linear(2, 2)
        self.device = torch.device("cpu")

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        scores: torch.Tensor = self.plm(batch["x"])
        return scores


def settings(folder: Path) -> Any:
    optimize = SimpleNamespace(
        freeze_para=False, no_decay=["bias"], weight_decay=0.1, lr=0.1,
        scheduler=SimpleNamespace(num_warmup_steps=2),
    )  # fmt: skip
    return SimpleNamespace(
        logging=SimpleNamespace(path=str(folder)),
        plm=SimpleNamespace(optimize=optimize),
        train=SimpleNamespace(num_epochs=3, gradient_accumulation_steps=2, max_grad_norm=0.5),
        classification=SimpleNamespace(metric=["accuracy"]),
    )


def test_runner_equals_a_plain_loop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [
        InputFeatures(x=torch.randn(3, 2), label=torch.randint(0, 2, (3,))) for _ in range(4)
    ]
    model, plain = Scores(), Scores()
    plain.load_state_dict(model.state_dict())
    runner = ClassificationRunner(model, settings(tmp_path), batches, batches, batches)
    score = runner.run()

    groups = [
        {"params": [plain.plm.weight], "weight_decay": 0.1},
        {"params": [plain.plm.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for step in range(6):
        rate = step / 2 if step < 2 else (6 - step) / 4
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * rate
        for batch in batches[step % 2 * 2 : step % 2 * 2 + 2]:
            (nn.functional.cross_entropy(plain(batch), batch["label"]) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    last = torch.load(runner.checkpoint_path("last"), weights_only=True)
    torch.testing.assert_close(last["plm.weight"], plain.plm.weight)
    torch.testing.assert_close(last["plm.bias"], plain.plm.bias)
    right = [(model(b).argmax(-1) == b["label"]).float().mean() for b in batches]
    assert score == pytest.approx(float(sum(right)) / 4)
    assert runner.best_score is not None
