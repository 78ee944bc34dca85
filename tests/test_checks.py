"""A call refuses arguments that cannot be meant, before it runs anything, with words that name them."""

import copy
import functools
import inspect
import os
import pickle
from collections.abc import Callable
from operator import getitem
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import legacy, testing
from tests.helpers import assert_says, make_mesh


POSITIONS = (
    "pmap2: {name} is {given} of type {type}, but must be the position of an argument, or several, numbered "
    "from 0, as in {name}=(0,)."
)
NAMES = (
    "shard_map: axis_names is {given} of type {type}, but must be the name of a mesh axis, or several, as in "
    "axis_names={{'data'}}; leave it out for all."
)
DEVICES = (
    "pmap2: devices is {given} of type {type}, but must be jax.Devices in the order of the lanes, as in "
    "devices=jax.devices()[:4]."
)
BACKEND = "pmap2: backend is {given} of type {type}, but must be the name of a platform, as in backend='cpu'."
SPMD = (
    "vmap2: spmd_axis_name is {given} of type {type}, but must be the name of a mesh axis, or a tuple of "
    "several, as in spmd_axis_name='data'."
)
LANES = (
    "{transform}: axis_name is {given} of type {type}, but must be a string, as in axis_name='data'; a "
    "number is the position of an array's axis, and a tuple is several names."
)
SEVERAL = (
    "{what}: axis_name is {given} of type {type}, but must be a string, or a tuple of several, as in "
    "axis_name=('data', 'model')."
)
KINDS = (
    "{transform}: {name} is {kind}: a call of it gives no values, only something that is still to run. "
    "JAX traces a function once, from its arguments to its results: write `def` without `async`, and "
    "`return` the values without `yield`."
)


def same(x: Any) -> Any:
    return x


def double(x: Any) -> Any:
    return 2 * x


def sharded(fun: Any = same, **kwargs: Any) -> Any:
    return sm.shard_map(fun, make_mesh(), P("x"), P("x"), **kwargs)


def check(make: Callable[[], Any], text: str, given: Any, **words: Any) -> None:
    shown = text.format(given=repr(given), type=type(given).__name__, **words)
    assert_says(make, TypeError, shown)


@pytest.mark.parametrize(
    "given", [None, "n", "donated", 1.0, [1.0], True, [False], [None], (0, "x")]
)
@pytest.mark.parametrize("name", ["donate_argnums", "static_broadcasted_argnums"])
def test_positions(name: str, given: Any) -> None:
    check(lambda: sm.pmap2(same, **{name: given}), POSITIONS, given, name=name)


@pytest.mark.parametrize("given", [0, {0}, [-1], np.int32(0), np.array([0]), range(1)])
def test_positions_in_every_form(given: Any) -> None:
    mapped = sm.pmap2(same, static_broadcasted_argnums=given, axis_size=2)
    np.testing.assert_array_equal(mapped(3), [3, 3])


@pytest.mark.parametrize("given", [None, 3, 0, 1.5, ["x", ["y"]]])
def test_names_of_mesh_axes(given: Any) -> None:
    check(lambda: sharded(axis_names=given), NAMES, given)


def test_what_carries_lanes() -> None:
    check(lambda: sm.pmap2(same, devices=3), DEVICES, 3)  # type: ignore[call-overload]
    check(lambda: sm.pmap2(same, devices=jax.devices()[0]), DEVICES, jax.devices()[0])
    check(lambda: sm.pmap2(same, backend=3), BACKEND, 3)  # type: ignore[call-overload]
    check(lambda: sm.vmap2(same, spmd_axis_name=["x"]), SPMD, ["x"])  # type: ignore[call-overload]


@pytest.mark.parametrize("given", ["", 0, False, 3, 1.5, (), ("a",), ("a", "b")])
@pytest.mark.parametrize("transform", ["vmap2", "pmap2"])
def test_names_of_lanes(transform: str, given: Any) -> None:
    check(lambda: getattr(sm, transform)(same, axis_name=given), LANES, given, transform=transform)


def test_any_other_object_names_lanes() -> None:
    name = object()
    psum = lambda x: jax.lax.psum(x, name)
    np.testing.assert_array_equal(sm.vmap2(psum, axis_name=name)(np.ones(3)), [3, 3, 3])


