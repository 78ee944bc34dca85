"""The classes of statemesh's errors."""


class StatemeshError(ValueError):
    """Anything that statemesh finds wrong."""


class SpecError(StatemeshError):
    """A spec that does not fit its array, its tree or the mesh."""


class BatchAxisError(StatemeshError):
    """A lane axis that does not fit a state or an array."""


class DivergedStateError(StatemeshError):
    """A state that shards wrote differently, although one copy of it is kept."""


class StructureError(StatemeshError):
    """Trees, values or filters that do not fit each other."""
