"""PyTorch operators over the kernels; `kernel_backend` decides where each one runs."""

from .grouped_experts import grouped_experts
from .rope import rope

__all__ = ["grouped_experts", "rope"]
