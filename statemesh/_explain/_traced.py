"""The collectives and the mapped calls of a traced program, and the user's lines that they stand in."""

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from .._axes._mesh_and_lanes import MERGING
from .._axes._reduction import GRADIENT, LOSS, REDUCING
from .._base._errors import first_paths
from .._base._types import Array, AxisName, Leaf
from .._jax import _jaxprs as jaxprs
from .._jax._compat import ClosedJaxpr, Equation, Jaxpr, Operand
from .._jax._frames import Frame, frames_of, user_line
from ._explanation import Collective


# Primitives that name mapped axes and exchange nothing over them.
_SILENT = ("axis_index", "pvary", "pcast", "vary_unreduced_cast", "reduced_vary_cast", "core_call")
# What XLA calls these operations.
OPCODES = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "pbroadcast": "collective-broadcast",
}


# What JAX writes around the names of scopes when it transforms what stands in them, and the scopes that it
# opens itself.
_AROUND_SCOPE = re.compile(r"(?:transpose|jvp|vmap)\((.*)\)")
_OWN_SCOPES = ("", "checkpoint", "rematted_computation", MERGING, REDUCING)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """An operand of a collective on one device."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class TracedCollective:
    """An equation that exchanges over mesh axes.

    **Attributes:**

    - `record`: what an explanation says of it where nothing is compiled.
    - `primitive`: JAX's name of the primitive.
    - `parts`: one for each operand.
    - `frames`: where it was traced, the innermost first.
    """

    record: Collective
    primitive: str
    parts: tuple[Part, ...]
    frames: tuple[Frame, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """How often something runs in a call: `times`, `unknown_loop` and `branch` as in `Collective`."""

    times: int = 1
    unknown_loop: bool = False
    branch: bool = False

    def in_loop(self, turns: int | None) -> "Runs":
        """How often the body of a loop runs, if the loop itself runs this often.

        **Arguments:**

        - `turns`: of the loop; `None` if nobody knows how many it makes.
        """
        if turns is None:
            return dataclasses.replace(self, unknown_loop=True)
        return dataclasses.replace(self, times=self.times * turns)

    def in_branch(self) -> "Runs":
        return dataclasses.replace(self, branch=True)


def sent(opcode: str, size: int, operand: int) -> int:
    """The bytes that a device sends when `size` devices exchange operands in a ring.

    **Arguments:**

    - `operand`: the bytes of a device's operand.
    """
    match opcode:
        case "all-reduce":
            return math.ceil(2 * operand * (size - 1) / size)
        case "all-gather":
            return operand * (size - 1)
        case "collective-permute":
            return operand if size > 1 else 0
        case _:
            return math.ceil(operand * (size - 1) / size)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A mapped call in a program: its name, and for each result the paths of the states merged into it."""

    name: str
    merged: tuple[tuple[str, ...], ...]


# The names of what some results of a jaxpr become outside.
_Outward = Callable[[Iterable[int]], set[str]]


def traced_collectives(jaxpr: Any, calls: Sequence[Mapped]) -> list[TracedCollective]:
    """The collectives of a traced program, in its order.

    **Arguments:**

    - `calls`: the mapped calls that the program makes.
    """
    return list(_Walk(jaxprs.open_jaxpr(jaxpr), calls, lambda at: set(), {}).collectives())


