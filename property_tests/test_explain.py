"""What `explain` says of random programs: all that the compiled program exchanges, and what devices hold."""

import json
import re
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import compiles

from .base.models import model_of
from .base.settings import fewer
from .plain.cases import cases, values
from .plain.mapped import mapping
from .trees import Setting


pytestmark = pytest.mark.slow


EXCHANGES = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"


def bytes_on_a_device(x: jax.Array) -> int:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    part: Any = x.addressable_shards[0].data
    size: int = part.nbytes
    return size


@fewer(1 / 4)  # Every example compiles a program.
@given(st.data())
def test_random_programs_are_explained_whole(data: st.DataObject) -> None:
    case = data.draw(cases(), "case")
    run = data.draw(values(case=case, calls=1), "values")
    mapped = mapping(case)
    ((gain, inputs),) = run.calls
    args = mapped.place(model_of(case, run.slots, run.seed), Setting(gain), *inputs)
    found = mapped.explain(*args)
    with compiles() as seen:
        jax.block_until_ready(mapped(*args))
    assert seen.times == 0

    compiled = mapped.lower(*args).compile()
    written = re.findall(rf"%([\w.\-]+) = .*? (?:{EXCHANGES})(?:-start)?\(", compiled.as_text())
    named = [name for one in found.collectives for name in one.instructions]
    assert set(named) == set(written)
    # The compiler adds nothing where all axes are mapped over.
    assert all(one.cause != "XLA's own" for one in found.collectives)
    assert all(one.line or "policy" in one.cause for one in found.collectives)

    memory = found.memory
    assert memory is not None
    assert sum(memory.by_argument.values()) == memory.arguments
    assert sum(memory.by_result.values()) + memory.result_table == memory.results

    held = [bytes_on_a_device(x) for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    assert sorted(row.bytes for row in found.leaves) == sorted(held)
    assert all(not row.moved for row in found.leaves)
    assert max(map(len, str(found).splitlines())) <= 100
    assert json.loads(json.dumps(found.to_dict()))["name"] == found.name
