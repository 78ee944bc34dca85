"""The classes of statemesh's errors."""


class StatemeshError(ValueError):
    """Any mistake that statemesh refuses."""


class SpecError(StatemeshError):
    """A spec that does not fit its array, its tree or the mesh."""


class BatchAxisError(StatemeshError):
    """A lane axis that does not fit a state or an array."""


class DivergedStateError(StatemeshError):
    """A state that keeps one copy, but to which shards wrote different values."""


class StructureError(StatemeshError):
    """Trees, values or filters that do not fit each other."""
