"""All public functions of JAX that make arrays, and a way to call each of them."""

import contextlib
import dataclasses
import importlib
import inspect
import pkgutil
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


Function: TypeAlias = Callable[..., Any]
# It calls a function on operands that are made of two matrices, with entries between 0.2 and 0.9.
Form: TypeAlias = Callable[[Function, jax.Array, jax.Array], Any]

PACKAGES = ("jax.numpy", "jax.lax", "jax.random", "jax.nn", "jax.scipy")
# They write files or change settings. The last one is compiled for no CPU.
NOT_CALLED = ("save", "savez", "load", "set_printoptions", "printoptions", "mulhi")


def modules() -> Iterator[types.ModuleType]:
    for name in PACKAGES:
        module = importlib.import_module(name)
        yield module
        for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
            if not any(part.startswith("_") for part in info.name.split(".")):
                with contextlib.suppress(ImportError):
                    yield importlib.import_module(info.name)


def public_functions() -> dict[str, Function]:
    """By the first name under which each stands in a module."""
    functions: dict[str, Function] = {}
    seen: set[int] = set()
    for module in modules():
        with warnings.catch_warnings():
            # Names on their way out.
            warnings.simplefilter("ignore")
            for name in sorted(dir(module)):
                fun: Any = None if name.startswith("_") else getattr(module, name, None)
                is_function = callable(fun) and not inspect.isclass(fun) and id(fun) not in seen
                if is_function and name not in NOT_CALLED and not _is_dtype(fun):
                    seen.add(id(fun))
                    functions[f"{module.__name__}.{name}"] = fun
    return functions


def _is_dtype(x: Any) -> bool:
    return hasattr(x, "dtype") and not callable(getattr(x, "__wrapped__", None))


def whole(x: jax.Array) -> jax.Array:
    return (x * 100).astype(jnp.int32) % 7


def key(x: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(0), (x[0, 0] * 1000).astype(jnp.uint32))


def positive(x: jax.Array) -> jax.Array:
    return x @ x.T + 4 * jnp.eye(4)


FORMS: list[Form] = [
    lambda f, a, b: f(a, b),
    lambda f, a, b: f(a[0], b[0]),
    lambda f, a, b: f(a),
    lambda f, a, b: f(a[0]),
    lambda f, a, b: f(whole(a), whole(b)),
    lambda f, a, b: f(whole(a[0]), whole(b[0])),
    lambda f, a, b: f(whole(a)),
    lambda f, a, b: f(whole(a[0])),
    lambda f, a, b: f(a > 0.5, b > 0.5),
    lambda f, a, b: f(a > 0.5),
    lambda f, a, b: f(a, b, a + b),
    lambda f, a, b: f(a[0], b[0], a[1]),
    lambda f, a, b: f(a, whole(b)),
    lambda f, a, b: f(a[0], whole(b[0]) % 4),
    lambda f, a, b: f(whole(a[0]) % 4, b[0]),
    lambda f, a, b: f(a > 0.5, a, b),
    lambda f, a, b: f([a, b]),
    lambda f, a, b: f((a[0], b[0])),
    lambda f, a, b: f(key(a)),
    lambda f, a, b: f(key(a), (3,)),
    lambda f, a, b: f(key(a), b[0]),
    lambda f, a, b: f(key(a), b[0], b[1]),
    lambda f, a, b: f(key(a), b[0], positive(b)),
    lambda f, a, b: f(key(a), 3, 0.5),
    lambda f, a, b: f(key(a), 3, (2,)),
    lambda f, a, b: f(key(a), 3),
    lambda f, a, b: f(key(a), (3,), 0, 5),
    lambda f, a, b: f(key(a), 0.0, 1.0, (3,)),
    lambda f, a, b: f(key(a), 3.0, 2.0, 1.0),
    lambda f, a, b: f(a, 1),
    lambda f, a, b: f(a, 1, 0),
    lambda f, a, b: f(a[0], 2),
    lambda f, a, b: f(a, (0, 1)),
    lambda f, a, b: f(a, (1, 0)),
    lambda f, a, b: f(a, (2, 8)),
    lambda f, a, b: f(a, 1, b),
    lambda f, a, b: f(a, 1, 2),
    lambda f, a, b: f(a, b, 1),
    lambda f, a, b: f(a[0], b[0], 2),
    lambda f, a, b: f(a, jnp.float32),
    lambda f, a, b: f(a, jnp.int32),
    lambda f, a, b: f(jnp.float32, (4,), 0),
    lambda f, a, b: f((4, 4), a[0, 0]),
    lambda f, a, b: f((4, 4)),
    lambda f, a, b: f(4),
    lambda f, a, b: f(4, 4),
    lambda f, a, b: f(a[0, 0], b[0, 0], 4),
    lambda f, a, b: f(lax.complex(a, b)),
    lambda f, a, b: f(a[0], b[0], a[1], b[1]),
    lambda f, a, b: f(a[0, 0], b[0, 0], a[1, 1], b[1, 1]),
    lambda f, a, b: f(a[0], b[0], a[1], b[1], a[2]),
    lambda f, a, b: f(positive(a), b),
    lambda f, a, b: f(jnp.cumsum(a[0]), b[0], jnp.cumsum(b[1])),
    lambda f, a, b: f("ij,jk->ik", a, b),
    lambda f, a, b: f(lambda x: x * 2, a),
    lambda f, a, b: f(lambda x: x.sum(), 0, a),
    lambda f, a, b: f(lambda x, y: x * y, a, b),
]


