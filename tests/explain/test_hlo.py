"""How `explain` reads compiled programs, also in the forms of other platforms."""

# XLA writes long lines.
# ruff: noqa: E501

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh._explain._groups import axes_of, groups_in, groups_over
from statemesh._explain._hlo import CompiledText, parts_of
from statemesh._explain._matched import matched
from statemesh._explain._traced import Part, TracedCollective

from .helpers import make_mesh


jnp: Any = jax.numpy

TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0}, s32[2,2]{1,0})->(f32[4]{0}, pred[])}, num_partitions=8

FileNames
1 "/home/me/train.py"
2 "/home/me/layers.py"

FunctionNames
1 "step"
2 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=2 end_column=9}
2 {file_name_id=2 function_name_id=2 line=20 end_line=21 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%turn (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %v = f32[4]{0} get-tuple-element(%t), index=1
  %ar-start = f32[4]{0} all-reduce-start(%v), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add, metadata={op_name="jit(step)/while/body/psum" stack_frame_id=2}
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
  %ag-start = (f32[4]{0}, f32[32]{0}) all-gather-start(%a), channel_id=2, replica_groups=mesh['x'=2,'y'=4] {'x','y'}, dimensions={0}, metadata={op_name="jit(step)/all_gather" stack_frame_id=1}
  %cp-start = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}, metadata={op_name="jit(step)/ppermute" stack_frame_id=1}
  %both = (f32[4]{0}, /*index=1*/f32[]) all-reduce(%a, %c), replica_groups={}, to_apply=%add
  %first = f32[4]{0} get-tuple-element(%both), index=0, metadata={op_name="jit(step)/psum" stack_frame_id=1}
  %second = f32[] get-tuple-element(%both), index=1, metadata={op_name="jit(step)/pmean/psum" stack_frame_id=2}
  ROOT %out = (f32[4]{0}, pred[]) tuple(%a, %d)
}
"""

OUTER, INNER = ("/home/me/train.py", 10), ("/home/me/layers.py", 20)


def test_a_program_of_another_platform() -> None:
    text = CompiledText(TEXT)
    found = {one.name: one for one in text.instructions()}
    assert list(found) == ["ar-start", "rs", "ag-start", "cp-start", "both"]
    reduce = found["ar-start"]
    # Six turns of one loop, and one of a loop of unknown length.
    assert (reduce.times, reduce.unknown_loop, reduce.size) == (7, True, 2)
    assert reduce.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert reduce.elements[0].source.frames == (INNER, OUTER)
    assert reduce.sent(reduce.elements[0]) == 7 * 16
    (scattered,) = found["rs"].elements
    assert (scattered.part.bytes, found["rs"].sent(scattered)) == (32, 24)
    assert scattered.source.frames == (("/home/me/train.py", 12),)
    (gathered,) = found["ag-start"].elements
    assert (found["ag-start"].size, found["ag-start"].sent(gathered)) == (8, 7 * 16)
    assert found["cp-start"].groups == ((0, 1), (2, 3))
    assert found["cp-start"].sent(found["cp-start"].elements[0]) == 16
    both = found["both"]
    assert [one.part.bytes for one in both.elements] == [16, 4] and both.size == 8
    assert [one.source.frames[0] for one in both.elements] == [OUTER, INNER]
    assert text.parameters() == [("flat_args[0]", 16), ("flat_args[2]", 16)]
    assert text.results() == [16, 1]


def traced(primitive: str, frames: Any, size: int, axes: Any = ("x",)) -> TracedCollective:
    part = Part("float32", (size // 4,), size)
    line = f"{frames[0][0]}:{frames[0][1]}"
    return TracedCollective(
        primitive, primitive, axes, 2, (part,), 1, False, False, frames, "your code", line
    )


def test_what_belongs_together() -> None:
    ones = [
        traced("psum", (OUTER,), 16),
        traced("psum", (INNER, OUTER), 16),
        traced("psum", (INNER, OUTER), 4),
        traced("all_gather", (OUTER,), 16),
        traced("pmax", (OUTER,), 4),
    ]
    instructions = CompiledText(TEXT).instructions()
    found = matched(ones, instructions, {"x": 2, "y": 4})
    assert [(one.operation, one.compiled, one.instructions) for one in found] == [
        ("psum", "merged with 1 other", ("both",)),
        ("psum", "as traced", ("ar-start",)),
        ("psum", "merged with 1 other", ("both",)),
        ("all_gather", "as traced", ("ag-start",)),
        ("pmax", "removed", ()),
        ("reduce-scatter", "XLA's own", ("rs",)),
        ("collective-permute", "XLA's own", ("cp-start",)),
    ]
    assert found[5].axes == ("y",) and found[5].line == "/home/me/train.py:12"


@pytest.mark.parametrize("over", [("x",), ("y",), ("x", "z"), ("x", "y", "z")])
def test_axes_of_groups(over: Any) -> None:
    shape = {"x": 2, "y": 3, "z": 2}
    assert axes_of(groups_over(shape, over), shape) == over
    assert axes_of([(0, 5), (1, 2)], shape) is None


def test_groups_as_xla_writes_them() -> None:
    assert groups_in("replica_groups=[2,4]<=[8], x", 8) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups_in("replica_groups={{0,2},{1,3}}, x", 4) == [(0, 2), (1, 3)]
    assert groups_in("replica_groups={}, x", 3) == [(0, 1, 2)]
    assert groups_in("replica_groups=mesh['x'=2,'y'=2] {'y'}, x", 4) == [(0, 1), (2, 3)]


def test_sizes_of_shapes() -> None:
    parts = parts_of("(f8e4m3fn[4]{0:T(256)}, s4[3]{0}, pred[2]{0}, token[], c64[2]{0}, u32[])")
    assert [(part.dtype, part.bytes) for part in parts] == [
        ("f8e4m3fn", 4),
        ("s4", 2),
        ("pred", 2),
        ("token", 0),
        ("c64", 16),
        ("u32", 4),
    ]


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
    assert all("test_explain_hlo.py:" in one.line for one in own)
    assert [one.axes for one in found.collectives if one.operation == "psum"] == [("x",)]
