"""Step 3: the function of one instance is run, or traced and run, and what that shows of its results.

It shows over which axes a value may differ between instances, and which entering state a returned one
continues.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
from jax import Array

from .._axes._differing import Recorded, all_axes, check_unsummed, looking_for_left, settled
from .._axes._joined import AnyArray
from .._axes._mesh_and_lanes import (
    lanes_in_checked_map,
    meshes_and_lanes,
    one_copy,
    same_in_lanes,
    varying_over,
)
from .._base._errors import StatemeshError, StructureError, error_listing
from .._base._specs import Placement
from .._base._trees import is_state, path_str
from .._base._types import NO_AXES, Axes, AxisName, Fun, Key, KeyPath, Leaf, PyTree, PyTreeDef
from .._jax import _compat as compat
from .._jax import _jaxprs as jaxprs
from .._jax import _typed_right as typed_right
from .._jax._compat import ClosedJaxpr, Equation, tree_util
from .._jax._dataflow import DataflowOfSets
from .._jax._frames import frames_of, user_line
from .._jax._jaxprs import REBUILT, Links, link_made
from .._state._state import NEW, State, Unknown, origin, origins, with_origins


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A tree whose arrays are taken out, to be made again from these or other arrays.

    `taken_apart` leaves none of the arrays in it: JAX reports a tracer that is kept as a leak.

    **Attributes:**

    - `leaves`: the tree's leaves, with `None` for each array that is taken out.
    - `marks`: for each state in the tree a mark of the state that it continues.
    - `positions`: where the arrays stand among the leaves.
    """

    leaves: list[Leaf]
    treedef: PyTreeDef
    marks: list[object]
    positions: list[int]

    def filled(self, arrays: Sequence[Leaf]) -> PyTree:
        """The tree with these arrays in it."""
        leaves = list(self.leaves)
        for i, x in zip(self.positions, arrays, strict=True):
            leaves[i] = x
        return with_origins(self.treedef.unflatten(leaves), self.marks)


def taken_apart(
    tree: PyTree, kept: Mapping[int, Leaf] = MappingProxyType({})
) -> tuple[Skeleton, list[Array]]:
    """A tree as its skeleton and its arrays.

    **Arguments:**

    - `kept`: by the identity of an array the one that stays in the skeleton for it. JAX returns other arrays
        for results that are arguments: so arguments are not to be results.
    """
    leaves, treedef = tree_util.tree_flatten(tree)
    leaves = [kept.get(id(x), x) for x in leaves]
    stays = {id(x) for x in kept.values()}
    positions = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and id(x) not in stays]
    arrays = [leaves[i] for i in positions]
    for i in positions:
        leaves[i] = None
    return Skeleton(leaves, treedef, origins(tree), positions), arrays


@dataclasses.dataclass(frozen=True)
class Traced:
    """The program of a function of trees.

    **Attributes:**

    - `closed`: its jaxpr, from the arrays in the operands to those in the result.
    - `arguments`: the arrays in the operands.
    - `skeleton`: the result without its arrays.
    """

    closed: ClosedJaxpr
    arguments: list[Array]
    skeleton: Skeleton


