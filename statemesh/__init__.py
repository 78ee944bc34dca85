"""States as immutable leaves of a module tree, and mapped calls that thread them explicitly.

What models are made of is loaded here. What runs them is loaded when one of its names is used first: it takes
longer, and a program that only builds models, or prints its help, does not need it.
"""

import typing

from . import filters as filters
from ._base._errors import BatchAxisError as BatchAxisError
from ._base._errors import DivergedStateError as DivergedStateError
from ._base._errors import RetracedWarning as RetracedWarning
from ._base._errors import SpecError as SpecError
from ._base._errors import StatemeshError as StatemeshError
from ._base._errors import StructureError as StructureError
from ._base._specs import PerShard as PerShard
from ._base._trees import is_state as is_state
from ._state._module import Module as Module
from ._state._module import field as field
from ._state._partition import combine as combine
from ._state._partition import partition as partition
from ._state._partition import states as states
from ._state._random import RandomState as RandomState
from ._state._state import BatchState as BatchState
from ._state._state import HiddenState as HiddenState
from ._state._state import LongTermState as LongTermState
from ._state._state import NonBatchState as NonBatchState
from ._state._state import ParamState as ParamState
from ._state._state import ShortTermState as ShortTermState
from ._state._state import State as State


if typing.TYPE_CHECKING:
    from ._engine import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        # Python and its tools ask modules for names such as `__path__`, which are never in the engine.
        if not name.startswith("_"):
            from . import _engine

            if hasattr(_engine, name):
                return globals().setdefault(name, getattr(_engine, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        from . import _engine

        return sorted({*globals(), *(name for name in vars(_engine) if not name.startswith("_"))})


__version__ = "0.3.0"
