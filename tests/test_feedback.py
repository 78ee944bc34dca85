"""What one call returns that the next call gets."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import statemesh as sm
from statemesh.testing._equivalent._feedback import FeedBack, find, leaf_specs


jnp: Any = jax.numpy
X = np.ones((8, 3), np.float32)
W = np.ones(3, np.float32)
LOSS = np.float32(0)


class Net(sm.Module):
    w: sm.ParamState
    mean: sm.BatchState


class Slots(NamedTuple):
    count: Any
    mu: Any


def net(width: int = 3) -> Net:
    return Net(sm.ParamState(jnp.zeros(width)), sm.BatchState(jnp.zeros(width), reduce="mean"))


def pairs(args: tuple[Any, ...], result: Any, **more: Any) -> dict[str, str]:
    """The path in the result of each argument that is replaced, by the argument's path."""
    found = find(args, more.pop("kwargs", {}), result, name="step", **more)
    return {a: b.removeprefix("step(...)") for a, b in found.pairs}


# Wherever it stands


def test_cache_comes_first_in_the_result() -> None:
    cache = {"k": X, "v": X}
    assert pairs((cache, X), (cache, X)) == {"args[0]": "[0]"}


def test_loss_then_net_and_slots_in_a_tuple() -> None:
    for slots in (Slots(0, W), (W, W), {"mu": W}, [sm.State(0.0)]):
        found = pairs((net(), slots, X), (LOSS, (net(), slots)))
        assert found == {"args[0]": "[1][0]", "args[1]": "[1][1]"}


def test_model_is_the_last_argument() -> None:
    assert pairs((X, net()), (X, net())) == {"args[1]": "[1]"}
    assert pairs((X, net()), net()) == {"args[1]": ""}


def test_keyword_arguments() -> None:
    found = pairs((X,), (X, net()), kwargs={"model": net(), "train": True})
    assert found == {"kwargs['model']": "[1]"}


def test_dictionaries_in_and_out() -> None:
    state = {"params": {"w": W}, "step": 0, "x": X}
    new = {"params": {"w": W}, "step": 1, "loss": LOSS}
    assert pairs((state,), new) == {
        "args[0]['params']": "['params']",
        "args[0]['step']": "['step']",
    }


def test_model_inside_another_structure() -> None:
    new = {"net": net(), "loss": LOSS}
    assert pairs(({"net": net()}, X), new) == {"args[0]['net']": "['net']"}


def test_largest_parts_first() -> None:
    # Each State would fit, too.
    assert pairs((net(),), [net()]) == {"args[0]": "[0]"}


def test_states_of_a_model_that_comes_back_in_parts() -> None:
    new = {"w": net().w, "mean": net().mean}
    assert pairs((net(),), new) == {"args[0].mean": "['mean']", "args[0].w": "['w']"}
    assert pairs((net(),), (net().mean, net().w)) == {"args[0].w": "[1]", "args[0].mean": "[0]"}


def test_shape_dtype_structs_and_jax_arrays_are_arrays() -> None:
    shapes = jax.eval_shape(lambda: net())
    assert pairs((net(), X), (X, shapes)) == {"args[0]": "[1]"}


def test_static_leaves_are_not_compared() -> None:
    old, new = {"act": jnp.tanh, "w": W, "n": 1}, {"act": jnp.sin, "w": W, "n": 2}
    assert pairs((old,), (new,)) == {"args[0]": "[0]"}


def test_static_metadata_without_a_hash() -> None:
    class Listed(sm.Module):
        w: Any
        sizes: Any = sm.field(static=True)

    model = Listed(W, [1, 2])
    assert pairs((model, X), (X, Listed(W, [1, 2]))) == {"args[0]": "[1]"}
    assert pairs((X, model), Listed(W, [1, 3])) == {"args[1].w": ".w"}


# Equal parts


def test_equal_parts_are_paired_by_their_names() -> None:
    args = ({"ema": net(), "net": net()},)
    assert pairs(args, (LOSS, {"net": net(), "ema": net(), "more": W})) == {
        "args[0]['ema']": "[1]['ema']",
        "args[0]['net']": "[1]['net']",
    }
    named = pairs((), {"ema": net(), "net": net()}, kwargs={"net": net(), "ema": net(), "x": X})
    assert named == {"kwargs['net']": "['net']", "kwargs['ema']": "['ema']"}


