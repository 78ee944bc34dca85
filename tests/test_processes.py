"""Several processes, each with its own devices, lanes and parts."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import statemesh as sm
from statemesh._arguments import Arguments
from statemesh._resolve._processes import check_global_shapes
from tests import process_steps
from tests.process_steps import CALLS, LANES


pytestmark = pytest.mark.slow


ROOT = pathlib.Path(__file__).parent.parent
COUNT = 2
# Far longer than anything here takes.
PATIENCE = 120


@contextlib.contextmanager
def running(
    commands: Sequence[Sequence[str]], logs: Sequence[pathlib.Path], each: int = LANES // COUNT
) -> Iterator[Any]:
    """Processes, each in its own group. All that are left at the end are killed."""
    flags = f"--xla_force_host_platform_device_count={each}"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for i, (command, log) in enumerate(zip(commands, logs, strict=True)):
            # No result may depend on the order of a set.
            environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONHASHSEED": str(i + 1)}
            with log.open("wb") as out:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def processes(tasks: str, timeout: int, folder: pathlib.Path) -> Iterator[Any]:
    """Two processes that run these tasks together, and the files with their results."""
    port = free_port()
    folder.mkdir()
    outs = [folder / str(i) for i in range(COUNT)]
    setup = (str(COUNT), str(port), str(timeout))
    commands = [
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "tests.process_steps",
            tasks,
            str(i),
            *setup,
            str(out),
        ]
        for i, out in enumerate(outs)
    ]
    with running(commands, [out.with_suffix(".log") for out in outs]) as started:
        yield started, outs


def ended(started: Sequence[subprocess.Popen[bytes]], outs: Sequence[pathlib.Path]) -> list[Any]:
    """The exit code and the output of each process, all of which must end in time."""
    deadline = time.monotonic() + PATIENCE
    found = []
    for process, out in zip(started, outs, strict=True):
        code = process.wait(timeout=max(deadline - time.monotonic(), 0))
        found.append((code, out.with_suffix(".log").read_text(errors="replace")))
    return found


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of each of two processes: arrays as its devices hold them, and facts."""
    folder = tmp_path_factory.mktemp("processes") / "together"
    with processes("lanes,shards,others,refusals,alike,traced_alike", 60, folder) as (
        started,
        outs,
    ):
        for code, output in ended(started, outs):
            assert code == 0, output
    return [
        (dict(np.load(out.with_suffix(".npz"))), json.loads(out.with_suffix(".json").read_text()))
        for out in outs
    ]


@pytest.fixture(scope="module")
def one_process() -> process_steps.Found:
    """The results of one process on all devices."""
    return process_steps.run("lanes,shards,others,alike,traced_alike")


