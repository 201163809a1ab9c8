"""The report: parsed again, its curves hold the rows, and nothing reaches or breaks out."""

import itertools
import json
import math
from html.parser import HTMLParser

import pytest

from bmforge.errors import DataError
from bmforge.train.report.page import write_report

NASTY = '<script>alert("&")</script>'
VOID = {"meta", "line", "circle", "polyline", "br"}


class Page(HTMLParser):
    """Collects tags, curves and text, and checks that tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.stack, self.curves, self.text = [], [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "polyline":
            attrs = dict(attrs)
            points = [tuple(map(float, p.split(","))) for p in attrs["points"].split()]
            self.curves[attrs["data-curve"]] = points
        if tag not in VOID or tag in ("circle", "line"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.stack and self.stack[-1] == tag:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def make_run(run_dir, rows=40):
    run_dir.mkdir()
    lines = []
    for step in range(1, rows + 1):
        row = {"step": step, "loss": 9.0 * math.exp(-step / 30) + 2, "lr": 1e-3 / step}
        row |= {"grad_norm": 1.0 + (step % 5) / 10, "tokens_per_s": 900.0 + step}
        if step == 7:
            row |= {"loss": None, "grad_norm": None, "skipped": f"a non-finite loss {NASTY}"}
        lines.append(row)
        if step % 10 == 0:
            lines.append({"step": step, "val_loss": 3.0 + 1 / step})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text + '{"step": 41, "lo')
    (run_dir / "run.toml").write_text(f'name = "{NASTY}"\n')
    results = {"bits_per_byte": {"model": 1.91, "unigram": 4.48, NASTY: 3.4}, "perplexity": 12.5}
    (run_dir / "results.json").write_text(json.dumps(results))
    samples = [{"step": 20, "prompt": "To ", "text": "To be <b>"}, {"step": 40, "text": NASTY}]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    for step in (20, 40):
        folder = run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x" * 1_500_000)
    (run_dir / "checkpoints" / "step-00000060.tmp").mkdir()
    return run_dir


def test_every_row_is_a_point_and_the_page_stands_alone(tmp_path):
    path = write_report(make_run(tmp_path / f"run {NASTY.replace('/', '')}"))
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert path.name == "report.html"
    assert page.stack == []
    counts = {name: len(points) for name, points in page.curves.items()}
    assert counts == {
        "training": 39,
        "validation": 4,
        "learning rate": 40,
        "norm": 39,
        "tokens/s": 40,
    }
    lowered = text.lower()
    assert "http:" not in lowered
    assert "https:" not in lowered
    assert "url(" not in lowered
    assert not [a for _, a in page.tags if {"src", "href", "onclick"} & set(a)]
    assert not {"script", "link", "img", "iframe", "b>"} & {tag for tag, _ in page.tags}
    shown = "".join(page.text)
    assert shown.count(NASTY) == 4  # config, results, sample, skipped step
    for expected in ("To ", "be <b>", "step-00000020", "1.5 MB", "12.5", "1.91", "a non-finite"):
        assert expected in shown
    assert "step-00000060" not in shown


def test_curves_are_drawn_to_scale(tmp_path):
    page = Page(write_report(make_run(tmp_path / "run")).read_text(encoding="utf-8"))
    points = page.curves["tokens/s"]
    steps = [x for x, _ in points]
    widths = [b - a for a, b in itertools.pairwise(steps)]
    assert max(widths) - min(widths) <= 0.2 + 1e-9
    heights = [a - b for (_, a), (_, b) in itertools.pairwise(points)]
    assert min(heights) > 0
    assert max(heights) - min(heights) <= 0.2 + 1e-9
    for curve in page.curves.values():
        assert all(0 <= x <= 640 and 0 <= y <= 300 for x, y in curve)


def test_skipped_steps_are_marked(tmp_path):
    page = Page(write_report(make_run(tmp_path / "run")).read_text(encoding="utf-8"))
    marks = [attrs for tag, attrs in page.tags if attrs.get("class") == "skipline"]
    assert len(marks) == 2  # in the loss and in the gradient norm
    step_7 = page.curves["learning rate"][6][0]
    assert float(marks[0]["x1"]) == pytest.approx(step_7, abs=0.11)


def test_long_runs_are_thinned_and_keep_their_end(tmp_path):
    run_dir = tmp_path / "long"
    run_dir.mkdir()
    rows = "".join(json.dumps({"step": s, "loss": 5.0 - s / 10000}) + "\n" for s in range(1, 9999))
    (run_dir / "metrics.jsonl").write_text(rows)
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    points = page.curves["training"]
    assert 2000 < len(points) <= 4001
    assert points[-1][0] == max(x for x, _ in points) == pytest.approx(626, abs=0.1)


@pytest.mark.parametrize("row", [{"step": 1}, {"step": 1, "loss": 3.0}, {"step": 0, "loss": 0.0}])
def test_a_single_row_is_enough(tmp_path, row):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.stack == []
    assert len(page.curves) == ("loss" in row)


def test_errors_name_the_file(tmp_path):
    with pytest.raises(DataError, match="no metrics yet"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"st')
    with pytest.raises(DataError, match="no metrics yet"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(DataError, match=r"results\.json"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
