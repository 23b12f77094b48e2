"""PyTorch operators over the kernels; `kernel_backend` decides where each one runs."""

from .rope import rope

__all__ = ["rope"]