@pytest.mark.parametrize(
    "task",
    [
        "lanes",
        "shards",
        "mixed",
        "donated",
        "given twice",
        "fed",
        "redrawn",
        "made",
        "map",
        "handed over",
        "alike",
        "alike too",
        "programs",
    ],
)
def test_several_processes_find_what_one_does(task: str, together: Any, one_process: Any) -> None:
    expected = {name: x for name, x in one_process[0].items() if re.match(rf"{task}\d?\b", name)}
    assert expected
    for name, x in expected.items():
        # Device by device, also for values that are the same everywhere.
        got = np.concatenate([arrays[name] for arrays, _ in together])
        assert got.dtype == x.dtype, name
        if np.issubdtype(x.dtype, np.floating):
            np.testing.assert_allclose(got, x, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(got, x, err_msg=name)


def test_the_lanes_of_all_processes_are_computed_with(together: Any) -> None:
    x, shift = process_steps.lane_data(range(LANES))
    rows = np.arange(LANES * 3).reshape(LANES, 3)
    end = f"lanes{CALLS - 1}"

    def everywhere(name: str) -> Any:
        return np.concatenate([arrays[end + name] for arrays, _ in together])

    np.testing.assert_array_equal(everywhere("[0]['total']"), np.tile(x.sum(1), (LANES, 1)))
    np.testing.assert_array_equal(everywhere("[0]['x']")[:, :, 0], (x * 2 + shift).T)
    np.testing.assert_array_equal(everywhere("[1]['rows'].value")[:, 0], rows + CALLS * x.T)
    np.testing.assert_array_equal(
        everywhere("[1]['count'].value"), np.full(LANES, 5 + CALLS * x[0].sum())
    )


def test_every_lane_of_all_processes_has_a_stream_of_its_own(together: Any) -> None:
    drawn = np.concatenate(
        [
            arrays[f"lanes{call}[0]['{name}']"][:, 0]
            for arrays, _ in together
            for call in range(CALLS)
            for name in ("drawn", "own")
        ]
    )
    assert len(np.unique(drawn, axis=0)) == 2 * CALLS * LANES


def test_lanes_come_back_as_local_arrays(together: Any, one_process: Any) -> None:
    parts = [
        [LANES // COUNT if size == LANES else size for size in shape]
        for shape in one_process[1]["lanes"]["shapes"]
    ]
    for _, facts in together:
        assert facts["lanes"]["local"]
        assert facts["lanes"]["shapes"] == parts


@pytest.mark.parametrize("task", ["lanes", "shards"])
def test_what_comes_out_goes_in_again(task: str, together: Any) -> None:
    for _, facts in together:
        assert facts[task]["traces"] == 1
        assert facts[task]["compiled again"] == 0
        assert facts[task]["untouched"]


def test_lanes_become_whole_arrays_and_parts_again_without_a_copy(together: Any) -> None:
    for _, facts in together:
        assert facts["lanes"]["placed"]
        assert facts["others"]["donated"]
        assert facts["others"]["kept where it is only read"]


def test_what_had_to_be_copied_is_not_donated(together: Any) -> None:
    assert all(facts["others"]["copied"] for _, facts in together)


def test_programs_are_lowered_for_the_lanes_of_all_processes(together: Any) -> None:
    assert all(facts["lanes"]["lowered"] for _, facts in together)


PASSED = (
    "With several processes, each passes one lane for each of its own devices, and gets these lanes "
    "back."
)
TRACED = (
    "BatchAxisError: <lambda>: pmap2 over the devices of several processes cannot be traced, as by jit, "
    "grad, vmap or scan around it. It takes and gives this process's lanes, which exist only while it "
    "runs. Call it outside of them, and transform the function that it maps; or use shard_map."
)
REFUSED = {
    "too few": f"BatchAxisError: <lambda>: this process passed 3 lanes, but has 4 devices. {PASSED}",
    "all": f"BatchAxisError: <lambda>: this process passed 8 lanes, but has 4 devices. {PASSED}",
    "too many": (
        "BatchAxisError: <lambda>: 9 lanes on 8 devices; pmap2 gives every lane a device of its own. Use "
        "8 at most, each with a part of the batch, as in x.reshape(8, -1, *x.shape[1:]); or use vmap2 or "
        "shard_map."
    ),
    "shape": (
        "BatchAxisError: <lambda>: arguments do not fit global_arg_shapes:\n"
        "  - x: float32[4,3] here, but global_arg_shapes has (4, 3), of which this process's part is (2, "
        "3)\n"
        "A global shape is that of one array, with the lanes of all processes on the mapped axis; give "
        "None for any other argument."
    ),
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


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_several_processes_are_refused(what: str, together: Any) -> None:
    for _, facts in together:
        assert facts["refusals"][what] == REFUSED[what]


DIFFERENT = (
    "StructureError: {}: all processes must pass the same values here, but they passed different ones:\n"
    "{}\n"
    "Make them from the same seed or file in every process, or send one process's array or seed to all: "
    "jax.experimental.multihost_utils.broadcast_one_to_all(x). If each process has a part of the data, "
    "make one array of the parts: jax.make_array_from_process_local_data(sharding, part)."
)
KEY = "states['rng']: key<fry>[]"
# The name of the call, and the reported differences. `?` is the number of the process.
DISAGREED = {
    "committed": ("step", ["states['count']: float32[]"]),
    "key": ("step", [KEY]),
    "several": ("step", ["states['count']: float32[]", KEY, "x: float32[8]"]),
    "more": ("step", ["the structure of the arguments, or where their arrays lie"]),
    "number": ("<lambda>", ["n: ?.0"]),
    "grad": ("<lambda>", ["n: float32[]"]),
    "place": ("place", ["tree['rng']: key<fry>[]"]),
    "pack": ("pack", ["model['count']: float32[]"]),
    "shared": ("<lambda>", ["s: float32[]"]),
    "argument": (
        "<lambda>",
        ["the structure of the arguments: PyTreeDef(((*, CustomNode(_Box[?], [])), {}))"],
    ),
}


@pytest.mark.parametrize("what", list(DISAGREED))
def test_what_every_process_has_to_pass_alike_is_compared(what: str, together: Any) -> None:
    name, bad = DISAGREED[what]
    for process, (_, facts) in enumerate(together):
        lines = [line if "or where" in line else f"{line} in this process" for line in bad]
        text = "\n".join(f"  - {line}" for line in lines).replace("?", str(process))
        assert facts["alike"][what] == DIFFERENT.format(name, text)


@pytest.mark.parametrize("what", ["static", "within", "function", "structure", "leaves"])
def test_static_leaves_of_all_processes_are_compared(what: str, together: Any) -> None:
    path = (
        "the structure of the arguments: " if what in ("structure", "leaves") else "config: Config("
    )
    for _, facts in together:
        text = facts["alike"][what]
        assert text.startswith(DIFFERENT.split("{}\n")[0].format("step") + f"  - {path}"), text
        assert text.count("  - ") == 1


# What the first line that differs shows of the program of each process.
PROGRAMS = {
    "number": ("1.0", "2.0"),
    "operation": (" = sin ", " = cos "),
    "inside": ("2.0", "3.0"),
    "longer": ("", "returns "),
    "constant": ("", ""),
    "out_specs": ("", ""),
    "pmap2": ("1.0", "2.0"),
    "grad": ("1.0", "2.0"),
}


@pytest.mark.parametrize("what", list(PROGRAMS))
def test_processes_that_trace_other_programs_are_refused(what: str, together: Any) -> None:
    texts = [facts["traced_alike"][what] for _, facts in together]
    assert texts[0] == texts[1]
    found = re.fullmatch(
        "StructureError: <lambda>: all processes must run the same program, but they traced different ones. "
        r"Line \d+ is the first that differs:\n  - process 0: (.*)\n  - process 1: (.*)\n"
        r"Nothing that is traced may depend on jax\.process_index\(\), on the time or on a seed of one "
        "process, nor on the order of a set. What differs between devices is an argument that is split, or "
        r"comes of sm\.axis_index inside\.",
        texts[0],
    )
    assert found, texts[0]
    assert found[1] != found[2]
    for line, fragment in zip(found.groups(), PROGRAMS[what], strict=True):
        assert fragment in line


def test_a_process_that_raises_while_it_traces_tells_the_others(together: Any) -> None:
    assert [facts["traced_alike"]["raised"] for _, facts in together] == [
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
    texts = [facts["traced_alike"][what] for _, facts in together]
    assert texts[0] == texts[1]
    assert re.fullmatch(
        "StructureError: <lambda>: all processes must lay out its arguments alike, but their meshes or specs "
        rf"differ:\n  - process 0: {line}\n"
        r"Give every process the same mesh, with its devices in one order, and the same specs\.",
        texts[0],
    ), texts[0]


def test_nothing_is_compared_again_that_lies_right(together: Any) -> None:
    assert all(facts["alike"]["asked in later calls"] == 0 for _, facts in together)


def test_a_lost_process_ends_the_others(tmp_path: pathlib.Path) -> None:
    """JAX ends them within its own timeout, with a reason, whatever they wait for."""
    ways = ["process 0 is killed", "process 1 is killed", "process 1 raises"]
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(processes(way, 10, tmp_path / way)) for way in ways]
        for way, (started, outs) in zip(ways, groups, strict=True):
            found = ended(started, outs)
            lost = int(way.split()[1])
            code, output = found[lost]
            if way.endswith("killed"):
                assert code == 17, output
            else:
                assert code != 0 and "RuntimeError: this process gives up" in output, output
            code, output = found[1 - lost]
            assert code not in (0, 17), output
            assert "This most likely indicates that another task died" in output, output
            assert "coordination service" in output, output
            assert "nobody missed the lost process" not in output, output


def test_whatever_is_left_over_is_killed(tmp_path: pathlib.Path) -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=-1)"
    with (
        pytest.raises(RuntimeError, match="the test fails"),
        running([[sys.executable, "-c", nested]], [tmp_path / "log"]) as started,
    ):
        raise RuntimeError("the test fails")
    (process,) = started
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


# Global shapes in one process, which has all lanes: they are the shapes of the arguments.


def step(x: Any, y: Any, z: Any) -> Any:
    return jnp.sum(x) + y * jax.tree.leaves(z)[0]


def test_global_shapes_that_fit_change_nothing() -> None:
    axes: dict[str, Any] = {"in_axes": (-1, 0, None)}
    shaped = sm.pmap2(step, global_arg_shapes=([3, np.int64(LANES)], (LANES,), None), **axes)
    args = np.arange(3 * LANES).reshape(3, LANES), np.arange(LANES), {"z": jnp.arange(2)}
    expected = args[0].sum(0)[:, None] + args[1][:, None] * np.arange(2)
    np.testing.assert_array_equal(shaped(*args), expected)
    np.testing.assert_array_equal(sm.pmap2(step, **axes)(*args), expected)


def test_what_all_lanes_share_has_its_own_shape_as_the_global_one() -> None:
    shaped = sm.pmap2(step, in_axes=(0, None, 0), global_arg_shapes=(None, (5,), (LANES, 5)))
    out = shaped(np.zeros(LANES), np.arange(5), np.ones((LANES, 5)))
    np.testing.assert_array_equal(out, np.tile(np.arange(5), (LANES, 1)))


def test_a_state_of_one_array_has_a_global_shape() -> None:
    double = sm.pmap2(
        lambda s: s.set(s.value * 2), state_in_axes=..., global_arg_shapes=((LANES, 3),)
    )
    state = sm.State(jnp.arange(3 * LANES).reshape(LANES, 3))
    np.testing.assert_array_equal(double(state).value, np.arange(3 * LANES).reshape(LANES, 3) * 2)


def test_other_shapes_are_checked_at_every_call() -> None:
    double = sm.pmap2(lambda x: x * 2, global_arg_shapes=((LANES, 3),))
    x = jnp.arange(3 * LANES).reshape(LANES, 3)
    x = double(double(x))
    with pytest.raises(sm.BatchAxisError, match=r"int32\[8,2\] here"):
        double(x[:, :2])
    np.testing.assert_array_equal(double(x), np.arange(3 * LANES).reshape(LANES, 3) * 8)


def test_all_arguments_that_are_not_of_their_global_shapes_are_named() -> None:
    told = sm.pmap2(
        step, in_axes=(1, 0, 0), global_arg_shapes=((3, LANES + 1), (LANES - 1,), (LANES,))
    )
    pair = [jnp.ones(LANES), jnp.ones(LANES)]
    with pytest.raises(sm.BatchAxisError) as caught:
        told(jnp.ones((3, LANES)), jnp.ones(LANES), pair)
    assert str(caught.value) == (
        "step: arguments do not fit global_arg_shapes:\n"
        "  - x: float32[3,8] here, but global_arg_shapes has (3, 9), of which this process's part is (3, 9)\n"
        "  - y: float32[8] here, but global_arg_shapes has (7,), of which this process's part is (7,)\n"
        "  - z: [float32[8], float32[8]] here, but global_arg_shapes has (8,), of which this process's part "
        "is (8,)\n"
        "A global shape is that of one array, with the lanes of all processes on the mapped axis; give None "
        "for any other argument."
    )


def test_a_global_shape_of_another_rank_does_not_fit() -> None:
    told = sm.pmap2(lambda x: x, in_axes=1, global_arg_shapes=((LANES,),))
    with pytest.raises(
        sm.BatchAxisError, match=r"float32\[3,8\] here, but global_arg_shapes has \(8,\)"
    ):
        told(jnp.ones((3, LANES)))


def test_every_positional_argument_has_an_entry() -> None:
    told = sm.pmap2(step, global_arg_shapes=((LANES,),))
    with pytest.raises(sm.BatchAxisError) as caught:
        told(*[jnp.ones(LANES)] * 3)
    assert str(caught.value) == (
        "step was called with 3 positional arguments, but global_arg_shapes has 1 entry. It has one for "
        "each positional argument: its global shape, or None."
    )


@pytest.mark.parametrize("given", [8, (8,), ((8, 2.0),), "8"])
def test_shapes_are_tuples_of_ints(given: Any) -> None:
    with pytest.raises(TypeError) as caught:
        sm.pmap2(step, global_arg_shapes=given)
    assert str(caught.value) == (
        f"global_arg_shapes={given!r} is not a shape (a tuple of ints) or None for each positional argument."
    )


@pytest.mark.parametrize("lanes", [7, 9])
def test_a_wrong_number_of_lanes_never_has_the_right_part(lanes: int) -> None:
    # The same as in one of two processes with four devices each.
    args = (np.ones((4, 3)),)
    arguments = Arguments(lambda x: x, args, {})
    check_global_shapes("f", [(8, 3)], arguments, args, {0: 0}, 8)
    with pytest.raises(sm.BatchAxisError, match="do not fit global_arg_shapes"):
        check_global_shapes("f", [(lanes, 3)], arguments, args, {0: 0}, 8)
