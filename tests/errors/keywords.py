"""Every keyword of every public callable with values that it may not have: refused, and in which words.

Callables and keywords are found by `inspect`, so a new one cannot be forgotten. What is accepted is listed by
name, with the reason; nothing is accepted and ignored.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh import checkpoint, legacy, nn, testing
from tests.helpers import jnp, make_mesh

from .table import same_everywhere


class Thing:
    """An object that means nothing anywhere."""

    def __repr__(self) -> str:
        return "Thing()"


# What JAX and NumPy say of values that statemesh passes on to them. Other versions may say otherwise.
OTHER_WORDS = re.compile(
    "valid (JAX type|JAX array type|value for jnp.array)|as a (JAX value|data type)"
    "|PRNG key|^data type|^Field elements|^scan got |out of bounds for array"
)
THING = Thing()
VALUES: tuple[Any, ...] = ("zz", 37, -41, 2.75, None, THING, True, ["zz"])
X = np.ones(8, np.float32)
KEY = jax.random.key(0)
ROWS = jnp.ones((4, 2))
MODULES: dict[str, types.ModuleType] = {
    "": sm,
    "filters.": sm.filters,
    "nn.": nn,
    "testing.": testing,
    "checkpoint.": checkpoint,
}


# What the callables are used on


def identity(x: Any) -> Any:
    return x


def advance(state: Any, x: Any) -> Any:
    return x, state.set(state.value + 1)


def loss_fn(model: Any, x: Any) -> Any:
    return (model["w"].value * x).sum(), model


class Counter(sm.Module):
    count: Any = None

    def init_state(self) -> "Counter":
        return self.replace(count=sm.State(0.0))

    def update(self, x: Any) -> Any:
        return x, self


def model() -> dict[str, Any]:
    return {"w": sm.ParamState(X)}


@functools.cache
def whole() -> tempfile.TemporaryDirectory[str]:
    """A folder with one step, of which the uses have copies."""
    folder = tempfile.TemporaryDirectory()
    with checkpoint.Checkpoints(folder.name) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(2)})
    return folder


def saved() -> str:
    shutil.copytree(f"{whole().name}/1", "a")
    return "a"


def with_a_step() -> Any:
    shutil.copytree(whole().name, "a")
    return checkpoint.Checkpoints("a")


def example(strategy: Any) -> Any:
    few = hypothesis.settings(max_examples=5, database=None)
    return hypothesis.find(strategy, lambda drawn: True, settings=few)


def on_states(filter: Any) -> Any:
    return sm.states(model(), filter)


@dataclasses.dataclass
class Use:
    """How a callable is used.

    **Attributes:**

    - `needs`: the arguments that it cannot be called without. A folder is made by a function.
    - `then`: what is done with its result, where mistakes show only then.
    - `of`: makes the object whose method it is.
    """

    needs: dict[str, Any] = dataclasses.field(default_factory=dict)
    then: Callable[[Any], Any] = lambda result: None
    of: Callable[[], Any] | None = None

    def run(self, name: str, parameter: inspect.Parameter, value: Any) -> None:
        # A folder called "zz" is made in a temporary one.
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            needs = {key: need() if key == "folder" else need for key, need in self.needs.items()}
            target = self.target(name)
            owner = getattr(target, "__self__", None)
            with owner if isinstance(owner, checkpoint.Checkpoints) else contextlib.nullcontext():
                if parameter.kind is parameter.VAR_POSITIONAL:
                    result = target(*needs.values(), value)
                elif parameter.kind is parameter.POSITIONAL_ONLY:
                    result = target(value)
                else:
                    result = target(**{**needs, parameter.name: value})
                self.then(result)

    def target(self, name: str) -> Callable[..., Any]:
        if self.of is not None:
            method: Callable[..., Any] = getattr(self.of(), name.split(".")[-1])
            return method
        return CALLABLES[name]


MESH = make_mesh("2")
SHARDED: dict[str, Any] = {"mesh": MESH, "in_specs": P("x"), "out_specs": P("x")}
EQUIVALENT = {"args": (X,), "meshes": [{"x": 2}], "in_specs": P("x"), "out_specs": P("x")}
NEW = {"module": Counter(), "init_kwargs": {}, "axis_size": 2}
LANES = Use({"fn": advance, "in_axes": (None, 0)}, lambda mapped: mapped.lower(sm.State(0.0), X))
GRAD = Use({"fun": loss_fn}, lambda step: step(model(), X))
MAP = Use({"module": Counter(), "init_map_size": 2}, lambda map: map.init_all_states()(X[:2]))
NORM = Use({"size": 2}, lambda norm: norm(ROWS))
ON_X = Use({"x": X, "axis_name": "x"})
FILTER = Use(then=on_states)

USES: dict[str, Use] = {
    "State": Use({"value": X}),
    "State.set": Use({"value": X}, of=lambda: sm.State(X)),
    "RandomState": Use({"key": KEY}),
    "RandomState.split": Use(of=lambda: sm.RandomState(KEY)),
    "RandomState.rows": Use({"n": 2}, of=lambda: sm.RandomState(KEY)),
    "PerShard": Use(),
    "partition": Use({"tree": model()}),
    "combine": Use(),
    "states": Use({"tree": model()}),
    "new_states": Use({"before": model(), "after": model()}),
    "trainable": Use({"model": model()}),
    "is_state": Use(),
    "shard_map": Use({"fun": identity, **SHARDED}, lambda mapped: mapped(X)),
    "legacy.shard_map": Use({"f": identity, **SHARDED}, lambda mapped: mapped(X)),
    "StatefulMapping.on_mesh": Use(of=lambda: sm.shard_map(identity, None, P("x"), P("x"))),
    "pmap2": LANES,
    "vmap2": LANES,
    "pmap2_new_states": Use(NEW),
    "vmap2_new_states": Use(NEW),
    "Map": MAP,
    "Map.map": Use(
        {}, lambda method: method(X[:2]), lambda: sm.Map(Counter(), 2).init_all_states()
    ),
    "value_and_grad": GRAD,
    "grad": GRAD,
    "scan": Use({"f": lambda c, x: (c, x), "init": sm.State(0.0), "xs": X}),
    "place": Use({"tree": model(), "mesh": MESH}),
    "pack": Use({"model": model(), "mesh": MESH}),
    "fsdp": Use({"model": model(), "mesh": MESH, "axis_name": "x", "min_size": 0}),
    "gather": Use({"tree": model(), "axis_name": "x"}),
    "scatter": Use({"whole": model(), "model": model()}),
    "global_norm": Use({"tree": model()}),
    "explain": Use({"fun": identity}),
    **dict.fromkeys(("psum", "pmean", "pmax", "pmin", "all_gather"), ON_X),
    "axis_index": Use(),
    "axis_size": Use(),
    **dict.fromkeys(("filters.All", "filters.Any", "filters.Not", "filters.OfType"), FILTER),
    **dict.fromkeys(("filters.WithTag", "filters.PathContains", "filters.Where"), FILTER),
    "filters.to_predicate": Use({"filter": ...}),
    "nn.Average": Use({"example": 0.0}),
    "nn.Average.__call__": Use({"values": 1.0}, of=lambda: nn.Average(0.0)),
    "nn.BatchNorm": NORM,
    "nn.BatchNorm.__call__": Use({"x": ROWS}, of=lambda: nn.BatchNorm(2)),
    "nn.BatchNorm.with_statistics": Use({"mean": X[:2], "var": X[:2]}, of=lambda: nn.BatchNorm(2)),
    "nn.Dropout": Use({"rate": 0.5, "key": KEY}, lambda layer: layer(ROWS)),
    "nn.Dropout.__call__": Use(of=lambda: nn.Dropout(0.5, KEY)),
    "nn.EMA": Use({"model": model()}),
    "nn.EMA.__call__": Use(of=lambda: nn.EMA(model())),
    "nn.EMA.averaged": Use(of=lambda: nn.EMA(model())),
    "nn.GRUCell": Use({"input_size": 2, "hidden_size": 2, "key": KEY}),
    "nn.GRUCell.init_state": Use(of=lambda: nn.GRUCell(2, 2, key=KEY)),
    "nn.GRUCell.__call__": Use(of=lambda: nn.GRUCell(2, 2, key=KEY).init_state()),
    "nn.KVCache": Use({"capacity": 4, "heads": 1, "dim": 2}, lambda cache: cache.init_state()),
    "nn.KVCache.__call__": Use(
        {"keys": jnp.ones((1, 1, 2)), "values": jnp.ones((1, 1, 2))},
        of=lambda: nn.KVCache(4, 1, 2).init_state(),
    ),
    "checkpoint.Checkpoints": Use({"folder": lambda: "a"}),
    "checkpoint.Checkpoints.save": Use(
        {"step": 1, "tree": {"x": 1}}, of=lambda: checkpoint.Checkpoints("a")
    ),
    "checkpoint.Checkpoints.load": Use({"like": {"x": jnp.ones(2)}}, of=with_a_step),
    "checkpoint.save": Use({"folder": lambda: "a", "tree": {"x": 1}}),
    "checkpoint.load": Use({"folder": saved, "like": {"x": jnp.ones(2)}}),
    "testing.assert_budget": Use({"fun": lambda: X, "peak": 100}),
    "testing.assert_equivalent": Use({"fun": identity, **EQUIVALENT}),
    "testing.assert_same_replicas": Use({"tree": {"x": jnp.ones(2)}}),
    "testing.emulate": Use({"mapped": identity}),
    "testing.locate": Use({"mapped": sm.shard_map(identity, **SHARDED)}),
    "testing.set_devices": Use(),
    "testing.load_profile": Use(),
    "testing.meshes": Use(then=example),
    "testing.specs": Use({"shape": (8,), "mesh": MESH}, example),
    "testing.shapes": Use({"spec": P("x"), "mesh": MESH}, example),
    "testing.arrays": Use({"shape": (2,)}, example),
    "testing.states": Use(then=example),
    "testing.modules": Use(then=example),
    "testing.filters": Use({"tree": model()}, example),
    "testing.given_meshes": Use(),
}

# Callables of which the same is said, with another name.
LIKE = {
    **dict.fromkeys(("pmean", "pmax", "pmin"), "psum"),
    "axis_size": "axis_index",
    "grad": "value_and_grad",
}

# Callables without keywords of their own.
WITHOUT = (
    # Their keywords are the user's, or those of fields.
    "Module Module.replace Module.init_state Module.init_all_states Map.init_all_states State.replace",
    "RandomState.replace Map.update Map.__call__ StatefulMapping.__call__ StatefulMapping.lower",
    "StatefulMapping.explain StatefulMapping.place StatefulMapping.unsharded",
    # What statemesh makes or returns, and what it calls.
    "StatefulMapping Packed Packed.tree_flatten Packed.tree_flatten_with_keys Packed.unpack",
    "Explanation Explanation.to_dict Explanation.draw testing.Checked testing.Located testing.Place",
    "State.enter State.leave State.reshard RandomState.enter RandomState.leave RandomState.reshard",
    # No arguments, and `equinox.field`.
    "filters.Everything filters.Nothing checkpoint.Checkpoints.close checkpoint.Checkpoints.wait",
    "nn.Average.reset nn.GRUCell.reset nn.KVCache.reset nn.KVCache.init_state field",
)

NAMES = (("zz", THING), "a name: outside of a mapped call any is right")
TREE = (VALUES, "any tree")
ARRAYS = ((37, -41, 2.75, None, True), "a tree of numbers")
SIZE = ((37,), "a size")
POSITIVE = ((37, 2.75), "a positive number")
FILTERS = ((True, None), "a filter: of all states, or of none")
LIMIT = ((37, 2.75), "a limit, and the call keeps to it or does not")
# Values that are accepted, by keyword, or by callable and keyword, and why. Besides, each keyword takes its
# default, and each flag `True`.
ACCEPTED: dict[str, tuple[tuple[Any, ...], str]] = {
    # What is held, saved or looked at.
    **dict.fromkeys(("tree", "trees", "before", "after", "node"), TREE),
    **dict.fromkeys(
        ("scan.init", "pack.model", "explain.args", "testing.emulate.args", "testing.locate.args"),
        TREE,
    ),
    **dict.fromkeys(("State.value", "x", "nn.Average.example"), ARRAYS),
    "trainable.model": ((2.75,), "a float is a parameter"),
    "nn.EMA.model": ((2.75,), "a float is a parameter"),
    "nn.Average.__call__.values": ((37, -41, 2.75, True), "a number, as the layer was made for"),
    "testing.assert_equivalent.args": ((["zz"],), "a static argument"),
    # Names, tags and paths.
    "name": (("zz",), "a name"),
    "tag": (("zz", ["zz"]), "tags"),
    "state_tag": (("zz",), "a tag"),
    "folder": (("zz",), "a folder"),
    "testing.states.tags": ((["zz"],), "tags"),
    # Names of axes.
    "axis_name": NAMES,
    "axis_names": NAMES,
    "spmd_axis_name": NAMES,
    **{f"{name}.axis_name": (("zz",), "a name") for name in ("pmap2", "pmap2_new_states")},
    **{
        f"{name}.axis_name": (
            ("zz", THING, None),
            "a name, or no axis, over which all stays as it is",
        )
        for name in ("psum", "pmean", "pmax", "pmin", "all_gather", "axis_index", "axis_size")
    },
    "fsdp.axis_name": ((None,), "no axis, so that all parameters stay whole"),
    "testing.meshes.axis_names": (("zz", ["zz"]), "names"),
    "testing.given_meshes.axis_names": (("zz", ["zz"]), "names"),
    # Filters.
    **dict.fromkeys(("filter", "filters", "wrt", "leave_out", "init_state_axes"), FILTERS),
    "state_out_axes": FILTERS,
    "filters.All.filters": FILTERS,
    "filters.Any.filters": FILTERS,
    "filters.Not.filter": (("zz", None, ["zz"]), "a filter that matches nothing here"),
    "filters.to_predicate.filter": (("zz", None, True, ["zz"]), "a filter"),
    # Numbers.
    **dict.fromkeys(("num", "n", "step", "keep", "max_devices", "min_size"), SIZE),
    **dict.fromkeys(("input_size", "hidden_size", "batch_size", "capacity", "heads", "dim"), SIZE),
    **dict.fromkeys(("min_rank", "max_rank", "max_side", "max_states"), SIZE),
    "vmap2_new_states.axis_size": SIZE,
    "testing.arrays.shape": SIZE,
    "testing.assert_equivalent.steps": SIZE,
    "first_axis": ((37,), "parameters of fewer axes are not split"),
    "unroll": ((37, True), "steps, or all of them"),
    **dict.fromkeys(("weight", "eps", "count", "tolerance"), POSITIVE),
    "testing.arrays.min_value": ((-41, 2.75), "a number"),
    "testing.arrays.max_value": ((37, 2.75), "a number"),
    **dict.fromkeys(("collectives", "bytes", "peak", "allocated", "temporaries"), LIMIT),
    **dict.fromkeys(("donated", "held", "moved"), LIMIT),
    # What `None` and `True` say.
    **dict.fromkeys(("shard_map.in_specs", "legacy.shard_map.in_specs"), ((None,), "no specs")),
    "testing.assert_equivalent.in_specs": ((None,), "no specs"),
    "StatefulMapping.on_mesh.mesh": ((None,), "the mesh that is set when it is called"),
    "in_axes": ((None,), "no axis"),
    "momentum": ((None,), "all values count the same"),
    "row_axis": ((None,), "one row"),
    "nn.BatchNorm.__call__.where": ((True,), "a mask"),
    **dict.fromkeys(("gradients", "testing.assert_equivalent.check_vma"), ((True,), "a flag")),
}


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, class and method, by name. Kinds of state that add nothing are left out."""
    yield "legacy.shard_map", legacy.shard_map
    for prefix, module in MODULES.items():
        for name in dir(module):
            value = getattr(module, name)
            if name[0] == "_" or isinstance(value, types.ModuleType):
                continue
            if not isinstance(value, type):
                yield prefix + name, value
                continue
            is_kind = issubclass(value, sm.State) and value.__init__ is sm.State.__init__
            if issubclass(value, BaseException) or (is_kind and value is not sm.State):
                continue
            yield prefix + name, value
            # A filter is called by statemesh.
            for method, function in vars(value).items() if prefix != "filters." else ():
                if inspect.isfunction(function) and (method[0] != "_" or method == "__call__"):
                    yield f"{prefix}{name}.{method}", function


