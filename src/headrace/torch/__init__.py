"""What needs torch: tensors, process groups, devices, clocks. The only floor below the adapters that imports it."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("headrace.torch needs PyTorch: pip install 'headrace[torch]'") from error

from headrace.torch.feed import Feed

__all__ = ["Feed"]
