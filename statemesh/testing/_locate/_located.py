"""What `locate` returns."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Place:
    """A line at which shards stop having what one device has.

    **Attributes:**

    - `file`, `line`, `source`: the line, and its text. Where no line of the user's makes a result, the source
        is the path of the result, and the others are empty.
    - `operation`: what it computes there.
    - `got`: what some shards have where they are most off.
    - `want`: what they should have.
    - `shards`: which shards these are.
    - `step`: inside a loop the number of the first round in which it happens.
    - `note`: what else is known about the value.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> from statemesh.testing import locate
        >>> def centred(x):
        ...     mean = x.mean(0)
        ...     return x - mean
        >>> mesh = AbstractMesh((4,), ("data",))
        >>> centred = sm.shard_map(centred, mesh, in_specs=P("data"), out_specs=P("data"))
        >>> located = locate(centred, jnp.arange(8.0))
        >>> place = located.places[0]
        >>> place.line, place.source
        (2, 'mean = x.mean(0)')

        ```
    """

    file: str
    line: int
    source: str
    operation: str
    got: str
    want: str
    shards: str
    step: int | None = None
    note: str = ""

    def __str__(self) -> str:
        at = f", first in round {self.step} of the loop" if self.step is not None else ""
        what = f"{self.operation}{at}: {self.got}, and should be {self.want}"
        return f"{self.where}\n    {what}"

    @property
    def where(self) -> str:
        """The line as one line of text."""
        return f"{self.file}:{self.line}: {self.source}" if self.file else self.source


@dataclasses.dataclass(frozen=True)
class Located:
    """Where a call on a mesh stops computing what it computes on one device.

    **Attributes:**

    - `places`: at most three lines, the likeliest first.
    - `matched`: whether the two programs have the same steps. Where they have not, some values are not
        compared.
    - `cause`: what puts all results right, if running the program so has confirmed it.
    - `gradient`: whether the results agree, and only the derivatives differ.
    - `rounding`: whether all agrees in double precision, and differs only in the dtypes of the program.

    !!! example

        ```python
        >>> import jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> from statemesh.testing import locate
        >>> def centred(x):
        ...     mean = x.mean(0)
        ...     return x - mean
        >>> mesh = AbstractMesh((4,), ("data",))
        >>> centred = sm.shard_map(centred, mesh, in_specs=P("data"), out_specs=P("data"))
        >>> located = locate(centred, jnp.arange(8.0))
        >>> located.matched, located.gradient, len(located.places)
        (True, False, 2)

        ```
    """

    places: tuple[Place, ...]
    matched: bool
    cause: str | None = None
    gradient: bool = False
    rounding: bool = False

    def __str__(self) -> str:
        first, *others = self.places
        what = "The derivatives stop" if self.gradient else "Values stop"
        lines = [f"{what} being those of one device here:", f"  {first}"]
        if first.note:
            lines.append(f"    In other words: {first.note}.")
        if self.cause:
            lines.append(f"    Tried: {self.cause}.")
        if others:
            lines.append("or, less likely, here:")
            lines += [f"  {place.where}" for place in others]
        if self.rounding:
            lines.append("In double precision all agrees: numbers overflow or are rounded.")
        if not self.matched:
            lines.append("The programs have different steps: some values could not be compared.")
        return "\n".join(lines)
