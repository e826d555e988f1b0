"""Packages that not every installation has: whether one is installed, and the command that installs its extra."""

from __future__ import annotations

import importlib.util


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without importing it.

    Args:
        module: The name of a package or module, without dots.
    """
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # an import hook refuses it
        return False


def format_remedy(extra: str) -> str:
    """Return the command that installs an extra, for the end of an error message.

    Args:
        extra: The name of the extra in pyproject.toml.
    """
    return f"pip install 'deformer-stream[{extra}]'"