def trace(
    fun: Callable[..., PyTree],
    operands: Sequence[PyTree],
    mark: compat.FollowedAxes | compat.TypedRight | None,
    links: Links | None,
) -> Traced:
    """Trace a function.

    **Arguments:**

    - `mark`: names the axes along which the program will be walked, or what is typed right in it; `None` for
        none.
    - `links`: for the states that the function is given, where it matters which of them its results continue.
    """
    inside, arguments = taken_apart(operands)
    skeletons: list[Skeleton] = []
    # For each state of the result its arrays, and whether JAX has made it, not the user; `None` for one
    # without links.
    returned: list[tuple[range, bool | None]] = []

    def traced(*arrays: Array) -> list[Array]:
        with nullcontext() if links is None else links.linking():
            result = fun(*inside.filled(arrays))
        skeleton, outputs = taken_apart(result)
        skeletons[:] = [skeleton]
        followed = frozenset() if links is None else links.followed
        returned[:] = [
            (at, state._meta.token is not None if (type(state), state._meta) in followed else None)
            for state, at in _states_and_arrays(result)
        ]
        return outputs

    bound: list[compat.Mark] = [] if mark is None else [mark]
    if links is not None:
        bound.append(compat.FollowedStates())
    closed = compat.trace_marked(traced, arguments, bound)
    (skeleton,) = skeletons
    if links is None or None not in skeleton.marks:
        return Traced(closed, arguments, skeleton)
    # The mark of a State that JAX made is read off the program's links.
    marks_at = {i: origin(state) for state, at in _states_and_arrays(operands) for i in at}
    program = jaxprs.open_jaxpr(closed)
    sources = _Continued().through(program, [frozenset([i]) for i in range(len(program.invars))])
    marks: list[object] = []
    for continued, (at, by_jax) in zip(skeleton.marks, returned, strict=True):
        if continued is None and by_jax is not None:
            numbers = sorted(frozenset[int]().union(*(sources[k] for k in at)))
            several = dict.fromkeys(marks_at[i] for i in numbers if marks_at.get(i) is not None)
            if len(several) == 1:
                (continued,) = several
            elif several or by_jax:
                continued = Unknown(tuple(several))
        marks.append(continued)
    return Traced(closed, arguments, dataclasses.replace(skeleton, marks=marks))


def _states_and_arrays(tree: PyTree) -> list[tuple[State, range]]:
    """Each state of a tree, with the numbers of its arrays among all arrays of the tree."""
    states = []
    start = 0
    for node in tree_util.tree_leaves(tree, is_leaf=is_state):
        arrays = [x for x in tree_util.tree_leaves(node) if isinstance(x, jax.Array)]
        if is_state(node):
            states.append((node, range(start, start + len(arrays))))
        start += len(arrays)
    return states


# Numbers of arguments: none where nothing is known, several where it may be any of them.
Sources: TypeAlias = frozenset[int]


class _Continued(DataflowOfSets[int]):
    """The arguments that a value may continue."""

    def own_rule(self, eqn: Equation, facts: Sequence[Sources]) -> Sequence[Sources] | None:
        if (link := link_made(eqn)) is None:
            return None
        new, old = facts
        # A `cond` that returns one state or another is rebuilt as the one that its first branch returns.
        return [old | new if link == REBUILT else old]

    def plain(self, eqn: Equation, facts: Sequence[Sources]) -> Sequence[Sources]:
        inner = jaxprs.jaxprs_of(eqn)
        if [(len(j.invars), len(j.outvars)) for j in inner] == [(len(facts), len(eqn.outvars))]:
            return self.through(inner[0], facts)
        if len(eqn.outvars) == 1 and jaxprs.forwards(eqn):
            return [self.join(facts)]
        return [self.nothing] * len(eqn.outvars)

    def stacked(self, part: Sources) -> Sources:
        return self.nothing


# Over which axes may a value differ? JAX's types say so inside a checked `shard_map`, and the batching of a
# `vmap` says so for its lanes (`FromTypes`). For the lanes of `pmap2` the program is traced and walked
# (`FromDataflow`). Where the author turned the check off, it is walked too, but nothing is known and so
# nothing is refused. Both classes have the same methods. Whatever runs inside an instance is run by `run`.

# The axes over which arrays may differ, by the identity of the arrays. The arrays are kept with them: the
# `id` of one that is gone may be given to another.
_AxesOfArrays: TypeAlias = dict[int, tuple[AnyArray, Axes]]


def _by_identity(arrays: Sequence[AnyArray], axes: Sequence[Axes]) -> _AxesOfArrays:
    return {id(x): (x, over) for x, over in zip(arrays, axes, strict=True)}


