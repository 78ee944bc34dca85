"""Functions of `jax.jit` under `assert_equivalent`: the devices against the same program on one."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from statemesh.testing import assert_equivalent
from statemesh.testing._check import _check
from statemesh.testing._locate import _locate


jnp: Any = jax.numpy


def mesh_of(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


AUTO, EXPLICIT = mesh_of(), mesh_of(AxisType.Explicit)
X = np.sin(np.arange(32, dtype=np.float32)).reshape(8, 4)
W = {"a": np.cos(np.arange(32, dtype=np.float32)).reshape(4, 8), "b": X / 2}


def shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """Of the weights of two layers, each split where the other is not."""
    return {"a": on(mesh, None, "model"), "b": on(mesh, "model")}


def on(mesh: Mesh, *entries: str | None) -> NamedSharding:
    return NamedSharding(mesh, P(*entries))


# Right programs


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x @ w["a"]) @ w["b"]))


def train(w: Any, momentum: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(w, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, w, momentum), momentum, value


@pytest.mark.slow
def test_training_step_with_donated_buffers() -> None:
    split = shardings(AUTO)
    step = jax.jit(
        train,
        in_shardings=(split, split, on(AUTO, "data")),
        out_shardings=(split, split, on(AUTO)),
        donate_argnums=(0, 1),
    )
    zeros = jax.tree.map(np.zeros_like, W)
    checked = assert_equivalent(step, (W, zeros, X))
    assert checked.fed_back == (("args[0]", "train(...)[0]"), ("args[1]", "train(...)[1]"))
    assert len(checked.differentiated) == 5
    assert checked.agreed[:3] == (
        "on mesh data=2, model=2",
        "inside jit on mesh data=2, model=2",
        "saved on mesh data=2, model=2 and placed on mesh data=2, model=2",
    )
    assert not checked.unjudged


@functools.partial(jax.jit, static_argnums=2)
def scaled(w: Any, x: Any, power: int, *, shift: Any) -> Any:
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w + shift), on(AUTO, "data", "model"))
    return hidden.sum(0) ** power


def test_shardings_of_the_arguments_with_static_ones_and_a_constraint() -> None:
    w, x = jax.device_put(W["a"], on(AUTO, None, "model")), jax.device_put(X, on(AUTO, "data"))
    shift = jax.device_put(np.float32(0.5), on(AUTO))
    checked = assert_equivalent(scaled, (w, x, 2), kwargs={"shift": shift})
    gradient = "the gradient by args[0]", "the gradient by args[1]"
    assert checked.differentiated == (*gradient, "the gradient by kwargs['shift']")


@jax.jit
def explicit(w: Any, x: Any, unused: Any) -> Any:
    del unused
    hidden = jnp.tanh(x @ w["a"])
    return jnp.dot(hidden, w["b"], out_sharding=on(EXPLICIT, "data")), hidden.sum(0)


def test_explicit_axes() -> None:
    w, x = jax.device_put(W, shardings(EXPLICIT)), jax.device_put(X, on(EXPLICIT, "data"))
    checked = assert_equivalent(explicit, (w, x, x))
    assert checked.agreed[:2] == ("on mesh data=2, model=2", "inside jit on mesh data=2, model=2")
    assert len(checked.differentiated) == 4


def descent(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        y = jnp.dot(jnp.tanh(x @ w["a"]), w["b"], out_sharding=on(EXPLICIT, "data"))
        return jnp.mean(jnp.square(y))

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


@pytest.mark.slow
def test_explicit_axes_of_jit_in_a_training_step() -> None:
    split = shardings(EXPLICIT)
    step = jax.jit(
        descent, in_shardings=(split, on(EXPLICIT, "data")), out_shardings=(split, on(EXPLICIT))
    )
    checked = assert_equivalent(step, (W, X))
    assert len(checked.differentiated) == 3
    assert "inside jit on mesh data=2, model=2" in checked.agreed


MESHES: list[Any] = [{"data": 2}, {"data": 4}]


@jax.jit
def centered(x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x - x.mean(0), P("data"))


by_its_specs = jax.jit(lambda x: x - x.mean(0), in_shardings=P("data"))


def test_in_specs_or_specs_of_jit_place_the_arguments_on_each_mesh() -> None:
    for fun, in_specs in ((centered, P("data")), (by_its_specs, ...)):
        checked = assert_equivalent(fun, (X,), meshes=MESHES, in_specs=in_specs, gradients=False)
        assert checked.agreed[:2] == ("on mesh data=2", "on mesh data=4")


def test_a_mesh_that_the_caller_has_set() -> None:
    x = jax.device_put(X, on(AUTO, "data"))
    with jax.set_mesh(AUTO):
        checked = assert_equivalent(centered, (x,), gradients=False)
    assert checked.agreed[0] == "on mesh data=2, model=2"


@jax.jit
def by_context(x: Any) -> Any:
    return x * (1 if jax.sharding.get_abstract_mesh().empty else 2)


def test_a_program_is_traced_for_the_mesh_around_it() -> None:
    x = jax.device_put(X, on(AUTO, "data"))
    assert assert_equivalent(by_context, (x,), gradients=False).agreed
    with jax.set_mesh(AUTO):
        assert assert_equivalent(by_context, (x,), gradients=False).agreed


def halved(state: Any) -> Any:
    return {"x": state["x"] / 2}


def test_a_result_is_put_where_jit_takes_it() -> None:
    step = jax.jit(halved, in_shardings=on(AUTO, "data"), out_shardings=on(AUTO, "model"))
    assert assert_equivalent(step, ({"x": X},), gradients=False).fed_back


@jax.jit
def overflowing(x: Any) -> Any:
    return jnp.log(jnp.exp(x))


def test_what_one_device_makes_of_its_dtypes_too_is_no_mistake() -> None:
    x = jax.device_put(np.full(8, 100, np.float32), on(AUTO, "data"))
    assert assert_equivalent(overflowing, (x,), gradients=False).agreed


def test_it_is_compared_with_a_function_that_is_given() -> None:
    x = jax.device_put(X, on(AUTO, "data"))
    with pytest.raises(AssertionError, match=r"^<lambda>: the calls do not agree: .* is off by"):
        assert_equivalent(by_its_specs_on(AUTO), (x,), unsharded=lambda x: x - x.mean(0) / 2)


def by_its_specs_on(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x - x.mean(0), in_shardings=on(mesh, "data"))


def test_a_function_of_shards_under_jit_stays_one() -> None:
    checked = assert_equivalent(
        jnp.sin,
        (X,),
        meshes=[{"data": 2}],
        in_specs=P("data"),
        out_specs=P("data"),
        gradients=False,
    )
    assert "inside jit on mesh data=2" in checked.agreed


# Wrong programs. No partitioner makes a mistake when it is told to, so that these make their own.


@custom_partitioning
def total(x: Any) -> Any:
    return x.sum(0)


def _without_all_reduce(mesh: Mesh, args: Any, result: Any) -> Any:
    del args, result
    return mesh, lambda x: x.sum(0), NamedSharding(mesh, P()), (NamedSharding(mesh, P("data")),)


total.def_partition(
    partition=_without_all_reduce,
    infer_sharding_from_operands=lambda mesh, args, shape: NamedSharding(mesh, P()),
    sharding_rule="i j -> j",
)


def report(fun: Any, *args: Any, **more: Any) -> str:
    """The report of a check that must fail."""
    with pytest.raises(AssertionError, match="the calls do not agree") as failure:
        assert_equivalent(fun, args, gradients=False, **more)
    return str(failure.value)


@jax.jit
def summed(w: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ w)
    added = total(hidden)
    return 2 * added


def line_in(fun: Any, number: int) -> str:
    """The file and number of a line in a function of `jax.jit`, counted from its decorator."""
    return f"test_jitted.py:{fun.__wrapped__.__code__.co_firstlineno + number}"


def placed_wrong() -> tuple[Any, Any]:
    return jax.device_put(W["a"], on(AUTO)), jax.device_put(X, on(AUTO, "data"))


def test_copies_differ_where_a_partition_rule_drops_its_all_reduce() -> None:
    first, _, head, *place, line, lost, _ = report(summed, *placed_wrong()).splitlines()
    see, path = line_in(summed, 3), "copies of summed(...) on several devices differ"
    assert first == f"summed: the calls do not agree, see {see}: {path} on mesh data=2, model=2."
    assert place[:2] == [
        "  On the devices values are wrong first here:",
        f"    {see}: added = total(hidden)",
    ]
    assert place[2].startswith("      - `custom_partitioning`: float32[8] with spec P()")
    assert head == "On mesh data=2, model=2, compared with the function on one device:"
    assert line.startswith("  - summed(...): float32[8] with spec P() has one value for all shards")
    assert "on shard data=0, model=0 and" in line
    assert "The compiled program has lost a reduction" in lost


def test_the_report_names_the_call_the_path_the_spec_and_the_shards() -> None:
    # In the first call the wrong sum is not used.
    before = {"sum": jax.device_put(np.zeros((4, 8), np.float32), on(AUTO, None, "model"))}

    @jax.jit
    def counted(state: Any, w: Any, x: Any) -> Any:
        wrong = total(jnp.tanh(x @ w)) * jnp.ones((4, 1))
        used = jnp.where(state["sum"] > 0, wrong, 1)
        return {"sum": jax.lax.with_sharding_constraint(used, on(AUTO, "data", "model"))}, x.sum()

    text = report(counted, before, *placed_wrong())
    first, see = text.splitlines()[0], line_in(counted, 2)
    assert first.startswith(
        f"counted: the calls do not agree, see {see}: counted(...)[0]['sum'] is off"
    )
    assert "with spec P('data', 'model'), on mesh data=2, model=2, call 2 of 3." in first
    assert "compared with the function on one device" in text


@custom_partitioning
def running(x: Any) -> Any:
    return jnp.cumsum(x, 0)


def _without_what_came_before(mesh: Mesh, args: Any, result: Any) -> Any:
    del args, result
    rows = NamedSharding(mesh, P("data"))
    return mesh, lambda x: jnp.cumsum(x, 0), rows, (rows,)


running.def_partition(
    partition=_without_what_came_before,
    infer_sharding_from_operands=lambda mesh, args, shape: args[0].sharding,
    sharding_rule="i j -> i j",
)


def test_the_report_names_the_shards_that_are_wrong() -> None:
    text = report(jax.jit(running), jax.device_put(X, on(AUTO, "data")))
    shards = "on shard data=1, model=0 and data=1, model=1, with spec P('data')"
    assert shards in text.splitlines()[0].replace(", None)", ")")


def added(x: Any) -> Any:
    return running(x + 1)


@pytest.mark.parametrize("which", ["in_shardings", "out_shardings"])
def test_the_line_is_found_where_only_jit_knows_the_mesh(which: str) -> None:
    options: dict[str, Any] = {which: on(AUTO, "data")}
    text = report(jax.jit(added, **options), X)
    line = f"test_jitted.py:{added.__code__.co_firstlineno + 1}"
    assert text.startswith(f"added: the calls do not agree, see {line}: ")


@jax.custom_vjp
def multiplied(w: Any, x: Any) -> Any:
    return x @ w


def _pull(saved: Any, ct: Any) -> Any:
    w, x = saved
    each = (x[:, :, None] * ct[:, None]).reshape(len(x), -1)
    return total(each).reshape(w.shape), ct @ w.T


multiplied.defvjp(lambda w, x: (x @ w, (w, x)), _pull)


@jax.jit
def in_one_line(w: Any, x: Any) -> Any:
    return multiplied(w, x)


def test_a_wrong_gradient_is_found() -> None:
    w, x = placed_wrong()
    with pytest.raises(AssertionError) as failure:
        assert_equivalent(in_one_line, (w, x))
    text = str(failure.value)
    see, path = line_in(in_one_line, 2), "copies of the gradient by args[0]"
    assert text.startswith(f"in_one_line: the calls do not agree, see {see}: {path} on several")
    assert "It agrees on mesh data=2, model=2, on mesh" in text


def test_a_report_ends_without_an_error_of_its_own(monkeypatch: Any) -> None:
    def failing(*_: Any) -> Any:
        raise ValueError("no such program")

    monkeypatch.setattr(_locate, "RAISE_FAILURES", False)
    monkeypatch.setattr(_check, "first_wrong", failing)
    text = report(summed, *placed_wrong())
    assert "No line is named, because looking for it failed: ValueError: no such program" in text


@jax.jit
def unreduced(x: Any) -> Any:
    def of_shard(x: Any) -> Any:
        return x.sum(0)  # No psum.

    mapped = jax.shard_map(of_shard, mesh=AUTO, in_specs=P("data"), out_specs=P(), check_vma=False)
    return mapped(x)


def test_a_dropped_psum_inside() -> None:
    text = report(unreduced, jax.device_put(X, on(AUTO, "data")))
    first = f"unreduced: the calls do not agree, see {line_in(unreduced, 6)}: copies"
    assert text.startswith(first)
    assert "float32[4] with out spec P() is one copy for all shards along 'data'" in text


# What makes no sense


plain = jax.jit(lambda x: x * 2)


@pytest.mark.parametrize(
    ("fun", "options", "message"),
    [
        (plain, {}, "neither its shardings nor its arguments name a mesh"),
        (plain, {"meshes": MESHES}, "without shardings: give in_specs"),
        (plain, {"in_specs": P("data")}, "in_specs need meshes"),
        (plain, {"state_in_specs": P("data")}, "has no shards: leave out state_in_specs"),
        (
            plain,
            {"check_vma": True, "bitwise": True},
            "has no shards: leave out check_vma, bitwise",
        ),
        (plain, {"unsharded": False}, "has no shards: leave out unsharded"),
        (
            plain,
            {"meshes": [AbstractMesh((2,), ("data",))], "in_specs": P()},
            "runs on devices only",
        ),
        (
            by_its_specs_on(AUTO),
            {"meshes": MESHES},
            "shardings on a mesh of its own: leave out meshes",
        ),
        (lambda x: x, {}, "meshes is None of type NoneType, but must be a list of meshes"),
    ],
)
def test_what_makes_no_sense_is_refused(fun: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        assert_equivalent(fun, (X,), **options)


def test_errors_of_the_function_say_where_it_was_called() -> None:
    x = jax.device_put(X, on(AUTO, "data"))
    with pytest.raises(TypeError) as failure:
        assert_equivalent(jax.jit(lambda x: x @ x), (x,))
    assert "While assert_equivalent called `<lambda>`" in "".join(failure.value.__notes__)
