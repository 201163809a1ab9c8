"""Text classification tasks of CLUE and FewCLUE, one JSON object per line.

Where CLUE and FewCLUE use different file names, both are accepted. CLUE's own `test.json` has no
labels, FewCLUE's `test_public.json` has. An entry with the label "-" (no annotator agreement) is
skipped.
Source: Xu et al. 2020 (CLUE), 2021 (FewCLUE).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bmforge.data.tasks.superglue import read_wsc
from bmforge.data.tasks.task import BenchmarkTask, TaskExample, TaskRecord, read_records

__all__ = ["CLUE"]

_FILES = {
    "train": ("train.json", "train_0.json"),
    "dev": ("dev.json", "dev_0.json"),
    "test": ("test.json", "test_public.json", "test1.0.json"),
    **{f"train_{n}": (f"train_{n}.json",) for n in range(5)},
    **{f"dev_{n}": (f"dev_{n}.json",) for n in range(5)},
    "train_few_all": ("train_few_all.json",),
    "dev_few_all": ("dev_few_all.json",),
}
# Dict from a class code of tnews to the class name; 105 and 111 are unused.
_NEWS = {
    **{"100": "story", "101": "culture", "102": "entertainment", "103": "sports"},
    **{"104": "finance", "106": "house", "107": "car", "108": "edu", "109": "tech"},
    **{"110": "military", "112": "travel", "113": "world", "114": "stock"},
    **{"115": "agriculture", "116": "game"},
}


def _classes(
    name: str,
    fields: tuple[str, ...],
    label_names: tuple[str, ...],
    words: Mapping[str, int] | None = None,
) -> BenchmarkTask:
    """Return a classification task whose lines contain texts and a label.

    Args:
        name: name of the task.
        fields: names of the text fields.
        label_names: names of the labels.
        words: dict from the labels in the files to their indices; None if the files contain label
            names.
    """
    numbers = words or {word: n for n, word in enumerate(label_names)}

    def read(path: Path) -> Iterator[TaskExample]:
        for number, row in enumerate(read_records(path)):
            if row.values.get("label") != "-":
                texts = {field: _text(row, field) for field in fields}
                idx = row.values.get("id", row.values.get("idx", number))
                yield TaskExample(texts, row.label(numbers), idx)

    return BenchmarkTask(name, label_names, _FILES, read)


def _text(row: TaskRecord, field: str) -> str:
    """Return the text of a field; a list of keywords is joined."""
    return "；".join(row.texts(field)) if field == "keyword" else row.text(field)


def _read_wsc(path: Path) -> Iterator[TaskExample]:
    """Yield the examples of a WSC file, which has SuperGLUE's format."""
    for row in read_records(path):
        yield from read_wsc(row)


# Classes of csldcp, as its files write them.
_DISCIPLINES = """
材料科学与工程 作物学 口腔医学 药学 教育学 水利工程 理论经济学 食品科学与工程 畜牧学/兽医学 体育学
核科学与技术 力学 园艺学 水产 法学 地质学/地质资源与地质工程 石油与天然气工程 农林经济管理
信息与通信工程 图书馆、情报与档案管理 政治学 电气工程 海洋科学 民族学 航空宇航科学与技术
化学/化学工程与技术 哲学 公共卫生与预防医学 艺术学 农业工程 船舶与海洋工程 计算机科学与技术 冶金工程
交通运输工程 动力工程及工程热物理 纺织科学与工程 建筑学 环境科学与工程 公共管理 数学 物理学
林学/林业工程 心理学 历史学 工商管理 应用经济学 中医学/中药学 天文学 机械工程 土木工程 光学工程
地理学 农业资源利用 生物学/生物科学与工程 兵器科学与技术 矿业工程 大气科学 基础医学/临床医学
电子科学与技术 测绘科学与技术 控制科学与工程 军事学 中国语言文学 新闻传播学 社会学 地球物理学
植物保护
"""

_TWO = ("sentence1", "sentence2")
_SAME = ("different", "same")
_INFERENCE = ("contradiction", "entailment", "neutral")
_DIGITS = {"0": 0, "1": 1}
_TRUTH = {"false": 0, "true": 1, "0": 0, "1": 1}

CLUE = (
    _classes("eprstmt", ("sentence",), ("Negative", "Positive")),
    _classes("csl", ("abst", "keyword"), ("false", "true"), _TRUTH),
    _classes("ocnli", _TWO, _INFERENCE),
    _classes("cmnli", _TWO, _INFERENCE),
    _classes("afqmc", _TWO, _SAME, _DIGITS),
    _classes("bustm", _TWO, _SAME, _DIGITS),
    _classes(
        "tnews", ("sentence",), tuple(_NEWS.values()), {code: n for n, code in enumerate(_NEWS)}
    ),
    # The files contain its 119 classes as numbers; the names are in its labels.json.
    _classes("iflytek", ("sentence",), tuple(str(n) for n in range(119))),
    _classes("csldcp", ("content",), tuple(_DISCIPLINES.split())),
    BenchmarkTask("cluewsc2020", ("false", "true"), _FILES, _read_wsc),
    BenchmarkTask("cluewsc", ("false", "true"), _FILES, _read_wsc),
)