@dataclasses.dataclass(frozen=True)
class Lost:
    """What JAX's types lose in what one instance runs.

    **Attributes:**

    - `primitives`: those whose rules lose that values differ.
    - `lines`: where the user calls them.
    - `axes`: the axes that are lost.
    - `in_gradients`: whether gradients that were taken inside have such types.
    - `run`, `typed`: in which run of the instance it was found, and the axes over which the types of its
        results vary as they are.
    """

    primitives: frozenset[Any] = frozenset()
    lines: tuple[str, ...] = ()
    axes: Axes = NO_AXES
    in_gradients: bool = False
    run: int = 0
    typed: tuple[Axes, ...] = ()


class TypesLost(BaseException):
    """What is being traced has to be traced again with right types. It is no error for others to handle."""

    def __init__(self, lost: Lost) -> None:
        super().__init__(lost)
        self.lost = lost


class FromTypes:
    """Learnt from JAX: on a mesh from its types and from the program, in lanes from what a `vmap` batches.

    Neither types nor the program alone would do. Some of JAX's rules for types lose what varies, and types
    do not say that all shards have the same after an `all_gather`.

    **Arguments:**

    - `axis_names`: the axes that are asked about.
    """

    # A value that differs where one copy is kept is refused.
    is_known = True

    def __init__(self, axis_names: tuple[AxisName, ...]) -> None:
        self.axis_names = axis_names
        self.meshes = frozenset(meshes_and_lanes(axis_names)[0])
        self.recorded = Recorded()
        # What the program shows of arrays that were computed operation by operation.
        self.shown: _AxesOfArrays = {}
        # What an earlier trace has found, and whether types are to stay as JAX makes them nevertheless.
        self.lost, self.stay_lost = Lost(), False
        self._runs = 0

    def start(self, arrays: Sequence[Leaf], axes: Sequence[Axes]) -> None:
        """Begin with an instance's inputs, and the axes over which each is split. The types say it here."""

    def run(
        self,
        fun: Fun,
        operands: Sequence[PyTree],
        links: Links | None = None,
        counted: bool = False,
    ) -> PyTree:
        """What a function makes of trees.

        **Arguments:**

        - `links`: for the states among the operands, where it matters which of them the results continue.
        - `counted`: whether some state's policy depends on how many instances have the same value.
        """
        if lanes_in_checked_map(self.axis_names):
            return self._run_in_lanes(fun, operands, links, counted)
        is_asked = links is not None or bool(counted and self.meshes)
        if compat.under_jit():
            self._runs += 1
            looks_for_lost = bool(self.meshes) and not self.stay_lost
            before = len(compat.recorded_equations()) if looks_for_lost else 0
            if typing := typed_right.active():
                result, outputs = self._typed_right(fun, operands, links)
            elif is_asked:
                traced = trace(fun, operands, None, links)
                outputs = jaxprs.run_jaxpr(traced.closed, traced.arguments)
                result = traced.skeleton.filled(outputs)
            else:
                result = fun(*operands)
                outputs = [x for x in tree_util.tree_leaves(result) if isinstance(x, jax.Array)]
            if looks_for_lost:
                self._find_lost(outputs, compat.recorded_equations()[before:], typing)
            return result
        if typed_right.active():
            # An earlier trace has found what types lose.
            return self._typed_right(fun, operands, links)[0]
        # With `jit=False` it runs operation by operation, for someone who debugs it. It is traced too only if
        # anyone asks for what its program shows.
        with looking_for_left() as left:
            result = fun(*operands)
        if not (is_asked or left):
            return result
        result, outputs, program = _with_program(fun, operands, result, None, links)
        if program is None:
            return result
        jaxpr = jaxprs.open_jaxpr(program.closed)
        typed = [compat.varying(x) for x in program.arguments]
        sizes = {name: jax.lax.axis_size(name) for name in self.meshes}
        check_unsummed(jaxpr, typed, sizes, unrecorded=jaxpr.eqns)
        if is_asked:
            self.shown.update(_by_identity(outputs, all_axes(jaxpr, typed)))
        return result

    def _typed_right(
        self, fun: Fun, operands: Sequence[PyTree], links: Links | None
    ) -> tuple[PyTree, list[Array]]:
        """What a function makes, traced with right types, and the arrays in it."""
        traced = trace(fun, operands, compat.TypedRight(typed_right.names()), links)
        with typed_right.typing_right(frozenset()):  # The casts are in it.
            outputs = self._as_typed(jaxprs.run_jaxpr(traced.closed, traced.arguments))
        return traced.skeleton.filled(outputs), outputs

    def _find_lost(
        self, outputs: Sequence[Array], equations: Sequence[Equation], typing: frozenset[Any]
    ) -> None:
        """Look where the types of what was recorded lose that something differs.

        **Raises:** `TypesLost`, for primitives that are not typed right yet.
        """
        losing = self.recorded.losing(outputs, equations)
        wrong = [eqns for eqns in losing.equations if eqns[-1].primitive not in typing]
        if wrong and losing.used:
            lines = [
                next(filter(None, (user_line(frames_of(eqn)) for eqn in reversed(eqns))), "")
                for eqns in wrong
            ]
            lost = Lost(
                frozenset(eqns[-1].primitive for eqns in wrong),
                tuple(dict.fromkeys(filter(None, lines))),
                frozenset(losing.axes),
                losing.in_gradients,
                self._runs,
                tuple(map(compat.varying, outputs)),
            )
            raise TypesLost(lost)

    def _as_typed(self, outputs: list[Array]) -> list[Array]:
        """Results of what is typed right, with the types of before where they do not differ for all that."""
        if self._runs != self.lost.run:
            return outputs
        return [
            one_copy(x, same)
            if (same := [*(compat.varying(x) - typed - self.recorded.of(x))])
            else x
            for x, typed in zip(outputs, self.lost.typed, strict=True)
        ]

    def _run_in_lanes(
        self, fun: Fun, operands: Sequence[PyTree], links: Links | None, counted: bool
    ) -> PyTree:
        """Run it in the lanes of a `vmap` inside a checked `shard_map`.

        There our collectives give each lane a copy, and only the program shows that the copies are the same.
        What it shows to be so leaves the lanes as one value.
        """
        try:
            with _jit_enabled():
                program = trace(fun, operands, None, links)
        except Exception as error:
            # JAX cannot trace its own `axis_index` over lanes here. If the function fails for a reason of its
            # own, it fails again.
            result = fun(*operands)
            if counted:
                axis = self.axis_names[0]
                called = axis if isinstance(axis, str) else "rows"
                raise StatemeshError(
                    f"The lanes of a vmap ({axis!r}) inside a checked shard_map got a state with "
                    "reduce='sum' or a function, and what they run cannot be traced. So it is unknown which "
                    "written values are the same in all lanes, and count once. The reason is usually "
                    "jax.lax.axis_index over the lanes, or a branch on the value of an array. Write "
                    f"sm.axis_index({called!r}) instead of jax.lax.axis_index({called!r}), and jax.lax.cond "
                    "or jnp.where instead of the branch."
                ) from error
            return result
        outputs = jaxprs.run_jaxpr(program.closed, program.arguments)
        axes = all_axes(
            jaxprs.open_jaxpr(program.closed), varying_over(program.arguments, self.axis_names)
        )
        for name in self.axis_names:
            pairs = zip(outputs, axes, strict=True)
            outputs = [x if name in over else same_in_lanes(name, x) for x, over in pairs]
        return program.skeleton.filled(outputs)

    def of(self, values: Sequence[Leaf]) -> list[Axes]:
        """The axes over which each array may differ: all of them for an array of which nothing is known."""
        typed = varying_over(values, self.axis_names)
        pairs = zip(values, typed, strict=True)
        return [axes if axes >= self.meshes else axes | self._shown(x) for x, axes in pairs]

    def same_over(self, x: Leaf) -> Axes:
        """The axes over which an array is the same although its type says that it may differ."""
        return (compat.varying(x) & self.meshes) - self._shown(x)

    def typed_as_varying(self, x: Leaf, axes: Axes) -> Leaf:
        """`x` with a type that says that it may differ over these axes."""
        return compat.vary(x, [name for name in self.axis_names if name in axes & self.meshes])

    def _shown(self, x: Leaf) -> Axes:
        """The mesh axes over which the program shows that an array may differ.

        Those of its type, where there is no program.
        """
        if not self.meshes:
            return NO_AXES
        if compat.under_jit():
            return self.recorded.of(x) & self.meshes
        shown = self.shown.get(id(x))
        return (compat.varying(x) if shown is None else shown[1]) & self.meshes


