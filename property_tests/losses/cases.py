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
def loss_cases(draw: st.DrawFn, *, over: str = "mesh") -> LossCase:
    """Losses on a `'mesh'`, in `'lanes'`, or in lanes on each shard of a mesh (`'both'`)."""
    lane = None
    if over == "mesh":
        mesh = draw(meshes())
    elif over == "lanes":
        mesh = MeshShape(draw(st.sampled_from([(2,), (1,), (4,), (8,)])))
        lane = mesh.axis_names[-1]
    else:
        mesh = MeshShape(draw(st.sampled_from([(2, 2), (4, 2)])), draw(st.booleans()))
        lane = mesh.axis_names[-1]
    separate = lane is not None and draw(st.booleans())
    # JAX has no collectives over lanes inside a checked `shard_map`.
    without_collectives = separate or over == "both"
    maker = _Maker(draw, mesh, lane, without_collectives, separate)
    for number in range(draw(st.integers(1, 4))):
        maker.layer(first=number == 0)
    return maker.made()


class _Maker:
    def __init__(
        self,
        draw: st.DrawFn,
        mesh: MeshShape,
        lane: str | None,
        without_collectives: bool,
        separate: bool,
    ) -> None:
        self.draw = draw
        self.mesh = mesh
        self.lane = lane
        self.without_collectives = without_collectives
        self.separate = separate
        names = draw(st.permutations(mesh.axis_names))
        rows = {name for name in names if draw(st.sampled_from([True, True, False]))}
        if lane is not None:
            # The axis of lanes comes first, so that the rows of each lane are contiguous.
            names = [lane, *(name for name in names if name != lane)]
            rows |= {lane} if separate else set()
        self.rows: Axes = tuple(name for name in names if name in rows)
        # The axes over which the function may reduce.
        self.open = tuple(name for name in names if not (without_collectives and name == lane))
        self.layers: list[Layer] = []
        self.leaves: list[Leaf] = []
        # The axes over which JAX's types say that the features vary.
        self.varies = set(self.rows)

    def layer(self, *, first: bool) -> None:
        """Adds a layer. The first has a parameter."""
        ops = ["scale", "dense", "shift", "rows", "block"]
        if not first:
            ops += ["penalty", "tanh", "sin", "softplus", "idle"]
            ops += ["center"] if set(self.rows) <= set(self.open) else []
        op = self.draw(st.sampled_from(ops))
        control = "plain"
        param: int | None = None
        parts: tuple[bool, ...] = ()
        if op in ("scale", "dense", "shift"):
            control = self.draw(st.sampled_from(CONTROLS))
            lead = (TIMES,) if control == "layers" else ()
            rank = 2 if op == "dense" else 1
            param = self.param((*lead, *[WIDTH] * rank), len(lead), self.open)
            parts = tuple(self.part(axes) for axes in self.leaves[param].spec[len(lead) :])
            self.pass_on(param, len(lead), parts, keep=control in ("scan", "layers"))
        elif op == "rows":
            # Inside a checked `shard_map` a lane cannot always get its index from JAX.
            hidden = self.without_collectives and self.lane in self.rows
            whole = self.draw(st.booleans()) and not hidden
            spec: Spec = ((), ()) if whole else (self.rows, ())
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
            known = [k for k, leaf in enumerate(self.leaves) if leaf.axes <= set(self.open)]
            again = self.draw(st.booleans()) if known else False
            param = (
                self.draw(st.sampled_from(known)) if again else self.param((WIDTH,), 0, self.open)
            )
        self.layers.append(Layer(op, param, parts, control))

    def dtype(self) -> str:
        return self.draw(st.sampled_from(DTYPES))

    def param(self, shape: tuple[int, ...], whole: int, axes: Axes) -> int:
        """The number of a parameter split over some of these axes. Sometimes it exists already."""
        alike = [k for k, leaf in enumerate(self.leaves) if leaf.shape == shape]
        fitting = [k for k in alike if self.leaves[k].axes <= set(axes)]
        if fitting and self.draw(st.integers(0, 3)) == 3:
            return self.draw(st.sampled_from(fitting))
        spec = self.draw(specs(axes=axes, rank=len(shape) - whole))
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
        declared = kind != "array" and (self.lane is not None or self.draw(st.booleans()))
        return Slot(kind, (leaf,), None, declared)

    def some(self, of: set[str]) -> Axes:
        names = [name for name in self.mesh.axis_names if name in of]
        return tuple(name for name in names if self.draw(st.booleans()))

    def made(self) -> LossCase:
        draw = self.draw
        varies, separate_axes = self.varies, {self.lane} if self.separate else set()
        # The function reduces over some axes itself, and `axis_name` names the rest.
        own = set(self.some(varies & set(self.open)))
        left = varies - own - separate_axes
        others = set(self.mesh.axis_names) - left - separate_axes
        named = left | set(self.some(others))
        # Only losses that differ are summed.
        sums = named == left and left <= set(self.rows)
        reduce = draw(st.sampled_from(["mean", "sum"] if sums else ["mean"]))
        slots = tuple(map(self.slot, self.leaves))
        around = draw(st.sampled_from(AROUND))
        if self.separate and around == "scan":
            around = "plain"
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
            self.lane,
            self.without_collectives,
            self.separate,
            around,
            draw(st.booleans()),
        )
