"""torchtitan's rotary embedding with the rotation done by the NKI kernel.

The cache, its precision and where it is computed stay torchtitan's; so do checkpoints, since the
cache is in none. `qwen3_trainium.overrides.nki_rope` puts this module into a model.
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive
from torchtitan.models.common.rope import CosSinRoPE

from qwen3_trainium import kernel_backend
from qwen3_trainium.errors import SettingError
from qwen3_trainium.kernels.rope import check_rope
from qwen3_trainium.ops import rope

# Scalings that change the cache alone, which is torchtitan's: the kernel takes any cache.
SCALINGS = ("none", "yarn")


class NKIRoPE(CosSinRoPE):
    """`CosSinRoPE` by kernel; the meaning of `positions` is the same.

    Given positions, the kernel fetches each token's row of the cache itself, so that documents of
    a packed sequence that restart at 0 need no gathered cache. Without, it reads rows in order.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        implementation: str = "own"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate query and key `[B, S, H, D]`; positions `[B, S]`, `[1, S]` or None for 0 … S−1."""
        q, k, cache = _local(query), _local(key), _local(self.cache)
        if positions is not None:
            positions = _local(positions).expand(q.shape[0], -1)
        q_out, k_out = rope(q, k, cache, positions, implementation=self.config.implementation)
        return _like(q_out, query), _like(k_out, key)


def derived(config: CosSinRoPE.Config, implementation: str) -> NKIRoPE.Config:
    """Every field of a torchtitan config, for the kernel's module.

    Raises SettingError for a scaling that the module does not implement.
    """
    if config.scaling not in SCALINGS:
        raise SettingError(
            f"nki_rope does not implement rope scaling {config.scaling!r}: use one of "
            f"{', '.join(SCALINGS)}, or leave the override out"
        )
    return derive(config, NKIRoPE.Config, implementation=implementation)


def require_length(seq_len: int) -> None:
    """SettingError, before anything is launched, for a sequence length the kernel cannot take."""
    shape = (1, seq_len, 1, 2)
    try:
        check_rope(shape, shape, (seq_len, 4), kernel_backend.lnc(), "BSHD")
    except ValueError as error:
        raise SettingError(str(error)) from None


# Tensor parallelism shards heads, and a rotation treats each head by itself: every rank rotates
# its own heads.
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(local: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    if not isinstance(model, DTensor):
        return local
    return DTensor.from_local(local, model.device_mesh, model.placements, run_check=False)