@dataclasses.dataclass
class _Walk:
    """A walk along one jaxpr and those that it runs.

    **Attributes:**

    - `calls`: the mapped calls that the program makes.
    - `outward`: what results of the jaxpr become outside.
    - `sizes`: of the bound axes.
    - `runs`: how often the jaxpr runs.
    - `frames`, `stack`: where the equation around it was traced, and JAX's own names of what it stands in.
    """

    jaxpr: Jaxpr
    calls: Sequence[Mapped]
    outward: _Outward
    sizes: Mapping[AxisName, int]
    runs: Runs = Runs()
    frames: tuple[Frame, ...] = ()
    stack: str = ""

    def __post_init__(self) -> None:
        self.readers: dict[int, list[Equation]] = {}
        for eqn in self.jaxpr.eqns:
            for operand in eqn.invars:
                self.readers.setdefault(id(operand), []).append(eqn)
        self.results: dict[int, list[int]] = {}
        for k, result in enumerate(self.jaxpr.outvars):
            self.results.setdefault(id(result), []).append(k)

    def collectives(self) -> Iterator[TracedCollective]:
        for eqn in self.jaxpr.eqns:
            if axes := self._axes(eqn):
                yield self._collective(eqn, axes)
            for walk in self._inner(eqn):
                yield from walk.collectives()

    def _axes(self, eqn: Equation) -> tuple[AxisName, ...]:
        if eqn.primitive.name in _SILENT or jaxprs.jaxprs_of(eqn):
            return ()
        return tuple(name for name in jaxprs.axes_named(eqn) if name in self.sizes)

    def _inner(self, eqn: Equation) -> Iterator["_Walk"]:
        """The walks along the jaxprs that an equation runs."""
        sizes, runs = self.sizes, self.runs
        match eqn.primitive.name:
            case "shard_map":
                sizes = {**sizes, **dict(eqn.params["mesh"].shape)}
            case "scan":
                runs = runs.in_loop(eqn.params["length"])
            case "while":
                runs = runs.in_loop(None)
            case "cond":
                runs = runs.in_branch()
        frames, stack = self._frames(eqn), self._stack(eqn)
        for inner in jaxprs.jaxprs_of(eqn):
            outward = self._through(eqn, inner)
            yield _Walk(inner, self.calls, outward, sizes, runs, frames, stack)

    def _through(self, eqn: Equation, inner: Jaxpr) -> _Outward:
        """What the results of an inner jaxpr become outside of its equation."""
        if eqn.primitive.name == "shard_map" and (merged := self._merged_by(inner)):
            return lambda at: {path for k in at for path in merged[k]}
        if len(inner.outvars) != len(eqn.outvars):
            return lambda at: set()
        return lambda at: self._becomes(eqn.outvars[k] for k in at)

    def _frames(self, eqn: Equation) -> tuple[Frame, ...]:
        """Where an equation was traced, with the frames around it where JAX has left those out."""
        inner, around = frames_of(eqn), self.frames
        return inner if inner[len(inner) - len(around) :] == around else inner + around

    def _merged_by(self, inner: Jaxpr) -> tuple[tuple[str, ...], ...]:
        """For each result of a mapped call the states merged into it; nothing where that is not known."""
        name = getattr(getattr(inner, "debug_info", None), "func_name", None)
        alike = [call for call in self.calls if len(call.merged) == len(inner.outvars)]
        # Where decorators hide the name, the number of results has to do.
        merged = {call.merged for call in alike if call.name == name} or {
            call.merged for call in alike
        }
        return merged.pop() if len(merged) == 1 else ()

    def _becomes(self, results: Iterable[Any]) -> set[str]:
        """The names of the gradients and of the loss that values become, else of the written states."""
        names: set[str] = set()
        reached: set[int] = set()
        waiting = list(results)
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            reached.update(self.results.get(id(value), ()))
            for eqn in self.readers.get(id(value), ()):
                name = jaxprs.name_given(eqn)
                if name is not None and _is_reduced(name):
                    names.add(name)
                else:
                    waiting += eqn.outvars
        return names | self.outward(reached)

    def _collective(self, eqn: Equation, axes: tuple[AxisName, ...]) -> TracedCollective:
        name, runs, frames = eqn.primitive.name, self.runs, self._frames(eqn)
        operation = jaxprs.spelled(name)
        groups = eqn.params.get("axis_index_groups")
        size = len(groups[0]) if groups else math.prod(self.sizes[axis] for axis in axes)
        parts = tuple(_part(operand.aval) for operand in eqn.invars)
        opcode = OPCODES.get(operation, operation)
        record = Collective(
            operation=operation,
            axes=axes,
            **dataclasses.asdict(runs),
            bytes=runs.times * sum(sent(opcode, size, part.bytes) for part in parts),
            arrays=tuple(map(str, parts)),
            cause=self._cause(eqn),
            # A policy runs after the user's function has returned.
            line="" if MERGING in self._stack(eqn) else user_line(frames),
            compiled="",
            instructions=(),
        )
        return TracedCollective(record, name, parts, frames_of(eqn))

    def _cause(self, eqn: Equation) -> str:
        stack = self._stack(eqn)
        if REDUCING in stack:
            return self._gradients(eqn)
        if MERGING in stack:
            names = sorted(n for n in self._becomes(eqn.outvars) if not _is_reduced(n))
            return f"the policy of {first_paths(names, ' and ')}" if names else "a policy"
        if "rematted_computation" in stack:
            return "recomputing your code"
        if "transpose(" not in stack:
            return "your code"
        # JAX gives a `custom_vjp`'s whole backward function the line of the call. A scope tells lines apart.
        scope = _innermost_scope(stack)
        return f"the gradient of your code in {scope}" if scope else "the gradient of your code"

    def _stack(self, eqn: Equation) -> str:
        """JAX's own names of what it transposes and recomputes around an equation."""
        return f"{self.stack}/{getattr(eqn.source_info, 'name_stack', '')}"

    def _gradients(self, eqn: Equation) -> str:
        gradients: list[str] = []
        loss = False
        for result in eqn.outvars:
            becomes = self._becomes([result])
            names = sorted(n for n in becomes if n.startswith(GRADIENT))
            gradients += names
            loss = loss or not names or LOSS in becomes
        names = [name.removeprefix(GRADIENT) for name in dict.fromkeys(gradients)]
        if not names:
            return "the loss"
        return f"the gradient of {first_paths(names, ' and ')}" + (" and the loss" if loss else "")