def _image(x: jax.Array) -> jax.Array:
    return x.reshape(1, 1, 4, 4)


_GATHER = lax.GatherDimensionNumbers((1,), (0,), (0,))
_SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
_MATMUL = (((1,), (0,)), ((), ()))


def _scatter(f: Function, a: jax.Array, b: jax.Array) -> Any:
    return f(a, whole(b[:2, :1]) % 4, b[:2], _SCATTER)


# Arguments that no form fits.
SPECIAL: dict[str, Form] = {
    "jax.numpy.argwhere": lambda f, a, b: f(a > b, size=4),
    "jax.numpy.bincount": lambda f, a, b: f(whole(a[0]), b[0], length=7),
    "jax.numpy.choose": lambda f, a, b: f(whole(a) % 2, [b, 2 * b], mode="clip"),
    "jax.numpy.compress": lambda f, a, b: f(a[0] > 0.5, b, axis=0, size=2),
    "jax.numpy.cross": lambda f, a, b: f(a[:, :3], b[:, :3]),
    "jax.numpy.dsplit": lambda f, a, b: f(a.reshape(2, 2, 4), 2),
    "jax.numpy.extract": lambda f, a, b: f(a > 0.5, b, size=4),
    "jax.numpy.fill_diagonal": lambda f, a, b: f(a, b[0], inplace=False),
    "jax.numpy.flatnonzero": lambda f, a, b: f(a > b, size=4),
    "jax.numpy.fromfunction": lambda f, a, b: f(lambda i, j: a[0, 0] * i + j, (2, 2)),
    "jax.numpy.intersect1d": lambda f, a, b: f(whole(a[0]), whole(b[0]), size=4),
    "jax.numpy.nonzero": lambda f, a, b: f(a > b, size=4),
    "jax.numpy.place": lambda f, a, b: f(a, a > 0.5, b[0], inplace=False),
    "jax.numpy.put": lambda f, a, b: f(a, whole(b[0]), b[0], inplace=False),
    "jax.numpy.put_along_axis": lambda f, a, b: f(a, whole(b) % 4, b, 0, inplace=False),
    "jax.numpy.ravel_multi_index": lambda f, a, b: f(
        (whole(a[0]), whole(b[0])), (7, 7), mode="clip"
    ),
    "jax.numpy.setdiff1d": lambda f, a, b: f(whole(a[0]), whole(b[0]), size=4),
    "jax.numpy.setxor1d": lambda f, a, b: f(whole(a[0]), whole(b[0]), size=8),
    "jax.numpy.union1d": lambda f, a, b: f(whole(a[0]), whole(b[0]), size=8),
    "jax.numpy.unique": lambda f, a, b: f(whole(a[0]), size=4, return_inverse=True),
    "jax.numpy.unique_all": lambda f, a, b: f(whole(a[0]), size=4),
    "jax.numpy.unique_counts": lambda f, a, b: f(whole(a[0]), size=4),
    "jax.numpy.unique_inverse": lambda f, a, b: f(whole(a[0]), size=4),
    "jax.numpy.unique_values": lambda f, a, b: f(whole(a[0]), size=4),
    "jax.numpy.unpackbits": lambda f, a, b: f(whole(a).astype(jnp.uint8)),
    "jax.numpy.linalg.cross": lambda f, a, b: f(a[:, :3], b[:, :3]),
    "jax.lax.argmax": lambda f, a, b: f(a, 0, jnp.int32),
    "jax.lax.argmin": lambda f, a, b: f(a, 0, jnp.int32),
    "jax.lax.associative_scan": lambda f, a, b: f(lambda x, y: x * y, (a, b)[0] + b),
    "jax.lax.broadcast_in_dim": lambda f, a, b: f(a, (2, 4, 4), (1, 2)),
    "jax.lax.concatenate": lambda f, a, b: f([a, b], 0),
    "jax.lax.cond": lambda f, a, b: f(whole(a)[0, 0] % 2 == 0, lambda x: 2 * x, lambda x: x, b),
    "jax.lax.conv": lambda f, a, b: f(_image(a), _image(b)[..., :2, :2], (1, 1), "SAME"),
    "jax.lax.conv_general_dilated": lambda f, a, b: f(
        _image(a), _image(b)[..., :2, :2], (1, 1), "SAME"
    ),
    "jax.lax.conv_general_dilated_local": lambda f, a, b: f(
        _image(a), jnp.stack([b[:, :3]] * 3, -1)[None], (1, 1), "VALID", (2, 2)
    ),
    "jax.lax.conv_general_dilated_patches": lambda f, a, b: f(_image(a), (2, 2), (1, 1), "SAME"),
    "jax.lax.conv_transpose": lambda f, a, b: f(
        a.reshape(1, 4, 4, 1), b.reshape(4, 4, 1, 1), (1, 1), "SAME"
    ),
    "jax.lax.conv_with_general_padding": lambda f, a, b: f(
        _image(a), _image(b), (1, 1), "SAME", None, None
    ),
    "jax.lax.custom_linear_solve": lambda f, a, b: f(
        lambda x: a[0] * x, b[0], lambda _, y: y / a[0], symmetric=True
    ),
    "jax.lax.custom_root": lambda f, a, b: f(
        lambda x: x - a[0], b[0], lambda g, x: x - g(x), lambda g, y: y / g(1.0)
    ),
    "jax.lax.dot_general": lambda f, a, b: f(a, b, _MATMUL),
    "jax.lax.dynamic_slice": lambda f, a, b: f(b, (whole(a)[0, 0] % 2, 0), (2, 2)),
    "jax.lax.dynamic_update_index_in_dim": lambda f, a, b: f(b, b[0], whole(a)[0, 0] % 4, 0),
    "jax.lax.dynamic_update_slice": lambda f, a, b: f(b, b[:2, :2], (whole(a)[0, 0] % 2, 0)),
    "jax.lax.dynamic_update_slice_in_dim": lambda f, a, b: f(b, b[:2], whole(a)[0, 0] % 2, 0),
    "jax.lax.empty": lambda f, a, b: f((4,), jnp.float32),
    "jax.lax.fft": lambda f, a, b: f(lax.complex(a, b), "fft", (4,)),
    "jax.lax.fori_loop": lambda f, a, b: f(0, 3, lambda i, x: x * a, a + b),
    "jax.lax.gather": lambda f, a, b: f(b, whole(a[:2, :1]) % 4, _GATHER, (1, 4)),
    "jax.lax.index_take": lambda f, a, b: f(b, (whole(a[0]) % 4,), (0,)),
    "jax.lax.iota": lambda f, a, b: f(jnp.int32, 4),
    "jax.lax.pad": lambda f, a, b: f(a, b[0, 0], [(1, 0, 0), (0, 1, 0)]),
    "jax.lax.platform_dependent": lambda f, a, b: f(a, default=lambda x: x * b),
    "jax.lax.ragged_dot": lambda f, a, b: f(a, jnp.stack([b, b]), jnp.array([1, 3])),
    "jax.lax.ragged_dot_general": lambda f, a, b: f(
        a,
        jnp.stack([b, b]),
        jnp.array([1, 3]),
        lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
    ),
    "jax.lax.reduce": lambda f, a, b: f(
        (a, b), (jnp.float32(0), jnp.float32(0)), lambda x, y: (x[0] + y[0], x[1] + y[1]), (0,)
    ),
    "jax.lax.reduce_and": lambda f, a, b: f(whole(a), [0]),
    "jax.lax.reduce_or": lambda f, a, b: f(whole(a), [0]),
    "jax.lax.reduce_xor": lambda f, a, b: f(whole(a), [0]),
    "jax.lax.reduce_window": lambda f, a, b: f(a, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "jax.lax.rng_uniform": lambda f, a, b: f(a[0, 0], b[0, 0] + 1, (3,)),
    "jax.lax.scan": lambda f, a, b: f(lambda x, y: (x * y, x), a[0] * b[0], a + b),
    "jax.lax.scatter": _scatter,
    "jax.lax.scatter_add": _scatter,
    "jax.lax.scatter_sub": _scatter,
    "jax.lax.scatter_mul": _scatter,
    "jax.lax.scatter_min": _scatter,
    "jax.lax.scatter_max": _scatter,
    "jax.lax.scatter_apply": lambda f, a, b: f(
        b, whole(a[:2, :1]) % 4, jnp.sin, _SCATTER, update_shape=(2, 4)
    ),
    "jax.lax.slice": lambda f, a, b: f(a, (0, 1), (2, 3)),
    "jax.lax.split": lambda f, a, b: f(a, (1, 3)),
    "jax.lax.squeeze": lambda f, a, b: f(a[None], (0,)),
    "jax.lax.switch": lambda f, a, b: f(whole(a)[0, 0] % 2, [lambda x: 2 * x, lambda x: x], b),
    "jax.lax.while_loop": lambda f, a, b: f(
        lambda c: c[0] < whole(a)[0, 0], lambda c: (c[0] + 1, c[1] * 2), (0, b)
    ),
    "jax.lax.linalg.cholesky_update": lambda f, a, b: f(jnp.tril(a) + jnp.eye(4), b[0]),
    "jax.lax.linalg.householder_product": lambda f, a, b: f(a, b[0]),
    "jax.lax.linalg.lu_pivots_to_permutation": lambda f, a, b: f(whole(a[0]) % 4, 4),
    "jax.lax.linalg.ormqr": lambda f, a, b: f(a, b[0], b),
    "jax.lax.linalg.tridiagonal_solve": lambda f, a, b: f(a[0], b[0] + 4, a[1], b),
    "jax.lax.reduce_precision": lambda f, a, b: f(a * b, 8, 10),
    "jax.lax.rng_bit_generator": lambda f, a, b: f(whole(a[0]).astype(jnp.uint32), (3,)),
    "jax.random.wrap_key_data": lambda f, a, b: f(whole(a[0, :2]).astype(jnp.uint32)),
    "jax.nn.scaled_dot_general": lambda f, a, b: f(a, b, _MATMUL),
    "jax.nn.scaled_matmul": lambda f, a, b: f(*_scaled(a, b)),
    "jax.scipy.linalg.cho_solve": lambda f, a, b: f((jnp.tril(a) + jnp.eye(4), True), b[0]),
    "jax.scipy.linalg.eigh_tridiagonal": lambda f, a, b: f(a[0], b[0, :3], eigvals_only=True),
    "jax.scipy.linalg.leslie": lambda f, a, b: f(a[0], b[0, :3]),
    "jax.scipy.linalg.lu_solve": lambda f, a, b: f((positive(a), jnp.arange(4)), b[0]),
    "jax.scipy.ndimage.map_coordinates": lambda f, a, b: f(a, [4 * b[0], 4 * b[1]], 1),
    "jax.scipy.optimize.minimize": lambda f, a, b: (
        f(lambda x: ((x - a[0]) ** 2).sum(), a[1] + b[0], method="BFGS").x
    ),
    "jax.scipy.special.bessel_jn": lambda f, a, b: f(a[0], v=2),
    "jax.scipy.special.sph_harm_y": lambda f, a, b: f(
        jnp.array([1]), jnp.array([0]), a[0, :1], b[0, :1], n_max=2
    ),
    "jax.scipy.stats.multinomial.logpmf": lambda f, a, b: f(whole(a[0]), 20, b[0]),
    "jax.scipy.stats.multinomial.pmf": lambda f, a, b: f(whole(a[0]), 20, b[0]),
    # These take what the forms above do not vary.
    "jax.numpy.frexp": lambda f, a, b: f(10 * a * b),
    "jax.lax.sort": lambda f, a, b: f((a, b), num_keys=1),
    "jax.lax.sort_key_val": lambda f, a, b: f(a[0], b[0]),
    "jax.random.permutation": lambda f, a, b: f(key(a), b),
    "jax.random.choice": lambda f, a, b: f(key(a), b[0], (3,), replace=False),
}
if hasattr(lax, "scaled_dot"):
    SPECIAL["jax.lax.scaled_dot"] = lambda f, a, b: _scaled_dot(f, *_scaled(a, b))


def _scaled_dot(f: Function, a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> Any:
    scales = {"lhs_scale": c[0], "rhs_scale": d[0].T}
    return f(a[0], b[0].T, **scales, preferred_element_type=jnp.float32)


def _scaled(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    # The blocks that share a scale have 32 entries.
    wide = [jnp.tile(x, (1, 8))[None].astype(jnp.float8_e4m3fn) for x in (a, b)]
    scale = jnp.ones((1, 4, 1), jnp.float8_e8m0fnu)
    return wide[0], wide[1], scale, scale


# They name the mesh axis.
COLLECTIVE: dict[str, Form] = {
    "jax.lax.all_gather": lambda f, a, b: f(a, "x"),
    "jax.lax.all_to_all": lambda f, a, b: f(a, "x", 0, 0, tiled=True),
    "jax.lax.axis_index": lambda f, a, b: f("x"),
    "jax.lax.pbroadcast": lambda f, a, b: f(a, "x", 0),
    "jax.lax.pcast": lambda f, a, b: f(b, "x", to="varying"),
    "jax.lax.pmax": lambda f, a, b: f(a, "x"),
    "jax.lax.pmean": lambda f, a, b: f(a, "x"),
    "jax.lax.pmin": lambda f, a, b: f(a, "x"),
    "jax.lax.ppermute": lambda f, a, b: f(a, "x", [(0, 1), (1, 0)]),
    "jax.lax.pshuffle": lambda f, a, b: f(a, "x", [1, 0]),
    "jax.lax.psum": lambda f, a, b: f(a, "x"),
    "jax.lax.psum_scatter": lambda f, a, b: f(a, "x", tiled=True),
    "jax.lax.pswapaxes": lambda f, a, b: f(a[:2], "x", 0),
    "jax.lax.ragged_all_to_all": lambda f, a, b: f(
        a[0],
        b[0],
        *[jnp.array(x, jnp.int32) for x in ([0, 2], [2, 2], [0, 2], [2, 2])],
        axis_name="x",
    ),
}


def arrays(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def form_of(name: str, fun: Function, a: jax.Array, b: jax.Array) -> Form | bool | None:
    """The first form in which a function makes arrays; `None` if it makes none, `False` if none fits."""
    runs = False
    for form in [SPECIAL[name]] if name in SPECIAL else FORMS:
        with contextlib.suppress(Exception):
            made = jax.eval_shape(lambda a, b, form=form: arrays(form(fun, a, b)), a, b)
            if made:
                return form
            runs = True
    return None if runs else False


# Each function is tried with the first operand varying and the second not, and the other way round.
VARYING = ("first", "second")
SHARDS = 2
_draw = np.random.default_rng(1).uniform
OWN, SAME = [_draw(0.2, 0.9, (n, 4, 4)).astype(np.float32) for n in (SHARDS, 1)]


def operands(varying: str, own: Any, same: Any) -> tuple[Any, Any]:
    return (own[0], same[0]) if varying == "first" else (same[0], own[0])


def is_key(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


@dataclasses.dataclass
class Tried:
    """A function that is called in one form, on shards and on one device."""

    fun: Function
    form: Form
    varying: str
    # How often its values were traced. A second trace says that the types of the first lost something.
    traces: int = 0

    def values(self, own: Any, same: Any) -> list[jax.Array]:
        self.traces += 1
        made = arrays(self.form(self.fun, *operands(self.varying, own, same)))
        return [jax.random.key_data(x) if is_key(x) else x for x in made]

    def total(self, w: Any, own: Any, same: Any) -> Any:
        """A sum that depends on `w` through the operands and through what is made of them.

        It is of each shard's own, whatever the function makes of its operands.
        """
        total = 0 * jnp.sum(own)
        for x in self.values(w * own, w * same):
            # Where an entry stands counts, as after a permutation.
            places = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)
            total += jnp.sum(w * jnp.real(x).astype(jnp.float32) * places)
        return total

    def inside(self, own: Any, same: Any) -> Any:
        """The gradient of the sum of all shards' totals, by JAX's rule for what all shards share.

        All shards should have it; this is the first one's.
        """
        gradient = jax.grad(self.total)(jnp.float32(1), own, same)
        return lax.psum(jnp.where(lax.axis_index("x") == 0, gradient, 0), "x")

    def summed(self, w: Any, own: Any, same: Any) -> Any:
        return lax.psum(self.total(w, own, same), "x")

    def on_one_device(self, own: Any, same: Any) -> Any:
        totals = lambda w: sum(self.total(w, own[k : k + 1], same) for k in range(SHARDS))
        return jax.grad(totals)(jnp.float32(1))


def every(names: Iterable[str]) -> tuple[dict[str, list[Tried]], list[str]]:
    """For each function the ways to try it; and those that can be called in no form.

    What makes no arrays is in neither.
    """
    functions, tried, left = public_functions(), {}, []
    first, second = map(jnp.asarray, (OWN[0], SAME[0]))
    for name in names:
        fun = functions[name]
        form = COLLECTIVE.get(name) or form_of(name, fun, first, second)
        if form is False:
            left.append(name)
        elif callable(form):
            tried[name] = [Tried(fun, form, varying) for varying in VARYING]
    return tried, left
