"""How the site shows signatures: as users write them, without private parameters and private defaults."""

from typing import Any

import griffe


PRIVATE = ("compat.INFER", "MISSING", "UNDECLARED")


class AsWritten(griffe.Extension):
    """Leaves out what begins with an underscore. A default that stands for nothing given is `...`."""

    def on_function_instance(self, *, func: griffe.Function, **rest: Any) -> None:
        del rest
        kept = [x for x in func.parameters if not x.name.startswith("_")]
        for parameter in kept:
            if str(parameter.default) in PRIVATE:
                parameter.default = "..."
        func.parameters = griffe.Parameters(*kept)
