"""OpenDelta's API, implemented with bmforge, for programs that only change their imports.

    import bmforge.compat.opendelta as opendelta

Start at `basemodel` (the base class), then `delta_configs` (config fields) and `delta_models`.
docs/migrating/opendelta.md lists every difference and its reason.
"""
