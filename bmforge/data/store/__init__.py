"""Token stores, alone, many as one or parts of one, and block datasets of older tools.

Start reading at `token_store.py`; `sharded.py` opens many as one, `where.py` chooses documents by
what `columns.py` knows of them.
"""
