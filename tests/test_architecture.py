"""The code's own shape: which part may import which."""

import ast
import functools
import graphlib
import pathlib

import pytest


ROOT = pathlib.Path(__file__).parent.parent / "statemesh"

# The order of the flow. A part may import those before it, never those after it.
LAYERS = [
    "_base",
    "_jax",
    "_axes",
    "_state",
    "_explain",
    "_call",
    "_scan",
    "_fsdp",
    "_grad",
    "_map",
    "nn",
    "testing",
    "checkpoint",
    "certify",
]
DOORS = {"__init__", "_engine", "filters", "legacy"}


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    return {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}


def part(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


@functools.cache
def imported(path: pathlib.Path) -> set[str]:
    """The modules of statemesh that a file imports, as paths below the package."""
    found = set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - (node.level - 1)]
        module = tuple((node.module or "").split(".")) if node.module else ()
        for alias in node.names:
            named, door = "/".join((*base, *module, alias.name)), "/".join((*base, *module))
            candidates = [
                path for name in (named, door) for path in (f"{name}.py", f"{name}/__init__.py")
            ]
            found |= set([candidate for candidate in candidates if candidate in modules()][:1])
    return found


def test_every_part_has_its_place() -> None:
    assert {part(name) for name in modules()} == {*LAYERS, *DOORS}


def test_imports_run_with_the_flow() -> None:
    against = [
        f"{name} imports {other}"
        for name, path in modules().items()
        if part(name) not in DOORS
        for other in sorted(imported(path))
        if part(other) in DOORS or LAYERS.index(part(other)) > LAYERS.index(part(name))
    ]
    assert not against


def test_no_import_circles() -> None:
    graph = {name: imported(path) for name, path in modules().items()}
    assert any(graph.values())
    # A circle is an error that names it.
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) == len(graph)


def test_private_jax_is_in_one_file() -> None:
    """What it takes from JAX's interior has a test each, in `tests/libraries`."""
    for name, path in modules().items():
        assert "jax._src" not in path.read_text() or name == "_jax/_lifting.py", name


def test_only_one_file_knows_unstable_jax() -> None:
    """And what tests, which is to share nothing with what it tests."""
    for name, path in modules().items():
        if name != "_jax/_compat.py":
            text = path.read_text()
            of_testing = ("testing/_program/_jaxprs.py", "testing/_program/_backward.py")
            allowed = (*of_testing, "_jax/_lifting.py", "certify/_run.py")
            assert "jax.extend" not in text or name in allowed, name
            assert "__version__" not in text or name == "__init__.py", name


def _beyond_the_door(name: str) -> list[str]:
    """What a module of `testing` uses that users have not."""
    used: list[str] = []
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            ours = [a for a in node.names if a.name.split(".")[0] == "statemesh"]
            used += [a.name for a in ours if (a.name, a.asname) != ("statemesh", "sm")]
        if isinstance(node, ast.ImportFrom):
            outside = node.level > name.count("/")
            # What a library's file is, and which frames a traceback shows: no result hangs on it.
            if (node.module or "") in ("_base._libraries", "_jax._frames"):
                continue
            if outside or (node.module or "").split(".")[0] == "statemesh":
                used.append(f"{'.' * node.level}{node.module}")
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            # What maps a function again with other specs: no result hangs on it, only the line of a report.
            is_known = node.attr in ("_declared", "_bound") and name.endswith("_other_specs.py")
            used += [ast.unparse(node)] if private and not is_known else []
    return used


def test_testing_knows_what_users_know() -> None:
    """Of statemesh it imports the door, and its own siblings."""
    names = [name for name in modules() if part(name) == "testing"]
    assert names
    assert not {name: used for name in names if (used := _beyond_the_door(name))}


def test_the_door_names_everything() -> None:
    import statemesh

    halves = [ROOT / "__init__.py", ROOT / "_engine.py"]
    named: list[str] = []
    for node in (node for half in halves for node in ast.parse(half.read_text()).body):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name
                named.append(alias.name)
    public = {name for name in dir(statemesh) if not name.startswith("_")}
    assert {name for name in named if hasattr(statemesh, name)} == set(named) <= public
    assert len(named) == len(set(named))
    with pytest.raises(AttributeError, match=r"^module 'statemesh' has no attribute 'shardmap'$"):
        _ = statemesh.shardmap  # type: ignore[attr-defined]
