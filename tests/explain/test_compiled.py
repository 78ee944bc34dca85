"""What `explain` reads in compiled programs, also in the forms of other platforms."""

# XLA writes long lines.
# ruff: noqa: E501

import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.explain.explained_programs import line
from tests.helpers import make_mesh


jnp: Any = jax.numpy
FILE = pathlib.Path(__file__)

# A compiled program of `step`, as another platform may write it. Words in capitals stand for its lines.
TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0}, s32[2,2]{1,0})->(f32[4]{0}, pred[])}, num_partitions=8

FileNames
1 "FILE"
2 "/home/me/train.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=TURN end_line=10 column=2 end_column=9}
2 {file_name_id=1 function_name_id=1 line=GATHERED end_line=21 column=2 end_column=9}
3 {file_name_id=1 function_name_id=1 line=SUMMED end_line=21 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=1}


%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%turn (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %v = f32[4]{0} get-tuple-element(%t), index=1
  %ar-start = f32[4]{0} all-reduce-start(%v), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add, metadata={op_name="jit(step)/while/body/psum" stack_frame_id=1}
  %ar-done = f32[4]{0} all-reduce-done(%ar-start)
  ROOT %next = (s32[], f32[4]{0}) tuple(%n, %ar-done)
}

%more (t: (s32[], f32[4])) -> pred[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

%async (p: bf16[8,2]) -> bf16[2,2] {
  %p = bf16[8,2]{1,0} parameter(0)
  ROOT %rs = bf16[2,2]{1,0} reduce-scatter(%p), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add, metadata={op_name="jit(step)/reduce_scatter" source_file="/home/me/train.py" source_line=12}
}

ENTRY %main (a: f32[4], b: s32[2,2]) -> (f32[4], pred[]) {
  %a = f32[4]{0} parameter(0), metadata={op_name="flat_args[0]"}
  %b = s32[2,2]{1,0} parameter(1), metadata={op_name="flat_args[2]"}
  %loop = (s32[], f32[4]{0}) while(%init), condition=%more, body=%turn, backend_config={"known_trip_count":{"n":"6"}}
  %free = (s32[], f32[4]{0}) while(%init), condition=%more, body=%turn
  %rs-start = ((bf16[8,2]{1,0}), bf16[2,2]{1,0}) async-start(%h), calls=%async
  %ag-start = (f32[4]{0}, f32[32]{0}) all-gather-start(%a), channel_id=2, replica_groups=mesh['x'=2,'y'=4] {'x','y'}, dimensions={0}, metadata={op_name="jit(step)/all_gather" stack_frame_id=2}
  %cp-start = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %both = (f32[4]{0}, /*index=1*/f32[]) all-reduce(%a, %c), replica_groups={}, to_apply=%add
  %first = f32[4]{0} get-tuple-element(%both), index=0, metadata={op_name="jit(step)/psum" stack_frame_id=3}
  %second = f32[] get-tuple-element(%both), index=1, metadata={op_name="jit(step)/psum" stack_frame_id=3}
  %odd = (f8e4m3fn[4]{0:T(256)}, s4[3]{0}, pred[2]{0}, c64[2]{0}, u32[]) all-reduce(%e, %f), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %out = (f32[4]{0}, pred[]) tuple(%a, %d)
}
"""


def step(a: Any, b: Any) -> Any:
    def turn(total: Any, _: Any) -> Any:
        return jax.lax.psum(total + a, "x"), None  # line: turn

    total, _ = jax.lax.scan(turn, jnp.zeros(4), None, length=6)
    rows = jax.lax.all_gather(a, ("x", "y"))  # line: gathered
    both = jax.lax.psum((a, a.sum()), ("x", "y"))  # line: summed
    largest = jax.lax.pmax(b, "x")  # line: removed
    return total + rows.sum(0) + both[0] + both[1], largest.sum() > 0


def test_a_program_of_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        word.upper(): line(word, FILE).split(":")[1] for word in ("turn", "gathered", "summed")
    }
    text = re.sub(r"line=([A-Z]+)", lambda m: f"line={places[m[1]]}", TEXT)
    monkeypatch.setattr(
        jax.stages.Compiled, "as_text", lambda self: text.replace("FILE", str(FILE), 1)
    )
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    mapped = sm.shard_map(step, mesh, P(), P(), check_vma=False)
    found = mapped.explain(jnp.ones(4), jnp.ones((2, 2), jnp.int32))
    rows = {
        one.instructions: (one.operation, one.compiled, one.axes, one.bytes)
        for one in found.collectives
        if one.operation != "psum"
    }
    assert rows == {
        ("ag-start",): ("all_gather", "as traced", ("x", "y"), 7 * 16),
        (): ("pmax", "removed", ("x",), 0),
        ("rs",): ("reduce-scatter", "XLA's own", ("y",), 24),
        # These pairs of devices lie along no axis.
        ("cp-start",): ("collective-permute", "XLA's own", (), 16),
        ("odd",): ("all-reduce", "XLA's own", ("x", "y"), 7 + 4 + 4 + 28 + 7),
    }
    sums = [one for one in found.collectives if one.operation == "psum"]
    assert [(one.compiled, one.axes, one.bytes, one.times) for one in sums] == [
        # Six turns of one loop, and one of a loop of unknown length.
        ("as traced", ("x",), 7 * 16, 7),
        ("merged with 1 other", ("x", "y"), 28, 1),
        ("merged with 1 other", ("x", "y"), 7, 1),
    ]
    assert [one.unknown_loop for one in sums] == [True, False, False]
    lines = {one.line for one in found.collectives if one.compiled == "XLA's own"}
    assert lines == {"", "/home/me/train.py:12"}
    assert found.memory is not None
    assert list(found.memory.by_argument.values()) == [16, 16]
    assert list(found.memory.by_result.values()) == [16, 1]


def test_what_xla_adds_on_its_own() -> None:
    """Rows over an axis that the call leaves to the compiler: it sums what it has split."""
    mesh = make_mesh("4x2")
    fun = sm.shard_map(
        lambda x: jax.lax.psum(x.sum(1), "x"), mesh, P("x"), P(), axis_names=frozenset("x")
    )
    x = jax.device_put(np.ones((8, 6), np.float32), NamedSharding(mesh, P("x", "y")))
    found = sm.explain(jax.jit(fun), x)
    own = [one for one in found.collectives if one.cause == "XLA's own"]
    assert own and all(one.axes == ("y",) for one in own if one.operation == "all-reduce")
    assert all("test_compiled.py:" in one.line for one in own)
    assert [one.axes for one in found.collectives if one.operation == "psum"] == [("x",)]


SOURCE = """
def step(net, x):
    mean = jax.lax.pmean(x.mean(0), "x")
    largest = jax.lax.pmax(abs(x), "x")
    return x - mean, largest
"""


def written_at(first: int) -> Any:
    """The function, in a file that has so many lines before it."""
    names: dict[str, Any] = {"jax": jax}
    exec(compile("\n" * first + SOURCE, "model.py", "exec"), names)
    return sm.shard_map(names["step"], make_mesh(), (None, P("x")), (P("x"), P()))


def test_lines_are_those_of_the_program_that_is_explained() -> None:
    x = jax.numpy.ones((8, 3))
    for first in (0, 10):
        found = written_at(first).explain(None, x).collectives
        assert [(one.line, one.compiled, one.bytes) for one in found] == [
            (f"model.py:{first + 3}", "as traced", pytest.approx(2 * 7 / 8 * 12, abs=1)),
            (f"model.py:{first + 4}", "as traced", pytest.approx(2 * 7 / 8 * 12, abs=1)),
        ]