class FromDataflow:
    """Learnt from the program: each function is traced to a jaxpr first, which is walked and then run.

    So a gradient that is taken inside is that of the one lane, as under `vmap`. Where JAX types what varies,
    it sums the gradient of what all lanes share over them.

    **Arguments:**

    - `axis_names`: the axes that are asked about: lanes, or a mesh whose check the author turned off.
    - `is_known`: whether a value that differs where one copy is kept is refused. Without the check it is not,
        and the program is walked only because gradients inside depend on it.
    """

    def __init__(self, axis_names: tuple[AxisName, ...], is_known: bool) -> None:
        self.is_known = is_known
        self.mark = compat.FollowedAxes(axis_names, lanes=is_known)
        self.axes = frozenset(axis_names)
        self.known: _AxesOfArrays = {}

    def start(self, arrays: Sequence[Leaf], axes: Sequence[Axes]) -> None:
        self.known.update(_by_identity(arrays, axes))

    def run(
        self,
        fun: Fun,
        operands: Sequence[PyTree],
        links: Links | None = None,
        counted: bool = False,
    ) -> PyTree:
        if not compat.under_jit():
            try:
                result = fun(*operands)
                if not self.is_known and links is None and not counted:
                    # Nobody asks for what the program shows.
                    return result
                result, outputs, shown = _with_program(fun, operands, result, self.mark, links)
                axes = [self.axes] * len(outputs) if shown is None else self._of_results(shown)
                self.known.update(_by_identity(outputs, axes))
                return result
            except StatemeshError:
                # `value_and_grad` needs the program, which a call has but for `jax.disable_jit()`.
                if not compat.jit_disabled():
                    raise
        with _jit_enabled():
            program = trace(fun, operands, self.mark, links)
            closed = settled(program.closed, self._known(program.arguments, NO_AXES), self.axes)
        outputs = jaxprs.run_jaxpr(closed, program.arguments)
        axes = self._of_results(dataclasses.replace(program, closed=closed))
        self.known.update(_by_identity(outputs, axes))
        return program.skeleton.filled(outputs)

    def of(self, values: Sequence[Leaf]) -> list[Axes]:
        return self._known(values, NO_AXES if self.is_known else self.axes)

    def same_over(self, x: Leaf) -> Axes:
        return NO_AXES

    def typed_as_varying(self, x: Leaf, axes: Axes) -> Leaf:
        return x

    def _known(self, values: Sequence[Leaf], unknown: Axes) -> list[Axes]:
        return [self.known.get(id(x), (x, unknown))[1] for x in values]

    def _of_results(self, program: Traced) -> list[Axes]:
        return all_axes(jaxprs.open_jaxpr(program.closed), self._known(program.arguments, NO_AXES))


