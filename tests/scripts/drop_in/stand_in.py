"""The functions that a test file of JAX gets in the place of `jax.shard_map` and `jax.pmap`, and its tests.

As a program it runs one part of the tests of a file, in its own process.
"""

import builtins
import functools
import importlib
import json
import re
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

import statemesh as sm
import statemesh.legacy


def _broken(mapping: Callable[..., Any]) -> Callable[..., Any]:
    """A map whose results are wrong, because each of them is doubled."""

    def twice(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.concatenate([jnp.atleast_1d(x)] * 2), tree)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        if not args:
            return functools.partial(mapped, **kwargs)
        fun, *others = args
        return mapping(lambda *a, **k: twice(fun(*a, **k)), *others, **kwargs)

    return mapped


def by_older_names(fun: Any = None, mesh: Any = None, in_specs: Any = ..., **options: Any) -> Any:
    """The older function, called with the argument names of `jax.shard_map`.

    It cannot express a decorator without a mesh or specs; such a call goes to the newer function.
    """
    if fun is None:
        return functools.partial(by_older_names, mesh=mesh, in_specs=in_specs, **options)
    names = options.get("axis_names") or ()
    if mesh is None or in_specs is ... or not set(names) <= set(mesh.axis_names):
        given = {} if in_specs is ... else {"in_specs": in_specs}
        return sm.shard_map(fun, mesh, **given, **options)
    auto = frozenset(mesh.axis_names) - frozenset(names) if names else frozenset()
    check_rep = options.get("check_vma", True)
    return sm.legacy.shard_map(
        fun, mesh, in_specs, options["out_specs"], check_rep=check_rep, auto=auto
    )


# Variants by name: the functions in the place of `shard_map` and of `pmap`.
VARIANTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "jax": (jax.shard_map, jax.pmap),
    "statemesh": (sm.shard_map, sm.pmap2),
    "not compiled": (functools.partial(sm.shard_map, jit=False), sm.pmap2),
    "older names": (by_older_names, sm.pmap2),
    "broken": (_broken(sm.shard_map), _broken(sm.pmap2)),
}


def _counted(mapping: Callable[..., Any], count: Counter[str]) -> Callable[..., Any]:
    """A mapping function that counts the mapped functions that it makes, and their calls."""

    def counting(*args: Any, **kwargs: Any) -> Any:
        count["made"] += 1
        made = mapping(*args, **kwargs)
        if not args or not callable(args[0]):  # This makes a decorator, which makes the mapping.
            return lambda fun: _Counting(made(fun), count)
        return _Counting(made, count)

    return counting


class _Counting:
    """A mapped function whose calls are counted. It behaves like the function in everything else."""

    def __init__(self, made: Any, count: Counter[str]) -> None:
        self.__dict__.update(_made=made, _count=count)
        functools.update_wrapper(self, made)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._count["called"] += 1
        return self._made(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class _Seen(types.ModuleType):
    """A module with other functions under some of its names."""

    def __init__(self, module: types.ModuleType, instead: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, **instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def load(file: Path, variant: str) -> tuple[types.ModuleType, dict[str, Counter[str]]]:
    """A test file as a module that sees replacements for these functions of JAX, and how often they are used.

    Only the imports of that file change: JAX's own modules keep their functions.
    """
    counts = {name: Counter[str](made=0, called=0) for name in ("shard_map", "pmap")}
    pairs = zip(counts.items(), VARIANTS[variant], strict=True)
    instead = {name: _counted(mapping, count) for (name, count), mapping in pairs}

    def importing(name: str, *scopes: Any, **more: Any) -> Any:
        module = importlib.__import__(name, *scopes, **more)
        fromlist = scopes[2] if len(scopes) > 2 else more.get("fromlist")
        if name == "jax._src.shard_map" and fromlist:
            return _Seen(module, {"shard_map": instead["shard_map"]})
        return _Seen(module, instead) if module is jax else module

    module = types.ModuleType(file.stem)
    module.__dict__.update(
        __file__=str(file), __builtins__={**vars(builtins), "__import__": importing}
    )
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    return module, counts


def name(test: Any) -> str:
    """The name of a test, or of the test that a subtest is of, the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", str(getattr(test, "test_case", test).id()))


def tests_of(suite: Any) -> list[Any]:
    if not isinstance(suite, unittest.TestSuite):
        return [suite]
    return [test for part in suite for test in tests_of(part)]


def main(file: str, variant: str, part: str, parts: str, only: str) -> None:
    module, counts = load(Path(file), variant)
    sys.modules[module.__name__] = module
    flags.FLAGS(["tests"])
    tests = sorted(tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)), key=name)
    chosen = [test for test in tests[int(part) :: int(parts)] if only in name(test)]
    result = unittest.TestResult()
    for test in chosen:
        test.run(result)
    # The outcome of each test: a word, and the exception or the reason.
    found = {name(test): ("passed", "") for test in chosen}
    found |= {name(test): ("skipped", reason) for test, reason in result.skipped}
    failed = [*result.failures, *result.errors]
    found |= {name(test): ("failed", text[-6000:]) for test, text in failed}
    print("\n" + json.dumps({"found": found, "counts": counts}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
