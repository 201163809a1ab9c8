"""Quantization after training or during training (quantization-aware training).

Start reading at `apply.py` (after training) and `fake.py` (during training).
"""

from bmforge.compress.quantize.apply import quantize
from bmforge.compress.quantize.config import QuantizeConfig
from bmforge.compress.quantize.fake import FakeQuantize
from bmforge.compress.quantize.int8_product import int8_linear

__all__ = ["FakeQuantize", "QuantizeConfig", "int8_linear", "quantize"]
