"""BMInf's API over bmforge, for programs with changed import lines.

Start at `wrap` (`wrapper` limits the memory of any module), then `blocks` and `linear`, which it
uses, `models` (CPM-1, CPM-2 and EVA of BMInf 1.0) and `torch` (their differentiable forms).
docs/migrating/bminf.md lists every difference and its reason.
"""
