"""Tasks of a cluster give the bytes of one machine, in whatever order and after kills."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prepare_cases import written

from bmforge.data import Document, PrepareConfig, prepare, python_topics
from bmforge.data.clean.filter_step import RuleFilter
from bmforge.data.cluster import ClusterConfig, _Job, make_filter, make_step, run_on_cluster
from bmforge.errors import ConfigError

CONFIG = PrepareConfig(
    vocab_size=300,
    validation_fraction=0.1,
    shard_bytes=1500,
    near_duplicates=0.8,
    keep_index=True,
    rules="none",
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        texts = [f"text number {n} of file {name if n % 5 else 'x'} about the mill " * (2 + n % 4)
                 for n in range(30)]  # fmt: skip
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "in" / f"{name}.jsonl").write_text(lines)
    return tmp_path


def test_tasks_in_any_order_give_the_same_bytes(corpus: Path) -> None:
    plain = prepare(corpus / "in", corpus / "plain", CONFIG)
    config = ClusterConfig(str(corpus / "in"), str(corpus / "out"), CONFIG)
    job = _Job(config)
    for stage in ("documents", "sketches", "encode"):
        count = len(job.keys().of(stage))
        assert count > 3
        for rank in reversed(range(1, 3)):
            job.spread(stage, rank, 3)
        job.join()  # a task is missing: nothing behind it is done
        assert all(name != "prepared.toml" for name in written(corpus / "out"))
        done = corpus / "out" / "preparing.tmp" / "stages" / stage / "000001.done"
        done.unlink()  # as if that task had been killed
        for rank in (1, 0, 0):
            job.spread(stage, rank, 3)
        job.join()
        job.check(stage)
    report = prepare(corpus / "in", corpus / "out", CONFIG)
    assert written(corpus / "out") == written(corpus / "plain")
    assert replace(report, out_dir=plain.out_dir) == plain


def test_executors_of_datatrove_give_the_same_bytes(corpus: Path) -> None:
    pytest.importorskip("datatrove", reason="needs the extra cluster")
    prepare(corpus / "in", corpus / "plain", CONFIG)
    config = ClusterConfig(str(corpus / "in"), str(corpus / "out"), CONFIG, tasks=3, at_once=1)
    report = run_on_cluster(config, executor="local")
    assert report is not None
    assert written(corpus / "out") == written(corpus / "plain")
    again = run_on_cluster(config, executor="local")
    assert again is not None
    assert again.reused


def test_ray_gives_the_same_bytes(corpus: Path) -> None:
    pytest.importorskip("datatrove", reason="needs the extra cluster")
    pytest.importorskip("ray", reason="needs ray")
    prepare(corpus / "in", corpus / "plain", CONFIG)
    config = ClusterConfig(str(corpus / "in"), str(corpus / "out"), CONFIG, tasks=2, at_once=2)
    run_on_cluster(config, executor="ray")
    assert written(corpus / "out") == written(corpus / "plain")


@dataclass
class LongEnough:
    """A filter as datatrove has them."""

    least: int
    name: str = "🔍 Long enough"

    def filter(self, document: Any) -> Any:
        return True if len(document.text) >= self.least else (False, "short")


def test_filters_of_datatrove_are_steps_of_ours(corpus: Path) -> None:
    pytest.importorskip("datatrove", reason="needs the extra cluster")
    report = prepare(corpus / "in", corpus / "out", CONFIG, steps=[make_step(LongEnough(80))])
    assert report.funnel is not None
    assert report.funnel.dropped["datatrove.long_enough.short"].documents > 0


def test_our_rules_are_steps_of_datatrove() -> None:
    @dataclass
    class Theirs:
        text: str
        id: str

    documents = list(python_topics())
    given = [Theirs(one.text, one.id) for one in documents]
    found = list(make_filter("english")(given))
    judge = RuleFilter("english")
    judged = [(one.id, judge(one)) for one in documents]
    kept = {id: one.text for id, one in judged if isinstance(one, Document)}
    assert {one.id: one.text for one in found} == kept
    assert 0 < len(kept) < len(documents)


@pytest.mark.parametrize(
    ("executor", "changes", "said"),
    [("slrum", {}, "Did you mean 'slurm'"), ("local", {"tasks": 0}, "at least 1")],
)
def test_what_does_not_fit_is_said(corpus: Path, executor: Any, changes: dict, said: str) -> None:
    config = replace(ClusterConfig(str(corpus / "in"), str(corpus / "out"), CONFIG), **changes)
    with pytest.raises(ConfigError, match=said):
        run_on_cluster(config, executor=executor)


# Stands for Slurm's own: a job runs at once, its array one after the other, and only behind jobs
# that ended well.
SBATCH = """
import os, re, subprocess, sys
from pathlib import Path

ended = Path(os.environ["ENDED_JOBS"])
given = dict(word[2:].split("=", 1) for word in sys.argv[1:-1])
script = Path(sys.argv[-1]).read_text()
said = dict(re.findall(r"#SBATCH --([\\w-]+)=(.*)", script)) | given
before = said.get("dependency", "").partition(":")[2]
done = ended.read_text().split() if ended.exists() else []
if before and before not in done:
    sys.exit(f"job {before} has not ended well, of {done}")
number = str(100 + len(done))
exported = dict(pair.split("=") for pair in said.get("export", "").split(",") if "=" in pair)
first, last = re.match(r"(\\d+)-(\\d+)", said["array"]).groups()
for rank in range(int(first), int(last) + 1):
    task = {"ARRAY_TASK_ID": str(rank), "JOB_ID": number, "NODEID": "0", "NODELIST": "node1"}
    env = os.environ | exported | {f"SLURM_{key}": value for key, value in task.items()}
    subprocess.run(["bash", sys.argv[-1]], env=env, check=True, stdout=sys.stderr)
ended.write_text(" ".join([*done, number]))
print("Submitted batch job", number)
"""
SRUN = """
import os, sys

words = sys.argv[1:]
while words[0].startswith("-"):
    del words[: 2 if words[0] == "-n" else 1]
os.execvp(words[0], words)
"""
SCONTROL = "print('node1')"
TOOL = "from datatrove.tools.{name} import main\nmain()\n"


@pytest.mark.long
def test_slurm_gives_the_same_bytes(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of tasks is a job behind the one before; `prepare` returns what they made."""
    pytest.importorskip("datatrove", reason="needs the extra cluster")
    tools = ("launch_pickled_pipeline", "merge_stats")
    commands = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}
    commands |= {name: TOOL.format(name=name) for name in tools}
    (corpus / "bin").mkdir()
    for name, text in commands.items():
        (corpus / "bin" / name).write_text(f"#!{sys.executable}\n{text}")
        (corpus / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{corpus / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ENDED_JOBS", str(corpus / "ended"))
    plain = prepare(corpus / "in", corpus / "plain", CONFIG)
    options = {"time": "00:10:00", "partition": "cpu"}
    config = ClusterConfig(
        str(corpus / "in"), str(corpus / "out"), CONFIG, tasks=3, at_once=2, options=options
    )
    assert run_on_cluster(config, executor="slurm") is None
    assert written(corpus / "out") == written(corpus / "plain")
    report = prepare(corpus / "in", corpus / "out", CONFIG)
    assert report.reused
    assert replace(report, out_dir=plain.out_dir, reused=False) == plain