@pytest.mark.parametrize("given", ["", 0, False, ["a"], {}, ("a", 0)])
def test_names_of_several_axes(given: Any) -> None:
    loss = lambda model: (model.sum(), model)
    check(lambda: sm.value_and_grad(loss, axis_name=given), SEVERAL, given, what="value_and_grad")
    rng = sm.RandomState(jax.random.key(0))
    check(lambda: rng.rows(3, given), SEVERAL, given, what="RandomState.rows")
    check(lambda: sm.nn.BatchNorm(2, axis_name=given), SEVERAL, given, what="BatchNorm")
    check(lambda: sm.nn.Dropout(0.5, rng.key, axis_name=given), SEVERAL, given, what="Dropout")


@pytest.mark.parametrize("given", [True, False, None, ["states"], {}, 3, (0,)])
def test_donate(given: Any) -> None:
    text = f"donate={given!r} is not known. Use one of 'none', 'states', 'all'."
    assert_says(lambda: sharded(donate=given), sm.StatemeshError, text)


async def coroutine(x: Any) -> Any:
    return x


async def stream(x: Any) -> Any:
    yield x


def generator(x: Any) -> Any:
    yield x


class Late:
    __name__ = "Late"

    async def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("fun", "name", "kind"),
    [
        (coroutine, "coroutine", "an async function"),
        (stream, "stream", "an async generator function"),
        (generator, "generator", "a generator function"),
        (functools.partial(coroutine), "coroutine", "an async function"),
        (Late(), "Late", "an async function"),
    ],
)
def test_functions_that_do_not_run_when_they_are_called(fun: Any, name: str, kind: str) -> None:
    static = functools.partial(sm.pmap2, static_broadcasted_argnums=0)
    makes: dict[str, Any] = {
        "shard_map": sharded,
        "pmap2": static,
        "vmap2": sm.vmap2,
        "value_and_grad": sm.grad,
    }
    for transform, make in makes.items():
        text = KINDS.format(transform=transform, name=name, kind=kind)
        assert_says(functools.partial(make, fun), TypeError, text)


@pytest.mark.parametrize("given", [3, None, "loss"])
def test_a_loss_that_is_no_function(given: Any) -> None:
    text = (
        f"value_and_grad takes a function, got {given!r} of type {type(given).__name__}. The function comes "
        "first: `value_and_grad(loss_fn, axis_name='data')`."
    )
    assert_says(lambda: sm.value_and_grad(given), TypeError, text)


TEXTS = {
    "name": "a string, as in name='mean'",
    "tag": "a string or several, as in tag='slow' or tag=('slow', 'encoder')",
    "WithTag": "a string, as in WithTag('slow'); for several write [WithTag('a'), WithTag('b')]",
    "OfType": "a class, as in OfType(sm.ParamState)",
    "PathContains": "the name of a field, the key of a dictionary or an index, as in PathContains('encoder')",
    "Where": "a function of the tree, as in Where(lambda model: model.encoder)",
    "n": "an int, 0 or more: the number of rows that this shard holds, as in rows(x.shape[0], 'data')",
    "map": "the name of a method, as in map('update')",
    "init_kwargs": "a dictionary of arguments by name, as in init_kwargs={'batch_size': 4}, or {} for none",
    "state_tag": "a string, as in state_tag='new'",
    "num": "an int, 0 or more: the number of keys, as in split(2)",
}


def refused(make: Callable[[Any], Any], given: Any, what: str, argument: str, wanted: str) -> None:
    kind, shown = type(given).__name__, repr(given)
    text = f"{what}: {argument} is {shown} of type {kind}, but must be {TEXTS[wanted]}."
    assert_says(lambda: make(given), TypeError, text)


@pytest.mark.parametrize("given", [3, 1.5, [3], b"a", ("a", 3), ["a", ["b"]], object])
def test_tags(given: Any) -> None:
    refused(lambda tag: sm.BatchState(1.0, tag=tag), given, "BatchState", "tag", "tag")
    refused(lambda tag: sm.State(1.0).replace(tag=tag), given, "State", "tag", "tag")


@pytest.mark.parametrize("given", [3, ["a"], b"a"])
def test_names_of_states(given: Any) -> None:
    refused(lambda name: sm.State(1.0, name=name), given, "State", "name", "name")
    refused(lambda name: sm.State(1.0).replace(name=name), given, "State", "name", "name")


