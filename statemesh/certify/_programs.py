"""Short programs in plain JAX, each of which fails if a cell is wrong."""

import ast
import inspect

from .._base._checks import is_inexact
from . import _operands
from ._cells import AROUND, MAPS, TYPE
from ._rows import Row, drawn
from ._run import Judged


_HEAD = """\
import os; os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, {module}
from jax import lax; from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_enable_x64", True); KEY = jax.random.key(7)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.{kind},))
"""

# Of each of two shards, whose numbers differ, the operands.
_OPERANDS = """\
a_and_b = np.random.default_rng(2).uniform(0.2, 0.9, (2, 2, 4, 4))
of_shards = [({operands},) for a, b in map(jnp.asarray, a_and_b)]
call = lambda {names}: {call}
"""

# The sum of all results, in which it counts where an entry stands.
_TOTAL = """\
def total({names}):
    ys = [y for y in jax.tree.leaves(call({names})) if jnp.issubdtype(y.dtype, jnp.inexact)]
    weights = [jnp.cos(jnp.arange(y.size)).reshape(y.shape) for y in ys]
    return sum(jnp.sum(w * (jnp.real(y) + jnp.imag(y))) for w, y in zip(weights, ys))
"""

_ONE = """\
as_integers = lambda y: jax.random.key_data(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else y
results = lambda {names}: [as_integers(y) for y in jax.tree.leaves({made}) if y.dtype != jax.dtypes.float0]
"""

# What is right is computed without a mesh: some functions do not run on one device where one is set.
_IN_MESH = "with jax.set_mesh(mesh): "

_COMPARED = """\
for g, w in zip(got, want, strict=True):
    for shard in g.addressable_shards:
        np.testing.assert_allclose(shard.data, w[shard.index], rtol=1e-6, atol=1e-9)
"""


def program(row: Row, cell: Judged) -> str:
    """The text of a program whose assertion fails if a cell is wrong."""
    floats = [k for k, x in enumerate(row.operands) if is_inexact(drawn(x, 0))]
    names = ", ".join(f"x{k}" for k in range(len(row.operands)))
    prefix = row.name.rsplit(".", 1)[0]
    module = "statemesh as sm" + (f", {prefix}" if prefix.startswith("statemesh") else "")
    kind = "Auto" if cell.mode == "Auto" else "Explicit"
    head = _HEAD.format(module=module if cell.mode == "statemesh" else prefix, kind=kind)
    call = row.call.replace("f(", f"{row.name}(", 1)
    text = head + _helpers(row)
    text += _OPERANDS.format(operands=", ".join(row.operands), names=names, call=call)
    if cell.column.startswith("vjp"):
        text += _TOTAL.format(names=names)
    text += _ONE.format(names=names, made=_made(cell, names, floats, len(row.operands)))
    if cell.mode in MAPS:
        return text + _of_map(row, cell, names, floats) + _COMPARED
    return text + _partitioned(row, cell) + _COMPARED


def _made(cell: Judged, names: str, floats: list[int], count: int) -> str:
    """What one shard makes, as an expression."""
    call, of = f"call({names})", ", ".join(f"x{k}" for k in floats)
    if cell.column == "jvp":
        tangents = "".join(f"jnp.cos(x{k})," for k in floats)
        return f"jax.jvp(lambda {of}: {call}, ({of},), ({tangents}))[1]"
    if cell.column == "vjp":
        # So that the sum is each shard's own, whatever the function makes of its operands.
        plus_zero = (
            " + 0.0 * lax.axis_index('x')" if cell.mode in ("shard_map", "statemesh") else ""
        )
        pulled = f"jax.vjp(lambda {of}: total({names}){plus_zero}, {of})"
        return f"(lambda y, pull: pull(jnp.ones_like(y)))(*{pulled})"
    if cell.column in ("vmap", "lanes"):
        other = "0.9 * " if floats else ""
        mapped = floats or list(range(count))
        axes = "".join("0," if k in mapped else "None," for k in range(count))
        operands = ", ".join(
            f"jnp.stack([x{k}, {other}x{k}])" if k in mapped else f"x{k}" for k in range(count)
        )
        if cell.column == "vmap":
            return f"jax.vmap(lambda {names}: {call}, ({axes}))({operands})"
        summed = f"jax.tree.map(lambda y: lax.psum(y, 'lanes'), {call})"
        return f"jax.vmap(lambda {names}: {summed}, ({axes}), None, axis_name='lanes')({operands})"
    return call