CALLABLES = dict(public_callables())


def parameters(name: str) -> list[inspect.Parameter]:
    """The parameters of a callable that a user fills in."""
    known = list(inspect.signature(CALLABLES[name]).parameters.values())
    method = USES[name].of is not None
    return [p for p in known[method:] if p.name[0] != "_" and p.kind is not p.VAR_KEYWORD]


@functools.cache
def refusals(name: str) -> str:
    """What is said of the values that are refused: a line for all values of a keyword of which it is said."""
    lines = []
    for parameter in parameters(name):
        said: dict[str, list[str]] = {}
        for value in VALUES:
            if text := refusal(name, parameter, value):
                said.setdefault(text, []).append(repr(value))
        for text, shown in said.items():
            which = "" if len(shown) == len(VALUES) else f"={' '.join(shown)}"
            lines.append(f"{parameter.name}{which}: {text}")
    text = "\n".join(lines) or "nothing is refused"
    if name in LIKE and text == refusals(LIKE[name]).replace(f"{LIKE[name]}:", f"{name}:"):
        return f"as of {LIKE[name]}"
    return text


def refusal(name: str, parameter: inspect.Parameter, value: Any) -> str | None:
    """The first line of what is said of a value, with `{}` for it and its type; `None` if it is accepted."""
    shown = f"{name}: {parameter.name}={value!r}"
    try:
        USES[name].run(name, parameter, value)
    except (AssertionError, Warning):
        pass  # A check of `testing` came to its end.
    except Exception as error:
        if not is_clear(error, name, parameter.name, value):
            raise AssertionError(f"{shown} fails somewhere inside: {error!r}") from error
        if OTHER_WORDS.search(str(error)):
            return f"{type(error).__name__} in the words of JAX or NumPy"
        text = same_everywhere(f"{type(error).__name__}: {error}").split("\n")[0]
        inner = value[0] if isinstance(value, list) and repr(value) not in text else value
        text = text.replace(repr(inner), "{}", 1)
        return text.replace(f"{{}} of type {type(inner).__name__}", "{} of type {}", 1)
    assert reason(name, parameter, value) is not None, f"{shown} is accepted, and ignored"
    return None


def is_clear(error: Exception, name: str, argument: str, value: Any) -> bool:
    """Whether statemesh words an error, or it names the callable, the argument, the value or its type."""
    if isinstance(error, sm.StatemeshError):
        return True
    inner = value[0] if isinstance(value, list) else value
    names = [name.split(".")[-1], argument, repr(inner), type(value).__name__, type(inner).__name__]
    return isinstance(error, TypeError | ValueError) and any(
        re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error)) for name in names
    )


def reason(name: str, parameter: inspect.Parameter, value: Any) -> str | None:
    """Why a value is accepted; `None` where it is to be refused."""
    if value is parameter.default:
        return "the default"
    if value is True and isinstance(parameter.default, bool):
        return "a flag"
    for key in (f"{name}.{parameter.name}", parameter.name):
        if key in ACCEPTED:
            values, why = ACCEPTED[key]
            taken = any(
                value is one or (type(value) is type(one) and value == one) for one in values
            )
            return why if taken else None
    return None
