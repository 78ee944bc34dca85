"""Layers that round activations for low-precision inference, on any mesh."""

from ._quantize import Quantize as Quantize
from ._range import Range as Range