@pytest.mark.parametrize(
    ("filter", "argument", "given"),
    [
        ("OfType", "type", "State"),
        ("OfType", "type", (3,)),
        ("WithTag", "tag", ["a"]),
        ("WithTag", "tag", None),
        ("PathContains", "key", ["a"]),
        ("Where", "where", "encoder"),
        ("Where", "where", None),
    ],
)
def test_named_filters(filter: str, argument: str, given: Any) -> None:
    refused(getattr(sm.filters, filter), given, filter, argument, filter)


@pytest.mark.parametrize("given", [3.5, "a", True, [3]])
def test_counts(given: Any) -> None:
    rng = sm.RandomState(jax.random.key(0))
    refused(rng.rows, given, "RandomState.rows", "n", "n")
    refused(rng.split, given, "RandomState.split", "num", "num")


def test_counts_below_zero() -> None:
    rng = sm.RandomState(jax.random.key(0))
    text = f"RandomState.rows: n is -3, but must be {TEXTS['n']}."
    assert_says(lambda: rng.rows(-3, "x"), sm.StatemeshError, text)
    text = f"RandomState.split: num is -1, but must be {TEXTS['num']}."
    assert_says(lambda: rng.split(-1), sm.StatemeshError, text)
    two: Any = np.int64(2)
    assert rng.rows(two)[0].shape == rng.split(two)[0].shape == (2,)


@pytest.mark.parametrize(
    ("make", "label", "value", "dtype", "least", "most"),
    [
        (lambda: sm.State(2**70), "State: value", 2**70, "int32", -(2**31), 2**31 - 1),
        (
            lambda: sm.State([1, -(2**31) - 1]),
            "State: value[1]",
            -(2**31) - 1,
            "int32",
            -(2**31),
            2**31 - 1,
        ),
        (lambda: sm.State(np.int8(3)).set(300), "State: value", 300, "int8", -128, 127),
        (lambda: sm.State(np.uint8(3), name="n").set(-1), "n: value", -1, "uint8", 0, 255),
        (
            lambda: sm.State(3).replace(value=2**31),
            "State: value",
            2**31,
            "int32",
            -(2**31),
            2**31 - 1,
        ),
    ],
)
def test_numbers_that_do_not_fit(
    make: Callable[[], Any], label: str, value: int, dtype: str, least: int, most: int
) -> None:
    text = (
        f"{label} is {value}, which does not fit into {dtype} ({least} to {most}). Give the state a dtype "
        "that holds it, as in State(jnp.float32(0))."
    )
    assert_says(make, sm.StructureError, text)


class Counter(sm.Module):
    count: sm.State | None = None
    inner: "Counter | None" = None

    def init_state(self) -> "Counter":
        return self.replace(count=sm.State(0.0))


@pytest.mark.parametrize("make", [sm.vmap2_new_states, sm.pmap2_new_states])
def test_what_creates_states(make: Any) -> None:
    kwargs: list[Any] = [None, 3, ["a"], {3: 1}]
    for given in kwargs:
        one = lambda given: make(Counter(), given, axis_size=2)
        refused(one, given, make.__name__, "init_kwargs", "init_kwargs")
    tags: list[Any] = [3, ["a"], b"a"]
    for given in tags:
        one = lambda given: make(Counter(), {}, given, axis_size=2)
        refused(one, given, make.__name__, "state_tag", "state_tag")


def test_map() -> None:
    refused(lambda name: sm.Map(Counter(), 2).map(name), 3, "Map", "map", "map")
    refused(lambda tag: sm.Map(Counter(), 2, state_tag=tag), 3, "Map", "state_tag", "state_tag")
    check(lambda: sm.Map(Counter(), 2, axis_name=0), LANES, 0, transform="Map")
    behavior: Any = ["vmap"]
    text = "behavior=['vmap'] is not known. Use one of 'vmap', 'pmap'."
    assert_says(lambda: sm.Map(Counter(), 2, behavior=behavior), sm.StatemeshError, text)
    text = (
        "a key of init_state_axes is 'a' of type str, not an axis. Use an int (negative ones count from the "
        "end), or None for what all lanes share."
    )
    assert_says(lambda: sm.Map(Counter(), 2, init_state_axes={"a": ...}), TypeError, text)
    there = "The states are:\n  - module.count: State(float32[])"
    text = f"init_state_axes: no state matches 'slow'. {there}"
    made = sm.Map(Counter(), 2, init_state_axes="slow")
    assert_says(lambda: made.init_all_states(), sm.StructureError, text)


