"""Making a model small: quantise, prune, distil and turn into experts, in any combination.

Start reading at `compress.py` (all of it at once) and `method.py` (what all ways have in common);
`phases.py` divides a recipe, `report.py` says what became of a model. `distill/` lets a model learn
from another one, `prune/` makes zeros and smaller shapes, `quantize/` integers, `moefy/` experts.
"""

from bmforge.compress.calibrate import calibrate_blocks
from bmforge.compress.compress import Compression, compress
from bmforge.compress.config import CompressConfig
from bmforge.compress.distill import DistillConfig, Distiller, DistillLoss
from bmforge.compress.method import Method, MethodBase
from bmforge.compress.moefy import MoEfyConfig, moefy
from bmforge.compress.prune import PruneConfig, StructureConfig, prune, shrink_
from bmforge.compress.quantize import QuantizeConfig, quantize
from bmforge.compress.report import CompressReport, ModelSizes, PhaseFacts, measure_sizes
from bmforge.compress.sensitivity import Sensitivity, measure_sensitivity

__all__ = [
    "CompressConfig",
    "CompressReport",
    "Compression",
    "DistillConfig",
    "DistillLoss",
    "Distiller",
    "Method",
    "MethodBase",
    "MoEfyConfig",
    "ModelSizes",
    "PhaseFacts",
    "PruneConfig",
    "QuantizeConfig",
    "Sensitivity",
    "StructureConfig",
    "calibrate_blocks",
    "compress",
    "measure_sensitivity",
    "measure_sizes",
    "moefy",
    "prune",
    "quantize",
    "shrink_",
]
