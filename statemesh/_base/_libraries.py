"""What is a library's code and what is the user's, and how a file is shown: whoever shows lines asks here."""

import functools
import os
import pathlib
import site
import sys
import sysconfig


# Code without a file: what decorators and imports generate. That of `python -c` has the name of the former.
_GENERATED = ("<@", "<frozen") + (() if sys.argv[:1] == ["-c"] else ("<string>",))
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# They may stand where no package is installed, such as a checkout of JAX that PYTHONPATH names.
_NEEDED = ("jax", "jaxlib", "numpy", "equinox", "hypothesis")


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a file belongs to a library, so that the line that a user wants is the one that called it.

    That is a file of Python, of statemesh or of a package that is installed: in an environment, for a user,
    or with `pip --target` in a folder of `sys.path`. A package that is installed editably stays the user's.
    """
    if file.startswith(_GENERATED) or file.startswith(_library_folders()):
        return True
    for folder in sys.path:
        prefix = os.path.join(os.path.abspath(folder), "")
        if file.startswith(prefix):
            top = file[len(prefix) :].split(os.sep)[0]
            if top in _installed_by_pip(prefix):
                return True
    return False


@functools.lru_cache(maxsize=4096)
def is_library_module(name: str | None) -> bool:
    """Whether a module is one of Python or of an installed package, whose globals stay."""
    if name is None or name == "__main__":
        return False
    if name.split(".")[0] in ("statemesh", "builtins", *sys.stdlib_module_names):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and is_library(file)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _NEEDED]
    folders |= {os.path.dirname(file) for file in files if file}
    return (OWN_FOLDER, *(os.path.join(folder, "") for folder in sorted(folders)))


@functools.lru_cache(maxsize=64)
def _installed_by_pip(folder: str) -> frozenset[str]:
    """The names at the top of a folder that `pip` has written down to have installed there."""
    names: set[str] = set()
    for record in pathlib.Path(folder).glob("*.dist-info/RECORD"):
        rows = record.read_text(errors="replace").splitlines()
        names |= {row.split(",")[0].split("/")[0] for row in rows}
    return frozenset(names)


def shown(file: str) -> str:
    """A file as messages name it: without its folder, and a cell of a notebook by its number."""
    return cell_of(file) or os.path.basename(file)


def cell_of(file: str) -> str | None:
    """The name of a cell of a notebook, as IPython's tracebacks have it; `None` for any other file."""
    # IPython keeps the code of a cell under the name of a temporary file.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return " ".join(cell) if cell else None
