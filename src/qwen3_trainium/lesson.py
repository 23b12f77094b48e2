"""What every lesson does first, and how its exercises answer."""

import logging
import os
import warnings
from collections.abc import Callable

from qwen3_trainium import checks, cpu, plots, profiles
from qwen3_trainium.profiles import Profile


def begin(profile: str, **changes) -> Profile:
    """Load the profile, show versions and machine, and keep a page free of progress bars.

    changes   parameters of the lesson; None keeps the profile's value

    A lesson calls this before it imports torch: its own process computes on the CPU, whatever the
    profile, and must hold no NeuronCore that the ranks of its runs need.
    """
    settings = profiles.load(profile, **changes)
    cpu.hide_accelerators()
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if settings.device == "cpu":
        os.environ.setdefault("HF_DATASETS_CACHE", str(profiles.ROOT / ".cache" / "datasets"))
        cpu.prepare()
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # Of torchtitan's messages a reader can act on errors alone; a run's full log is in its folder.
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata, on every loader
    plots.use_style()
    checks.environment(settings)
    return settings


def exercise(answer, right: Callable[[object], bool], hint: str) -> None:
    """Say how an exercise stands: not attempted, not yet right with a hint, or right."""
    if answer is None or answer is ...:
        print("Not attempted yet: set `answer` above and run the cell again.")
        return
    try:
        done = bool(right(answer))
    except Exception as error:  # a reader's answer may be of any type
        print(f"Not yet: the answer cannot be checked ({error}). {hint}")
        return
    print("Right." if done else f"Not yet. {hint}")