def test_states_of_modules_that_are_nested_deeply() -> None:
    model = Counter()
    for _ in range(400):
        model = Counter(inner=model)
    assert len(jax.tree.leaves(model.init_all_states())) == 401


def abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype)


def deleted() -> jax.Array:
    x = jax.numpy.ones(8) + 1
    x.delete()
    return x


X = np.ones(8, np.float32)


def test_meshes() -> None:
    mesh: Any
    wanted = "Make one with `jax.make_mesh((jax.device_count(),), ('x',))`."
    for mesh in (None, "x"):
        text = f"mesh must be a jax.sharding.Mesh, got {mesh!r} of type {type(mesh).__name__}. {wanted}"
        for make in (
            lambda mesh: sm.place(X, mesh),
            lambda mesh: sm.pack(sm.State(X), mesh),
            lambda mesh: legacy.shard_map(same, mesh, P("x"), P("x")),
        ):
            assert_says(functools.partial(make, mesh), TypeError, text)
    empty = Mesh(np.array([]), ("x",))
    for what in ("place", "pack"):
        text = f"{what} requires a non-empty mesh, but {empty} has no devices. {wanted}"
        one: Any = functools.partial(getattr(sm, what), sm.State(X), empty)
        assert_says(one, sm.SpecError, text)
    text = (
        "shard_map: auto is None of type NoneType, but must be the names of mesh axes that are not mapped "
        "over, as in auto={'model'}."
    )
    auto: Any = None
    call = lambda: legacy.shard_map(same, make_mesh(), P("x"), P("x"), auto=auto)
    assert_says(call, TypeError, text)
    expected = r"but must be a jax.sharding.Mesh, which has devices to put arrays on\."
    with pytest.raises(TypeError, match=expected):
        sm.place(X, make_mesh().abstract_mesh)


def test_axes_that_are_left_open() -> None:
    text = """\
specs name axes the mesh does not have:
  - {where} refers to UNCONSTRAINED: P(UNCONSTRAINED)
The axes to map over are 'x' of Mesh(x=8). A mapped call must know how each axis is split: write None for one that is not split."""  # noqa: E501
    spec = P(P.UNCONSTRAINED)
    make = lambda: sm.shard_map(same, make_mesh(), spec, P("x"))
    assert_says(make, sm.SpecError, text.format(where="in_specs"))
    assert_says(lambda: sm.place(X, make_mesh(), spec), sm.SpecError, text.format(where="specs"))
    held = sm.shard_map(same, make_mesh(), None, P())
    state = sm.State(X, spec=spec)
    assert_says(lambda: held(state), sm.SpecError, text.format(where="the spec of x"))


def test_placing_what_is_traced() -> None:
    text = """\
{what}: these arrays are traced, as inside jit, grad or vmap, and cannot be placed:
  - {path}
Place them before, outside the traced function. Inside it, a mapped call lays out its arguments itself."""
    place = lambda x: sm.place({"w": sm.State(x)}, make_mesh())["w"].value.sum()
    for transform in (jax.jit, jax.grad, jax.vmap):
        shown = text.format(what="place", path="tree['w']")
        x = X[None] if transform is jax.vmap else X
        assert_says(functools.partial(transform(place), x), TypeError, shown)
    shown = text.format(what="same.place", path="x")
    assert_says(lambda: jax.jit(sharded().place)(X), TypeError, shown)


def test_shapes_without_values() -> None:
    text = """\
{what}: these arguments are shapes without values (jax.ShapeDtypeStruct):
  - {path}
Pass arrays. For shapes there are `mapped.lower(...)` and `jax.eval_shape(mapped, ...)`."""
    for mapped in (sharded(), sm.pmap2(same), sm.vmap2(same)):
        shown = text.format(what="same", path="x")
        for call in (mapped, mapped.place, mapped.unsharded):
            assert_says(functools.partial(call, abstract(X)), TypeError, shown)
    mesh, model = make_mesh(), {"w": sm.State(X)}
    bare = jax.eval_shape(lambda: model)
    shown = text.format(what="place", path="tree['w']")
    assert_says(lambda: sm.place(bare, mesh), TypeError, shown)
    assert_says(lambda: sm.pack(bare, mesh), TypeError, text.format(what="pack", path="model['w']"))


