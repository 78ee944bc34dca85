"""How both suites compile: fast, and each program once. And how often Python collects garbage: seldom."""

import gc
import os
from pathlib import Path


# Each program runs only a few times, so fast compilation matters more than fast programs.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax


# Many tests compile the same small programs, and a second run of a suite compiles nearly all of them again.
# JAX finds a program by its text, its options and the versions, so what is kept is what would be compiled.
# Two processes may write one entry at once. JAX then warns that it is not whole, and compiles; pyproject.toml
# ignores this warning.
_FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "jax"
_OPTIONS = {
    "jax_compilation_cache_dir": str(_FOLDER),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
# What JAX keeps of the tests before is no garbage, and each collection looks at all of it.
gc.set_threshold(50_000, 20, 100)

for _name, _value in _OPTIONS.items():
    jax.config.update(_name, _value)
    # Processes that tests start read it there.
    os.environ[_name.upper()] = str(_value)
