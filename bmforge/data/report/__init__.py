"""A prepared corpus for people: documents shown, and one page that draws the funnel.

Start reading at `page.py`; `drawings.py` has its pictures, `samples.py` what is shown of texts.
"""

from __future__ import annotations

from bmforge.data.report.page import write_corpus_report
from bmforge.data.report.samples import read_dropped, read_kept

__all__ = ["read_dropped", "read_kept", "write_corpus_report"]
