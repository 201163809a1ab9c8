"""Turning MLPs into experts of which a router picks few; start reading at `convert.py`.

`cluster.py` and `coactivation.py` say which features belong together, `router.py` trains what picks
them, `activity.py` looks at what an MLP does with real tokens.
"""

from bmforge.compress.moefy.config import MoEfyConfig
from bmforge.compress.moefy.convert import MoEfyReport, moefy
from bmforge.compress.moefy.method import ExpertsMethod

__all__ = ["ExpertsMethod", "MoEfyConfig", "MoEfyReport", "moefy"]
