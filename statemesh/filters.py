"""Which states: the named filters, and what turns any filter into a function."""

from ._state._filters import All as All
from ._state._filters import Any as Any
from ._state._filters import Everything as Everything
from ._state._filters import Not as Not
from ._state._filters import Nothing as Nothing
from ._state._filters import OfType as OfType
from ._state._filters import PathContains as PathContains
from ._state._filters import Where as Where
from ._state._filters import WithTag as WithTag
from ._state._filters import to_predicate as to_predicate
