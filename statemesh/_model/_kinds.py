"""The kinds of state that say how long a value lives and what it is for."""

from .._base._types import Value
from ._state import State


class ShortTermState(State[Value]):
    """State that is meaningful for a short while: one sequence, one episode, one batch."""

    __slots__ = ()


class HiddenState(ShortTermState[Value]):
    """The hidden value of a recurrent layer."""

    __slots__ = ()


class NonBatchState(ShortTermState[Value]):
    """State that is never given a lane axis: it stays replicated where others are distributed."""

    __slots__ = ()


class LongTermState(State[Value]):
    """State that lives as long as the model: parameters and statistics."""

    __slots__ = ()


class ParamState(LongTermState[Value]):
    """Parameters: what training changes along its gradients."""

    __slots__ = ()


class BatchState(LongTermState[Value]):
    """Statistics gathered from batches, such as a running mean."""

    __slots__ = ()
