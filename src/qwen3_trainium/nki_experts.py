"""torchtitan's grouped experts, computed by our kernels.

The module keeps torchtitan's parameters, so a checkpoint of either loads into the other; router,
dispatch and combination stay torchtitan's own. Shape suffixes: R routed rows, E experts, D model
dimension, F expert width.
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts

from qwen3_trainium import moe
from qwen3_trainium.errors import SettingError
from qwen3_trainium.ops.grouped_experts import check_experts, grouped_experts


class NKIGroupedExperts(GroupedExperts):
    """`ops.grouped_experts` in place of three grouped matrix products in bfloat16.

    Computes in the dtype of its input: float32 stays float32, which torchtitan's own does not do.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        transpose_by_dma: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.transpose_by_dma = config.transpose_by_dma

    def parallelize(self, parallel_dims) -> None:
        require_no_expert_parallel(parallel_dims.ep)
        super().parallelize(parallel_dims)

    def compute(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert and how many each has; returns `[R, D]` in the rows' dtype."""
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        # FSDP hands over whole matrices in its compute dtype. Under autocast rows may be narrower.
        w1_EFD, w2_EDF, w3_EFD = (
            (w.to_local() if isinstance(w, DTensor) else w).to(x_RD.dtype) for w in weights
        )
        return grouped_experts(
            x_RD,
            num_tokens_per_expert_E,
            w1_EFD,
            w2_EDF,
            w3_EFD,
            transpose_by_dma=self.transpose_by_dma,
        )


def computing_method(experts: type) -> str:
    """The method of torchtitan's `GroupedExperts` that takes sorted rows and their counts.

    Before July 2026 `forward` was dispatch, computation and combination, and the computation had
    a method of its own.
    """
    return "_experts_forward" if hasattr(experts, "_experts_forward") else "forward"


setattr(NKIGroupedExperts, computing_method(GroupedExperts), NKIGroupedExperts.compute)


def require(config) -> None:
    """Raise SettingError for a torchtitan config whose experts the kernels cannot compute.

    Before anything is launched: sizes and dtype, and expert parallelism.
    """
    require_no_expert_parallel(config.parallelism.expert_parallel_degree)
    dtype = config.training.mixed_precision_param
    rows = config.training.local_batch_size * config.training.seq_len
    for layer in config.model_spec.model.layers:
        experts = moe.grouped_experts(layer.moe)
        E, D, F = experts.num_experts, experts.dim, experts.hidden_dim
        shapes = ((rows * layer.moe.router.top_k, D), (E,), (E, F, D), (E, D, F), (E, F, D))
        try:
            check_experts(*shapes, [dtype] * 4)
        except ValueError as error:
            raise SettingError(str(error)) from None


def require_no_expert_parallel(degree: int) -> None:
    """Raise SettingError when ranks are to own different experts.

    Rows then arrive from other ranks in numbers that differ from step to step, and the kernels'
    shapes, which are to be compiled once, would follow them.
    """
    if degree > 1:
        raise SettingError(
            f"expert_parallel_degree is {degree}, but the nki_experts override computes all "
            "experts on every rank: set it to 1, or leave the override out"
        )
