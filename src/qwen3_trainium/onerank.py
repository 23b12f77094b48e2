"""A whole run in this process: torchtitan's trainer on one rank, without a launcher.

What `launch` starts in processes of its own, for a model small enough to train in a notebook. The
run's folder is like any other and is read with `runlog`.
"""

import contextlib
import logging
import os
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from qwen3_trainium import guards
from qwen3_trainium.data import CACHE


def train(config, folder: Path) -> Path:
    """Train a torchtitan config to its last step; returns `folder`.

    config   for one rank: `launch.build_config` of a profile with `ranks=1`
    folder   where metrics and checkpoints go; a checkpoint that lies there is resumed

    Raises SettingError when the folder holds a finished run.
    """
    import torch

    from qwen3_trainium.train import require_sound

    if (folder / "tb").exists():
        guards.check_run_folder(folder)
    # Read when the first block is compiled: what a compiler made once is kept with our caches.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
    config.dump_folder = str(folder)
    with _single_rank_environment(), _one_thread(), _without_idle_warnings():
        trainer = config.build()
        try:
            trainer.train()
            for model in trainer.model_parts:
                require_sound(model, "after the last step")
        finally:
            trainer.close()
            torch.distributed.destroy_process_group()
    return folder


@contextlib.contextmanager
def _without_idle_warnings() -> Iterator[None]:
    """Of a page, keep off what PyTorch says to everybody who has no GPU; a run's log has it."""
    compiler = logging.getLogger("torch.utils.cpp_extension")
    level = compiler.level
    compiler.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*complete support on cpu device mesh")
        warnings.filterwarnings("ignore", message=".*use `get_last_lr..`")
        yield
    compiler.setLevel(level)


def can_compile() -> bool:
    """Whether `torch.compile` finds a C++ compiler here, which it needs on a CPU."""
    return any(shutil.which(os.environ.get("CXX") or name) for name in ("g++", "clang++"))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of computation: several that share busy cores wait for each other, spinning.

    Measured on two busy cores, a step took 0.8 s with one thread and up to 20 s with two.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _single_rank_environment() -> Iterator[None]:
    """What torchrun would tell a lone rank, for as long as the block runs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    told = {
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