def test_arrays_that_were_given_up() -> None:
    text = """\
{what}: these arguments were given up to an earlier call that donates its arguments:
  - {path}
Go on with what that call returned, as in `out, model = step(model, x)`."""
    gone = deleted()
    shown = text.format(what="same", path="x")
    for mapped in (sharded(), sm.vmap2(same)):
        held = functools.partial(mapped, gone)
        inside = lambda x, held=held: jax.jit(held)()
        for call in (mapped, mapped.place, mapped.unsharded, inside):
            assert_says(functools.partial(call, gone), sm.StatemeshError, shown)
    shown = text.format(what="place", path="tree")
    assert_says(lambda: sm.place(gone, make_mesh()), sm.StatemeshError, shown)


def test_packed_models() -> None:
    mesh = make_mesh()
    packed = sm.pack({"a": sm.State(np.ones(4)), "b": sm.State(1.0)}, mesh)
    text = (
        "pack: model is Packed(2 states in 1 arrays, 0 not packed) of type Packed, but must be a model that "
        "is not packed yet, as in pack(packed.unpack(), mesh)."
    )
    assert_says(lambda: sm.pack(packed, mesh), TypeError, text)
    text = (
        "Packed is immutable; cannot assign to `buffers`. Its values change in a mapped call, by "
        "`jax.tree.map`, or in the model: `packed.unpack()`."
    )
    assert_says(lambda: setattr(packed, "buffers", ()), AttributeError, text)
    assert_says(lambda: delattr(packed, "buffers"), AttributeError, text)
    for again in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        np.testing.assert_array_equal(again.unpack()["a"].value, np.ones(4))
    text = (
        "Packed: the buffer with ['a'], ['b'] is {shape}, but was packed with shape (5,), in which the "
        "states have their positions. Change shapes in the model, and pack the model anew."
    )
    step = sm.shard_map(lambda model: model, mesh, None, None)
    step(packed)
    changes: list[Callable[[Any], Any]] = [
        lambda x: x.reshape(-1, 1),
        lambda x: x[:2],
        lambda x: np.stack([x, x]),
    ]
    for change in changes:
        other = jax.tree.map(change, packed)
        (buffer,) = other.buffers
        shown = text.format(shape=f"float32[{','.join(map(str, buffer.shape))}]")
        assert_says(other.unpack, sm.StructureError, shown)
        assert_says(functools.partial(getitem, other.states, "['b']"), sm.StructureError, shown)
        assert_says(functools.partial(step, other), sm.StructureError, shown)
        repr(other)


@pytest.mark.parametrize("what", ["state_in_specs", "state_out_specs"])
@pytest.mark.parametrize("filter", [sm.RandomState, sm.filters.OfType(sm.RandomState)])
def test_specs_of_keys(what: str, filter: Any) -> None:
    text = (
        f"RandomState in {what} cannot be placed with spec=P('x'): every shard holds the same key and "
        "draws its own numbers from it. Leave `spec` out, or use sm.PerShard('axis') for independent keys."
    )
    specs: dict[str, Any] = {what: {filter: P("x")}}
    assert_says(lambda: sharded(**specs), sm.SpecError, text)
    for spec in (P(), sm.PerShard("x")):
        sharded(**{what: {filter: spec}})


def written(change: Callable[[Any], Any], state: sm.State, **kwargs: Any) -> Any:
    """The outcome for a state whose value is replaced in a mapped call."""
    step = lambda state, x: state.replace(value=change(state.value + x.sum()))
    return sm.shard_map(step, make_mesh(), (None, P("x")), None, **kwargs)(state, X)


def test_a_state_whose_structure_is_replaced_leaves_the_way_it_entered() -> None:
    new = written(lambda value: (value, {"b": 2 * value}), sm.State(1.0, reduce="mean"))
    assert jax.tree.map(float, new.value) == (2.0, {"b": 4.0})
    state = sm.State(np.arange(16.0, dtype=np.float32))
    new = written(lambda value: (value, value), state, state_in_specs=P("x"), donate="states")
    for x in new.value:
        np.testing.assert_array_equal(x, np.arange(16) + 1)
        assert x.sharding.spec == P("x")
    step = sm.vmap2(
        lambda s, x: s.replace(value=(s.value, x)), in_axes=(None, 0), state_in_axes=...
    )
    first, second = step(sm.State(X), 3 * X).value
    np.testing.assert_array_equal([first, second], [X, 3 * X])


