"""`explain`: what a call lays where, moves, reduces and holds."""

import functools
import json
import re
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm

from .explained_programs import PROGRAMS, Net, Program, X, line, net, train
from .helpers import compiles, counted, make_mesh


jnp: Any = jax.numpy
QUICK = ("python_loop", "unknown_loop", "all_policies", "packed", "exchanges")
CASES = [
    pytest.param(name, mesh, marks=[] if mesh == "8" and name in QUICK else pytest.mark.slow)
    for name in PROGRAMS
    for mesh in ("8", "1", "4x2", "2x2x2")
]
SIZES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}


def trained(mesh: Any = None, **options: Any) -> Any:
    return sm.shard_map(train, mesh or make_mesh(), (None, P("x")), (P("x"), P()), **options)


def in_text(text: str) -> dict[str, float]:
    """The collectives of a compiled program and the bytes that a device sends at each."""
    found = {}
    pattern = r"%([\w.\-]+) = (.*?) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)\("
    for row in text.splitlines():
        if made := re.search(pattern, row):
            name, result, kind = made.groups()
            arrays = re.findall(r"(f32|s32|u32|pred)\[([\d,]*)\]", result)
            total = sum(
                SIZES[t] * int(np.prod([int(n) for n in dims.split(",") if n]))
                for t, dims in arrays
            )
            size = group_size(row)
            factor = {
                "all-reduce": 2 * (size - 1) / size,
                "all-gather": (size - 1) / size,
                "reduce-scatter": size - 1,
                "collective-permute": float(size > 1),
                "all-to-all": (size - 1) / size,
            }[kind]
            found[name] = total * factor
    return found


def group_size(row: str) -> int:
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", row):
        return 1 + ("{0,0}" not in pairs[0])
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{'x'\}", row):
        return int(re.search(r"'x'=(\d+)", mesh[1])[1])  # type: ignore[index]
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", row):
        return int(iota[1])
    first = re.search(r"replica_groups=\{\{([\d,]+)\}", row)
    assert first is not None
    return len(first[1].split(","))


def assert_expected(program: Program, found: sm.Explanation) -> None:
    expected = [
        (
            one.operation,
            one.axes,
            one.times,
            one.unknown_loop,
            one.branch,
            one.cause if one.cause.startswith("the ") else line(one.cause),
        )
        for one in program.expected
    ]
    seen = [
        (
            one.operation,
            one.axes,
            one.times,
            one.unknown_loop,
            one.branch,
            one.line if one.cause.endswith("your code") else one.cause,
        )
        for one in found.collectives
    ]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_every_collective_has_its_cause(name: str, mesh: str) -> None:
    program = PROGRAMS[name]
    mapped, args = program.mapped(make_mesh(mesh)), program.arguments(make_mesh(mesh))
    found = mapped.explain(*args)
    assert_expected(program, found)
    if mesh == "8" and not program.packed:
        # Without compiling it is the same.
        shapes = program.mapped(AbstractMesh((8,), ("x",))).explain(*args)
        assert shapes.bytes == found.bytes
    written = in_text(mapped.lower(*args).compile().as_text())
    ours = {i for one in found.collectives for i in one.instructions}
    assert ours == set(written)
    if not any(one.times > 1 for one in found.collectives):
        assert found.bytes == pytest.approx(sum(written.values()), abs=len(found.collectives))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "packed"])
def test_the_same_is_known_without_compiling(name: str) -> None:
    program = PROGRAMS[name]
    found = program.mapped(AbstractMesh((8,), ("x",))).explain(*program.args())
    assert_expected(program, found)


@pytest.mark.parametrize("name", ["donated", "packed", "exchanges"])
def test_memory_adds_up(name: str) -> None:
    program, mesh = PROGRAMS[name], make_mesh()
    mapped, args = program.mapped(mesh), program.arguments(mesh)
    memory = mapped.explain(*args).memory
    stats = mapped.lower(*args).compile().memory_analysis()
    assert memory is not None
    assert sum(memory.by_argument.values()) == memory.arguments == stats.argument_size_in_bytes
    made = sum(memory.by_result.values())
    assert made + memory.result_table == memory.results == stats.output_size_in_bytes
    assert memory.donated == stats.alias_size_in_bytes
    assert abs(memory.peak - stats.peak_memory_in_bytes) <= 0.1 * stats.peak_memory_in_bytes


