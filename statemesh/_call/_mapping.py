"""What the mapped calls return."""

import copy
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from .._base._errors import StatemeshError
from .._base._trees import fun_name
from .._base._types import AnyMesh, Fun, Params, PyTree, Result
from .._explain._explanation import Explanation
from .._jax._frames import leave_out_own, without_own_frames
from ._arguments import boxed, opened
from ._call import Pipeline
from ._explain import explain_call
from ._program import Lowered
from ._rules import Declared, SpecRules


Others = ParamSpec("Others")
if TYPE_CHECKING:
    from typing import Self
else:
    Self = Any  # What checks annotations at run time knows it only in a class that it checks whole.


F = TypeVar("F", bound=Callable[..., Any])

_arguments: set[str] = set()


def makes_mappings(transform: F) -> F:
    """Note the arguments of `shard_map`, `pmap2` or `vmap2`.

    A mapping does not change them: another mesh, say, makes another mapping.
    """
    _arguments.update(inspect.signature(transform).parameters)
    return transform


class StatefulMapping(Generic[Params, Result]):
    """A mapped function: called like the function it was made from.

    `shard_map`, `pmap2` and `vmap2` return one. It compiles at the first call with each new signature and
    is a method when it stands in a class.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, statemesh as sm
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> @sm.shard_map(mesh=mesh, in_specs=(None, P("data")), out_specs=P())
        ... def add(total, x):
        ...     return total.set(total.value + x.sum())
        >>> total, x = sm.State(0.0, reduce="sum"), jnp.arange(16.0)
        >>> _, placed = add.place(total, x)                # what no call has to move
        >>> placed.sharding.spec
        P('data',)
        >>> float(add(total, placed).value), float(add.unsharded(total, x).value)
        (120.0, 120.0)
        >>> add.lower(total, x).out_info.value.shape
        ()
        >>> add.explain(total, x).collectives[0].operation
        'psum'

        ```
    """

    # `jax.jit` and `functools.wraps` copy a `__dict__` onto what they return. So ours holds only the
    # attributes of the user's function; our own have slots.
    __slots__ = (
        "__dict__",
        "__name__",
        "__qualname__",
        "__weakref__",
        "__wrapped__",
        "_bound",
        "_declared",
        "_pipeline",
    )

    def __init__(
        self,
        declared: Declared,
        pipeline: Pipeline | None = None,
        bound: tuple[PyTree, ...] = (),
    ) -> None:
        fun = declared.fun
        self._declared = declared
        self.__wrapped__ = fun
        self.__name__ = fun_name(fun)
        self.__qualname__ = getattr(fun, "__qualname__", self.__name__)
        self.__dict__ |= _attributes(fun)
        self._pipeline = Pipeline(declared) if pipeline is None else pipeline
        self._bound = bound

    def __setattr__(self, name: str, value: object) -> None:
        if name in _arguments or (name in vars(StatefulMapping) and not name.startswith("_")):
            mapping, transform = self.__name__, self._declared.transform
            way_out = f"Map the function again, as in {transform}({mapping}, {name}=...)"
            if transform == "shard_map" and name == "mesh":
                way_out += f", or call {mapping}.on_mesh(mesh)"
            if name in ("lower", "explain", "place", "unsharded", "on_mesh"):
                way_out = "Give what you set another name"
            raise AttributeError(
                f"{mapping}.{name} cannot be set: what {transform} returned does not change. {way_out}."
            )
        super().__setattr__(name, value)

    @property
    def __signature__(self) -> inspect.Signature | None:
        try:
            signature = inspect.signature(self.__wrapped__)
        except (TypeError, ValueError):
            return None
        parameters = list(signature.parameters.values())[len(self._bound) :]
        return signature.replace(parameters=parameters)

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        all_args: tuple[PyTree, ...] = args
        try:
            if self._bound or self._declared.static:
                all_args = self._all(args)
            result: Result = self._pipeline.call(all_args, kwargs)
        except Exception as error:
            leave_out_own(error)
            raise
        return result

    def _all(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        args, declared = self._bound + args, self._declared
        return boxed(declared.fun, declared.static, args) if declared.static else args

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: "StatefulMapping[Concatenate[Any, Others], Result]",
        instance: object,
        owner: type | None = None,
    ) -> "StatefulMapping[Others, Result]": ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._with((instance,))

    def _with(self, bound: tuple[PyTree, ...]) -> "StatefulMapping":
        return StatefulMapping(self._declared, self._pipeline, bound)

    # Copies share the compiled programs. Pickling leaves them out.

    def __copy__(self) -> "StatefulMapping":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "StatefulMapping":
        return self._with(copy.deepcopy(self._bound, memo)) if self._bound else self

    def __reduce__(self) -> tuple[PyTree, ...]:
        fun = self.__wrapped__
        place = getattr(fun, "__module__", None), self.__qualname__
        # `__main__` is another module in another process.
        if place[0] != "__main__" and self._is_at(*place):
            return _named, (*place, self._bound)
        return StatefulMapping, (self._declared, None, self._bound)

    def _is_at(self, module: Any, qualname: str) -> bool:
        try:
            mapping = attrgetter(qualname)(sys.modules[module])
        except (KeyError, AttributeError):
            return False
        return isinstance(mapping, StatefulMapping) and mapping._pipeline is self._pipeline

    @without_own_frames
    def lower(self, *args: PyTree, **kwargs: PyTree) -> Lowered:
        """Lower the call without running it.

        **Arguments:**

        - `args`, `kwargs`: the arguments, or `jax.ShapeDtypeStruct`s in place of arrays.

        **Returns:** what `jax.jit(...).lower` gives: `args_info` and `out_info` by the call's own arguments
        and result, `as_text()`, and `compile()`, which gives a function of the call's arguments. Its
        `program` is the `jax.stages.Lowered` of a function of the arguments' arrays.
        """
        return self._pipeline.lower(args, kwargs, self._all)

    @without_own_frames
    def explain(self, *args: PyTree, **kwargs: PyTree) -> Explanation:
        """Say what the call lays where, moves, reduces and holds. Nothing is run.

        **Arguments:**

        - `args`, `kwargs`: the arguments, or `jax.ShapeDtypeStruct`s in place of arrays. On an `AbstractMesh`
            nothing is compiled.

        **Returns:** an `Explanation`.

        **Raises:** what the call would raise.
        """
        return explain_call(self._pipeline, self._all(args), kwargs)

    @without_own_frames
    def place(self, *args: Params.args, **kwargs: Params.kwargs) -> tuple[PyTree, ...]:
        """Lay arguments out as the call wants them, so that no call has to move them.

        **Arguments:**

        - `args`, `kwargs`: all arguments of a call.

        **Returns:** the positional arguments, as a tuple.
        """
        return opened(self._pipeline.place(self._all(args), kwargs))[len(self._bound) :]

    @without_own_frames
    def unsharded(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Call the same function on one device: the reference that nobody has to write.

        What `shard_map` maps runs on a mesh of one device, what `pmap2` maps as by `vmap2`.

        **Arguments:**

        - `args`, `kwargs`: the arguments of the call.

        **Returns:** what the call returns, on one device.
        """
        return self._pipeline.on_one_device.call(self._all(args), kwargs)

    @property
    def mesh(self) -> AnyMesh | None:
        """The mesh that `shard_map` was given; `None` if it was given none, and for lanes."""
        return getattr(self._declared.rules, "mesh", None)

    def on_mesh(self, mesh: AnyMesh) -> "StatefulMapping[Params, Result]":
        """The same function with the same specs on another mesh, where no memory is given up.

        **Arguments:**

        - `mesh`: a mesh that has the axes which the specs name.

        **Returns:** what `shard_map` returns for that mesh.

        **Raises:** `StatemeshError` for what `pmap2` and `vmap2` return; `SpecError` for specs that do not
        fit the mesh.

        !!! example

            ```python
            >>> import jax, jax.numpy as jnp, statemesh as sm
            >>> from jax.sharding import PartitionSpec as P
            >>> all, two = (jax.make_mesh((n,), ("data",), devices=jax.devices()[:n]) for n in (8, 2))
            >>> double = sm.shard_map(lambda x: 2 * x, all, in_specs=P("data"), out_specs=P("data"))
            >>> double(jnp.arange(8.0)).sharding.shard_shape((8,))
            (1,)
            >>> double.on_mesh(two)(jnp.arange(8.0)).sharding.shard_shape((8,))
            (4,)

            ```
        """
        rules = self._declared.rules
        if not isinstance(rules, SpecRules):
            raise StatemeshError(
                f"{self.__name__}.on_mesh: {self._declared.transform} maps over lanes, and not over a mesh "
                "with named axes. Give its function to shard_map."
            )
        rules = dataclasses.replace(rules, mesh=mesh)
        declared = dataclasses.replace(self._declared, rules=rules, donate="none")
        return StatefulMapping(declared, None, self._bound)

    def __repr__(self) -> str:
        typed = ", ".join([self.__qualname__, *self._declared.rules.as_typed()])
        return f"{self._declared.transform}({typed})"


if TYPE_CHECKING:

    class Decorator(Protocol):
        """A mapping that still waits for its function."""

        def __call__(self, fun: Callable[Params, Result], /) -> StatefulMapping[Params, Result]: ...
else:
    Decorator = Any


def _attributes(fun: Fun) -> dict[str, Any]:
    """The attributes that `functools.wraps` would copy, without those that a mapping defines itself."""
    of_fun = getattr(fun, "__dict__", {})
    if not inspect.isroutine(fun) and "__wrapped__" not in of_fun:
        return {}
    attributes = {k: v for k, v in of_fun.items() if not hasattr(StatefulMapping, k)}
    for name in ("__module__", "__doc__", "__annotations__", "__type_params__"):
        if hasattr(fun, name):
            attributes[name] = getattr(fun, name)
    return attributes


def _named(module: str, qualname: str, bound: tuple[PyTree, ...]) -> StatefulMapping:
    mapping: StatefulMapping = attrgetter(qualname)(importlib.import_module(module))
    return mapping._with(bound) if bound else mapping
