"""The page of licenses is what the table says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_licenses_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("license_pages", ROOT / "dev/license_pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    text = pages.PAGE.read_text("utf-8")
    assert pages.page() == text, "run python dev/license_pages.py"
    assert (
        "| attribution: section 3(a); changes: section 3(a)(1)(B); share-alike: section 3(b) |"
        in text
    )
