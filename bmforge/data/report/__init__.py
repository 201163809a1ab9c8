"""Reports on a prepared corpus: an HTML page with the filter funnel, and document samples.

Start reading at `page.py`; `drawings.py` has its charts, `samples.py` reads the samples.
"""

from __future__ import annotations

from bmforge.data.report.page import write_corpus_report
from bmforge.data.report.samples import read_dropped, read_kept

__all__ = ["read_dropped", "read_kept", "write_corpus_report"]
