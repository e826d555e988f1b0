"""The step from the parameters of a model to its network in PyTorch, and the error if PyTorch is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deformer_stream.errors import ConfigError
from deformer_stream.extras import format_remedy
from deformer_stream.model.parameters import Model, ModelParameters

if TYPE_CHECKING:
    from deformer_stream.model.deformer import DEformer


def require_torch(purpose: str) -> None:
    """Check that PyTorch is installed, before a module is imported that needs it.

    Args:
        purpose: What needs PyTorch, the subject of the error message, such as "training".

    Raises:
        ConfigError: PyTorch is not installed.
    """
    try:
        import torch  # noqa: F401 - only whether it is there
    except ImportError as error:
        remedy = format_remedy("train")
        raise ConfigError(f"{purpose} needs PyTorch, which cannot be imported ({error}): {remedy}") from None


def load_network(model: Model, purpose: str = "scoring without compiled kernels") -> DEformer:
    """Return the network of a model in PyTorch.

    Args:
        model: The network, which is returned, or the parameters from which it is built. It is built once.
        purpose: What needs PyTorch, for the error message.

    Raises:
        ConfigError: PyTorch is not installed.
    """
    require_torch(purpose)
    from deformer_stream.model.deformer import DEformer

    if isinstance(model, ModelParameters):
        if model.network is None:
            model.network = DEformer.from_parameters(model)
        network: DEformer = model.network
        return network
    if not isinstance(model, DEformer):
        raise TypeError(f"a model is a DEformer or ModelParameters, not a {type(model).__name__}")
    return model
