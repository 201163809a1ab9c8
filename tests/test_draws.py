"""Samples of test matrices in `make test`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from draws import matrix_name, sample_sizes, variants_left_out
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class FakeTest:
    """A collected test, of which only the id is read."""

    nodeid: str


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), unique=True),
    st.dictionaries(st.sampled_from(["tests/t.py::a", "tests/t.py::b"]), st.integers(0, 5)),
    st.randoms(),
)
def test_samples_have_their_size_whatever_the_order(names, sizes, random):
    tests = [FakeTest(f"tests/t.py::{name}[{number}]") for name, number in names]
    left_out = variants_left_out(tests, sizes)
    for name in "abc":
        variants = [test for test in tests if f"::{name}[" in test.nodeid]
        size = sizes.get(f"tests/t.py::{name}", len(variants))
        assert len(set(variants) - set(left_out)) == min(size, len(variants))
    random.shuffle(tests)
    assert set(variants_left_out(tests, sizes)) == set(left_out)


def test_families_of_a_suite_share_a_sample():
    assert matrix_name("tests/parity/test_t5.py::TestT5::test_a[x::y]") == "tests/parity::test_a"
    assert matrix_name("tests/data/test_b.py::test_a[x]") == "tests/data/test_b.py::test_a"


def test_sampled_functions_exist():
    sources = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("bmforge/testing/**/*.py")]
    defined = {
        name for source in sources for name in re.findall(r"def (test_\w+)\(", source.read_text())
    }
    names = [name.split("::") for name in sample_sizes()]
    wrong = [name for path, name in names if not (ROOT / path).exists() or name not in defined]
    assert not wrong, f"tests/draws.toml names unknown tests: {wrong}"
