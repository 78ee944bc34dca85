"""Several processes, each with its own devices, lanes and parts."""

import json
import re
from typing import Any

import numpy as np
import pytest

from tests.call import process_steps
from tests.call.process_steps import LANES
from tests.processes import COUNT, STRICT, free_port, run_together


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of each of two processes: arrays as its devices hold them, and facts."""
    folder = tmp_path_factory.mktemp("processes")
    module = [*STRICT, "tests.call.process_steps"]
    setup = [str(COUNT), str(free_port())]
    commands = [[*module, str(i), *setup, str(folder / f"{i}")] for i in range(COUNT)]
    run_together(commands, folder, LANES // COUNT)
    return [
        (dict(np.load(folder / f"{i}.npz")), json.loads((folder / f"{i}.json").read_text()))
        for i in range(COUNT)
    ]


@pytest.fixture(scope="module")
def one_process() -> process_steps.Found:
    """The results of one process on all devices."""
    return process_steps.run(process_steps.SHARED)


def test_several_processes_find_what_one_does(together: Any, one_process: Any) -> None:
    expected, _ = one_process
    for arrays, _ in together:
        assert arrays.keys() == expected.keys()
    for name, x in expected.items():
        # Device by device, also for values that are the same everywhere.
        joined = np.concatenate([arrays[name] for arrays, _ in together])
        assert joined.dtype == x.dtype, name
        if np.issubdtype(x.dtype, np.floating):
            np.testing.assert_allclose(joined, x, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(joined, x, err_msg=name)


def test_calls_in_a_row(together: Any, one_process: Any) -> None:
    """Lanes come back as local arrays, and go in again as they are; what is given up or copied."""
    parts = [
        [LANES // COUNT if size == LANES else size for size in shape]
        for shape in one_process[1]["lanes"]["shapes"]
    ]
    steady = {"traces": 1, "compiled again": 0, "untouched": True}
    lanes = {"local": True, "shapes": parts, "placed": True, "lowered": True}
    for _, facts in together:
        assert facts["lanes"] == steady | lanes
        assert facts["shards"] == steady
        assert facts["others"] == {
            "donated": True,
            "kept where it is only read": True,
            "copied": True,
        }


PASSED = (
    "With several processes, each passes one lane for each of its own devices, and gets these lanes "
    "back."
)
TRACED = (
    "BatchAxisError: <lambda>: pmap2 over the devices of several processes cannot be traced, as by jit, "
    "grad, vmap or scan around it. It takes and gives this process's lanes, which exist only while it "
    "runs. Call it outside of them, and transform the function that it maps; or use shard_map."
)
SHAPE = (
    "BatchAxisError: <lambda>: arguments do not fit global_arg_shapes:\n"
    "  - x: float32[4,3] here, but global_arg_shapes has ({}, 3), of which this process's part is "
    "({}, 3)\n"
    "A global shape is that of one array, with the lanes of all processes on the mapped axis; give "
    "None for any other argument."
)
REFUSED = {
    "too few": f"BatchAxisError: <lambda>: this process passed 3 lanes, but has 4 devices. {PASSED}",
    "all": f"BatchAxisError: <lambda>: this process passed 8 lanes, but has 4 devices. {PASSED}",
    "too many": (
        "BatchAxisError: <lambda>: 9 lanes on 8 devices; pmap2 gives every lane a device of its own. Use "
        "8 at most, each with a part of the batch, as in x.reshape(8, -1, *x.shape[1:]); or use vmap2 or "
        "shard_map."
    ),
    "shape of 4": SHAPE.format(4, 2),
    "shape of 7": SHAPE.format(7, 3),
    "shape of 9": SHAPE.format(9, 5),
    "not ours": (
        "BatchAxisError: <lambda>: none of the 4 devices belongs to this process. Only processes that own "
        "some of them can make the call."
    ),
    "jit": TRACED,
    "grad": TRACED,
    "unsharded": (
        "BatchAxisError: unsharded: each of several processes has only its own lanes. Gather them, as with "
        "jax.experimental.multihost_utils.process_allgather, and call vmap2."
    ),
    "deleted": (
        "StatemeshError: <lambda>: these arguments were given up to an earlier call that donates its "
        "arguments:\n  - x\nGo on with what that call returned, as in `out, model = step(model, x)`."
    ),
}


def test_what_several_processes_are_refused(together: Any) -> None:
    for _, facts in together:
        assert facts["refusals"] == REFUSED


DIFFERENT = (
    "StructureError: {}: all processes must pass the same values here, but they passed different ones:\n"
    "{}\n"
    "Make them from the same seed or file in every process, or send one process's array or seed to all: "
    "jax.experimental.multihost_utils.broadcast_one_to_all(x). If each process has a part of the data, "
    "make one array of the parts: jax.make_array_from_process_local_data(sharding, part)."
)
KEY = "states['rng']: key<fry>[]"
STRUCTURE = "the structure of the arguments: "
# The name of the call, and the reported differences; `?` is the number of the process, `…` is any text.
DISAGREED = {
    "committed": ("configured", ["states['count']: float32[]"]),
    "key": ("configured", [KEY]),
    "several": ("configured", ["states['count']: float32[]", KEY, "x: float32[8]"]),
    "more": ("configured", ["the structure of the arguments, or where their arrays lie"]),
    "number": ("<lambda>", ["n: ?.0"]),
    "grad": ("<lambda>", ["n: float32[]"]),
    "place": ("place", ["tree['rng']: key<fry>[]"]),
    "pack": ("pack", ["model['count']: float32[]"]),
    "shared": ("<lambda>", ["s: float32[]"]),
    "argument": ("<lambda>", [f"{STRUCTURE}PyTreeDef(((*, CustomNode(_Box[?], [])), {{}}))"]),
    "static": ("configured", ["config: Config(…"]),
    "within": ("configured", ["config: Config(…"]),
    "function": ("configured", ["config: Config(…"]),
    "structure": ("configured", [f"{STRUCTURE}…"]),
    "leaves": ("configured", [f"{STRUCTURE}…"]),
}


def test_what_every_process_has_to_pass_alike_is_compared(together: Any) -> None:
    for process, (_, facts) in enumerate(together):
        assert facts["other_arguments"].keys() == DISAGREED.keys()
        for what, (name, bad) in DISAGREED.items():
            lines = [line if "or where" in line else f"{line} in this process" for line in bad]
            text = DIFFERENT.format(name, "\n".join(f"  - {line}" for line in lines))
            pattern = re.escape(text.replace("?", str(process))).replace("…", "[^\n]*")
            assert re.fullmatch(pattern, facts["other_arguments"][what]), (what, facts)


# What the first line that differs shows of the program of each process.
PROGRAMS = {
    "mapping": ("(('a', 5), ('b', 0))", "(('a', 5), ('b', 1))"),
    "number": ("1.0", "2.0"),
    "operation": (" = sin ", " = cos "),
    "inside": ("2.0", "3.0"),
    "longer": ("", "returns "),
    "constant": ("", ""),
    "out_specs": ("", ""),
    "pmap2": ("1.0", "2.0"),
    "grad": ("1.0", "2.0"),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_processes_that_trace_other_programs_are_refused(what: str, together: Any) -> None:
    texts = [facts["other_programs"][what] for _, facts in together]
    assert texts[0] == texts[1]
    match = re.fullmatch(
        "StructureError: <lambda>: all processes must run the same program, but they traced different ones. "
        r"Line \d+ is the first that differs:\n  - process 0: (.*)\n  - process 1: (.*)\n"
        r"Nothing that is traced may depend on jax\.process_index\(\), on the time or on a seed of one "
        "process, nor on the order of a set. What differs between devices is an argument that is split, or "
        r"comes of sm\.axis_index inside\.",
        texts[0],
    )
    assert match, texts[0]
    assert match[1] != match[2]
    for line, fragment in zip(match.groups(), PROGRAMS[what], strict=True):
        assert fragment in line


def test_a_call_that_only_one_process_makes_is_named(together: Any) -> None:
    for name, (_, facts) in zip(("evaluate", "train"), together, strict=True):
        assert facts["other_programs"]["other_call"] == (
            f"StructureError: {name}: all processes must make the same calls in the same order, but they "
            "are at different ones:\n  - process 0: evaluate\n  - process 1: train\n"
            "Look for a call that only some processes make, as under `if jax.process_index() == 0`, or as "
            "often as each has data. `explain`, `place` and `save` are such calls too. Make it in every "
            "process, and print or write what it gives in one."
        )


def test_a_process_that_raises_while_it_traces_tells_the_others(together: Any) -> None:
    assert [facts["other_programs"]["raised"] for _, facts in together] == [
        "StructureError: stops: 1 process (1) raised an error while tracing it, which this process did not. "
        "So none of them runs it. The error is in the output of process 1.",
        "KeyError: 'only in process 1'",
    ]


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("in_specs", r"x: P.*\('i',?\)\n  - process 1: x: P.*\(\)"),
        ("mesh", r"mesh: {'i': 8} of the devices \[.*\]\n  - process 1: mesh: .*\[.*\]"),
    ],
)
def test_processes_that_lay_out_differently_are_refused(
    what: str, line: str, together: Any
) -> None:
    texts = [facts["other_programs"][what] for _, facts in together]
    assert texts[0] == texts[1]
    assert re.fullmatch(
        "StructureError: <lambda>: all processes must lay out its arguments alike, but their meshes or specs "
        rf"differ:\n  - process 0: {line}\n"
        r"Give every process the same mesh, with its devices in one order, and the same specs\.",
        texts[0],
    ), texts[0]
