"""The first operation of a function of `jax.jit` whose values are wrong on devices."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from .._program._doubled import Wide, narrowed
from .._program._jaxprs import Equation, as_function, interpreted, with_all_values
from .._program._lines import line_of
from .._program._numbers import numbers
from .._program._trace import Trace, is_array_or_type
from .._types import AnyLeaf, PyTree, tree_util
from . import _report as report
from ._jitted import JittedOnMesh
from ._judge import Judge, ResultLeaf, unequal_copies
from ._programs import Chain, Selection


def first_wrong(on_mesh: JittedOnMesh, args: Wide, selected: Selection) -> tuple[list[str], str]:
    """Lines on the first operation whose values on devices are not those of one device, and its line.

    The program is compiled once more, with the values of all its operations as further results. The compiler
    then makes another program of it: if all its values are right, there are no lines.

    **Arguments:**

    - `selected`: what is differentiated by what, if a gradient is off.
    """
    every = _AllValues(on_mesh.programs(selected).of(args.types).trace)
    programs = on_mesh.programs_of(every)
    chain = Chain(programs, args, lambda args, _: args, 1)
    placed, by_keyword = on_mesh.placed(narrowed(args))
    arrays = programs.jitted(*placed, **by_keyword)
    paths = [f"`{eqn.primitive.name}`" for eqn in every.equations]
    parts = range(len(paths)), paths, arrays, map(numbers, arrays)
    chains, leaves = (chain, chain), list(map(ResultLeaf, *parts))
    off = {x.leaf.number: report.results([x]) for x in Judge().compare("own", 0, leaves, chains)}
    for leaf, eqn in zip(leaves, every.equations, strict=True):
        copies = unequal_copies(leaf, 0, chains)
        if leaf.number in off or copies:
            lines = [copies] if copies else off[leaf.number]
            line = line_of(eqn)
            source = f"    {line}: {line.source}" if line else "    in a library"
            first = "  On the devices values are wrong first here:"
            return [first, source, *(f"    {text}" for text in lines)], str(line or "")
    return [], ""


class _AllValues:
    """A traced call that gives the values of all its operations, also of those in functions of `jax.jit`.

    **Attributes:**

    - `equations`: the equation of each value, in order.
    """

    def __init__(self, traced: Trace) -> None:
        self.__name__ = "all_values"
        self._closed = traced.closed
        self.equations: list[Equation] = []

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> list[Any]:
        arrays = [x for x in tree_util.tree_leaves((args, kwargs)) if is_array_or_type(x)]
        values: list[Any] = []
        self.equations.clear()

        def run(eqn: Equation, operands: list[Any]) -> list[Any]:
            if eqn.primitive.name in ("jit", "pjit"):
                program, equations = with_all_values(eqn.params["jaxpr"])
                operands = _placed(operands, eqn.params["in_shardings"])
                every = as_function(program)(*program.consts, *operands)
                count = len(equations)
                values.extend(every[:count])
                self.equations.extend(equations)
                # So that the partitioner splits what leads to the results as it did.
                results = _placed(every[count:], eqn.params["out_shardings"])
            else:
                given = eqn.primitive.bind(*operands, **eqn.params)
                results = list(given) if eqn.primitive.multiple_results else [given]
            values.extend(results)
            self.equations.extend([eqn] * len(results))
            return results

        interpreted(self._closed.jaxpr, [*self._closed.consts, *arrays], lambda atom: atom.val, run)
        return values


def _placed(arrays: list[AnyLeaf], shardings: Any) -> list[AnyLeaf]:
    pairs = zip(arrays, shardings, strict=True)
    return [jax.device_put(x, s) if isinstance(s, NamedSharding) else x for x, s in pairs]