def test_memory_of_each_state() -> None:
    memory = trained().explain(net(), X).memory
    assert memory is not None
    assert memory.by_argument == {"net.w": 12, "net.mean": 12, "net.seen": 4, "x": 24}
    expected = {"train(...)[0]": 24, "net.w": 12, "net.mean": 12, "net.seen": 4}
    assert memory.by_result == expected
    # A state has one number, however many arrays it has.
    both = sm.State({"a": jnp.ones(3), "b": jnp.ones(2)})
    fun = sm.shard_map(lambda s: s.value["a"].sum() + s.value["b"].sum(), make_mesh("2"), None, P())
    memory = fun.explain(both).memory
    assert memory is not None and memory.by_argument == {"s": 20}


@pytest.mark.parametrize("donate", ["none", "states"])
def test_the_call_that_follows_compiles_and_traces_nothing(donate: Any) -> None:
    body, count = counted(train)
    mapped = sm.shard_map(body, make_mesh(), (None, P("x")), (P("x"), P()), donate=donate)
    args = mapped.place(net(), X)
    mapped.explain(*args)
    assert count.times == 1
    with compiles() as seen:
        mapped(*args)
    assert (count.times, seen.times) == (1, 0)


def test_nothing_is_run() -> None:
    called: list[Any] = []

    def report(x: Any) -> Any:
        jax.debug.callback(called.append, x.sum())
        return x

    fun = sm.shard_map(report, make_mesh("2"), P("x"), P("x"))
    args = fun.place(X)
    fun.explain(*args)
    jax.effects_barrier()
    assert called == []
    fun(*args)
    jax.effects_barrier()
    assert len(called) == 2


class Placed(sm.Module):
    by_filter: sm.ParamState
    by_itself: sm.State
    nowhere: sm.State
    key: sm.RandomState
    own: sm.State
    bias: jax.Array


def placed() -> Placed:
    return Placed(
        sm.ParamState(jnp.ones((8, 2))),
        sm.State(jnp.ones(16), spec=P("x")),
        sm.State(jnp.ones(3), reduce="max"),
        sm.RandomState(jax.random.key(0)),
        sm.State({"a": jnp.ones(8), "b": jnp.ones((8, 3))}, spec=sm.PerShard("x")),
        jnp.ones(5),
    )


def use(model: Placed, x: Any, y: Any, *, scale: Any) -> Any:
    grown = model.by_itself.value + 1
    own = model.own.set({"a": model.own.value["a"] + 1, "b": model.own.value["b"]})
    return (x * scale).sum() + y, model.replace(
        by_itself=grown, nowhere=x.sum(0), key=model.key.split()[1], own=own
    )


@functools.cache
def explained() -> sm.Explanation:
    mapped = sm.shard_map(
        use,
        make_mesh(),
        (P(), P("x"), None),
        (P("x"), P()),
        state_in_specs={sm.ParamState: P("x")},
        check_vma=False,
    )
    return mapped.explain(placed(), X, jnp.ones(1), scale=jnp.float32(2))


def test_who_says_where_a_leaf_lies() -> None:
    found = {row.path: (row.kind, row.enters, row.placed_by) for row in explained().leaves}
    assert found == {
        "model.by_filter": ("ParamState", "P('x')", "state_in_specs[ParamState]"),
        "model.by_itself": ("State", "P('x')", "its own spec"),
        "model.nowhere": ("State", "P()", "default"),
        "model.key": ("RandomState", "P()", "its kind"),
        "model.own.value['a']": ("State", "PerShard('x')", "its own spec"),
        "model.own.value['b']": ("State", "PerShard('x')", "its own spec"),
        "model.bias": ("array", "P()", "in_specs[0]"),
        "x": ("NumPy array", "P('x')", "in_specs[1]"),
        "y": ("array", "P()", "in_specs[2]"),
        "scale": ("array", "P()", "keyword argument"),
    }


def test_how_a_leaf_leaves() -> None:
    found = {row.path: row.leaves for row in explained().leaves}
    assert found == {
        "model.by_filter": "untouched",
        "model.by_itself": "written",
        "model.nowhere": "written, max over 'x'",
        "model.key": "written",
        "model.own.value['a']": "written",
        "model.own.value['b']": "untouched",
        "model.bias": "untouched",
        "x": "not returned",
        "y": "not returned",
        "scale": "not returned",
    }


