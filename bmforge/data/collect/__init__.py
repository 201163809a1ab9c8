"""Pages from the web into web archives, politely: only where robots.txt and budgets let us.

Start reading at `run.py`; `robots.py` reads robots.txt, `fetch.py` asks for one address,
`sitemaps.py` finds addresses in sitemaps and feeds, `archive.py` writes what came.
"""

from __future__ import annotations

from bmforge.data.collect.run import CollectReport, collect
from bmforge.settings import CollectConfig

__all__ = ["CollectConfig", "CollectReport", "collect"]
