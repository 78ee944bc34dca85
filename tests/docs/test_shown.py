"""How States are printed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from tests.helpers import make_mesh


class Pair(sm.Module):
    mean: sm.State
    weight: jax.Array


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (sm.State(3), "State(int32(3))"),
        (sm.State(np.float16(0.5)), "State(float16(0.5))"),
        (sm.State(True), "State(bool(True))"),
        (sm.State(1j), "State(complex64(1j))"),
        (sm.State(jnp.ones((2, 3))), "State(float32[2,3])"),
        (sm.HiddenState({"h": 1.5, "c": jnp.ones(2)}), "HiddenState({'c': float32[2], 'h': float32(1.5)})"),
        (sm.State(0, name="n", reduce="sum", tag="t"), "State(int32(0), name='n', reduce='sum', tag=['t'])"),
        (sm.State(0, reduce=jnp.maximum), "State(int32(0), reduce=maximum)"),
        (sm.RandomState(jax.random.key(0)), "RandomState(key<fry>[])"),
        (jax.eval_shape(lambda: sm.State(0)), "State(int32[])"),
        (jax.tree.map(lambda x: None, sm.State(0)), "State(None)"),
        (sm.State({}), "State({})"),
    ],
)  # fmt: skip
def test_one_line(state: sm.State, text: str) -> None:
    assert repr(state) == str(state) == text


def test_a_number_that_cannot_be_read() -> None:
    traced = jax.make_jaxpr(lambda s: shown.append(repr(s)))
    shown: list[str] = []
    traced(sm.State(0.0))
    gone = sm.State(0.0)
    gone.value.delete()
    assert [*shown, repr(gone)] == ["State(float32[])"] * 2
    placed = sm.place(sm.State(2.0), make_mesh())
    assert repr(placed) == "State(float32(2.0))"


def test_messages_read_no_numbers() -> None:
    with pytest.raises(sm.StructureError) as info:
        sm.partition(Pair(sm.State(3, name="n"), jnp.ones(2)), "tag")
    assert "mean: State(int32[], name='n')" in str(info.value)


def test_long_ones_wrap_and_small_arrays_show_their_numbers() -> None:
    state = sm.BatchState({"mean": jnp.arange(2), "var": jnp.ones(2)}, name="s" * 40, spec=P())
    assert repr(state) == (
        "BatchState(\n"
        "  {'mean': int32[2], 'var': float32[2]},\n"
        f"  name='{'s' * 40}',\n"
        f"  spec={P()!r}\n"
        ")"
    )
    pair = Pair(sm.State(jnp.arange(2)), jnp.ones(2))
    assert repr(pair) == "Pair(mean=State(int32[2]), weight=f32[2])"
    assert eqx.tree_pformat(pair, short_arrays=False) == (
        "Pair(\n  mean=State(Array([0, 1], dtype=int32)), weight=Array([1., 1.], dtype=float32)\n)"
    )


def test_rich() -> None:
    pretty = pytest.importorskip("rich.pretty")
    state = sm.BatchState({"mean": 0.5}, tag="t")
    assert pretty.pretty_repr(state) == (
        "BatchState({'mean': Array(0.5, dtype=float32)}, tag=['t'])"
    )


# treescope looks through all of NumPy, including deprecated names.
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_treescope() -> None:
    treescope = pytest.importorskip("treescope")
    text = treescope.render_to_text(sm.BatchState({"mean": 0.5}, tag="t"))
    assert "".join(text.split()).replace(",}", "}").replace(",)", ")") == (
        "BatchState(value={'mean':<jax.Array(0.5,dtype=float32)>},tag=['t'])"
    )
