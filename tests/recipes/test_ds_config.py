"""CPM-Pretrain's ds_config files, its rule for the batch size, and its loss scale."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from small_runs import SIZES, settings, write_counting

from bmforge.cli.main import main
from bmforge.compat.cpm_pretrain.ds_config import apply_ds_config, read_ds_config
from bmforge.errors import ConfigError
from bmforge.logging import get_logger
from bmforge.models.gpt2 import GPT2Config
from bmforge.parallel import Layout
from bmforge.recipes.inputs.corpus import CorpusConfig
from bmforge.recipes.micro_batches import resolve_batch
from bmforge.recipes.pretrain import GPT2PretrainConfig, pretrain
from bmforge.recipes.spans import T5SpansConfig
from bmforge.train import LossScaler, read_metrics
from bmforge.train.loss_scale import LossScaleConfig, build_scaler

# As published, but for the wrong size.
PUBLISHED = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "initial_scale_power": 16,
    },
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": True,
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "ds_config.json"
    file.write_text(json.dumps({**PUBLISHED, **changes}), encoding="utf-8")
    return file


def pipelined(config: Any, tp: int = 1, accumulate: int = 16) -> Any:
    data = dataclasses.replace(config.data, grad_accum_steps=accumulate)
    return dataclasses.replace(config, layout=Layout(pp=2, tp=tp), data=data)


class Listener(logging.Handler):
    """Keeps what is said."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


@pytest.fixture
def heard() -> Any:
    logger, listener = get_logger(), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    yield listener
    logger.removeHandler(listener)
    logger.setLevel(level)


def test_the_product_is_used_and_both_numbers_are_shown(tmp_path: Path, heard: Any) -> None:
    """The published example on 4 processes: mp 2 x pp 2 x micro batch 4 x gas 16 gives 64."""
    found = apply_ds_config(pipelined(T5SpansConfig(), tp=2), write(tmp_path), 4)
    assert (found.data.micro_batch_size, found.data.global_batch_size) == (4, 64)
    assert "train_batch_size=128" in heard.text
    assert "x 16 accumulation steps x 4 processes / pp=2 / tp=2 is 64: 64 is used" in heard.text
    assert "wall_clock_breakdown has no effect" in heard.text
    assert found.train.precision == "fp16"
    assert (found.train.grad_clip, found.train.log_every_steps) == (1.0, 10)
    scale = found.loss_scale
    assert (scale.fixed, scale.init_scale, scale.growth_interval_steps) == (None, 65536.0, 1000)
    assert (scale.hysteresis, scale.min_scale) == (2, 1.0)


def test_a_size_that_fits_needs_no_warning(tmp_path: Path, heard: Any) -> None:
    file = write(tmp_path, train_batch_size=24, gradient_accumulation_steps=3, fp16={})
    found = apply_ds_config(pipelined(GPT2PretrainConfig()), file, 4)
    assert found.data.global_batch_size == 24
    assert found.train.precision == "fp32"
    assert "is used" not in heard.text


def test_without_a_pipeline_it_is_ignored(tmp_path: Path, heard: Any) -> None:
    config = GPT2PretrainConfig(layout=Layout(tp=2))
    assert apply_ds_config(config, write(tmp_path), 4) is config
    assert "is ignored" in heard.text


