"""Checkpoints: save a tree on one mesh, load it on another."""

from . import _orbax as _orbax
from ._checkpoints import Checkpoints as Checkpoints
from ._files import CheckpointError as CheckpointError
from ._save_and_load import load as load
from ._save_and_load import save as save
