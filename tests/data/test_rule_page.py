"""The page of rules is what the tables say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_rules_is_up_to_date():
    spec = importlib.util.spec_from_file_location("rule_tables", ROOT / "dev" / "rule_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = tables.PAGE.read_text("utf-8")
    assert tables.page() == text, "run python dev/rule_tables.py"
    assert "| `short_doc` | words that are not only punctuation | at least 50 |" in text
    assert "poem: at least 16" in text