def test_equal_states_are_paired_by_the_names_of_states() -> None:
    old = sm.State(0.0, name="old")
    new = sm.State(0.0, name="new")
    assert pairs((old, new), (new, old)) == {"args[0]": "[1]", "args[1]": "[0]"}


def test_equal_parts_without_names_are_paired_in_order() -> None:
    assert pairs((net(), net()), (LOSS, net(), net())) == {"args[0]": "[1]", "args[1]": "[2]"}


def test_of_more_results_than_arguments_the_last_are_taken() -> None:
    grads, params = {"w": W}, {"w": W}
    assert pairs((params, X), (LOSS, grads, params)) == {"args[0]": "[2]"}


def test_of_more_arguments_than_results_the_first_are_taken() -> None:
    assert pairs((net(), net(), X), (LOSS, net())) == {"args[0]": "[1]"}


# What is not fed back


@pytest.mark.parametrize("result", [X, (X, X), [X], (LOSS, X), ((X,), LOSS)])
def test_batches_and_outputs_of_one_shape(result: Any) -> None:
    assert not find((X, W), {}, result)
    assert not find((X,), {}, result)
    assert not find((), {"x": X}, result)


def test_batches_and_outputs_beside_a_model() -> None:
    assert pairs((net(), X), (X, net())) == {"args[0]": "[1]"}


def test_other_shapes() -> None:
    assert not find((net(), X), {}, (X, net(4).w))
    assert not find(({"w": W},), {}, {"w": X})


def test_other_kinds_of_numbers() -> None:
    assert not find(({"w": W},), {}, {"w": W.astype(np.int32)})
    assert not find((sm.State(jax.random.key(0)),), {}, sm.State(jnp.zeros(())))
    # A state remains one in another dtype.
    assert find((sm.State(jnp.zeros(3)),), {}, sm.State(jnp.zeros(3, jnp.bfloat16)))


def test_nothing() -> None:
    results: list[Any] = [(), None, {}, "text", (None, "text")]
    for result in results:
        assert not find((None, "text", ()), {}, result)
    assert find((X,), {}, X).describe() == "nothing is fed back"


# Arrays by themselves


