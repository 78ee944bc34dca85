"""The explanation of a call."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .._base._types import AxisName
from ._drawing import Drawing, drawing_of
from ._html import html_of
from ._records import Collective, LeafRow, Memory, ResultRow
from ._sections import sections, summary
from ._text import text_of


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What a call lays where, moves, reduces and holds.

    `print` shows it as text of at most 100 columns, a notebook as tables.

    **Attributes:**

    - `name`: of the function.
    - `sizes`: the sizes of the mesh's axes.
    - `leaves`: a record for each array and number of the arguments: `path`, `kind`, `dtype`, `shape`,
        `shard_shape`, `enters`, `split`, `placed_by`, `leaves`, `bytes`, `moved`, `call` and `whole`.
    - `results`: a record for each array that the call makes, other than written leaves of the arguments:
        `path`, `kind`, `dtype`, `shape`, `shard_shape`, `leaves`, `bytes` and `call`.
    - `collectives`: a record for each exchange between devices: `operation`, `axes`, `times`,
        `unknown_loop`, `branch`, `bytes`, `arrays`, `cause`, `line`, `compiled` and `instructions`.
    - `memory`: what a device needs, by XLA's account: `arguments`, `results`, `temporaries`, `donated`,
        `peak`, `allocated`, `by_argument`, `by_result` and `result_table`. `None` where nothing was compiled.
    - `advice`: what surely can be mended, one text each.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import AbstractMesh, PartitionSpec as P
        >>> def mean(x):
        ...     return jax.lax.pmean(x.mean(), "data")
        >>> mesh = AbstractMesh((8,), ("data",))
        >>> found = sm.shard_map(mean, mesh, in_specs=P("data"), out_specs=P()).explain(jnp.ones(16))
        >>> [(row.path, row.shape, row.shard_shape) for row in found.leaves]
        [('x', (16,), (2,))]
        >>> found.collectives[0].axes, found.bytes
        (('data',), 7)

        ```
    """

    name: str
    sizes: Mapping[AxisName, int]
    leaves: Sequence[LeafRow]
    results: Sequence[ResultRow]
    collectives: Sequence[Collective]
    memory: Memory | None
    advice: Sequence[str]

    @property
    def bytes(self) -> int:
        """The bytes that a device sends in a call, as far as loops are known."""
        return sum(one.bytes for one in self.collectives)

    def to_dict(self) -> dict[str, Any]:
        """All of it as dictionaries, lists, texts and numbers.

        **Returns:** a dictionary that `json.dumps` takes.
        """
        return {
            "name": self.name,
            "sizes": {str(name): size for name, size in self.sizes.items()},
            "bytes": self.bytes,
            "leaves": [
                {**dataclasses.asdict(row), "split": [[*map(str, names)] for names in row.split]}
                for row in self.leaves
            ],
            "results": [dataclasses.asdict(row) for row in self.results],
            "collectives": [
                {**dataclasses.asdict(row), "axes": [str(axis) for axis in row.axes]}
                for row in self.collectives
            ],
            "memory": None if self.memory is None else dataclasses.asdict(self.memory),
            "advice": list(self.advice),
        }

    def draw(self) -> Drawing:
        """Show which device holds which part of which leaf of the arguments.

        **Returns:** a picture, which a notebook shows. It has its text in `svg`, and `save(path)`.
        """
        return drawing_of(self.leaves, self.sizes)

    def __str__(self) -> str:
        return text_of(summary(self), sections(self), self.advice)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_of(summary(self), sections(self), self.advice)
