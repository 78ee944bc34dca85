"""`explain`: what a call lays where, moves, reduces and holds."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.explain.explained_programs import PROGRAMS, Net, Program, X, net, train
from tests.helpers import compiles, counted, make_mesh, slow


jnp: Any = jax.numpy
OTHER_MESHES = {
    "nested_scans": "4x2",
    "gradient_through_gather": "4x2",
    "packed": "4x2",
    "all_policies": "2x2x2",
    "exchanges": "2x2x2",
    "donated": "2",
}
EXCHANGES = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"


def trained(mesh: Any = None, **options: Any) -> Any:
    return sm.shard_map(train, mesh or make_mesh(), (None, P("x")), (P("x"), P()), **options)


def assert_expected(program: Program, found: sm.Explanation) -> None:
    def cause(row: Any) -> str:
        return row.line if row.cause.endswith("your code") else row.cause

    assert sorted(program.expected_rows()) == sorted(
        (row.operation, row.axes, row.times, cause(row), row.unknown_loop, row.branch)
        for row in found.collectives
    )


@pytest.mark.parametrize(
    ("name", "mesh"),
    [*((name, "8") for name in PROGRAMS), *(slow(*case) for case in OTHER_MESHES.items())],
)
def test_every_collective_has_its_cause_and_every_byte_its_place(name: str, mesh: str) -> None:
    kind = AxisType.Explicit if mesh == "8" else AxisType.Auto
    program, devices = PROGRAMS[name], make_mesh(mesh, kind)
    mapped, args = program.mapped(devices), program.arguments(devices)
    found = mapped.explain(*args)
    assert_expected(program, found)
    if mesh == "8" and not program.packed:
        # The same is known without compiling.
        shapes = program.mapped(AbstractMesh((8,), ("x",), axis_types=(kind,))).explain(*args)
        assert_expected(program, shapes)
        assert shapes.bytes == found.bytes and shapes.memory is None
        assert {row.compiled for row in shapes.collectives} == {""}

    compiled = mapped.lower(*args).compile()
    written = re.findall(rf"%([\w.\-]+) = .*? (?:{EXCHANGES})(?:-start)?\(", compiled.as_text())
    assert {i for one in found.collectives for i in one.instructions} == set(written)
    memory, stats = found.memory, compiled.memory_analysis()
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


def test_nothing_is_run_and_the_call_that_follows_compiles_and_traces_nothing() -> None:
    called: list[Any] = []

    def report(model: Net, x: Any) -> Any:
        jax.debug.callback(called.append, x.sum())
        return train(model, x)

    body, count = counted(report)
    mapped = sm.shard_map(body, make_mesh(), (None, P("x")), (P("x"), P()), donate="states")
    args = mapped.place(net(), X)
    mapped.explain(*args)
    jax.effects_barrier()
    assert (called, count.times) == ([], 1)
    with compiles() as seen:
        mapped(*args)
    assert (count.times, seen.times) == (1, 0)
    jax.effects_barrier()
    assert len(called) == 8


class Placed(sm.Module):
    by_filter: sm.ParamState
    by_itself: sm.State
    nowhere: sm.State
    key: sm.RandomState
    own: sm.State
    bias: jax.Array


def test_where_a_leaf_lies_who_says_so_and_how_it_leaves() -> None:
    model = Placed(
        sm.ParamState(jnp.ones((8, 2))),
        sm.State(jnp.ones(16), spec=P("x")),
        sm.State(jnp.ones(3), reduce="max"),
        sm.RandomState(jax.random.key(0)),
        sm.State({"a": jnp.ones(8), "b": jnp.ones((8, 3))}, spec=sm.PerShard("x")),
        jnp.ones(5),
    )

    def use(model: Placed, x: Any, y: Any, *, scale: Any) -> Any:
        changed = {"by_itself": model.by_itself.value + 1, "nowhere": x.sum(0)}
        own = model.own.set({**model.own.value, "a": model.own.value["a"] + 1})
        new = model.replace(**changed, key=model.key.split()[1], own=own)
        return (x * scale).sum() + y, new

    mapped = sm.shard_map(
        use,
        make_mesh(),
        (P(), P("x"), None),
        (P("x"), P()),
        state_in_specs={sm.ParamState: P("x")},
        check_vma=False,
    )
    found = mapped.explain(model, X, jnp.ones(1), scale=jnp.float32(2))
    rows = {row.path: row for row in found.leaves}
    assert {
        path: (row.kind, row.enters, row.placed_by, row.leaves) for path, row in rows.items()
    } == {
        "model.by_filter": ("ParamState", "P('x')", "state_in_specs[ParamState]", "untouched"),
        "model.by_itself": ("State", "P('x')", "its own spec", "written"),
        "model.nowhere": ("State", "P()", "default", "written, max over 'x'"),
        "model.key": ("RandomState", "P()", "its kind", "written"),
        "model.own.value['a']": ("State", "PerShard('x')", "its own spec", "written"),
        "model.own.value['b']": ("State", "PerShard('x')", "its own spec", "untouched"),
        "model.bias": ("array", "P()", "in_specs[0]", "untouched"),
        "x": ("NumPy array", "P('x')", "in_specs[1]", "not returned"),
        "y": ("array", "P()", "in_specs[2]", "not returned"),
        "scale": ("array", "P()", "keyword argument", "not returned"),
    }
    assert rows["model.by_filter"].shard_shape == (1, 2)
    assert rows["model.own.value['b']"].shard_shape == (1, 3)
    assert rows["x"].shard_shape == (2, 3)
    assert [rows[path].bytes for path in ("model.by_filter", "model.key", "x")] == [8, 8, 24]
    (made,) = found.results
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


def test_layers_alike_are_one_row() -> None:
    """On more devices than there are."""

    def through(layers: list[Net], x: Any) -> Any:
        new = []
        for layer in layers:
            x = jnp.tanh(x * layer.w.value)
            new.append(layer.replace(mean=x.mean(0)))
        return x, new

    mesh = AbstractMesh((4096,), ("x",))
    mapped = sm.shard_map(through, mesh, (None, P("x")), (P("x"), P()))
    shapes: Any = jax.eval_shape(lambda: [net() for _ in range(30)])
    found = mapped.explain(shapes, jax.ShapeDtypeStruct((4096, 3), jnp.float32))
    assert len(found.leaves) == 91 and len(found.collectives) == 1
    text = str(found)
    assert len(text.splitlines()) < 25
    assert re.search(r"30 x 12 B  layers\[0..29\].w +f32\[3\]", text)
    assert "720 B  psum       x     1      f32[90]  the policy of layers[0].mean," in text
    assert "and 27 more" in text


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
    diverging = sm.shard_map(lambda s, x: s.set(x[0]), make_mesh("2"), (None, P("x")), P())
    wrong: list[tuple[Any, Any]] = [
        *[(mapped, (net(), *args)) for args in [(X, X), (X[:3],), (X[:, :2],)]],
        (diverging, (sm.State(jnp.zeros(3)), X)),
    ]
    for call, args in wrong:
        with pytest.raises((ValueError, TypeError)) as called:
            call(*args)
        with pytest.raises(type(called.value)) as asked:
            call.explain(*args)
        assert str(asked.value) == str(called.value)
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
    text, page = str(found), found._repr_html_()
    assert repr(found) == text and max(map(len, text.splitlines())) <= 100
    assert page.count("<table>") == 4 and page.count("<tr>") == page.count("</tr>")
    assert "net.mean BatchState" in page.replace("\N{NO-BREAK SPACE}", " ")
    ElementTree.fromstring(trained(make_mesh("2")).explain(net(), X)._repr_html_())
    shown = json.loads(json.dumps(found.to_dict()))
    assert shown["leaves"][0]["path"] == "net.w" and shown["collectives"][0]["axes"] == ["x"]
    assert shown["bytes"] == found.bytes == 56
    # What a cell of a notebook shows, by its type.
    display: Any = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
    table, _ = display.format(found)
    assert table == {"text/plain": text, "text/html": page}
    picture, _ = display.format(found.draw())
    assert picture["image/svg+xml"].startswith("<svg")


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
    mapped = sm.shard_map(lambda f, x: f(x), make_mesh("2"), (None, P("x")), P("x"))
    for k in range(2):
        found = mapped.explain(lambda x, k=k: x + k, X)
    assert list(found.advice) == [
        "f: a call was compiled anew for each value of it. "
        "Pass it as an array, or as an object that compares equal."
    ]


def test_the_picture(tmp_path: Path) -> None:
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


def test_each_part_of_a_scanned_body_is_a_row() -> None:
    def layer(c: Any, w: Any) -> Any:
        return jnp.tanh(jax.lax.psum(c * w, "x")), None

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.lax.scan(jax.checkpoint(layer), x, w.value)[0].sum()

        return jax.value_and_grad(loss)(w)

    call = sm.shard_map(step, jax.make_mesh((8,), ("x",)), (None, P("x")), P(), check_vma=False)
    found = call.explain(sm.ParamState(jnp.ones(4)), jnp.arange(16.0))
    assert [(one.cause, one.times) for one in found.collectives] == [
        ("your code", 4),
        ("recomputing your code", 4),
        ("the gradient of your code", 4),
    ]
    assert len({one.line for one in found.collectives}) == 1
    rows = [row for row in str(found).splitlines() if " psum " in row]
    assert len(rows) == 3


def test_two_loops_over_one_function_are_two_rows() -> None:
    def turn(total: Any, x: Any) -> Any:
        return total + jax.lax.psum(x, "x"), None

    def both(x: Any, y: Any) -> Any:
        first, _ = jax.lax.scan(turn, jnp.zeros(1), x)
        second, _ = jax.lax.scan(turn, jnp.zeros(1), y)
        return first * second

    def gradient(x: Any, y: Any) -> Any:
        return jax.grad(lambda x: both(x, y).sum())(x)

    mesh, rows = jax.make_mesh((8,), ("x",)), P(None, "x")
    args = jnp.ones((3, 8)), jnp.ones((5, 8))
    found = sm.shard_map(both, mesh, rows, P()).explain(*args)
    assert [(one.times, one.compiled) for one in found.collectives] == [
        (3, "as traced"),
        (5, "as traced"),
    ]
    # The gradient by `x` needs the second loop only.
    found = sm.shard_map(gradient, mesh, rows, rows).explain(*args)
    assert [(one.times, one.compiled) for one in found.collectives] == [
        (3, "removed"),
        (5, "as traced"),
    ]


def test_a_scope_in_a_backward_function_is_part_of_the_cause() -> None:
    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return 2 * x

    def backward(_: None, g: Any) -> tuple[Any]:
        with jax.named_scope("halos"):
            return (jax.lax.ppermute(g, "x", [(0, 1)]),)

    doubled.defvjp(lambda x: (doubled(x), None), backward)

    def step(x: Any) -> Any:
        def loss(x: Any) -> Any:
            with jax.named_scope("layer"):
                turned = jax.lax.ppermute(x, "x", [(1, 2)])
            return jax.vmap(jax.checkpoint(doubled))(turned).sum()

        return jax.grad(loss)(x)

    call = sm.shard_map(step, jax.make_mesh((8,), ("x",)), P("x"), P("x"))
    causes = {row.cause for row in call.explain(jnp.arange(16.0)).collectives}
    assert {"the gradient of your code in halos", "the gradient of your code in layer"} <= causes


def test_arguments_have_the_names_that_the_function_under_a_wrapper_gives_them() -> None:
    mapped = sm.shard_map(lambda mean, x: (mean, x), make_mesh(), (None, P("x")), (P(), P("x")))

    def step(model: Any, rows: Any, *, scale: Any) -> Any:
        return mapped(model, rows * scale)

    args = sm.State(jnp.ones(())), jnp.ones(8)
    for fun in (step, jax.jit(step), eqx.filter_jit(step)):
        memory = sm.explain(fun, *args, scale=jnp.ones(())).memory
        assert memory is not None and list(memory.by_argument) == ["model", "rows", "scale"]