def with_specs(
    args: tuple[Any, ...],
    result: Any,
    ins: Any,
    outs: Any,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    kwargs = kwargs or {}
    given = leaf_specs((ins, P()), (args, kwargs))
    return pairs(args, result, kwargs=kwargs, in_specs=given, out_specs=leaf_specs(outs, result))


def test_array_that_is_split_on_neither_side() -> None:
    assert with_specs((W, X), (W, LOSS), (P(), P("x")), P()) == {"args[0]": "[0]"}
    assert with_specs((W, X), (W, LOSS), (None, P("x")), None) == {"args[0]": "[0]"}
    assert with_specs((X,), (LOSS, W), P("x"), P(), {"w": W}) == {"kwargs['w']": "[1]"}
    assert with_specs(((W, W), X), (W, W), (P(), P("x")), P()) == {"args[0]": ""}


def test_array_that_is_split_on_one_side() -> None:
    assert with_specs((W, X), (W, LOSS), (P(), P("x")), (P("x"), P())) == {}
    assert with_specs((W, X), (W, LOSS), (P("x"), P("x")), (P(), P())) == {}
    assert with_specs((X,), X, P("x"), P("x")) == {}
    assert with_specs((X,), X, P("x"), P(None, None)) == {}


def test_array_that_is_one_of_several() -> None:
    assert with_specs((W, W, X), (W, LOSS), (P(), P(), P("x")), P()) == {}
    assert with_specs((W, X), (W, W), (P(), P("x")), P()) == {}
    # A result that is split is no candidate.
    assert with_specs((W, X), (W, W), (P(), P("x")), (P("x"), P())) == {"args[0]": "[1]"}
    # Neither is one of another dtype.
    assert with_specs((W, X), (W, W.astype(int)), (P(), P("x")), P()) == {"args[0]": "[0]"}


def test_loss_is_no_learning_rate() -> None:
    assert with_specs((W, X, np.float32(0.1)), (W, LOSS), (P(), P("x"), P()), P()) == {
        "args[0]": "[0]"
    }


def test_placements_of_structures_agree() -> None:
    cache = {"k": X}
    assert with_specs((cache, X), (cache, X), P("x"), P("x")) == {"args[0]": "[0]"}
    assert with_specs((cache, X), (cache, X), (P("x", None), P()), P(("x",))) == {"args[0]": "[0]"}
    assert with_specs((cache, X), (cache, X), (P("x"), P()), P()) == {}
    # Specs pass states by.
    assert with_specs((net(), X), (X, net()), P(), P("x")) == {"args[0]": "[1]"}


def test_specs_of_leaves() -> None:
    tree = (net(), {"a": X, "b": None}, 1.0)
    specs = (P("x"), {"a": sm.PerShard("x"), "b": None}, None)
    assert leaf_specs(specs, tree) == [None, None, sm.PerShard("x"), P()]
    assert leaf_specs(P("x"), tree) == [None, None, P("x"), P("x")]


# By name


def test_named_pairs_replace_what_would_be_found() -> None:
    assert pairs((W, X), (W, LOSS), named={"args[0]": "[0]"}) == {"args[0]": "[0]"}
    assert pairs((net(), net()), (net(), net()), named=[("args[1]", "step(...)[0]")]) == {
        "args[1]": "[0]"
    }
    assert pairs((net(), X), (X, net()), named={"args[1]": "[0]"}) == {"args[1]": "[0]"}
    assert pairs((net(),), net(), named={}) == {}
    inside = pairs((net(),), {"a": net()}, named={"args[0].w": '["a"].w'})
    assert inside == {"args[0].w": "['a'].w"}
    assert pairs((), W, kwargs={"w": W}, named={"kwargs['w']": ""}) == {"kwargs['w']": ""}


def test_named_paths_that_do_not_exist() -> None:
    with pytest.raises(sm.StructureError) as raised:
        find((net(),), {}, net(), {"args[1]": ""})
    assert str(raised.value) == (
        "feed_back: the arguments have no arrays at args[1], but at 5 other paths, such as args[0], "
        "args[0].w, args[0].mean, args[0].w.value."
    )
    with pytest.raises(sm.StructureError) as raised:
        find((W,), {}, W, {"args[0]": "[1]"})
    assert str(raised.value) == (
        "feed_back: the result has no arrays at fun(...)[1], but at 1 other path, such as fun(...)."
    )


def test_named_parts_that_do_not_fit() -> None:
    with pytest.raises(sm.StructureError) as raised:
        find((W,), {}, (X, net()), {"args[0]": "[0]"})
    assert str(raised.value) == (
        "feed_back: fun(...)[0] cannot become args[0], because structures or shapes differ: "
        "float32[8,3], and the argument is float32[3]."
    )
    with pytest.raises(sm.StructureError, match=r"a Net of float32\[3\], float32\[3\], and"):
        find((W,), {}, (X, net()), {"args[0]": "[1]"})


def test_named_parts_that_overlap() -> None:
    with pytest.raises(sm.StructureError) as raised:
        find((net(),), {}, (net(), net()), [("args[0]", "[0]"), ("args[0].w", "[1].w")])
    assert str(raised.value) == (
        "feed_back: fun(...)[1].w becomes args[0].w, and one of the two is in another pair already. "
        "Name each part once."
    )


# The next call


def test_apply_puts_what_was_returned_into_the_arguments() -> None:
    old = (W, net(), {"train": True, "k": X})
    new = net().replace(w=np.full(3, 2.0, np.float32))
    result = (LOSS, (new, {"k": X + 1, "train": True}))
    feedback = find(old, {"y": W}, result, name="step")
    args, kwargs = feedback.apply(old, {"y": W}, result)
    assert feedback.numbers == ((1, 1), (2, 2), (3, 3), (4, 4))
    assert args[0] is W and kwargs == {"y": W}
    assert args[1].w.value is new.w.value and args[2]["train"] is True
    np.testing.assert_array_equal(args[2]["k"], X + 1)


def test_describe() -> None:
    found = find((net(), {"k": X}), {}, ({"k": X}, net()), name="step")
    assert found.describe() == "step(...)[1] becomes args[0], step(...)[0] becomes args[1]"
    assert bool(found) and not FeedBack()
