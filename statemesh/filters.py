"""Which states: the named filters, and what turns any filter into a function."""

from ._model._filters import All as All
from ._model._filters import Any as Any
from ._model._filters import Everything as Everything
from ._model._filters import Not as Not
from ._model._filters import Nothing as Nothing
from ._model._filters import OfType as OfType
from ._model._filters import PathContains as PathContains
from ._model._filters import Where as Where
from ._model._filters import WithTag as WithTag
from ._model._filters import to_predicate as to_predicate