def _partitioned(row: Row, cell: Judged) -> str:
    operand, axis = cell.split.rsplit(" on axis ", 1)
    k = row.operands.index(operand)
    spec = "None, " * int(axis) + "'x'"
    return (
        "sharded = list(of_shards[0])\n"
        f"sharded[{k}] = jax.device_put(of_shards[0][{k}], NamedSharding(mesh, P({spec})))\n"
        "want = results(*of_shards[0])\n"
        f"{_IN_MESH}got = jax.jit(results)(*sharded)\n"
    )


def _of_map(row: Row, cell: Judged, names: str, floats: list[int]) -> str:
    varying = [k for k, x in enumerate(row.operands) if x in cell.split.split(" and ")]
    places = range(len(row.operands))
    specs = "".join("P('x')," if k in varying else "P()," for k in places)
    stacked = "".join(
        f"jnp.stack([s[{k}] for s in of_shards])," if k in varying else f"of_shards[0][{k}],"
        for k in places
    )
    inside = ", ".join(f"x{k}[0]" if k in varying else f"x{k}" for k in places)
    each = ", ".join(f"s[{k}]" if k in varying else f"of_shards[0][{k}]" for k in places)
    of = ", ".join(f"x{k}" for k in floats)
    is_summed = cell.column == AROUND or (cell.column == "vjp" and cell.mode != "unchecked")

    def mapped(made: str, out: str) -> str:
        fun = f"lambda {names}: {made}"
        if cell.mode == "statemesh":
            return f"sm.shard_map({fun}, mesh, ({specs}), {out})"
        check = ", check_vma=False" if cell.mode == "unchecked" else ""
        return f"jax.shard_map({fun}, mesh=mesh, in_specs=({specs}), out_specs={out}{check})"

    text = f"specs, stacked = ({specs}), ({stacked})\n"
    text += "inputs = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(stacked, specs)]\n"
    if cell.column.startswith("vjp"):
        gradient = f"jax.vjp(lambda {of}: total({names}), {of})[1](jnp.ones(()))"
        text += f"each = [(lambda {names}: {gradient})({each}) for s in of_shards]\n"
        joined = "".join(
            f"jnp.stack([e[{i}] for e in each]),"
            if k in varying or not is_summed
            else f"sum(e[{i}] for e in each),"
            for i, k in enumerate(floats)
        )
        text += f"want = [{joined}]\n"
    else:
        text += f"want = [jnp.stack(ys) for ys in zip(*[results({each}) for s in of_shards])]\n"
    if cell.column == AROUND:
        loss = f"lax.psum(total({inside}), 'x')"
        text += f"mapped = {mapped(loss, 'P()')}\n"
        text += f"around = lambda {names}: jax.vjp(lambda {of}: mapped({names}), {of})[1](jnp.ones(()))\n"
        return text + f"{_IN_MESH}got = jax.jit(around)(*inputs)\n"
    if cell.column == TYPE:
        k = cell.result
        text += f"{_IN_MESH}got = jax.jit({mapped(f'results({inside})[{k}]', 'P()')})(*inputs)  # one copy\n"
        return text + f"got, want = [got], [want[{k}][0]]\n"
    if is_summed:
        out = "".join("P('x')," if k in varying else "P()," for k in floats)
        kept = "".join(
            f"g[{i}][None]," if k in varying else f"g[{i}]," for i, k in enumerate(floats)
        )
        made = f"(lambda g: [{kept}])(results({inside}))"
        return text + f"{_IN_MESH}got = jax.jit({mapped(made, f'[{out}]')})(*inputs)\n"
    made = f"[y[None] for y in results({inside})]"
    return text + f"""{_IN_MESH}got = jax.jit({mapped(made, "P('x')")})(*inputs)\n"""


def _helpers(row: Row) -> str:
    """The source of what `_operands.py` defines and the row uses."""
    used = {x.id for x in ast.walk(ast.parse(row.line)) if isinstance(x, ast.Name)}
    text = ""
    for name, what in vars(_operands).items():
        if name in used and inspect.isfunction(what):
            tree = ast.parse(inspect.getsource(what))
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    node.returns = None
                    node.body = [
                        x
                        for x in node.body
                        if ast.get_docstring(node) is None or x is not node.body[0]
                    ]
                if isinstance(node, ast.arg):
                    node.annotation = None
            text += ast.unparse(tree) + "\n"
        elif name in used and name.isupper():
            kind = "" if isinstance(what, tuple) and type(what) is tuple else "lax."
            text += f"{name} = {kind}{what!r}\n"
    return text
