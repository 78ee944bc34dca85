"""Random programs as Python source. Their values are kept apart from the code that is compiled."""

import dataclasses
import functools
import hashlib
import linecache
import re
from collections.abc import Callable, Hashable, Iterable
from string import Template
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import statemesh as sm

from .wrapping import laid_out


Number: TypeAlias = int | float
# The numbers that an array repeats.
Numbers: TypeAlias = tuple[Number, ...]

_IMPORTS = (
    "import jax",
    "import jax.numpy as jnp",
    "import numpy as np",
    "from jax import lax",
    "from jax.sharding import AxisType, Mesh, PartitionSpec as P",
    "",
    "import statemesh as sm",
)
# The names that these lines define, so that they need not be run for each program.
_NAMES: dict[str, Any] = {
    "jax": jax,
    "jnp": jnp,
    "np": np,
    "lax": lax,
    "AxisType": AxisType,
    "Mesh": Mesh,
    "P": PartitionSpec,
    "sm": sm,
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array that a program is given.

    **Attributes:**

    - `shape`: the shape of the whole array.
    - `dtype`: `'float32'`, `'int32'`, or `'key'` for a random key.
    """

    shape: tuple[int, ...]
    dtype: str

    def text(self, numbers: Numbers) -> str:
        """An expression for this array."""
        if self.dtype == "key":
            key = f"jax.random.key({numbers[0]})"
            return f"jax.random.split({key}, {self.shape[0]})" if self.shape else key
        if not self.shape:
            return f"np.{self.dtype}({numbers[0]})"
        if len(set(numbers)) == 1:
            return f"np.full({self.shape}, {numbers[0]}, np.{self.dtype})"
        return f"np.resize(np.{self.dtype}({list(numbers)}), {self.shape})"


@dataclasses.dataclass(frozen=True)
class Code:
    """A program without its values: all that decides what is compiled.

    **Attributes:**

    - `definitions`: the function `step`, and the definitions that it needs.
    - `mesh`, `in_specs`, `out_specs`: expressions.
    - `arguments`: the name of each argument, and an expression in which `$v0` stands for the first leaf.
    - `leaves`: the arrays among the arguments.
    - `portable`: whether the program means the same on any mesh that divides its rows.
    - `smooth`: whether it is made of floats and differentiable functions only.
    """

    definitions: str
    mesh: str
    in_specs: str
    out_specs: str
    arguments: tuple[tuple[str, str], ...]
    leaves: tuple[Leaf, ...]
    portable: bool
    smooth: bool


@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """A random function of shards, with a mesh and arguments. `programs` draws them.

    Its `repr` is Python source that runs by itself. Equal programs have the same source. Programs with equal
    `code` have the same `fun` and `mapped`, so they share compiled programs.

    **Attributes:**

    - `code`: the program without its values.
    - `values`: for each array of the arguments, the numbers that it repeats.
    """

    code: Code
    values: tuple[Numbers, ...]

    @property
    def portable(self) -> bool:
        """Whether it means the same on any mesh that divides its rows, and unsharded."""
        return self.code.portable

    @property
    def smooth(self) -> bool:
        """Whether it is made of floats and differentiable functions only."""
        return self.code.smooth

    @property
    def fun(self) -> Callable[..., Any]:
        """The function of one shard: `(model, *inputs) -> (outputs, model)`."""
        fun: Callable[..., Any] = _namespace(self.code)["step"]
        return fun

    @property
    def mesh(self) -> Mesh:
        mesh: Mesh = _namespace(self.code)["mesh"]
        return mesh

    @property
    def in_specs(self) -> Any:
        return _namespace(self.code)["in_specs"]

    @property
    def out_specs(self) -> Any:
        return _namespace(self.code)["out_specs"]

    @property
    def mapped(self) -> sm.StatefulMapping:
        """`fun` over the mesh."""
        return _mapped(self.code)

    @functools.cached_property
    def args(self) -> tuple[Any, ...]:
        """The model and the inputs."""
        names = [name for name, _ in self.code.arguments]
        source = "".join(f"{name} = {text}\n" for name, text in self._arguments())
        space = dict(_namespace(self.code))
        exec(compile(source, "<arguments of a program>", "exec"), space)
        return tuple(space[name] for name in names)

    @property
    def source(self) -> str:
        """Complete source: imports, the function, the mesh, the values, the call, a print of its result."""
        code = self.code
        names = ", ".join(name for name, _ in code.arguments)
        body = "\n".join(
            [
                *("", "", "", code.definitions.rstrip(), "", ""),
                f"mesh = {code.mesh}",
                f"in_specs = {code.in_specs}",
                f"out_specs = {code.out_specs}",
                *(
                    line
                    for name, text in self._arguments()
                    for line in laid_out(f"{name} = {text}")
                ),
                "",
                "mapped = sm.shard_map(step, mesh, in_specs, out_specs)",
                f"for path, leaf in jax.tree_util.tree_leaves_with_path(mapped({names})):",
                "    print(jax.tree_util.keystr(path), leaf)",
            ]
        )
        return "\n".join([*_devices(self.mesh.size), *_imports(body)]) + body + "\n"

    def _arguments(self) -> Iterable[tuple[str, str]]:
        pairs = zip(self.code.leaves, self.values, strict=True)
        texts = {f"v{k}": leaf.text(numbers) for k, (leaf, numbers) in enumerate(pairs)}
        return [(name, Template(text).substitute(texts)) for name, text in self.code.arguments]

    def __repr__(self) -> str:
        return self.source

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis would print every field.
        del cycle
        for number, line in enumerate(self.source.splitlines()):
            if number:
                printer.break_()
            printer.text(line)


def _imports(body: str) -> list[str]:
    """The imports that the body needs."""
    lines = [line for line in _IMPORTS if not line.endswith(("jnp", "lax")) or _used(line, body)]
    return [line if "AxisType." in body else line.replace("AxisType, ", "") for line in lines]


def _used(line: str, body: str) -> bool:
    return re.search(rf"\b{line.split()[-1]}\.", body) is not None


def _devices(count: int) -> list[str]:
    if count == 1:
        return []
    flag = f"--xla_force_host_platform_device_count={count}"
    return ["import os", "", f'os.environ.setdefault("XLA_FLAGS", "{flag}")', ""]


def executed(definitions: str, **names: Any) -> dict[str, Any]:
    """The names that the definitions define. Tracebacks and debuggers show their source lines."""
    source = "\n".join(_IMPORTS) + "\n\n\n" + definitions
    filename = f"<program {hashlib.sha1(source.encode()).hexdigest()[:10]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    # The imports are in the shown source, but not executed again.
    blank = "\n" * (len(_IMPORTS) + 2)
    space: dict[str, Any] = {"__name__": filename, **_NAMES, **names}
    exec(compile(blank + definitions, filename, "exec"), space)
    return space


@functools.lru_cache(maxsize=4096)
def _defined(definitions: str) -> dict[str, Any]:
    return executed(definitions)


@functools.lru_cache(maxsize=4096)
def _namespace(code: Code) -> dict[str, Any]:
    space = dict(_defined(code.definitions))
    for name in ("mesh", "in_specs", "out_specs"):
        space[name] = eval(getattr(code, name), space)
    return space


@functools.lru_cache(maxsize=4096)
def _mapped(code: Code) -> sm.StatefulMapping:
    space = _namespace(code)
    mapped: sm.StatefulMapping = sm.shard_map(
        space["step"], space["mesh"], space["in_specs"], space["out_specs"]
    )
    return mapped


def axes_text(names: Iterable[Hashable]) -> str:
    """One axis name, or several, as one types them."""
    texts = [_quoted(name) for name in names]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _quoted(name: Hashable) -> str:
    text = repr(name)
    return f'"{name}"' if isinstance(name, str) and text == f"'{name}'" else text


def spec_text(entries: Iterable[tuple[Hashable, ...]]) -> str:
    """A spec with these names for each axis of an array."""
    texts = [axes_text(names) if names else "None" for names in entries]
    while texts and texts[-1] == "None":
        texts.pop()
    return f"P({', '.join(texts)})"


def mesh_text(mesh: Mesh) -> str:
    """The expression that makes a mesh, with its devices in their order."""
    order = [jax.devices().index(device) for device in mesh.devices.flat]
    if order == list(range(mesh.size)):
        devices = f"jax.devices()[:{mesh.size}]"
    else:
        devices = f"[jax.devices()[k] for k in {order}]"
    sizes = tuple(mesh.shape.values())
    if len(sizes) != 1:
        devices = f"np.array({devices}).reshape({', '.join(map(str, sizes))})"
    names = f"({', '.join(map(_quoted, mesh.axis_names))}{',' if len(sizes) == 1 else ''})"
    kinds = [f"AxisType.{kind.name}" for kind in mesh.axis_types]
    if set(kinds) == {"AxisType.Auto"}:
        return f"Mesh({devices}, {names})"
    types = f"({kinds[0]},) * {len(kinds)}" if len(set(kinds)) == 1 else f"({', '.join(kinds)})"
    return f"Mesh({devices}, {names}, axis_types={types})"
