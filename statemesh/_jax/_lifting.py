"""Lets run, in a checked `shard_map`, what JAX's check of types refuses although it has a meaning there.

JAX refuses a loop whose carry enters as one copy and comes out varying, branches that differ in what varies,
operands that vary apart in some primitives, and it knows no types of the primitives of other libraries. While
we lift, each of these gets the casts that are missing: what is the same everywhere is typed as varying, no
value changes. That happens where JAX records the operation, below any derivative or `vmap` that is taken of
it: these see the casts, and so a gradient is summed over shards where the check sums it.

JAX has no public place for that. We wrap its loops and `Primitive.bind` for as long as someone lifts, and
take the wrappers off again. What runs later (the rule of a derivative that is taken outside, the lowering of
another library's primitive) lifts for itself.
"""

import functools
import importlib
import inspect
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_
from traceback import walk_tb
from typing import Any

import jax
import jaxtyping
import numpy as np
from jax.extend import source_info_util
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._base._errors import StatemeshError, axes_argument, error_listing
from .._base._libraries import OWN_FOLDER, is_library, shown
from .._base._trees import describe
from .._base._types import NO_AXES, Axes, AxisName, Fun, Leaf, PyTree, flat_names
from . import _compat as compat
from . import _jaxprs as jaxprs
from ._compat import core, tree_util
from ._dataflow import shard_map_recorded
from ._frames import frames_in, user_line


_src_core: Any = importlib.import_module("jax._src.core")
_src_lu: Any = importlib.import_module("jax._src.linear_util")
_src_api: Any = importlib.import_module("jax._src.api")
_src_ad: Any = importlib.import_module("jax._src.interpreters.ad")
_src_config: Any = importlib.import_module("jax._src.config")
_src_derivatives: Any = importlib.import_module("jax._src.custom_derivatives")
_src_pe: Any = importlib.import_module("jax._src.interpreters.partial_eval")
_src_mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
_src_sharding: Any = importlib.import_module("jax._src.sharding_impls")
_ad: Any = ad
_batching: Any = batching

_JAXTYPING = os.path.dirname(jaxtyping.__file__) + os.sep
# Our own frames, and those that check their annotations.
_AROUND_BIND = (OWN_FOLDER, _JAXTYPING, "<")
# Files of JAX, of Python and of ours: no line in them is the library's that the user calls.
_NO_LIBRARIES = (
    OWN_FOLDER,
    compat.JAX_FOLDER,
    os.path.dirname(np.__file__) + os.sep,
    # Its checks of annotations stand around functions of the user's.
    _JAXTYPING,
    sysconfig.get_paths()["stdlib"] + os.sep + "contextlib.py",
    sysconfig.get_paths()["stdlib"] + os.sep + "functools.py",
)

_MARK = compat.Lifted()
_active: ContextVar[bool] = ContextVar("lifting", default=False)
# The casts of recorded jaxprs whose operand varies already: where each was recorded, and the operand's shape.
_needless: ContextVar[set[tuple[Any, tuple[int, ...]]]] = ContextVar("needless")
_lock = threading.Lock()
_count = 0

# JAX's texts where its check refuses; each of its releases has had other ones.
_REFUSALS = re.compile(
    r"manual axis types do not match|varying manual axes|to='varying'|invariant->variant"
    r"|variant->invariant|manual axis type|cotangent type .*\{V:|called under jax.shard_map"
    r"|can only accept axis_name which corresponds to|^\(ShapedArray\(.*\{V:"
)


def is_refusal(error: BaseException) -> bool:
    """Whether JAX's check of what varies raised an error."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, StatemeshError):
        # Outside of a trace JAX has taken its frames out of the traceback, so only the text tells.
        if _REFUSALS.search(str(at)) and "from=varying" not in str(at):
            return True
        # A collective over the lanes of a `vmap` fails without a word.
        if isinstance(at, AssertionError) and not at.args and compat.raised_by_jax(at):
            return True
        at = at.__cause__
    return False


@contextmanager
def lifting() -> Iterator[None]:
    """Within this context JAX's check refuses nothing that casts can mend."""
    global _count
    if _active.get():
        yield
        return
    with _lock:
        _count += 1
        if _count == 1:
            _wrappers.put_on()
    mark, casts = _active.set(True), _needless.set(set())
    try:
        # With a name bound JAX does not find again what it has traced without.
        with _src_core.extend_axis_env_nd([(_MARK, 1)]):
            yield
    finally:
        _active.reset(mark)
        _needless.reset(casts)
        with _lock:
            _count -= 1
            if _count == 0:
                _wrappers.take_off()


