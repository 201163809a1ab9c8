"""MoEfication: splits trained MLPs into experts with a router; start reading at `convert.py`.

`cluster.py` and `coactivation.py` group the features, `router.py` trains the routers, `activity.py`
measures feature activity on real tokens.
"""

from bmforge.compress.moefy.config import MoEfyConfig
from bmforge.compress.moefy.convert import MoEfyReport, moefy
from bmforge.compress.moefy.method import ExpertsMethod

__all__ = ["ExpertsMethod", "MoEfyConfig", "MoEfyReport", "moefy"]
