"""A function of `jax.jit` whose arguments lie on a mesh: the partitioner makes of it what the devices run.

Nothing is replayed shard by shard, since the program is that of one device. What the devices give is compared
with the program itself, run on one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import statemesh as sm

from .._caches import Recent, environment, held_by
from .._program._trace import is_array_or_type, name_of, type_of
from .._types import AnyLeaf, AnyMesh, Args, Fun, PyTree, tree_util
from ._programs import FunctionOnMesh, Programs, Selection, kept, with_constants


# For each leaf of `(args, kwargs)` where it lies; `None` where nobody says so.
Shardings: TypeAlias = tuple[NamedSharding | None, ...]
_NOTHING = Selection()
# Makes the context in which a function is traced and called.
Context: TypeAlias = Callable[[], AbstractContextManager[object]]


def is_jitted(fun: object) -> bool:
    """Whether a function is what `jax.jit` returns."""
    is_mapped = isinstance(fun, sm.StatefulMapping)
    return not is_mapped and hasattr(fun, "trace") and hasattr(fun, "lower")


def jitted_on_meshes(
    fun: Fun, args: Args, meshes: Sequence[AnyMesh] | None, in_specs: PyTree
) -> list[FunctionOnMesh]:
    """The function on the mesh that its shardings and its arguments name, or on each of the given meshes.

    **Arguments:**

    - `args`: the arguments as the user gave them.
    - `meshes`, `in_specs`: as for `assert_equivalent`; `None` and `...` where they are left out.
    """
    name, own = name_of(fun), _own_shardings(args)
    key = environment(fun, *held_by(args))
    if meshes is None:
        if in_specs is not ...:
            raise TypeError(f"{name}: in_specs need meshes. Give both, or neither.")
        given, results = _given_shardings(fun, args, own)
        named = [x.mesh for x in (*given, *own, *results) if x is not None]
        on = next((mesh for mesh in named if isinstance(mesh, Mesh)), None)
        if on is None:
            raise TypeError(
                f"{name} is a function of jax.jit, and neither its shardings nor its arguments name a mesh: "
                "place the arguments with jax.device_put(x, NamedSharding(mesh, spec)), or give meshes and "
                "in_specs."
            )
        # Whoever set a mesh around the check has traced another program than without it.
        around = jax.sharding.get_abstract_mesh()
        return [kept(key, JittedOnMesh, fun, on, own, given, False, around)]
    on_meshes: list[FunctionOnMesh] = []
    for mesh in meshes:
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"meshes: {mesh!r} has no devices. What the partitioner makes of {name}, a function of "
                "jax.jit, runs on devices only: give jax.sharding.Mesh, or the sizes of its axes."
            )
        with jax.set_mesh(mesh):
            placed = (None,) * len(own) if in_specs is ... else _by_specs(mesh, in_specs, args)
            given, _ = _given_shardings(fun, args, placed)
        known = [x for x in (*given, *placed) if x is not None]
        if any(x.mesh != mesh for x in given if x is not None):
            raise TypeError(
                f"{name} has shardings on a mesh of its own: leave out meshes, or give the specs alone to "
                "jax.jit, as in in_shardings=P('data')."
            )
        if not known:
            raise TypeError(
                f"{name} is a function of jax.jit without shardings: give in_specs, which place its "
                "arguments on each of the meshes."
            )
        on_meshes.append(kept(key, JittedOnMesh, fun, mesh, placed, given, True, None))
    return on_meshes


def _own_shardings(args: Args) -> Shardings:
    """Where the arrays lie that a user has placed on a mesh."""

    def own(x: AnyLeaf) -> NamedSharding | None:
        is_placed = isinstance(x, jax.Array) and x.committed
        return x.sharding if is_placed and isinstance(x.sharding, NamedSharding) else None

    return tuple(map(own, tree_util.tree_leaves(args)))


def _by_specs(mesh: Mesh, in_specs: PyTree, args: Args) -> Shardings:
    """The shardings of a prefix tree of specs. Keyword arguments are replicated."""
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)
    entries, structure = tree_util.tree_flatten(in_specs, is_leaf=is_spec)
    parts = structure.flatten_up_to(args[0])
    pairs = [*zip(entries, parts, strict=True), (None, args[1])]
    return tuple(
        NamedSharding(mesh, spec or PartitionSpec()) if eqx.is_array_like(leaf) else None
        for spec, part in pairs
        for leaf in tree_util.tree_leaves(part)
    )


def _given_shardings(
    fun: Fun, args: Args, placed: Shardings
) -> tuple[Shardings, list[NamedSharding]]:
    """The shardings that `jax.jit` was given: of each leaf of the arguments, and of results."""
    leaves, treedef = tree_util.tree_flatten(args)
    leaves = [jax.numpy.asarray(x) if _is_numpy(x) else x for x in leaves]
    arrays, statics = eqx.partition(leaves, is_array_or_type)

    def call(arrays: list[AnyLeaf]) -> list[AnyLeaf]:
        positional, by_keyword = treedef.unflatten(eqx.combine(arrays, statics))
        return tree_util.tree_leaves(eqx.filter(fun(*positional, **by_keyword), is_array_or_type))

    def typed(x: AnyLeaf, sharding: NamedSharding | None) -> AnyLeaf:
        return x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    try:
        jaxpr = jax.make_jaxpr(call)(list(map(typed, arrays, placed))).jaxpr
    except Exception as error:
        error.add_note(f"While assert_equivalent called `{name_of(fun)}`.")
        raise
    given: list[NamedSharding | None] = [None] * len(leaves)
    # A function without shardings may be inlined.
    if [eqn.primitive.name for eqn in jaxpr.eqns] not in (["jit"], ["pjit"]):
        return tuple(given), []
    (eqn,) = jaxpr.eqns
    numbers = [k for k, x in enumerate(arrays) if x is not None]
    number_of = {id(var): k for var, k in zip(jaxpr.invars, numbers, strict=True)}
    for var, sharding in zip(eqn.invars, eqn.params["in_shardings"], strict=True):
        if id(var) in number_of and isinstance(sharding, NamedSharding):
            given[number_of[id(var)]] = sharding
    return tuple(given), [x for x in eqn.params["out_shardings"] if isinstance(x, NamedSharding)]


def _is_numpy(x: object) -> bool:
    return eqx.is_array(x) or type(x).__module__ == "numpy"


class _Placing:
    """A function of `jax.jit` that finds its arguments where they lie in the user's call.

    **Arguments:**

    - `first`: where arguments lie in the first call.
    - `given`: where the function itself puts them in every call.
    """

    def __init__(self, fun: Fun, first: Shardings, given: Shardings, context: Context) -> None:
        self.__name__ = name_of(fun)
        self._fun, self._first, self._given, self._context = fun, first, given, context

    def placed(self, args: Args) -> Args:
        leaves, structure = tree_util.tree_flatten(args)
        each = zip(leaves, self._given, self._first, strict=True)
        placed: Args = structure.unflatten([_at(x, given, first) for x, given, first in each])
        return placed

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        with self._context():
            positional, by_keyword = self.placed((args, kwargs))
            return self._fun(*positional, **by_keyword)


def _at(x: AnyLeaf, given: NamedSharding | None, first: NamedSharding | None) -> AnyLeaf:
    """An argument in its place.

    What the call before returned stays where that call has put it, unless `jax.jit` would refuse it there.
    What lies on no mesh is placed by `jax.jit`, in whose program its type may differ.
    """
    if not isinstance(x, jax.Array):
        return x
    if isinstance(x, jax.core.Tracer):
        return x if first is None else jax.device_put(x, first)
    is_returned = x.committed and isinstance(x.sharding, NamedSharding)
    sharding: Any = (given or x.sharding) if is_returned else first
    # The function may take the buffers of its arguments for its results, and we read them again.
    return jax.device_put(x, sharding, may_alias=False)


class _JittedPrograms(Programs):
    """The programs of a function of `jax.jit`, which are its own reference."""

    def on_one_device(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        types = jax.tree.map(lambda x: type_of(x) if is_array_or_type(x) else x, (args, kwargs))
        return self.of(types).in_own_dtypes((args, kwargs))


class JittedOnMesh(FunctionOnMesh):
    """A function of `jax.jit` with arguments that lie on a mesh.

    **Arguments:**

    - `first`, `given`: the shardings of the arguments in the first call, and those that `jax.jit` was given.
    - `sets_mesh`: whether the function is called under `jax.set_mesh`.
    - `around`: the mesh that the caller has set.
    """

    def __init__(
        self,
        fun: Fun,
        mesh: Mesh,
        first: Shardings,
        given: Shardings,
        sets_mesh: bool,
        around: object,
    ) -> None:
        del around  # It is a part of the key under which this is kept.
        self.fun, self.mesh = fun, mesh
        self.specs: Mapping[str, PyTree] | None = None
        self._context: Context = (lambda: jax.set_mesh(mesh)) if sets_mesh else nullcontext
        self.mapped: Any = _Placing(fun, first, given, self._context)
        self._shardings = first, given
        self._of_selection: Recent[Programs] = Recent()

    def placed(self, args: Args) -> Args:
        placed: Args = self.mapped.placed(args)
        return placed

    def programs_of(self, call: Fun, selected: Selection = _NOTHING) -> Programs:
        """The programs of a function that finds its arguments in their places, as its own reference."""
        # For gradients with Explicit axes in their types.
        is_explicit = AxisType.Explicit in self.mesh.axis_types
        context = self._set_mesh if is_explicit else self._context
        what, program = "the function on one device", f"{name_of(call)}_on_mesh"
        return _JittedPrograms(what, call, selected, context, program=program)

    def programs(self, selected: Selection, *, unsharded: bool = False) -> Programs:
        del unsharded  # The program on one device is that of the mesh.

        def new() -> Programs:
            fun: Fun = (
                with_constants(self.fun, selected.constant) if selected.constant else self.fun
            )
            # Where it is traced the mesh is set already.
            call = _Placing(fun, *self._shardings, nullcontext)
            call.__name__ = name_of(self.fun)
            return self.programs_of(call, selected)

        return self._of_selection.get(selected, new)


def refused(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that make no sense for a function of `jax.jit`."""
    if several := [
        key for key, value in arguments.items() if value is not None and value is not ...
    ]:
        raise TypeError(
            f"{name} is a function of jax.jit, which has no shards: leave out {', '.join(several)}."
        )
