"""The generator of random programs: what it draws, that its source runs by itself, what programs share."""

import dataclasses
import functools
import itertools
import linecache
import os
import random
import re
import subprocess
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import statemesh as sm
from tests.helpers import compiles, make_mesh

from .random_programs import Program, programs


# To explain what was found `find` varies it, and returns the last variation.
FIND = settings(database=None, max_examples=300, phases=[Phase.generate, Phase.shrink])
Programs = st.SearchStrategy[Program]


def drawn(strategy: Programs, count: int) -> list[Program]:
    """So many examples, the same each time."""
    found: list[Program] = []

    @settings(
        max_examples=min(count, 20),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(program: Program) -> None:
        found.append(program)

    # One long run varies a few of its examples over and over.
    for k in range(-(-count // 20)):
        seed(k)(collect)()
    return found


@functools.cache
def some(portable: bool = True, smooth: bool = False) -> list[Program]:
    return drawn(programs(portable=portable, smooth=smooth), 300)


@functools.cache
def texts(portable: bool) -> list[str]:
    # Without line breaks inside of what is one call.
    lines = (" ".join(program.source.split()) for program in some(portable))
    return [re.sub(r" (?=[)\]}])|(?<=[(\[{]) ", "", line) for line in lines]


# What programs are made of, and in how many of 300 it is to be found at least.
PORTABLE: dict[str, tuple[str, int]] = {
    "arithmetic": (r"jnp\.(tanh|sin|cos|maximum|minimum|abs|clip|exp)\(", 100),
    "integers": (r"np\.int32\(", 60),
    "floats": (r"np\.float32\(", 100),
    "integers made floats": (r"% 13 \* 0\.25", 10),
    "floats made integers": (r"jnp\.round\(|> 0\.5\)\.astype", 3),
    "a product with a whole parameter": (r"@ model", 25),
    "a product with a split parameter": (r"lax\.psum\([^=]*@ model", 4),
    "a sum over rows": (r"lax\.psum\(\w+\.sum\(", 15),
    "a mean over shards": (r"lax\.pmean\(", 30),
    "a maximum over shards": (r"lax\.pmax\(", 30),
    "a minimum over shards": (r"lax\.pmin\(", 5),
    "over several axes at once": (r'lax\.p(sum|mean|max|min)\([^=]*, \("\w", "\w"', 15),
    "over one axis after the other": (r"lax\.p(\w+)\(lax\.p\1\(", 8),
    "a gather": (r"lax\.all_gather\(", 30),
    "a gather of units": (r"lax\.all_gather\([^=]*, axis=", 2),
    "a gather typed as equal": (r'to="invarying"', 8),
    "a row of another shard": (r"\)\) \+ 1\) %|len\(x\)\) \+ 1\) %", 8),
    "global row numbers": (r"lax\.axis_index\([^=]*\) \* len\(x\) \+ jnp\.arange", 10),
    "a branch": (r"lax\.cond\(", 20),
    "one of several branches": (r"lax\.switch\(", 20),
    "a loop": (r"lax\.fori_loop\(", 30),
    "a loop of unknown length": (r"lax\.(fori_loop\(0,|while_loop\([^=]*<) [^2-3]", 5),
    "a while": (r"lax\.while_loop\(", 10),
    "a scan": (r"lax\.scan\(", 20),
    "a scan over columns": (r"lax\.scan\([^=]*\.T", 1),
    "a collective in a branch or loop": (r"lambda c: [^=]*\(c [-+*] lax\.p", 5),
    "jax.checkpoint": (r"jax\.checkpoint\(", 20),
    "jax.jit inside": (r"jax\.jit\(", 10),
    "jax.vmap inside": (r"jax\.vmap\(lambda c", 8),
    "rows of a random stream": (r"rng\.rows\(", 40),
    "rows that all shards have": (r"rng\.rows\(len\(x\)\)", 2),
    "one key": (r"rng\.split\(\)", 30),
    "several keys": (r"rng\.split\(2\)", 5),
    "a stream in a loop": (r"rng: rng\.split", 5),
    "uniform": (r"jax\.random\.uniform\(", 20),
    "normal": (r"jax\.random\.normal\(", 5),
    "bernoulli": (r"jax\.random\.bernoulli\(", 5),
    "randint": (r"jax\.random\.randint\(", 5),
    "a state that is written": (r"\.set\(", 100),
    "a state made of the old one": (r"0\.9 \* model", 20),
    "reduce='mean'": (r'reduce="mean"', 25),
    "reduce='sum'": (r'reduce="sum"', 25),
    "reduce='max'": (r'reduce="max"', 15),
    "reduce='min'": (r'reduce="min"', 15),
    "a function as reduce": (r"reduce=total", 25),
    "moments": (r"reduce=merge_moments", 5),
    "written moments": (r'"mean": v\d+, "m2"', 2),
    "a state that is split": (r"sm\.\w+State\([^=]*spec=P\(\"|sm\.State\([^=]*spec=P\(\"", 40),
    "a matrix that is split": (r"spec=P\(None, ", 4),
    "a plain array": (r"jnp\.asarray\(", 8),
    "in a dictionary inside": (r'"inner": \{|inner=\{', 40),
    "in a list inside": (r'"items": \[|items=\[', 40),
    "a module": (r"class Model", 80),
    "a dictionary": (r"model = \{", 80),
    "several outputs": (r"return \(v", 40),
    "nothing written": (r"return [^=]*, model mesh", 15),
    "one device": (r"devices\(\)\[:1\]", 20),
    "eight devices": (r"devices\(\)\[:8\]", 40),
    "several mesh axes": (r"reshape\(", 80),
    "Explicit axes": (r"AxisType\.Explicit", 60),
    "states that change places": (
        r"(s\d)(?:=|\": )\(? ?model(?:\.|\[\")(?!\1)s\d(?:\.set\(|\"\]\.set\()",
        5,
    ),
    "that, passed on": (r"\(new\)\(new\)|leaf, new\)|new, new\)", 5),
    **{f"a {kind}": (rf"sm\.{kind}\(", 10) for kind in ("State", "BatchState", "ParamState")},
    **{f"a {kind}": (rf"sm\.{kind}\(", 5) for kind in ("HiddenState", "NonBatchState")},
    **{f"a {kind}": (rf"sm\.{kind}\(", 5) for kind in ("ShortTermState", "LongTermState")},
}
LOCAL: dict[str, tuple[str, int]] = {
    "a reduction of the own part": (r"v\d+ = \w+\.(sum|mean|max|min)\(", 30),
    "a reduction over shards alone": (r"v\d+ = lax\.p(sum|mean|max|min)\(\w+, ", 8),
    "axis_index": (r"v\d+ = lax\.axis_index\((\"\w\"|\([^)]*\))\) [a-z]", 10),
    "axis_size": (r"lax\.axis_size\(", 10),
    "ppermute": (r"lax\.ppermute\(", 10),
    "psum_scatter": (r"lax\.psum_scatter\(jnp\.stack", 5),
    "psum_scatter, tiled": (r"lax\.psum_scatter\(jnp\.conc[^=]*tiled=True", 3),
    "all_to_all": (r"lax\.all_to_all\(jnp\.stack", 5),
    "all_to_all, tiled": (r"lax\.all_to_all\(jnp\.conc[^=]*tiled=True", 3),
    "all_gather, stacked": (r"lax\.all_gather\(\S+, \"\w\"\)", 8),
    "PerShard": (r"State\([^=]*spec=sm\.PerShard\(", 20),
    "PerShard over several axes": (r"PerShard\(\"\w\", ", 3),
    "a key for each shard": (r"jax\.random\.split\(jax\.random\.key\(", 5),
    "numbers that shards draw for themselves": (r"= jax\.random\.\w+\(key\d", 15),
    "a branch that shards take or not": (r"lax\.cond\( ?lax\.axis_index", 5),
    "a loop that shards leave apart": (r"lax\.axis_index\([^=]*\) % 3 \+ 1", 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", PORTABLE)
def test_programs_reach(feature: str) -> None:
    pattern, least = PORTABLE[feature]
    assert sum(re.search(pattern, text) is not None for text in texts(True)) >= least


@pytest.mark.slow
@pytest.mark.parametrize("feature", LOCAL)
def test_programs_that_are_not_portable_reach_more(feature: str) -> None:
    pattern, least = LOCAL[feature]
    assert sum(re.search(pattern, text) is not None for text in texts(False)) >= least
    # Of columns, and of rows that are not split, any program may reduce its own part.
    if feature != "a reduction of the own part":
        assert not any(re.search(pattern, text) for text in texts(True))


def test_the_simplest_program() -> None:
    simplest = find(programs(), lambda program: True, settings=FIND)
    assert str(simplest) == SIMPLEST


SIMPLEST = """\
import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import statemesh as sm


def step(model, x):
    return model["s0"].value, model


mesh = Mesh(jax.devices()[:1], ("x",))
in_specs = (None, P("x"))
out_specs = (P("x"), P())
model = {"s0": sm.State(np.full((8,), 0.0, np.float32), spec=P("x"))}
x = np.full((8,), 0.0, np.float32)

mapped = sm.shard_map(step, mesh, in_specs, out_specs)
for path, leaf in jax.tree_util.tree_leaves_with_path(mapped(model, x)):
    print(jax.tree_util.keystr(path), leaf)
"""


def test_programs_shrink_to_what_is_looked_for() -> None:
    """To few steps on one device, and nothing is written."""
    found = find(
        programs(random=False, max_steps=4),
        lambda program: "lax.psum(" in program.source,
        settings=FIND,
        random=random.Random(0),
    )
    assert found.mesh.size == 1
    assert len(found.code.definitions.splitlines()) <= 4
    assert ".set(" not in found.source and "class Model" not in found.source
    assert set(itertools.chain(*found.values)) == {0}


@pytest.fixture(name="program")
def _program() -> Program:
    return one_of_many()


@functools.cache
def one_of_many() -> Program:
    """One with an integer, a float and a key, on all the devices."""
    strategy = programs(mesh=make_mesh("4x2"))
    wanted = ('reduce="sum"', "rng.rows", "np.int32", "lax.psum(")
    found = [p for p in drawn(strategy, 160) if all(text in p.source for text in wanted)]
    return max(found, key=lambda p: len({number for numbers in p.values for number in numbers}))


def printed(result: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(result)
    return "".join(f"{jax.tree_util.keystr(path)} {leaf!s}\n" for path, leaf in leaves)


@pytest.mark.slow
def test_its_repr_runs_by_itself(program: Program, tmp_path: Any) -> None:
    """In a new process, without anything set for it."""
    path = tmp_path / "pasted.py"
    path.write_text(repr(program))
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    root = os.path.dirname(os.path.dirname(os.path.abspath(sm.__file__)))
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        env={**environment, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    # Both suites compile without optimizing, a program by itself does not: floats round differently.
    number = r"-?\d+(?:\.\d*(?:e[+-]\d+)?)?"
    got, want = ran.stdout, printed(program.mapped(*program.args))
    assert re.sub(number + r"|\s", "", got) == re.sub(number + r"|\s", "", want)
    numbers = [[float(n) for n in re.findall(number, text)] for text in (got, want)]
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-5, atol=1e-5)
    assert len(got.splitlines()) >= 3


def test_programs_are_equal_where_their_source_is() -> None:
    found = drawn(programs(), 40)
    assert found == drawn(programs(), 40)
    assert {repr(p) for p in found} == {repr(p) for p in set(found)}
    assert len({repr(p) for p in found}) == len(set(found)) > 25
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].values = ()  # type: ignore[misc]


def test_other_values_compile_nothing_anew(program: Program) -> None:
    other = dataclasses.replace(
        program, values=tuple(tuple(n + 1 for n in numbers) for numbers in program.values)
    )
    assert other != program and other.fun is program.fun and other.mapped is program.mapped
    first = jax.block_until_ready(program.mapped(*program.args))
    args = other.args
    with compiles() as seen:
        second = jax.block_until_ready(other.mapped(*args))
    assert seen.times == 0
    assert printed(first) != printed(second)


def test_a_new_object_of_the_same_code_is_the_same_function(program: Program) -> None:
    again = Program(dataclasses.replace(program.code), program.values)
    assert again == program and hash(again) == hash(program)
    assert again.fun is program.fun and again.mapped is program.mapped


def test_tracebacks_show_its_lines(program: Program) -> None:
    try:
        program.fun(*[None] * len(program.args))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        shown = "".join(traceback.format_tb(error.__traceback__))
    else:
        raise AssertionError
    assert last.name == "step"
    source = program.code.definitions.splitlines()
    assert last.line and any(last.line in line for line in source)
    assert last.line in shown
    # The line numbers are those of the source that one would paste, less what sets the devices.
    assert last.line == linecache.getline(last.filename, last.lineno or 0).strip()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_given_mesh(kind: AxisType) -> None:
    mesh = Mesh(
        np.array(jax.devices()[::-1]).reshape(2, 4), ("rows", "or'columns"), axis_types=(kind,) * 2
    )
    for program in drawn(programs(mesh=mesh), 20):
        assert program.mesh == mesh


def test_what_is_asked_for() -> None:
    plain = drawn(programs(random=False, max_steps=2), 40)
    assert not any("RandomState" in program.source for program in plain)
    assert all(program.portable and not program.smooth for program in plain)
    for portable in (True, False):
        for program in drawn(programs(smooth=True, portable=portable), 60):
            assert program.smooth and program.portable is portable
            for leaf in jax.tree.leaves(program.args):
                assert leaf.dtype == np.float32 or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
