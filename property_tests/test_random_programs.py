"""Random programs, from their own source: the same on any mesh, unsharded, and emulated."""

import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statemesh.testing import UntestedWarning, assert_equivalent, meshes

from .random_programs import Program, programs
from .random_programs.runs import plain


pytestmark = pytest.mark.slow


# Every example compiles several programs.
examples: int = settings().max_examples
few = settings(max_examples=max(examples // 5, 1))
# Gradients are compiled too.
fewest = settings(max_examples=max(examples // 8, 1))


def check(program: Program, over: list[Any], **more: Any) -> None:
    """All of it again, by what users call."""
    with warnings.catch_warnings():
        # A random program may well leave a state as it is.
        warnings.simplefilter("ignore", UntestedWarning)
        assert_equivalent(
            program.fun,
            program.args,
            meshes=[*over, program.mesh],
            in_specs=program.in_specs,
            out_specs=program.out_specs,
            steps=2,
            **more,
        )


@few
@given(st.data())
def test_portable_programs_mean_the_same_on_any_mesh(data: st.DataObject) -> None:
    """And as the plain function without a mesh."""
    program = data.draw(programs(), "program")
    other = data.draw(meshes(axis_names=program.mesh.axis_names), "another mesh")
    check(program, [other], unsharded=plain(program), gradients=False)


@fewest
@given(programs(smooth=True, max_steps=4))
def test_their_gradients_do_too(program: Program) -> None:
    check(program, [])


@few
@given(programs(portable=False))
def test_programs_of_shards_mean_what_they_do_emulated(program: Program) -> None:
    check(program, [], unsharded=False, gradients=False)