def test_a_sum_needs_the_structure_of_the_old_value() -> None:
    text = """\
n: reduce='sum' adds the shards' increments to the old value, but the new value has a different tree structure.
  old: PyTreeDef(*)
  new: PyTreeDef((*, *))
Keep the structure, or merge with a function: reduce=lambda old, new, axis_names: jax.lax.psum(new, axis_names)."""  # noqa: E501
    state = sm.State(1.0, reduce="sum", name="n")
    step = lambda s, x: s.replace(value=(s.value, s.value + x.sum()))
    for mapped in (
        sm.shard_map(step, make_mesh(), (None, P("x")), None),
        sm.vmap2(step, in_axes=(None, 0)),
    ):
        assert_says(functools.partial(mapped, state, X), sm.StructureError, text)


def test_leaves_with_specs_of_their_own_are_not_mixed_up() -> None:
    state = sm.State({"a": X, "b": X}, spec={"a": P("x"), "b": P()})
    step = sm.shard_map(lambda s: s.replace(value=s.value["b"]), make_mesh(), None, None)
    text = """\
specs must be a tree prefix of what they place:
  - the spec of s is a dict with keys ['a', 'b'], but s.value is float32[8]
One spec stands for a whole subtree: P() or P('axis') in its place fits anything."""
    assert_says(lambda: step(state), sm.SpecError, text)


