"""Token stores (single, sharded, or filtered views), and block datasets of OpenBMB's tools.

Start reading at `token_store.py`; `sharded.py` opens many stores as one, `conditions.py` selects
documents by the metadata of `columns.py`.
"""