def lifted(fun: Fun) -> Fun:
    """A function that lifts whenever it is called."""

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lifting():
            return fun(*args, **kwargs)

    return call


@contextmanager
def in_shards() -> Iterator[None]:
    """A context for a function of shards, in which what is computed while JAX traces needs no devices.

    Where a mesh is set, JAX lays such a value (of `jax.ensure_compile_time_eval`) out on it as if one could,
    inside a `shard_map` over all axes, and then fails by an assertion. No public name unsets a mesh there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.are_all_axes_manual:
        yield
        return
    with _src_sharding._internal_use_concrete_mesh(Mesh(np.empty((), object), ())):
        yield


def with_casts_where_refused(call: Callable[[], list[Leaf]]) -> tuple[list[Leaf], bool]:
    """The outputs of a call of `jax.shard_map` that lifts where JAX refuses what it maps; and whether it did.

    What JAX takes is recorded as JAX records it, but for what it could not lower, or types wrongly.
    """
    if _active.get():
        return call(), True
    refusal: Exception | None = None
    try:
        outputs = call()
        mapped = shard_map_recorded(outputs)
        if mapped is None or not any(map(_is_mistyped, _equations(mapped))):
            return outputs, False
    except Exception as error:
        # An error of ours may quote a cast as the mend.
        if isinstance(error, StatemeshError) or not (is_refusal(error) or _passed_library(error)):
            raise
        refusal = error
    try:
        with lifting():
            return call(), True
    except Exception as error:
        # What the user's function raises behind what JAX refuses is the error to show.
        if isinstance(error, StatemeshError) or refusal is None:
            raise
        if is_refusal(refusal) and not is_refusal(error):
            raise
        failed = error
    if not is_refusal(refusal):
        raise refusal
    raise _not_lifted(failed) from failed


def _passed_library(error: BaseException) -> bool:
    """Whether an error came up through the code of an installed library besides JAX.

    It may compare types that JAX's check makes unequal, and raise an error of its own.
    """
    files = {frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)}
    return any(is_library(file) and not file.startswith((*_NO_LIBRARIES, "<")) for file in files)


def _not_lifted(error: BaseException) -> StatemeshError:
    """An error that names where JAX refuses something for good, and what to write."""
    lines = []
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_NO_LIBRARIES):
            lines.append((is_library(file), f"{shown(file)}:{line} ({frame.f_code.co_name})"))
    by_user = [line for of_library, line in lines if not of_library]
    by_library = [line for of_library, line in lines if of_library]
    items = [f"your line: {line}" for line in by_user[-1:]]
    items += [f"the library's line: {line}" for line in by_library[-1:]]
    return error_listing(
        StatemeshError,
        "JAX's check of what varies between shards refuses this, and casts do not mend it: "
        + (str(error).split("\n")[0] or type(error).__name__),
        items,
        "Cast what goes in to what comes out, `jax.lax.pcast(x, axis_name, to='varying')`, or report the "
        "program to statemesh.",
    )


def _equations(mapped: Any) -> Iterator[Any]:
    return jaxprs.equations(jaxprs.open_jaxpr(mapped.params["jaxpr"]))


def _is_mistyped(eqn: Any) -> bool:
    """Whether JAX has no types for the results of an equation, or cannot lower it with those that it has."""
    if eqn.primitive.name == _LINEAR_SOLVE:
        return any(not _has_types(jaxpr, xs) for jaxpr, xs in _of_solve(eqn.params, eqn.invars))
    return _is_foreign(eqn.primitive) and bool(_all_axes(eqn.invars))


def _axes(x: Leaf) -> Axes:
    return compat.varying_type(getattr(x, "aval", None) or jax.typeof(x))


def _all_axes(values: Sequence[Leaf]) -> Axes:
    return NO_AXES.union(*map(_axes, values))


def _vary(x: Leaf, axes: Axes) -> Leaf:
    """`x` typed as varying over these axes at least."""
    missing = tuple(sorted(axes - _axes(x), key=str))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


# Loops and branches. Each is run as it is first. If JAX refuses it, or types as the same what a varying
# predicate makes differ, it is run again with casts, until the types agree.


class _Agreeing:
    """The axes over which values vary that must have one type: a loop's carry, or the results of branches.

    **Arguments:**

    - `carry`: what goes into a loop; nothing for branches.
    """

    def __init__(self, *carry: PyTree) -> None:
        self.axes = [list(map(_axes, tree_util.tree_leaves(tree))) for tree in carry]
        # For each function that is traced (the body, or each branch) what its results had to be cast to.
        self.seen: dict[int, list[Axes]] = {}

    @property
    def joined(self) -> list[Axes]:
        """For each leaf the axes over which any of the values varies; nothing if their structures differ."""
        lists = [*self.axes, *self.seen.values()]
        if len(set(map(len, lists))) != 1:
            return []
        return [NO_AXES.union(*each) for each in zip(*lists, strict=True)]

    def cast(self, number: int, result: PyTree, more: Sequence[Axes]) -> PyTree:
        """A result with the types that have been seen until now.

        **Arguments:**

        - `more`: over which axes each leaf differs besides, because a predicate does that chooses it.
        """
        leaves = tree_util.tree_leaves(result)
        self.seen[number] = [_axes(x) | axes for x, axes in zip(leaves, more, strict=True)]
        return _cast_all(result, self.joined)

    def settle(self, run: Callable[[], Any]) -> Any:
        """What `run` gives once the types agree."""
        while True:
            before = self.joined
            try:
                return run()
            except Exception:  # JAX refuses in many ways, and a library may raise anything.
                # Trees of other structures, and all else that is wrong, are refused for good.
                if self.joined in ([], before):
                    raise
            self.axes = [self.joined]


def _cast_all(tree: PyTree, axes: Sequence[Axes]) -> PyTree:
    leaves, treedef = tree_util.tree_flatten(tree)
    return treedef.unflatten(map(_vary, leaves, axes)) if len(leaves) == len(axes) else tree


# JAX remembers what it has traced by the function, so each attempt is made with functions of its own.


def _scan(original: Any, f: Any, init: Any, *args: Any, **kwargs: Any) -> Any:
    carried = _Agreeing(init)

    def run() -> Any:
        @functools.wraps(f)
        def body(carry: Any, x: Any) -> Any:
            result = f(carry, x)
            if not (isinstance(result, tuple | list) and len(result) == 2):
                return result
            nothing = [NO_AXES] * len(tree_util.tree_leaves(result[0]))
            return carried.cast(0, result[0], nothing), result[1]

        return original(body, _cast_all(init, carried.joined), *args, **kwargs)

    return carried.settle(run)


def _while_loop(original: Any, cond_fun: Any, body_fun: Any, init_val: Any) -> Any:
    carried = _Agreeing(init_val)

    def run() -> Any:
        of_predicate: Axes = NO_AXES

        @functools.wraps(cond_fun)
        def cond(carry: Any) -> Any:
            nonlocal of_predicate
            predicate = cond_fun(carry)
            of_predicate = _all_axes(tree_util.tree_leaves(predicate))
            return predicate

        @functools.wraps(body_fun)
        def body(carry: Any) -> Any:
            result = body_fun(carry)
            before = list(tree_util.tree_leaves(carry))
            after = tree_util.tree_leaves(result)
            before += [None] * len(after)
            # It matters to no value that the body leaves as it is how often it runs.
            more = [
                NO_AXES if x is y else of_predicate for x, y in zip(before, after, strict=False)
            ]
            return carried.cast(0, result, more)

        return original(cond, body, _cast_all(init_val, carried.joined))

    return carried.settle(run)


def _branching(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`cond` and `switch`: the first takes two functions, the other a sequence of them."""
    names = ("pred", "true_fun", "false_fun", "index", "branches")
    index, *functions = (*args, *(kwargs.pop(name) for name in names if name in kwargs))
    args = tuple(functions)
    is_switch = bool(args) and isinstance(args[0], list | tuple)
    branches = args[0] if is_switch else args[:2]
    if index is None or len(branches) < 2 or not all(map(callable, branches)):
        return original(index, *args, **kwargs)
    rest = args[1:] if is_switch else args[2:]
    results = _Agreeing()
    of_index = _all_axes(tree_util.tree_leaves(index))
    # For each branch what each of its results is: the number of an operand, or something else.
    returned: dict[int, list[Any]] = {}

    def recorded(k: int, branch: Any) -> Any:
        @functools.wraps(branch)
        def run(*operands: Any) -> Any:
            result = branch(*operands)
            numbers = {id(x): i for i, x in enumerate(tree_util.tree_leaves(operands))}
            returned[k] = [numbers.get(id(x), x) for x in tree_util.tree_leaves(result)]
            lists = list(returned.values())
            if len(lists) < len(branches) or len(set(map(len, lists))) != 1:
                differ = [False] * len(returned[k])
            else:
                differ = [not _all_same(each) for each in zip(*lists, strict=True)]
            return results.cast(k, result, [of_index if each else NO_AXES for each in differ])

        return run

    def run() -> Any:
        functions = [recorded(k, branch) for k, branch in enumerate(branches)]
        return original(index, *([functions] if is_switch else functions), *rest, **kwargs)

    return results.settle(run)