def lines(first: str, *others: str) -> str:
    return "\n".join([first, *others])


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_specs_that_stand_for_states_only(kind: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    split, state = P("data"), sm.State(np.ones(8), reduce="sum")
    model = {"mean": sm.BatchState(np.zeros(8), reduce="mean"), "w": [sm.ParamState(np.ones(8))]}

    def step(model: Any, x: Any = 0.0, rng: Any = None) -> Any:
        return None

    def mapped(in_specs: Any, **options: Any) -> Any:
        return sm.shard_map(step, mesh, in_specs, P(), **options)

    head = "step: in_specs places arrays outside of States, so these specs would place nothing:"
    mend = (
        "Write None there, and say where States go: state_in_specs={...: P('data')} or State(value, "
        "spec=P('data')). A RandomState needs neither, because each shard draws from a stream of its own."
    )
    one = "  - in_specs = P('data') stands for model, a State"
    both = [
        "  - in_specs[0] = P('data') stands for model['mean'], a BatchState",
        "  - in_specs[0] = P('data') stands for model['w'][0], a ParamState",
    ]
    key = "  - in_specs[2] = P('data') stands for rng, a RandomState"
    rng = sm.RandomState(jax.random.key(0))
    refused_calls = [
        (lambda: mapped(split)(state), one),
        (lambda: mapped((split,))(state), one.replace("in_specs", "in_specs[0]")),
        (lambda: mapped((split, P("data")))(model, X), "\n".join(both)),
        (lambda: mapped(({"mean": split, "w": None}, split))(model, X), both[0]),
        (lambda: mapped((None, split, split))(state, X, rng), key),
        (lambda: mapped((split,)).place(state), one.replace("in_specs", "in_specs[0]")),
        (lambda: mapped((split,)).explain(state), one.replace("in_specs", "in_specs[0]")),
        (lambda: mapped((split,)).unsharded(state), one.replace("in_specs", "in_specs[0]")),
    ]
    for call, items in refused_calls:
        assert_says(call, sm.SpecError, lines(head, items, mend))
    head = "place: specs places arrays outside of States, so these specs would place nothing:"
    items = "  - specs = P('data') stands for tree, a State"
    placing = mend.replace("state_in_specs", "state_specs")
    assert_says(lambda: sm.place(state, mesh, split), sm.SpecError, lines(head, items, placing))
    # Where it places something, or says what holds anyway, nothing is lost.
    mapped(split)(state, X)
    mapped(split)({"state": state, "x": X})
    mapped((P(), P("data")))(model, X)
    mapped((split, None), state_in_specs=split)(model, None)
    mapped((split,))(sm.State(np.ones(8), spec=split, reduce="sum"))
    mapped((split, None))({"name": "static"}, None)
    sm.place({"state": state, "x": X}, mesh, split)
    sm.place(model, mesh, split, state_specs=split)


def test_flags() -> None:
    def grads(has_aux: Any) -> Any:
        return sm.grad(lambda w: (w.value.sum(), w), has_aux=has_aux)

    def scanned(reverse: Any) -> Any:
        return sm.scan(lambda c, x: (c, x), sm.State(0.0), X, reverse=reverse)

    def legacy_map(check_rep: Any) -> Any:
        return legacy.shard_map(double, make_mesh(), P(), P(), check_rep=check_rep)

    flags: dict[tuple[str, str], Callable[[Any], Any]] = {
        ("shard_map", "check_vma"): lambda x: sm.shard_map(double, out_specs=P(), check_vma=x),
        ("shard_map", "jit"): lambda x: sm.shard_map(double, out_specs=P(), jit=x),
        ("shard_map", "check_rep"): legacy_map,
        ("value_and_grad", "has_aux"): grads,
        ("scan", "reverse"): scanned,
    }
    for (what, argument), make in flags.items():
        for given in ("no", "yes", None, 0, 1, [True]):
            shown = f"{given!r} of type {type(given).__name__}"
            text = f"{what}: {argument} is {shown}, but must be True or False."
            assert_says(functools.partial(make, given), TypeError, text)
        for given in (True, False, np.True_):
            make(given)


def test_the_length_of_a_scan() -> None:
    def run(length: Any) -> Any:
        return sm.scan(lambda c, x: (c, x), sm.State(0.0), None, length)

    wanted = "an int, 0 or more: the number of steps, as in length=10"
    text = f"scan: length is -3, but must be {wanted}."
    assert_says(lambda: run(-3), sm.StatemeshError, text)
    for given in (2.0, True, "3", [3]):
        kind = type(given).__name__
        text = f"scan: length is {given!r} of type {kind}, but must be {wanted}."
        assert_says(functools.partial(run, given), TypeError, text)
    for steps in (0, np.int64(3)):
        run(steps)


def test_the_number_of_devices() -> None:
    for given, kind in (
        (0, sm.StatemeshError),
        (-1, sm.StatemeshError),
        (True, TypeError),
        ("8", TypeError),
    ):
        text = (
            f"set_devices: count is {given!r}, but must be an int, 1 or more, as in set_devices(8)."
        )
        flags = os.environ.get("XLA_FLAGS")
        assert_says(functools.partial(testing.set_devices, given), kind, text)  # type: ignore[arg-type]
        assert os.environ.get("XLA_FLAGS") == flags


def test_paths_that_keep_their_values() -> None:
    options: Any = {"meshes": [{"x": 2}], "in_specs": P("x"), "out_specs": P("x")}
    for keep in ("zz", ["args[0]", "zz"]):
        text = (
            "keep: no argument has the path 'zz'. The paths of the arguments are args[0]['a'], args[0]['b']; "
            "a shorter one, such as 'args[0]', stands for all that begin with it."
        )
        check = functools.partial(testing.assert_equivalent, first, ({"a": X, "b": X},), **options)
        assert_says(functools.partial(check, keep=keep), sm.StructureError, text)
    testing.assert_equivalent(first, ({"a": X, "b": X},), keep="args[0]['a']", **options)


def first(tree: Any) -> Any:
    return 2 * tree["a"]


MAPPINGS: dict[str, Callable[[], Any]] = {
    "shard_map": lambda: sm.shard_map(double, make_mesh(), P("x"), P("x")),
    "pmap2": lambda: sm.pmap2(double),
    "vmap2": lambda: sm.vmap2(double),
}


@pytest.mark.parametrize("transform", MAPPINGS)
def test_a_mapping_does_not_change(transform: str) -> None:
    mapped, options = MAPPINGS[transform](), inspect.signature(getattr(sm, transform)).parameters
    assert {"shard_map": "mesh", "pmap2": "devices", "vmap2": "in_axes"}[transform] in options
    for name in options:
        mend = f"Map the function again, as in {transform}(double, {name}=...)"
        if name == "mesh":
            mend += ", or call double.on_mesh(mesh)"
        text = f"double.{name} cannot be set: what {transform} returned does not change. {mend}."
        assert_says(functools.partial(setattr, mapped, name, None), AttributeError, text)
    for name in ("lower", "explain", "place", "unsharded", "on_mesh"):
        text = (
            f"double.{name} cannot be set: what {transform} returned does not change. Give what you set "
            "another name."
        )
        assert_says(functools.partial(setattr, mapped, name, None), AttributeError, text)
    # Like a function it takes attributes, and what `functools.wraps` sets.
    mapped.note = "mine"
    assert functools.update_wrapper(mapped, first).note == "mine"
    assert mapped.__name__ == "first"
    np.testing.assert_array_equal(mapped(X), 2 * X)