VaryingAxes: TypeAlias = FromTypes | FromDataflow


def _jit_enabled() -> AbstractContextManager[Any]:
    """Under `jax.disable_jit()` a program would lack the calls that are looked for in it."""
    return jax.disable_jit(False) if compat.jit_disabled() else nullcontext()


def _with_program(
    fun: Fun,
    operands: Sequence[PyTree],
    result: PyTree,
    mark: compat.FollowedAxes | None,
    links: Links | None,
) -> tuple[PyTree, list[AnyArray], Traced | None]:
    """Trace a function that has run operation by operation, for what its program shows.

    **Returns:** the result with its states marked as the program shows, the arrays in it, and the program;
    `None` where there is none.
    """
    outputs = [x for x in tree_util.tree_leaves(result) if isinstance(x, jax.Array)]
    try:
        with _jit_enabled():
            program = trace(fun, operands, mark, links)
    except compat.NEEDS_VALUES:
        # It branches on the values of its arguments.
        return result, outputs, None
    marks = origins(result)
    if len(marks) == len(program.skeleton.marks):
        # What forgot where it came from is marked as the program shows.
        pairs = zip(marks, program.skeleton.marks, strict=True)
        result = with_origins(result, [new if old is None else old for old, new in pairs])
    return result, outputs, program if len(outputs) == len(program.closed.out_avals) else None