def _is_reduced(name: str) -> bool:
    """Whether it is the name of a reduced gradient or loss."""
    return name == LOSS or name.startswith(GRADIENT)


def _innermost_scope(stack: str) -> str:
    """The name of the innermost `jax.named_scope`."""
    for scope in reversed(stack.split("/")):
        while around := _AROUND_SCOPE.fullmatch(scope):
            scope = around.group(1)
        if scope not in _OWN_SCOPES:
            return scope
    return ""


def _part(aval: Any) -> Part:
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    size = getattr(dtype, "itemsize", 0)
    return Part(str(dtype), shape, int(np.prod(shape, dtype=np.int64)) * size)


# The number of a call, and what tells each of its inputs from other arrays.
Site: TypeAlias = tuple[int, tuple[Hashable, ...]]

_MARK = "statemesh_mapped_call_"


def marked(number: int, outputs: Sequence[Array], inputs: Sequence[Leaf]) -> list[Array]:
    """The outputs of a call, with an equation in the program that tells its number and its inputs."""

    mark: Callable[[Any, Any], Any] = lambda outputs, inputs: outputs
    mark.__name__ = f"{_MARK}{number}"
    # It has a derivative of its own, so that no transformation drops the inputs, which it does not use.
    marking = jax.custom_jvp(mark)

    @marking.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return marking(*primals), tangents[0]

    return marking(list(outputs), list(inputs))


def sites_of(closed: ClosedJaxpr) -> list[Site]:
    """Every place of a program where a marked call stands."""
    return list(_sites(jaxprs.open_jaxpr(closed), {}, ()))


def _sites(
    jaxpr: Jaxpr, known: Mapping[int, Hashable], around: tuple[Hashable, ...]
) -> Iterator[Site]:
    """The places in a jaxpr and in the jaxprs that it runs.

    **Arguments:**

    - `known`: what tells an array of this jaxpr from others, where it is one of the jaxpr around it.
    - `around`: the numbers of the equations around it.
    """

    def identity(value: Operand) -> Hashable:
        return known.get(id(value), (around, id(value)))

    for k, eqn in enumerate(jaxpr.eqns):
        # What is computed again for a gradient is the same call.
        if eqn.params.get("differentiated"):
            continue
        inner = jaxprs.jaxprs_of(eqn)
        if (number := _number(eqn, inner)) is not None:
            yield number, tuple(map(identity, eqn.invars[len(eqn.outvars) :]))
            continue
        for body, operands in zip(inner, _entering(eqn, inner), strict=True):
            pairs = zip(body.invars, operands, strict=False)
            yield from _sites(body, {id(v): identity(x) for v, x in pairs}, (*around, k))


def _number(eqn: Equation, inner: Sequence[Jaxpr]) -> int | None:
    """The number of the call that an equation marks, if it is a mark."""
    if not jaxprs.with_own_derivative(eqn):
        return None
    names = [str(body.debug_info.func_name) for body in inner]
    numbers = [name.removeprefix(_MARK) for name in names if name.startswith(_MARK)]
    return int(numbers[0]) if numbers else None


def _entering(eqn: Equation, inner: Sequence[Jaxpr]) -> list[Sequence[Operand]]:
    """For each jaxpr that an equation runs the operands that are its first inputs, in each turn of a loop."""
    match jaxprs.control_flow(eqn):
        case "call", _:
            return [eqn.invars] * len(inner)
        case "cond", _:
            return [eqn.invars[1:]] * len(inner)
        case "scan", _, consts, _:
            return [eqn.invars[:consts]] * len(inner)
        case "while", cond, _, cond_consts, body_consts:
            consts = [eqn.invars[:cond_consts], eqn.invars[cond_consts : cond_consts + body_consts]]
            return [consts[0] if body is cond else consts[1] for body in inner]
        case _:
            return [()] * len(inner)
