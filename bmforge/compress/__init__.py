"""Model compression: quantization, pruning, distillation and MoEfication, in any combination.

Start reading at `compress.py` (the combined entry point) and `method.py` (the interface of all
methods); `phases.py` splits a recipe into phases, `report.py` reports the results. Subpackages:
`distill/` (distillation), `prune/` (sparsity and structured pruning), `quantize/` (quantization),
`moefy/` (splitting MLPs into experts).
"""

from bmforge.compress.calibrate import calibrate_blocks
from bmforge.compress.compress import Compression, compress
from bmforge.compress.config import CompressConfig
from bmforge.compress.distill import DistillConfig, Distiller, DistillLoss
from bmforge.compress.method import Method, MethodBase
from bmforge.compress.moefy import MoEfyConfig, moefy
from bmforge.compress.prune import PruneConfig, StructureConfig, prune, shrink_
from bmforge.compress.quantize import QuantizeConfig, quantize
from bmforge.compress.report import CompressReport, ModelSizes, PhaseResults, measure_sizes
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
    "PhaseResults",
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
