"""ModelCenter's model classes, each of which wraps bmforge's model of the same family.

Start at `base.py` (loading, building, heads), then `config` (field names). The classes are in
`encoders`, `decoders` and `openbmb`, their results in `outputs`.
"""