def test_shapes_and_bytes_of_a_device() -> None:
    rows = {row.path: row for row in explained().leaves}
    assert rows["model.by_filter"].shard_shape == (1, 2)
    assert rows["model.own.value['b']"].shard_shape == (1, 3)
    assert rows["x"].shard_shape == (2, 3)
    assert (rows["model.by_filter"].bytes, rows["model.key"].bytes, rows["x"].bytes) == (8, 8, 24)
    (made,) = explained().results
    assert (made.path, made.leaves, made.shape) == ("use(...)[0]", "P('x')", (8,))
    assert (made.shard_shape, made.bytes) == ((1,), 4)


def test_a_state_that_leaves_elsewhere() -> None:
    mapped = sm.shard_map(
        lambda state: state.set(state.value + 1), make_mesh(), None, P(), state_out_specs=P("x"),
        state_in_specs=P(None),
    )  # fmt: skip
    (row,) = mapped.explain(sm.State(jnp.ones(8))).leaves
    assert (row.enters, row.leaves) == ("P()", "written to P('x')")


def test_lanes() -> None:
    def lane(model: Net, x: Any) -> Any:
        return x + model.w.value, model.replace(seen=model.seen.value + 1, mean=x)

    mapped = sm.vmap2(lane, in_axes=(None, 1), state_in_axes={0: sm.BatchState}, axis_name="lanes")
    model = net().replace(mean=sm.BatchState(jnp.zeros((16, 3)), reduce="mean"))
    found = mapped.explain(model, X.T)
    assert [(row.path, row.enters, row.placed_by, row.leaves) for row in found.leaves] == [
        ("model.w", "all lanes", "default", "untouched"),
        ("model.mean", "axis 0", "state_in_axes[0]", "written"),
        ("model.seen", "all lanes", "default", "written"),
        ("x", "axis 1", "in_axes[1]", "not returned"),
    ]
    assert not found.collectives
    on_devices = sm.pmap2(lambda x: x + sm.psum(x, "lanes"), axis_name="lanes")
    found = on_devices.explain(np.ones((8, 4), np.float32))
    assert [row.shard_shape for row in found.leaves] == [(1, 4)]
    assert [(one.operation, one.bytes) for one in found.collectives] == [("psum", 28)]