# Which of the entering states does each returned one continue?


@dataclasses.dataclass(frozen=True, slots=True)
class Entered:
    """A state of the arguments inside one instance of the call."""

    mark: object
    path: str
    keys: KeyPath
    # As it came in, and as the function saw it after `enter`.
    old: State
    seen: State
    # One placement, and one index among the program's inputs, for each of its leaves.
    placements: tuple[Placement, ...]
    inputs: tuple[int, ...]


def find_origins(
    fun_name: str,
    returned: Sequence[tuple[KeyPath, State]],
    entered: Sequence[Entered],
    donating: bool,
) -> list[Entered | None]:
    """The entering state that each returned one continues; `None` for a state made inside.

    A state that was written with `set` or `replace` remembers where it came from, and one that was
    not written has the very arrays that went in. A written one that passed through `jax.tree.map`,
    `scan` or `cond` has forgotten; then the end of its path tells: `[1].bn.mean` in the result
    continues `[0].bn.mean` of the arguments. Where several fit equally well (two models of one
    class), they are taken in order.

    **Raises:** `StructureError` where fewer return than fit, and it makes a difference which: to a
    policy, to where the state goes, or to whose buffers are given up when `donating`.
    """
    by_mark = {id(entry.mark): i for i, entry in enumerate(entered)}
    # By returned state: the entering ones that it may continue, where the program shows several.
    shown: dict[int, list[int]] = {}
    by_arrays = {_arrays(entry.seen): i for i, entry in enumerate(entered) if values(entry.seen)}
    forms: list[Hashable] = [_form(entry.seen) for entry in entered]
    sources: list[int | None] = []
    for k, (_, state) in enumerate(returned):
        mark = origin(state)
        i = by_mark.get(id(mark))
        if i is None and (same := by_arrays.get(_arrays(state))) is not None:
            i = same if _form(state) == forms[same] else None
        if i is None and isinstance(mark, Unknown):
            shown[k] = [by_mark[id(other)] for other in mark.marks if id(other) in by_mark]
        sources.append(i)
    # The others are compared by their paths with the states that they may continue.
    alike: dict[Hashable, list[int]] = {}
    for i, form in enumerate(forms):
        alike.setdefault(form, []).append(i)
    # Steps of paths as numbers, the last one first: in a large model very many pairs are compared.
    numbers: dict[Key, int] = {}
    ends = [_numbered(entry.keys, numbers) for entry in entered]
    scores = {
        k: _scores(_numbered(keys, numbers), shown.get(k) or alike.get(_form(state), []), ends)
        for k, (keys, state) in enumerate(returned)
        if sources[k] is None and origin(state) is not NEW
    }
    taken = {i for i in sources if i is not None}
    _fill_by_path(scores, sources, taken)
    unsure: list[str] = []
    for k, fits in scores.items():
        if (i := sources[k]) is None:
            continue
        if k in shown:
            # The program shows that it continues one of several; its path only guesses which.
            left = [j for j in fits if j != i and (shown[k] or j not in taken)]
            unlike = any(_leave_apart(entered[i], entered[j]) for j in left)
        else:
            left = [j for j, score in fits.items() if score >= fits[i] and j not in taken]
            unlike = any(
                donating
                or entered[i].old.reduce is not None
                or entered[i].placements != entered[j].placements
                for j in left
            )
        if unlike:
            path = path_str(returned[k][0], f"{fun_name}(...)")
            several = " or ".join(entered[j].path for j in sorted([i, *left]))
            unsure.append(f"{path} may be {several}")
    if unsure:
        raise error_listing(
            StructureError,
            f"{fun_name}: these states differ only in where they came from, and nothing shows which of them "
            "each result continues",
            unsure,
            "That is lost if the branches of a `cond` return different states, or if a loop exchanges them. "
            "Distinguish them by a name or tag: State(value, name='a'); or write the values into the states "
            "that came in, after the `cond` or loop: `state.set(new.value)`.",
        )
    return [None if i is None else entered[i] for i in sources]


