"""All delicate programs, each right on every mesh.

A check that accuses one of them is mistaken. It may say that it cannot judge: where the function jumps, or
where a result is rounding and nothing else.
"""

from . import delicate_order, delicate_rounding, delicate_training
from .case import DELICATE as DELICATE
from .case import Delicate as Delicate


FILES = (delicate_order, delicate_rounding, delicate_training)
