"""ModelCenter's configs, each of which wraps the bmforge config of the family.

Start at `base.py`; `families.py` has the families.
"""