def _fill_by_path(
    scores: Mapping[int, Mapping[int, int]], sources: list[int | None], taken: set[int]
) -> None:
    """Fill in what is not found yet: the pairs whose paths agree best first, each entering state once."""
    # Paths without a common end are no evidence, unless there is only one candidate.
    pairs = [
        (-score, k, i)
        for k, fits in scores.items()
        for i, score in fits.items()
        if score > 0 or len(fits) == 1
    ]
    for _, k, i in sorted(pairs):
        if sources[k] is None and i not in taken:
            sources[k] = i
            taken.add(i)
    for k, fits in scores.items():
        # It may be a state that was returned twice, if at least the last step of its path agrees.
        best = max(fits, key=lambda i: fits[i], default=None)
        if sources[k] is None and best is not None and fits[best] > 1:
            sources[k] = best


def _arrays(state: State) -> tuple[int, ...]:
    return tuple(map(id, leaves_of(state)))


def _leave_apart(a: Entered, b: Entered) -> bool:
    """Whether it makes a difference to a written state which of two it continues."""
    return a.old.needs_old or b.old.needs_old or a.placements != b.placements


def links_for(entered: Sequence[Entered]) -> Links | None:
    """Links for states that only their origin tells apart, where it makes a difference which is which.

    `None` where there are no such states.
    """
    alike: dict[Hashable, list[Entered]] = {}
    for entry in entered:
        # A random state needs no link: its key carries its stream along.
        if not entry.old.always_replicated:
            alike.setdefault(_form(entry.seen), []).append(entry)
    followed = [
        (type(first.seen), first.seen._meta)
        for first, *others in alike.values()
        if any(_leave_apart(first, entry) for entry in others)
    ]
    return Links(frozenset(followed)) if followed else None


def _form(state: State) -> Hashable:
    """What a state must have in common with one that it continues."""
    shapes = tuple((x.shape, x.dtype) for x in values(state))
    return type(state), state._meta, tree_util.tree_structure(state.value), shapes


def _numbered(keys: KeyPath, numbers: dict[Key, int]) -> tuple[int, ...]:
    return tuple(numbers.setdefault(key, len(numbers)) for key in reversed(keys))


def _scores(
    path: tuple[int, ...], candidates: Sequence[int], ends: Sequence[tuple[int, ...]]
) -> dict[int, int]:
    """For each candidate twice the number of last steps that agree, plus one if these are its whole path."""
    scores = {}
    for i in candidates:
        end, count = ends[i], 0
        if end[:1] != path[:1]:  # In a large model that is so of nearly all pairs.
            scores[i] = int(not end)
            continue
        for x, y in zip(path, end, strict=False):
            if x != y:
                break
            count += 1
        scores[i] = 2 * count + (count == len(end))
    return scores


def values(state: State) -> list[Leaf]:
    """The leaves of a state's value."""
    return list(tree_util.tree_leaves(state.value))


def leaves_of(state: State) -> list[Leaf]:
    """All leaves of a state: its value's, then those of whatever its kind keeps beside it."""
    return list(tree_util.tree_leaves(state))


def has_same_leaves(a: State, b: State) -> bool:
    """Whether the leaves of two states are the very same objects: neither was written after the other."""
    mine, others = leaves_of(a), leaves_of(b)
    return len(mine) == len(others) and all(x is y for x, y in zip(mine, others, strict=True))