def _custom_linear_solve(original: Any, matvec: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
    """JAX does not look at these types, and lowers what does not fit."""
    while True:
        leaves = tree_util.tree_leaves(b)
        results = jax.make_jaxpr(matvec)(b).out_avals
        if len(leaves) != len(results):
            return original(matvec, b, *args, **kwargs)  # It raises.
        pairs = zip(leaves, results, strict=True)
        axes = [_axes(x) | compat.varying_type(aval) for x, aval in pairs]
        if axes == list(map(_axes, leaves)):
            return original(matvec, b, *args, **kwargs)
        b = _cast_all(b, axes)


def _all_same(values: Sequence[Any]) -> bool:
    first = values[0]
    return all(x is first or (type(x) is type(first) is int and x == first) for x in values)


# Operations. Each is bound as it is first. If JAX refuses it because its operands vary apart, they are cast.

_LINEAR_SOLVE = "custom_linear_solve"
_RUNS_JAXPRS = (*jaxprs.CALLS, "scan", "while", "cond", _LINEAR_SOLVE)
_WITH_OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call")


def _bind(original: Any, primitive: Any, *operands: Any, **params: Any) -> Any:
    name = primitive.name
    if name in _WITH_OWN_DERIVATIVE:
        # JAX calls the rules when someone takes the derivative, which may be outside of our call.
        fun, *rules = params["subfuns"]
        if OWN_FOLDER in str(getattr(fun.debug_info, "func_src_info", "")):
            return original(primitive, *operands, **params)  # Ours know of shards.
        if len(rules) == 1:
            rules = [_jvp_rule(rules[0])]
        else:
            axes_of_each = tuple(map(_axes, operands))
            over = NO_AXES.union(*axes_of_each)
            fun = _on_varying(fun, over)
            bwd = _bwd_rule(rules[1], axes_of_each, _is_wrapped(rules[1]))
            rules = [_lifted_rule(_on_varying_pairs(rules[0], over)), bwd]
        params["subfuns"] = (fun, *rules)
        return original(primitive, *operands, **params)
    if (retyped := _retyped(name, operands, params)) is not None:
        return retyped
    if name == _LINEAR_SOLVE:
        operands = tuple(_together(operands))
        retyped = [_retype(*pair) for pair in _of_solve(params, operands)]
        params["jaxprs"] = type(params["jaxprs"])(*retyped)
    elif _is_foreign(primitive):
        _teach(primitive)
        operands = tuple(_together(operands))
    elif name == "pvary":
        # In a jaxpr that was recorded with operands of other types they may vary already.
        axes = frozenset(params["axes"]) - _all_axes(operands)
        if not axes:
            if _is_run_again():
                _needless.get().update(map(_recorded_at, operands))
            return list(operands) if primitive.multiple_results else operands[0]
        params["axes"] = tuple(axis for axis in params["axes"] if axis in axes)
        # JAX would compute a cast of a constant at once inside `jax.ensure_compile_time_eval`, and cannot.
        with _src_config.eager_constant_folding(False):
            return original(primitive, *operands, **params)
    elif name == "psum_invariant" and _needless.get() and _is_run_again():
        is_transpose = "transpose" in str(source_info_util.current().name_stack)
        if is_transpose and not _needless.get().isdisjoint(map(_recorded_at, operands)):
            raise _summed_derivative(operands, params["axes"])
    try:
        return original(primitive, *operands, **params)
    except Exception as error:
        if name in _RUNS_JAXPRS or not is_refusal(error):
            raise
        together = _together(operands)
        if all(map(is_, operands, together)):
            raise
    # Its rule for derivatives may make the same mistake when somebody takes one outside.
    _teach_to_lift(primitive)
    return original(primitive, *together, **params)


def _is_run_again() -> bool:
    """Whether the operation to bind is an equation of a jaxpr that was recorded before."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_AROUND_BIND):
        frame = frame.f_back
    return frame.f_code is _src_core.eval_jaxpr.__code__


def _recorded_at(x: Leaf) -> tuple[Any, tuple[int, ...]]:
    """Which operation of the user's is run again, and on what shape: alike for a cast and its transpose."""
    traceback: Any = source_info_util.current().traceback
    codes, offsets = traceback.raw_frames()
    outside_jax = tuple(
        (code, offset)
        for code, offset in zip(codes, offsets, strict=True)
        if not code.co_filename.startswith(compat.JAX_FOLDER)
    )
    return outside_jax, np.shape(x)


def _summed_derivative(cotangents: Sequence[Leaf], axes: Sequence[AxisName]) -> StatemeshError:
    """An error for the transpose of a cast that was recorded, and is none for the values that there are."""
    line = user_line(frames_in(source_info_util.current().traceback))
    over = axes_argument(axes)
    return error_listing(
        StatemeshError,
        "a derivative would be summed over shards, because it was recorded (as by jax.make_jaxpr) for a "
        "value that all shards share, and runs with values that differ between them",
        [f"{line}: {describe(x)}, summed over {over!r}" for x in cotangents],
        "Let the value vary where it is recorded, and where a loop starts from it: "
        f"`x = jax.lax.pcast(x, {over!r}, to='varying')`.",
    )


def _together(operands: Sequence[Leaf]) -> list[Leaf]:
    """Operands typed as varying over all axes over which any of them does."""
    axes = _all_axes(operands)
    return [_vary(x, axes) for x in operands]


@_src_lu.transformation2  # type: ignore[untyped-decorator]
def _lifted_rule(fun: Any, *args: Any, **kwargs: Any) -> Any:
    with lifting():
        return fun(*args, **kwargs)


@_src_lu.transformation2  # type: ignore[untyped-decorator]
def _on_varying(fun: Any, axes: Axes, *args: Any) -> Any:
    return fun(*(_vary(x, axes) for x in args))


@_src_lu.transformation2  # type: ignore[untyped-decorator]
def _on_varying_pairs(fun: Any, axes: Axes, *args: Any) -> Any:
    # Each argument comes with whether it is differentiated.
    return fun(*(x if isinstance(x, bool) else _vary(x, axes) for x in args))


@_src_lu.transformation2  # type: ignore[untyped-decorator]
def _jvp_rule(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """A result and its tangent vary over the same axes."""
    with lifting():
        results = list(fun(*args, **kwargs))
        half = len(results) // 2
        pairs = [_pair(x, t) for x, t in zip(results[:half], results[half:], strict=True)]
        return [x for x, _ in pairs] + [t for _, t in pairs]


def _pair(x: Leaf, tangent: Leaf) -> list[Leaf]:
    return _together([x, tangent]) if isinstance(tangent, jax.Array) else [x, tangent]


# Whether the next rule to run belongs to an equation that was recorded before, for other operands.
_is_stale: ContextVar[bool] = ContextVar("is_stale", default=False)


def _summing(
    fun: Any, operands: tuple[Axes, ...], is_wrapped: bool, *args: Any, **kwargs: Any
) -> Any:
    """The cotangent of what all shards share is the sum of what each of them makes of it.

    **Arguments:**

    - `operands`: over which axes the operands vary.
    - `is_wrapped`: whether `fun` is such a rule itself, of the equation as it was recorded before.
    """
    over = NO_AXES.union(*operands)
    with lifting():
        if _is_stale.get():
            _is_stale.set(False)
            return fun(*args, **kwargs)
        # What a rule keeps of the operands are the operands themselves, not what they were cast to.
        args = tuple(_vary(x, over) if isinstance(x, jax.Array) else x for x in args)
        _is_stale.set(is_wrapped)
        results = fun(*args, **kwargs)
        # Newer releases also return what a rule logs.
        is_pair = isinstance(results, tuple) and len(results) == 2 and isinstance(results[0], list)
        cotangents = results[0] if is_pair else results
        cotangents = [
            _like(ct, axes) if isinstance(ct, jax.Array) else ct
            for ct, axes in zip(cotangents, operands, strict=True)
        ]
        return (cotangents, results[1]) if is_pair else cotangents


_bwd_rule = _src_lu.transformation2(_summing)


def _is_wrapped(rule: Any) -> bool:
    return any(transform is _summing for transform, *_ in rule.transforms)


def _like(cotangent: Leaf, axes: Axes) -> Leaf:
    summed = tuple(sorted(_axes(cotangent) - axes, key=str))
    if summed:
        cotangent = jax.lax.psum(cotangent, summed)
    return _vary(cotangent, axes)


def _accum(original: Any, self: Any, x: Any) -> None:
    """A cotangent that is one copy adds to one that varies: it is what each shard makes of it."""
    if isinstance(x, jax.Array):
        x = _vary(x, compat.varying_type(self.aval))
    original(self, x)


def _linear_transpose(original: Any, fun: Any, *primals: Any, **kwargs: Any) -> Any:
    """Cotangents get the types of the function's results."""
    axes: list[Axes] = []

    @functools.wraps(fun)
    def recorded(*args: Any) -> Any:
        result = fun(*args)
        axes[:] = map(_axes, tree_util.tree_leaves(result))
        return result

    transposed = original(recorded, *primals, **kwargs)
    return tree_util.Partial(lambda run, cotangent: run(_cast_all(cotangent, axes)), transposed)


def _struct(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """A `ShapeDtypeStruct` of shape and dtype alone: libraries compare some that they make of arrays with
    others that they make of shapes and dtypes.
    """
    dropped = ("sharding", "vma", "manual_axis_type")
    original(self, *args, **{key: x for key, x in kwargs.items() if key not in dropped})


def _make_jaxpr(original: Any, fun: Any, *args: Any, **kwargs: Any) -> Any:
    """A jaxpr that is recorded for shapes and dtypes is for operands that vary over all axes.

    So a gradient that is taken in it is that of each shard, as the library means it that records it.
    """
    make = original(fun, *args, **kwargs)
    axes = compat.manual_axes(jax.sharding.get_abstract_mesh())
    if not axes:
        return make

    @functools.wraps(make)
    def made(*operands: Any, **keywords: Any) -> Any:
        operands, keywords = jax.tree.map(lambda x: _as_varying(x, axes), (operands, keywords))
        return make(*operands, **keywords)

    return made


def _as_varying(x: Any, axes: Axes) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    like = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    aval = jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)
    return _typed(aval, axes, like)


def _jvp(original: Any, fun: Any, primals: Any, tangents: Any, *args: Any, **kwargs: Any) -> Any:
    """Tangents get the types of what they are tangents of."""
    axes = list(map(_axes, tree_util.tree_leaves(primals)))
    return original(fun, primals, _cast_all(tangents, axes), *args, **kwargs)


# A library may record a jaxpr for operands of which it tells JAX only shapes and dtypes, and run it with
# operands that vary. Then it is recorded again, by its equations, for the operands that there are.


def _retyped(name: str, operands: Sequence[Leaf], params: dict[str, Any]) -> Any:
    """What an equation gives that runs jaxprs recorded for operands of other types; `None` for any other."""
    if all(_has_types(jaxpr, xs) for jaxpr, xs in jaxprs.run_by(name, operands, params)):
        return None
    return jaxprs.run_anew(name, operands, params, _runs)


def _of_solve(params: dict[str, Any], operands: Sequence[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """The jaxprs of a `custom_linear_solve`, each with its operands: its constants and the right side."""
    lengths = params["const_lengths"]
    b = operands[sum(lengths) :]
    start = 0
    for jaxpr, length in zip(params["jaxprs"], lengths, strict=True):
        yield jaxpr, [*operands[start : start + length], *b]
        start += length


def _retype(jaxpr: Any, operands: Sequence[Leaf]) -> Any:
    """A jaxpr for operands that vary as these do."""
    if _has_types(jaxpr, operands):
        return jaxpr
    return jax.make_jaxpr(_runs(jaxpr))(*operands)


def _has_types(jaxpr: Any, operands: Sequence[Leaf]) -> bool:
    """Whether a jaxpr was recorded for operands that vary as these do. One that is not there was."""
    if jaxpr is None:
        return True
    pairs = zip(jaxpr.in_avals, operands, strict=True)
    return all(compat.varying_type(aval) == _axes(x) for aval, x in pairs)


def _runs(jaxpr: Any) -> Any:
    # A function of its own: JAX remembers what it has traced by the function.
    run = core.jaxpr_as_fun(jaxpr)
    return lambda *operands: tuple(run(*operands))


# Primitives of other libraries. What they make varies over all axes over which any of their operands does.


@functools.cache
def _is_foreign(primitive: Any) -> bool:
    """Whether another library than JAX says what types the results of a primitive have."""
    rule = primitive.abstract_eval
    cells = getattr(rule, "__closure__", None) or ()
    rules = [rule, *(cell.cell_contents for cell in cells)]
    modules = [getattr(getattr(x, "func", x), "__module__", None) for x in rules if callable(x)]
    return any(not module.split(".")[0].startswith("jax") for module in modules if module)


@functools.cache
def _teach(primitive: Any) -> None:
    """Give a primitive of another library types, and rules that lift.

    This stays. It changes nothing where nothing varies, as outside of every `shard_map`.
    """
    rule = primitive.abstract_eval

    def typed(*avals: Any, **params: Any) -> Any:
        axes = NO_AXES.union(*map(compat.varying_type, avals))
        results, effects = lifted(rule)(*avals, **params)
        if not axes:
            return results, effects
        several = results if primitive.multiple_results else [results]
        like = next(aval for aval in avals if compat.varying_type(aval))
        several = [_typed(aval, axes, like.sharding) for aval in several]
        return several if primitive.multiple_results else several[0], effects

    primitive.abstract_eval = typed
    # JAX remembers the types that it was told before.
    _src_pe._cached_abstract_eval.cache_clear()
    _teach_to_lift(primitive)
    # A rule for one platform is code of that platform, and records nothing.
    if (entry := _src_mlir._lowerings.get(primitive)) is not None:
        mlir.register_lowering(primitive, lifted(entry.rule), inline=entry.inline)


@functools.cache
def _teach_to_lift(primitive: Any) -> None:
    """Let the rules lift by which a primitive is transformed. This stays."""
    for rules in (_ad.primitive_jvps, _ad.primitive_transposes, _batching.fancy_primitive_batchers):
        if primitive in rules:
            rules[primitive] = lifted(rules[primitive])


def _typed(aval: Any, axes: Axes, like: Any = None) -> Any:
    """A type that says what varies. What another library makes says on no mesh of which it could be."""
    kind = getattr(aval, "manual_axis_type", None)
    if kind is None:
        return aval
    if like is not None and aval.sharding.mesh.empty:
        spec = PartitionSpec(*[None] * aval.ndim)
        aval = aval.update(sharding=like.update(spec=spec))
    return aval.update(manual_axis_type=kind.update(varying=axes))


# The wrappers.


class _Wrappers:
    """What stands in the place of functions of JAX while someone lifts."""

    def __init__(self) -> None:
        # Where each function is kept that is replaced, the replacement, and the original.
        self.replaced: list[tuple[Callable[[Any], None], Any, Any]] = []

    def prepare(self) -> None:
        for public, wrapper in (
            (jax.lax.scan, _scan),
            (jax.lax.while_loop, _while_loop),
            (jax.lax.cond, _branching),
            (jax.lax.switch, _branching),
            (jax.lax.custom_linear_solve, _custom_linear_solve),
            (jax.linear_transpose, _linear_transpose),
            (jax.jvp, _jvp),
            (jax.make_jaxpr, _make_jaxpr),
        ):
            # Every library has its own name for `jax.lax.scan`, which is a function around the one in a cell.
            cell = _cell(public)
            self._add(
                functools.partial(setattr, cell, "cell_contents"), wrapper, cell.cell_contents
            )
        for name in ("psum", "pmax", "pmin"):
            # `jax.lax.pmean` calls the one of its module.
            reduction = getattr(jax.lax, name)
            for scope in (vars(jax.lax), reduction.__globals__):
                self._add(functools.partial(scope.__setitem__, name), _reduced, reduction)
        accum = _src_ad.ValAccum
        self._add(functools.partial(setattr, accum, "accum"), _accum, accum.accum)
        struct = jax.ShapeDtypeStruct
        self._add(functools.partial(setattr, struct, "__init__"), _struct, struct.__init__)
        primitive = core.Primitive
        self._add(functools.partial(setattr, primitive, "bind"), _bind, primitive.bind)
        scope = inspect.unwrap(jax.random.gamma).__globals__
        name = "random_insert_pvary"
        self._add(functools.partial(scope.__setitem__, name), _with_key, scope[name])
        for scope in (vars(_src_derivatives), vars(_src_api)):
            put = functools.partial(scope.__setitem__, "core")
            self.replaced.append((put, _Lenient(), scope["core"]))

    def _add(self, put: Callable[[Any], None], wrapper: Any, original: Any) -> None:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Another thread may be lifting.
            if not _active.get():
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        self.replaced.append((put, call, original))

    def put_on(self) -> None:
        if not self.replaced:
            self.prepare()
        for put, wrapper, _ in self.replaced:
            put(wrapper)

    def take_off(self) -> None:
        for put, _, original in self.replaced:
            put(original)


class _Lenient:
    """`jax._src.core`, but for types that differ only in what varies: what has such types is cast later."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_src_core, name)

    def typematch(self, a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
        if not _active.get():
            return bool(_src_core.typematch(a, b, *args, **kwargs))
        return bool(_src_core.typematch(_untyped(a), _untyped(b), *args, **kwargs))

    def typecompat(self, a: Any, b: Any) -> bool:
        if not _active.get():
            return bool(_src_core.typecompat(a, b))
        return bool(_src_core.typecompat(_untyped(a), _untyped(b)))

    def typecheck(self, a: Any, x: Any) -> bool:
        return self.typecompat(a, jax.typeof(x))


def _untyped(aval: Any) -> Any:
    return _typed(aval, NO_AXES)


def _cell(fun: Any) -> Any:
    """The cell that holds what a function of JAX's interface wraps."""
    return fun.__closure__[fun.__code__.co_freevars.index("fun")]


# What `psum`, `pmax` and `pmin` of a tree are over lanes of a `vmap` inside a checked `shard_map`. Those of
# JAX fail there, and the module of collectives over lanes puts its own here.
over_lanes: dict[str, Callable[[PyTree, tuple[AxisName, ...]], PyTree]] = {}


def _reduced(original: Any, x: Any, axis_name: Any, **kwargs: Any) -> Any:
    """A reduction over lanes of a `vmap`, or over mesh axes, of which a leaf may vary over some only."""
    names = flat_names(axis_name)
    on_mesh = compat.manual_axes(jax.sharding.get_abstract_mesh()).intersection(names)
    lanes = tuple(name for name in names if name not in on_mesh)
    arrays = [leaf for leaf in tree_util.tree_leaves(x) if isinstance(leaf, jax.Array)]
    # Of a number JAX knows the result.
    if kwargs.get("axis_index_groups") is not None or not arrays:
        return original(x, axis_name, **kwargs)
    if lanes:
        x = over_lanes[original.__name__](x, lanes)
    if not on_mesh:
        return x
    varies = bool(_all_axes(arrays) & on_mesh)
    cast = jax.tree.map(lambda leaf: _vary(leaf, on_mesh), x) if varies else x
    return original(cast, tuple(name for name in names if name in on_mesh), **kwargs)


def _with_key(original: Any, name: str, key: Any, *args: Any) -> Any:
    """A key that is one copy draws with arguments that vary, as it does with a shape alone."""
    return original(name, _vary(key, _all_axes(args)), *args)


_wrappers = _Wrappers()
# The line of an operation is that of the user's code, or of the library's.
source_info_util.register_exclusion(__file__)
