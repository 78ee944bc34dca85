"""Draws losses. None is filtered out, because each layer fits the mesh and the loss is defined there."""

import numpy as np
from hypothesis import strategies as st

from ..base.arrays import Array
from ..programs import FLOAT, INT, Axes, Case, Leaf, MeshShape, Slot, Spec
from ..strategies import arrays, meshes, specs, templates
from .layers import TIMES, WIDTH, Layer, LossCase, LossValues


DTYPES = (FLOAT, FLOAT, FLOAT, "complex64", "bfloat16")
CONTROLS = ("plain", "plain", "scan", "layers", "cond", "remat", "jit")
AROUND = ("plain", "plain", "scan", "cond", "jit", "remat", "vmap")
# At least two rows for each shard.
ROWS = 16


@st.composite
def loss_values(draw: st.DrawFn, *, loss: LossCase) -> LossValues:
    """Numbers from -1 to 1."""

    def filled(leaf: Leaf) -> Array:
        few: Array = draw(arrays(shape=leaf.shape)) / 4
        if leaf.dtype == "complex64":
            few = few + 1j * draw(arrays(shape=leaf.shape)) / 4
        return np.asarray(few, np.dtype(leaf.dtype))

    params = [filled(leaf) for leaf in loss.params]
    return LossValues(params, filled(loss.case.inputs[0]), draw(st.sampled_from([1.0, -1.0])))


@st.composite
def loss_cases(draw: st.DrawFn) -> LossCase:
    """Losses on a mesh."""
    maker = _Maker(draw, draw(meshes()))
    for number in range(draw(st.integers(1, 4))):
        maker.layer(first=number == 0)
    return maker.made()


class _Maker:
    def __init__(self, draw: st.DrawFn, mesh: MeshShape) -> None:
        self.draw = draw
        self.mesh = mesh
        names = draw(st.permutations(mesh.axis_names))
        self.rows: Axes = tuple(
            name for name in names if draw(st.sampled_from([True, True, False]))
        )
        self.layers: list[Layer] = []
        self.leaves: list[Leaf] = []
        # The axes over which JAX's types say that the features vary.
        self.varies = set(self.rows)

    def layer(self, *, first: bool) -> None:
        """Adds a layer. The first has a parameter."""
        ops = ["scale", "dense", "shift", "rows", "block"]
        if not first:
            ops += ["penalty", "tanh", "sin", "softplus", "idle", "center"]
        op = self.draw(st.sampled_from(ops))
        control = "plain"
        param: int | None = None
        parts: tuple[bool, ...] = ()
        if op in ("scale", "dense", "shift"):
            control = self.draw(st.sampled_from(CONTROLS))
            lead = (TIMES,) if control == "layers" else ()
            rank = 2 if op == "dense" else 1
            param = self.param((*lead, *[WIDTH] * rank), len(lead))
            parts = tuple(self.part(axes) for axes in self.leaves[param].spec[len(lead) :])
            self.pass_on(param, len(lead), parts, keep=control in ("scan", "layers"))
        elif op == "rows":
            spec: Spec = ((), ()) if self.draw(st.booleans()) else (self.rows, ())
            param = self.add(Leaf((ROWS, 1), self.dtype(), spec))
        elif op == "block":
            axes = tuple(name for name in self.rows if self.draw(st.booleans()))
            leaf = Leaf((self.mesh.size(axes), WIDTH), self.dtype(), (axes, ()))
            param = self.add(leaf)
        elif op == "idle":
            # A complex parameter would have a constant gradient, whose sum over devices crashes XLA.
            spec = self.draw(specs(axes=self.mesh.axis_names, rank=1))
            param = self.add(Leaf((WIDTH,), FLOAT, spec))
        elif op == "penalty":
            again = bool(self.leaves) and self.draw(st.booleans())
            some = st.integers(0, len(self.leaves) - 1)
            param = self.draw(some) if again else self.param((WIDTH,), 0)
        self.layers.append(Layer(op, param, parts, control))

    def dtype(self) -> str:
        return self.draw(st.sampled_from(DTYPES))

    def param(self, shape: tuple[int, ...], whole: int) -> int:
        """The number of a parameter split over some mesh axes. Sometimes it exists already."""
        alike = [k for k, leaf in enumerate(self.leaves) if leaf.shape == shape]
        if alike and self.draw(st.integers(0, 3)) == 3:
            return self.draw(st.sampled_from(alike))
        spec = self.draw(specs(axes=self.mesh.axis_names, rank=len(shape) - whole))
        return self.add(Leaf(shape, self.dtype(), ((),) * whole + spec))

    def add(self, leaf: Leaf) -> int:
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def part(self, axes: Axes) -> bool:
        """Whether shards compute with parts, for which they must have the same rows."""
        return bool(axes) and not set(axes) & set(self.rows) and self.draw(st.booleans())

    def pass_on(self, param: int, lead: int, parts: tuple[bool, ...], *, keep: bool) -> None:
        """Updates the axes over which the features vary."""
        spec, before = self.leaves[param].spec[lead:], set(self.varies)
        for axes, part in zip(spec, parts, strict=True):
            self.varies |= set() if part else set(axes)
        if len(spec) == 2 and parts[0]:
            self.varies -= set(spec[0])
        if parts[-1]:
            self.varies |= set(spec[-1])
        self.varies |= before if keep else set()

    def slot(self, leaf: Leaf) -> Slot:
        kind = self.draw(st.sampled_from(["ParamState", "ParamState", "array"]))
        declared = kind != "array" and self.draw(st.booleans())
        return Slot(kind, (leaf,), None, declared)

    def some(self, of: set[str]) -> Axes:
        names = [name for name in self.mesh.axis_names if name in of]
        return tuple(name for name in names if self.draw(st.booleans()))

    def made(self) -> LossCase:
        draw = self.draw
        # The function reduces over some axes itself, and `axis_name` names the rest.
        own = set(self.some(self.varies))
        left = self.varies - own
        named = left | set(self.some(set(self.mesh.axis_names) - left))
        # Only losses that differ are summed.
        sums = named == left and left <= set(self.rows)
        reduce = draw(st.sampled_from(["mean", "sum"] if sums else ["mean"]))
        slots = tuple(map(self.slot, self.leaves))
        around = draw(st.sampled_from(AROUND))
        wanted = draw(st.integers(0, len(slots) - 1))
        trained = tuple(
            k == wanted or draw(st.sampled_from([True, True, False])) for k in range(len(slots))
        )
        lead = ((),) if around == "vmap" else ()
        shape = (*[2] * len(lead), ROWS, WIDTH)
        rank = len(self.mesh.axis_names)
        case = Case(
            self.mesh,
            rank,
            (Leaf(shape, FLOAT, (*lead, self.rows, ())),),
            (
                *slots,
                Slot("BatchState", (Leaf((WIDTH,)),), "mean", True),
                Slot("State", (Leaf((), INT),), None, True),
            ),
            draw(templates(count=len(slots) + 2)),
            (),
            (),
            (),
        )
        return LossCase(
            case,
            tuple(self.layers),
            self.rows,
            draw(st.sampled_from(["mean", "sum"])),
            tuple(name for name in self.mesh.axis_names if name in own),
            draw(st.sampled_from(["mean", "sum"])) if own else "mean",
            tuple(draw(st.permutations(sorted(named)))),
            draw(st.booleans()),
            reduce,
            trained,
            around,
            draw(st.booleans()),
        )
