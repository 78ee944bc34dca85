"""Runs a program call after call and compares each call with the reference."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import statemesh as sm
import statemesh.testing

from ..programs import Case
from ..trees import Setting, structure
from .arrays import Array, Global, Values, widen
from .checks import assert_close, assert_kept, at_home, input_shardings, jitted
from .models import arrays_of, declared_specs, mesh_of, model_of


# What the reference computes: the outputs, and the new values of the slots.
Results: TypeAlias = tuple[list[Global], list[list[Global]]]


class Comparison:
    """A program as statemesh runs it, next to its reference.

    Designs in which a call takes or returns its arrays in another form override the methods.
    """

    def __init__(self, case: Case, mapped: sm.StatefulMapping) -> None:
        self.case = case
        self.mapped = mapped

    def reference(self, gain: float, slots: list[list[Global]], inputs: Sequence[Array]) -> Results:
        """One call as the reference computes it."""
        raise NotImplementedError

    def model(self, values: Values) -> Any:
        """The model of the first call."""
        return model_of(self.case, values.slots, values.seed)

    def arguments(self, inputs: Sequence[Array], home: str) -> tuple[list[Any], dict[str, Any]]:
        return at_home(home, inputs, input_shardings(self.case)), {}

    def outputs(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """The outputs in the form that the reference gives them."""
        return outputs

    def slots(self, model: Any) -> Sequence[Sequence[Any]]:
        """The arrays of a model in the form that the reference gives them."""
        return arrays_of(self.case, model)

    def warned(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Expects the warnings of a call."""
        return contextlib.nullcontext()

    def check_stream(self, model: Any) -> None:
        """What is left of the stream is what an unsharded run leaves."""

    def check_layout(self, outputs: Sequence[Any], model: Any) -> None:
        """Results lie on the devices that they should lie on."""

    def restarted(self, values: Values, model: Any, world: Any) -> tuple[Any, Any]:
        """The model and the reference's values with which the next call starts."""
        return model, world

    def check(self, values: Values, how: str, home: str) -> None:
        """Makes all calls, each with the model that the call before returned.

        **Arguments:**

        - `how`: `'eager'`, `'jit'` (the call stands inside `jax.jit`), `'unsharded'`, `'emulated'` or
            `'packed'` (the model's arrays are in a few buffers).
        - `home`: where the inputs lie.
        """
        ways: dict[str, Callable[..., Any]] = {
            "unsharded": self.mapped.unsharded,
            "emulated": functools.partial(sm.testing.emulate, self.mapped),
        }
        call = ways.get(how, self.mapped)
        model = self.model(values)
        if how == "packed":
            specs = declared_specs(self.case)
            model = sm.pack(model, mesh_of(self.case.mesh), state_specs=specs)
        world = [[Global(widen(x)) for x in leaves] for leaves in values.slots]
        for number, (gain, inputs) in enumerate(values.calls):
            args, kwargs = self.arguments(inputs, home)
            if how == "eager" and number == 0:
                model = self.mapped.place(model, Setting(gain), *args, **kwargs)[0]
            this: Callable[..., Any] = functools.partial(call, **kwargs)
            before = model
            with self.warned(number):
                this = jitted(this) if how == "jit" else this
                outputs, model = this(model, Setting(gain), *args)
            wanted, world = self.reference(gain, world, inputs)
            for i, (got, want) in enumerate(zip(self.outputs(outputs), wanted, strict=True)):
                assert_close(got, want, f"call {number}, out{i}")
            assert structure(model) == structure(before)
            plain = model.unpack() if isinstance(model, sm.Packed) else model
            for k, (leaves, wants) in enumerate(zip(self.slots(plain), world, strict=True)):
                for n, (got, want) in enumerate(zip(leaves, wants, strict=True)):
                    assert_close(got, want, f"call {number}, s{k}.{n}")
            self.check_stream(plain)
            if how == "eager":
                self.check_layout(outputs, model)
                assert_kept(self.case, before, model)
            model, world = self.restarted(values, model, world)
