"""The loss that the guide reports for random weights, measured at full size on a CPU.

Shape suffixes: S sequence, V vocabulary.
"""

import dataclasses
import math
import time

from qwen3_trainium import dryrun, launch, parity
from qwen3_trainium.errors import SettingError

NEEDED_GIB = 12  # 4.02 billion parameters of 2 bytes, the largest one's float32 draws, the logits
TOKENS = 256  # one sequence of random tokens: text makes no difference to random weights
SIGMA = 0.02  # standard deviation of torchtitan's native head


@dataclasses.dataclass(frozen=True)
class FirstLoss:
    """Losses in nats a token; `seconds` to build, initialise and run.

    one_draw   with one random next token at each position: a step's loss
    loss       its mean over all V next tokens; one draw is off by about σ_logit/√tokens, 0.06
    """

    parameters: int
    loss: float
    one_draw: float
    seconds: float


def closed_form(vocab: int, dim: int, sigma: float = SIGMA) -> float:
    """Loss of a random model in nats a token: ln V + d·σ²/2.

    After the final RMSNorm a hidden state has d unit-variance elements, so a logit has variance
    v = d·σ², and the mean of ln Σ exp over V such logits exceeds ln V by v/2.
    """
    return math.log(vocab) + dim * sigma**2 / 2


def available_gib() -> float:
    """Memory that a process can still get on this machine."""
    with open("/proc/meminfo") as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return kib / 2**20


def first_loss() -> FirstLoss:
    """Build Qwen3-4B by torchtitan's own random initialisation, bfloat16, and measure its loss.

    Raises SettingError when the memory is not there.
    """
    import torch

    if (room := available_gib()) < NEEDED_GIB:
        raise SettingError(
            f"Qwen3-4B in bfloat16 needs {NEEDED_GIB} GiB of memory, but {room:.1f} GiB are "
            "available: leave full_size off, or use a larger machine"
        )
    started = time.monotonic()
    torch.manual_seed(0)
    profile = dryrun.profile_for(dryrun.real_width_folder(), steps=1, seq_len=TOKENS)
    model, spec = parity.initialised(
        launch.build_config("native", "random", profile), torch.bfloat16
    )
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(spec.model.vocab_size, (1, TOKENS + 1), generator=generator)
    positions = torch.arange(TOKENS)[None]
    with torch.no_grad():
        logits_1SV = model.eval()(
            drawn[:, :-1],
            positions=positions,
            attention_masks=model.get_attention_masks(positions),
        ).float()
    return FirstLoss(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        loss=(logits_1SV.logsumexp(-1) - logits_1SV.mean(-1)).mean().item(),
        one_draw=parity.loss(logits_1SV, drawn[:, 1:]).item(),
        seconds=time.monotonic() - started,
    )