def test_what_must_be_moved() -> None:
    mapped = trained()
    rows = {row.path: row.moved for row in mapped.explain(net(), X).leaves}
    assert rows == {"net.w": 12, "net.mean": 12, "net.seen": 4, "x": 24}
    found = mapped.explain(*mapped.place(net(), X))
    assert [row.moved for row in found.leaves] == [0] * 4
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), net())
    found = mapped.explain(shapes, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert [row.moved for row in found.leaves] == [0] * 4 and found.memory is not None


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_without_devices(kind: Any) -> None:
    mesh = AbstractMesh((1024, 4), ("x", "y"), axis_types=(kind, kind))
    shape = jax.ShapeDtypeStruct((4096, 3), jnp.float32)
    shapes: Any = jax.eval_shape(net)
    found = trained(mesh).explain(shapes, shape)
    assert found.memory is None and {one.compiled for one in found.collectives} == {""}
    rows = {row.path: row for row in found.leaves}
    assert rows["x"].shard_shape == (4, 3) and rows["net.w"].bytes == 12
    assert sorted(one.cause for one in found.collectives) == [
        "the gradient of net.w and the loss",
        "the policy of net.mean, net.seen",
    ]
    # Arrays will do as well as shapes.
    again = trained(mesh).explain(net(), np.ones((4096, 3), np.float32))
    assert again.collectives == found.collectives


class Deep(sm.Module):
    layers: list[Net]


def deep(count: int) -> Deep:
    return Deep([net() for _ in range(count)])


def through(model: Deep, x: Any) -> Any:
    layers = []
    for layer in model.layers:
        x = jnp.tanh(x * layer.w.value)
        layers.append(layer.replace(mean=x.mean(0)))
    return x, model.replace(layers=layers)


def test_layers_alike_are_one_row() -> None:
    mesh = AbstractMesh((4096,), ("x",))
    mapped = sm.shard_map(through, mesh, (None, P("x")), (P("x"), P()))
    shapes: Any = jax.eval_shape(lambda: deep(30))
    found = mapped.explain(shapes, jax.ShapeDtypeStruct((4096, 3), jnp.float32))
    assert len(found.leaves) == 91 and len(found.collectives) == 1
    text = str(found)
    assert len(text.splitlines()) < 25
    assert "30 x 12 B  model.layers[0..29].w     f32[3]" in text
    assert "720 B  psum       x     1      f32[90]  the policy of model.layers[0].mean," in text
    assert "and 27 more" in text


class Wide(sm.Module):
    layers: list[sm.ParamState]


@pytest.mark.slow
def test_a_billion_parameters_on_four_thousand_devices() -> None:
    def make() -> Wide:
        whole, spec = jnp.zeros((1600, 1600)), P(None, "y")
        return Wide([sm.ParamState(whole, spec=spec) for _ in range(400)])

    def loss(model: Wide, x: Any) -> Any:
        for w in model.layers:
            x = jnp.tanh(jax.lax.all_gather(x @ w.value, "y", axis=1, tiled=True))
        return (x**2).mean(), model

    def step(model: Wide, x: Any) -> Any:
        (value, _), grads = sm.value_and_grad(loss, axis_name="x")(model, x)
        pairs = zip(model.layers, grads.layers, strict=True)
        return value, Wide([w.set(w.value - 0.1 * grad.value) for w, grad in pairs])

    mesh = AbstractMesh((256, 16), ("x", "y"))
    mapped = sm.shard_map(step, mesh, (None, P("x")), P(), check_vma=False)
    shapes: Any = jax.eval_shape(make)
    found = mapped.explain(shapes, jax.ShapeDtypeStruct((4096, 1600), jnp.float32))
    assert sum(int(np.prod(row.shape)) for row in found.leaves[:-1]) > 1e9
    assert sum(row.bytes for row in found.leaves) == 400 * 1600 * 100 * 4 + 16 * 1600 * 4
    causes = [one.cause for one in found.collectives]
    # Six gradients of 640 kB fill a bucket of 4 MiB.
    reduced = {cause for cause in causes if cause.startswith("the gradient of model")}
    assert len(reduced) == -(-400 // 6)
    assert len(str(found).splitlines()) < 30


@pytest.mark.slow
def test_a_function_that_makes_mapped_calls() -> None:
    mapped = trained()

    @jax.jit
    def epoch(model: Net, x: Any) -> Any:
        return jax.lax.scan(lambda model, _: mapped(model, x)[::-1], model, None, length=4)

    model, x = mapped.place(net(), X)
    found = sm.explain(epoch, model, x)
    causes = {one.cause: one.times for one in found.collectives}
    assert causes == {
        "the gradient of net.w and the loss": 4,
        "the policy of net.mean, net.seen": 4,
    }
    assert {row.path: row.leaves for row in found.leaves} == {
        "net.w": "written",
        "net.mean": "written, mean over 'x'",
        "net.seen": "written, sum over 'x'",
        "x": "not returned",
    }
    with compiles() as seen:
        epoch(model, x)
    assert seen.times == 0
    # Now it is traced and compiled already.
    assert sm.explain(epoch, model, x) == found
    found = sm.explain(lambda model, x: mapped(model, x)[0].sum(), model, x)
    assert len(found.leaves) == 4 and found.memory is not None
    assert sm.explain(mapped, model, x) == mapped.explain(model, x)


class Shifted(sm.Module):
    w: sm.ParamState
    last: sm.HiddenState | None = None

    def init_state(self) -> "Shifted":
        return self.replace(last=sm.HiddenState(jnp.zeros(3)))

    def update(self, x: Any) -> Any:
        return x * self.w.value, self.replace(last=x)


def test_a_map() -> None:
    model = sm.Map(Shifted(sm.ParamState(jnp.ones(3))), 8, in_axes=0, out_axes=0, behavior="pmap")
    found = sm.explain(model.init_all_states(), jnp.ones((8, 3)))
    assert [(row.path, row.enters, row.leaves) for row in found.leaves] == [
        ("map.module.w", "all lanes", "untouched"),
        ("map.module.last", "axis 0", "written"),
        ("x", "axis 0", "not returned"),
    ]


def test_errors_are_those_of_the_call() -> None:
    mapped = trained()
    for args in [(net(), X, X), (net(), X[:3]), (net(), X[:, :2])]:
        with pytest.raises((ValueError, TypeError)) as called:
            mapped(*args)
        with pytest.raises((ValueError, TypeError)) as asked:
            mapped.explain(*args)
        assert type(asked.value) is type(called.value)
        assert str(asked.value) == str(called.value)
    diverging = sm.shard_map(lambda s, x: s.set(x[0]), make_mesh("2"), (None, P("x")), P())
    texts = []
    for call in (diverging, diverging.explain):
        with pytest.raises(sm.DivergedStateError) as raised:
            call(sm.State(jnp.zeros(3)), X)
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    gone = jnp.ones((16, 3))
    gone.delete()
    with pytest.raises((RuntimeError, ValueError), match="given up to an earlier call"):
        mapped.explain(net(), gone)


def test_a_method_and_static_leaves() -> None:
    class Model(sm.Module):
        w: sm.ParamState
        activation: Any

        @sm.shard_map(mesh=make_mesh("2"), in_specs=(None, P("x")), out_specs=P("x"))
        def __call__(self, x: Any) -> Any:
            return self.activation(x * self.w.value)

    found = Model(sm.ParamState(2.0), jnp.tanh).__call__.explain(X)
    assert [row.path for row in found.leaves] == ["self.w", "x"]


def test_as_text_as_tables_and_as_a_dictionary() -> None:
    found = trained().explain(net(), X)
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    first = text.splitlines()[0]
    assert first.startswith(
        "train on Mesh(x=8), 52 B of arguments a device, 52 B to move first, 2 "
    )
    assert repr(found) == text
    page = found._repr_html_()
    assert page.count("<table>") == 4 and page.count("<tr>") == page.count("</tr>")
    assert "net.mean BatchState" in page.replace("\N{NO-BREAK SPACE}", " ")
    shown = json.loads(json.dumps(found.to_dict()))
    assert shown["leaves"][0]["path"] == "net.w" and shown["collectives"][0]["axes"] == ["x"]
    assert shown["bytes"] == found.bytes == 56


TEXT = """\
train on Mesh(x=8), 52 B of arguments a device, 2 collectives, 56 B sent

Arguments, for each device
  bytes  leaf                 array      part  enters                leaves
  24 B   x array              f32[16,3]  2,3   P('x') (in_specs[1])  not returned
  12 B   net.w ParamState     f32[3]     3     P() (default)         written
  12 B   net.mean BatchState  f32[3]     3     P() (default)         written, mean over 'x'
  4 B    net.seen State       f32[]            P() (default)         written, sum over 'x'

New results, for each device
  bytes  leaf                 array      part  leaves
  24 B   train(...)[0] array  f32[16,3]  2,3   P('x')

Collectives
  sent  operation  over  times  arrays  cause
  28 B  psum       x     1      f32[4]  the gradient of net.w and the loss, LINE
  28 B  psum       x     1      f32[4]  the policy of net.mean, net.seen"""


def test_the_exact_text() -> None:
    mesh: Any = AbstractMesh((8,), ("x",))
    shapes: Any = jax.eval_shape(net)
    found = trained(mesh).explain(shapes, jax.ShapeDtypeStruct(X.shape, X.dtype))
    text = re.sub(r"\S*explained_programs\.py:\d+", "LINE", re.sub(r",\n +", ", ", str(found)))
    assert text == TEXT


def test_advice() -> None:
    large = sm.ParamState(jnp.zeros((2048, 2048)))
    rows = jax.device_put(np.zeros((2**18, 1), np.float32), jax.devices()[1])
    mapped = sm.shard_map(
        lambda w, x: x + w.value[0, 0], make_mesh("2"), (None, P("x")), P("x"), donate="states"
    )
    found = mapped.explain(large, rows)
    assert list(found.advice) == [
        "w is copied to each of 2 devices, 16.0 MiB on each. Give it a spec that splits it.",
        "donate gives nothing up: no result has the shape, dtype and placement of a donated argument.",
    ]
    rows = jax.device_put(np.zeros((2**20, 1), np.float32), jax.devices()[1])
    assert mapped.explain(large, rows).advice[1] == (
        "x: 2.0 MiB are laid out on each device at each call that gets them like this. "
        "Call <lambda>.place once, and pass what it returns."
    )
    assert list(trained(donate="states").explain(net(), X).advice) == []


def test_a_static_leaf_for_which_each_call_is_compiled() -> None:
    mapped = sm.shard_map(lambda f, x: f(x), make_mesh("2"), (None, P("x")), P("x"))
    for k in range(2):
        found = mapped.explain(lambda x, k=k: x + k, X)
    assert list(found.advice) == [
        "f: a call was compiled anew for each value of it. "
        "Pass it as an array, or as an object that compares equal."
    ]


def test_the_picture(tmp_path: Any) -> None:
    mesh = make_mesh("4x2")
    fun = sm.shard_map(
        lambda a, b, c: (a + b[0, 0] + c[0]).sum(),
        mesh,
        (P("x", "y"), P(None, "y"), P(("x", "y"))),
        P(),
        check_vma=False,
    )
    found = fun.explain(np.ones((8, 4)), np.ones((2, 2)), np.ones(8))
    picture = found.draw()
    tree = ElementTree.fromstring(picture.svg)
    shown = [[text.text for text in leaf.iter("{http://www.w3.org/2000/svg}text")] for leaf in tree]
    assert shown == [
        ["a float32[8,4] P('x', 'y')", "0", "1", "2", "3", "4", "5", "6", "7"],
        ["b float32[2,2] P(None, 'y')", "0,2,4,…", "1,3,5,…"],
        ["c float32[8] P(('x', 'y'))", "0", "1", "2", "3", "4", "5", "6", "7"],
    ]
    assert picture._repr_svg_() == picture.svg and repr(picture) == "<picture of 3 leaves>"
    picture.save(tmp_path / "leaves.svg")
    assert (tmp_path / "leaves.svg").read_text() == picture.svg
    large = AbstractMesh((64,), ("x",))
    (leaf,) = ElementTree.fromstring(
        sm.shard_map(lambda x: x, large, P("x"), P("x"))
        .explain(jax.ShapeDtypeStruct((64,), jnp.float32))
        .draw()
        .svg
    )
    assert leaf[0].text == "x float32[64] P('x') 64 parts" and len(leaf) == 1 + 2 * 16


def test_the_page_is_well_formed() -> None:
    found = sm.shard_map(lambda a: a, make_mesh("2"), P("x"), P("x")).explain(np.ones(4))
    ElementTree.fromstring(found._repr_html_())


@pytest.mark.parametrize("types", [AxisType.Explicit, AxisType.Auto])
def test_a_function_of_jax_itself(types: Any) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(types,))
    total: Any = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    x = jax.device_put(jnp.arange(16.0), jax.sharding.NamedSharding(mesh, P("x")))
    ours: Any = sm.shard_map(lambda x: jax.lax.pmax(x.max(), "x"), mesh, P("x"), P())
    funs: list[Any] = [lambda x: total(x), jax.jit(total), total, lambda x: total(x) + ours(x)]
    for fun in funs:
        found = sm.explain(fun, x)
        assert found.collectives[0].operation == "psum"
        assert found.collectives[0].bytes == 7


@pytest.mark.parametrize("explicit", [True, False])
def test_each_part_of_a_scanned_body_is_a_row(explicit: bool) -> None:
    def layer(c: Any, w: Any) -> Any:
        return jnp.tanh(jax.lax.psum(c * w, "x")), None

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.lax.scan(jax.checkpoint(layer), x, w.value)[0].sum()

        return jax.value_and_grad(loss)(w)

    mesh: Any = jax.make_mesh((8,), ("x",)) if explicit else make_mesh()
    call = sm.shard_map(step, mesh, (None, P("x")), P(), check_vma=False)
    found = call.explain(sm.ParamState(jnp.ones(4)), jnp.arange(16.0))
    assert [(one.cause, one.times) for one in found.collectives] == [
        ("your code", 4),
        ("recomputing your code", 4),
        ("the gradient of your code", 4),
    ]
    assert len({one.line for one in found.collectives}) == 1
    rows = [row for row in str(found).splitlines() if " psum " in row]
    assert len(rows) == 3
