"""The strategy for random programs: pure functions of shards, with states, a mesh and arguments."""

from collections.abc import Callable

from hypothesis import strategies as st
from jax.sharding import Mesh

from statemesh.testing import meshes

from . import blocks, steps
from . import local_steps as local
from .maker import POLICIES, Maker
from .results import outputs, written
from .source import Code, Leaf, Numbers, Program, mesh_text
from .values import FLOAT, INT, KEPT, Layout, Value
from .wrapping import laid_out


def programs(
    *,
    mesh: Mesh | None = None,
    portable: bool = True,
    smooth: bool = False,
    random: bool = True,
    max_steps: int = 8,
) -> st.SearchStrategy[Program]:
    """Random functions of shards that read and write states, each with a mesh and arguments.

    The `repr` of a program is Python source that runs by itself, to be pasted into a report. Programs are
    made of arithmetic, products with parameters that are whole or split, reductions and gathers over mesh
    axes, states of every policy, some of which change places, branches and loops, `jax.checkpoint`,
    `jax.jit`, and random numbers. Integers stay far from their largest and floats within a few units.
    Shrinks to a function without steps on one device.

    **Arguments:**

    - `mesh`: the mesh of all programs. Left out, meshes of some of the devices that there are.
    - `portable`: whether a program means the same on any mesh whose axes have these names and whose sizes
        divide its arrays, and unsharded. A program that is not portable may use what depends on the shards:
        reductions of a shard's own part, `axis_index`, permutations, exchanges, `PerShard` states, keys for
        each shard.
    - `smooth`: only floats and differentiable functions, so that gradients can be compared.
    - `random`: whether a program may draw random numbers.
    - `max_steps`: how many steps a program has at most, not counting its reads and writes.
    """
    return _programs(
        meshes() if mesh is None else st.just(mesh), portable, smooth, random, max_steps
    )


@st.composite
def _programs(
    draw: st.DrawFn,
    meshes: st.SearchStrategy[Mesh],
    portable: bool,
    smooth: bool,
    random: bool,
    most: int,
) -> Program:
    mesh = draw(meshes)
    maker = Maker(
        draw,
        draw(_layouts(mesh)),
        style=draw(st.sampled_from(("dict", "module"))),
        portable=portable,
        smooth=smooth,
    )
    inputs = _inputs(maker)
    for _ in range(draw(st.integers(1, 3))):
        maker.read(maker.slot(maker.dims(), maker.dtype()))
    for _ in range(most):
        if draw(st.integers(0, 9)) == 0:
            break
        draw(st.sampled_from(_possible(maker, random)))(maker)
    if maker.flip(out_of=3) and (twin := maker.twin()):
        maker.read(twin)
    returned, out_specs = outputs(maker)
    written(maker)
    code = _code(maker, mesh, [value for value, _ in inputs], returned, out_specs)
    values = [numbers for slot in maker.tree.slots for numbers in slot.values]
    return Program(code, (*values, *(numbers for _, numbers in inputs)))


@st.composite
def _layouts(draw: st.DrawFn, mesh: Mesh) -> Layout:
    names = draw(st.permutations(mesh.axis_names))
    # Mostly rows are split, and by more than one axis if there are more.
    rows = min(len(names), draw(st.sampled_from((1, 1, 2, 0))))
    units = len(names) - rows if draw(st.integers(0, 2)) else 0
    side = 8 if 8 % mesh.size == 0 else mesh.size
    sizes = {
        "r": side * draw(st.integers(1, 2)),
        "w": draw(st.integers(2, 3)),
        "h": side if units or draw(st.booleans()) else 0,
    }
    split = {"r": tuple(names[:rows]), "h": tuple(names[rows : rows + units])}
    return Layout(dict(mesh.shape), split, sizes)


def _inputs(maker: Maker) -> list[tuple[Value, Numbers]]:
    """One that has rows, and perhaps others; and what fills them."""
    found: list[tuple[Value, Numbers]] = []
    for name in ("x", "y", "z"):
        if found and not maker.flip(out_of=3):
            break
        dims = maker.dims() if found else maker.choose("r", "rw")
        dtype = maker.dtype()
        axes = maker.layout.axes(dims)
        value = Value(name, dims, dtype, axes, KEPT[dtype], exact=True)
        found.append((value, maker.numbers(Leaf(maker.layout.shape(dims), dtype))))
        maker.pool.append(value)
    return found


Step = Callable[[Maker], None]


def _possible(maker: Maker, random: bool) -> list[Step]:
    """The steps that fit what there is, simple ones first, frequent ones several times."""
    pool = maker.pool
    found: list[Step] = [steps.unary, steps.binary, steps.reduce]
    if any(v.dims == "" for v in pool) and all(v.dims == "" for v in pool):
        found.remove(steps.reduce)
    if any(v.dtype == INT for v in pool):
        found.append(steps.to_float)
    if any(v.dtype == FLOAT and v.exact for v in pool) and not maker.smooth:
        found.append(steps.to_int)
    found.append(steps.read)
    if any(v.dtype == FLOAT and v.dims in ("w", "rw", "h", "rh") for v in pool):
        found += [steps.matmul, steps.matmul]
    if any(v.dtype == FLOAT and v.dims in ("w", "rw") for v in pool):
        found.append(steps.softmax)
    if any(v.dtype == FLOAT and v.dims in ("r", "rw") for v in pool):
        found.append(blocks.vmap)
    if any(steps.gathered(maker, v) for v in pool):
        found += [steps.all_gather] * 2
    if not maker.smooth:
        found += [steps.row_numbers, blocks.while_loop]
    found += [
        blocks.checkpoint,
        blocks.jit,
        blocks.cond,
        blocks.switch,
        blocks.fori_loop,
        blocks.scan,
    ]
    if random:
        found += [blocks.rows, blocks.rows, blocks.first_draw, blocks.unused_draw]
    return found if maker.portable else found + _local(maker, random)


def _local(maker: Maker, random: bool) -> list[Step]:
    found: list[Step] = [local.axis_size, *([] if maker.smooth else [local.axis_index])]
    if any(v.dims for v in maker.pool):
        found += [local.local_reduce] * 2
    if random:
        found += [local.own_draw] * 2
    if any(v.varies for v in maker.pool):
        found += [local.collective, local.ppermute, local.psum_scatter, local.all_to_all]
        found += [local.all_gather_stacked, local.local_cond]
        found += [] if maker.smooth else [local.local_loop]
    return found


def _code(maker: Maker, mesh: Mesh, inputs: list[Value], returned: str, out_specs: str) -> Code:
    model, leaves = maker.tree.text(maker.layout)
    arguments = [("model", model)]
    for value in inputs:
        arguments.append((value.text, f"$v{len(leaves)}"))
        leaves.append(Leaf(maker.layout.shape(value.dims), value.dtype))
    names = ", ".join(name for name, _ in arguments)
    body = [*maker.lines, f"return {returned}, {maker.tree.name}"]
    parts = [text for name, text in POLICIES.items() if f"reduce={name}" in model]
    if maker.tree.style == "module":
        parts.append("\n".join(maker.tree.definition()))
    parts.append("\n".join([f"def step({names}):", *_indented(body)]))
    specs = ", ".join(["None", *(maker.layout.spec(value.dims) for value in inputs)])
    return Code(
        "\n\n\n".join(parts) + "\n",
        mesh_text(mesh),
        f"({specs})",
        f"({out_specs}, P())",
        tuple(arguments),
        tuple(leaves),
        maker.portable,
        maker.smooth,
    )


def _indented(lines: list[str]) -> list[str]:
    return [part for line in lines for part in laid_out(f"    {line}")]