def test_other_settings(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "loss_scale": 128}
    file = write(tmp_path, fp16=fp16, gradient_clipping=0, zero_optimization={"stage": 1})
    found = apply_ds_config(pipelined(GPT2PretrainConfig()), file, 2)
    assert found.loss_scale == LossScaleConfig(fixed=128.0)
    assert (found.train.grad_clip, found.layout.zero) == (None, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp61": {}}, r"unknown setting fp61 .*Did you mean 'fp16'"),
        ({"fp16": {"enabeld": True}}, r"unknown setting fp16.enabeld .*Did you mean 'enabled'"),
        ({"fp16": {"enabled": "yes"}}, r"fp16.enabled='yes' must be true or false"),
        ({"fp16": 3}, r"fp16=3 must be an object"),
        ({"train_batch_size": "many"}, r"train_batch_size='many' must be an integer"),
        ({"train_micro_batch_size_per_gpu": 0}, r"train_micro_batch_size_per_gpu=0 must be"),
        ({"gradient_clipping": -1}, r"gradient_clipping=-1 must be at least 0"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization.stage=4 must be 0, 1, 2 or 3"),
    ],
)
def test_bad_settings(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_ds_config(write(tmp_path, **changes))


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    with pytest.raises(ConfigError, match=r"cannot read --ds-config .*No such file"):
        read_ds_config(file)
    file.write_text("{'train_batch_size': 4}")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_ds_config(file)
    file.write_text("[4]")
    with pytest.raises(ConfigError, match="must contain a JSON object"):
        read_ds_config(file)


def test_the_command_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layout.pp", "2", "--data.grad-accum-steps", "8", "--print-config"]
    file = write(tmp_path)
    arguments = ["train", "gpt2-pretrain", *options, "--ds-config", str(file)]
    assert main([*arguments, "--dry-run", "--world", "8"]) == 0
    shown = capsys.readouterr().out
    assert "global_batch_size = 128" in shown  # 4 x 8 x 8 / 2
    assert 'precision = "fp16"' in shown
    file.write_text("{}}")
    assert main(arguments) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_accumulation_gives_the_global_batch() -> None:
    config = pipelined(GPT2PretrainConfig(), tp=2, accumulate=3)
    assert resolve_batch(config, 16).global_batch_size == 8 * 3 * 4
    wrong = dataclasses.replace(config.data, global_batch_size=50)
    with pytest.raises(
        ConfigError,
        match=r"global_batch_size=50 must be .*8 x .*=3 x 4 data-parallel processes = 96",
    ):
        resolve_batch(dataclasses.replace(config, data=wrong), 16)
    none = dataclasses.replace(config.data, grad_accum_steps=0)
    with pytest.raises(ConfigError, match="grad_accum_steps=0 must be at least 1"):
        resolve_batch(dataclasses.replace(config, data=none), 16)


def scales(config: LossScaleConfig, overflows: str) -> list[float]:
    """The scale after every step; "x" is an overflow."""
    scaler, found = build_scaler(config), []
    for step in overflows:
        scaler.update(step == "x")
        state = json.loads(json.dumps(scaler.state_dict()))
        scaler = build_scaler(config)
        scaler.load_state_dict(state)
        found.append(scaler.current_scale)
    return found


def test_the_scale_lets_overflows_pass() -> None:
    """By hand, after DeepSpeed's rule; a scaler that goes on from its state does the same."""
    two = LossScaleConfig(init_scale=16.0, growth_interval_steps=3, hysteresis=2, min_scale=4.0)
    assert scales(two, "xx...xxxxx") == [16, 8, 8, 8, 16, 16, 8, 4, 4, 4]
    assert scales(two, "..x...") == [16, 16, 16, 16, 16, 32]
    assert scales(LossScaleConfig(fixed=8.0), "xx..") == [8.0] * 4


def test_a_run_uses_it(tmp_path: Path) -> None:
    """From the first step on, and again where it goes on."""
    store = write_counting(tmp_path / "tokens", 11, end=7)
    config = GPT2PretrainConfig(
        run_dir=tmp_path / "run",
        model=GPT2Config(vocab_size=40, max_seq_len=16, **SIZES),
        data=CorpusConfig(paths=(str(store),), seq_len=8, global_batch_size=2, eos_id=7),
        train=settings(3, precision="fp16"),
        loss_scale=LossScaleConfig(init_scale=8.0, growth_interval_steps=2),
        export=False,
    )
    for steps in (3, 4):
        pretrain(dataclasses.replace(config, train=settings(steps, precision="fp16")))
    rows = read_metrics(config.run_dir / "metrics.jsonl")
    assert [row["loss_scale"] for row in rows] == [8.0, 8.0, 16.0, 16.0]


def test_by_default_it_is_the_trainers_own() -> None:
    plain, ours = LossScaler(), build_scaler(LossScaleConfig())
    for step in range(5000):
        for scaler in (plain, ours):
            scaler.update(step in (3, 4, 2500))
        assert plain.current_scale == ours.current_scale
    assert ours.current_scale != 2.0**16


def test_a_scale_without_effect_is_refused() -> None:
    scale = LossScaleConfig(hysteresis=2)
    scale.check("fp16")
    with pytest.raises(ConfigError, match=r"no effect with train\.precision='bf16'"):
        scale.check("bf16")
    with pytest.raises(ConfigError, match="other fields of loss_scale have no effect"):
        LossScaleConfig(fixed=4.0, hysteresis=2).check("fp16")
    with pytest.raises(ConfigError, match="hysteresis=0"):
        LossScaleConfig(hysteresis=0).check("fp16")
