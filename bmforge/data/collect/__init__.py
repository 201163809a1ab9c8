"""Web crawler that writes web archives, and respects robots.txt, delays and budgets.

Start reading at `run.py`; `robots.py` parses robots.txt, `fetch.py` sends one request,
`sitemaps.py` finds URLs in sitemaps and feeds, `archive.py` stores the pages.
"""

from __future__ import annotations

from bmforge.data.collect.run import CollectReport, collect
from bmforge.settings import CollectConfig

__all__ = ["CollectConfig", "CollectReport", "collect"]
