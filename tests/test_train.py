"""What stops a rank before its first step, or after it; in this process, on one rank."""

import dataclasses
import math
import sys

import pytest
import torch
import toys
from torch import nn

from qwen3_trainium import cpu, launch, onerank, profiles, runlog, train
from qwen3_trainium.errors import SettingError

cpu.prepare()


def train_checked(config, folder) -> None:
    """Train as a rank of a launch does, with the checks of `train`."""
    config.dump_folder = str(folder)
    with onerank._single_rank_environment(), onerank._one_thread():
        trainer = config.build()
        try:
            train._checked(type(trainer).train, save_initial=False)(trainer)
        finally:
            trainer.close()
            torch.distributed.destroy_process_group()


def test_random_weights_declared_as_published_stop_at_step_1(toy_profile, tmp_path):
    release = toys.qwen3(tmp_path / "random")  # its weights were never trained
    profile = dataclasses.replace(toy_profile, model=str(release), ranks=1, steps=2)
    config = launch.build_config("hf_finetune", "published", profile)
    with pytest.raises(RuntimeError, match="published weights were not loaded") as stopped:
        train_checked(config, tmp_path / "run")
    loss = runlog.read(tmp_path / "run").loss
    assert list(loss.index) == [1]
    assert f"{loss[1]:.2f}, worse than the {math.log(96):.2f}" in str(stopped.value)
    assert not list((tmp_path / "run").glob("checkpoint/step-*"))


def test_first_losses_of_random_starts():
    """12.43 and 12.97 were measured from random weights of the real and of the tiny sizes."""
    for loss, vocab in ((12.43, 151_936), (12.97, 4096)):
        with pytest.raises(RuntimeError, match="published weights were not loaded"):
            train.require_learned(loss, vocab)
    train.require_learned(2.0, 151_936)


@pytest.fixture
def backend_model(toy_profile, toy_release):
    """The Transformers backend's model as it is built, without weights, and its folder."""
    spec = launch.build_config("hf_finetune", "published", toy_profile)
    spec.model_spec.model.update_from_config(config=spec)
    with torch.device("meta"):
        return spec.model_spec.model.build(), toy_release


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("rms_norm_eps", 1e-5, "eps 1e-05 against 1e-06"),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 1e4},
            "theta 10000.0 against 5000000.0",
        ),
        ("head_dim", 10, "head_dim 10 against 16"),
        ("num_attention_heads", 8, "heads 8 against 4"),
        ("num_hidden_layers", 3, "layers 3 against 2"),
        ("tie_word_embeddings", False, "tied False against True"),
    ],
)
def test_model_of_other_numbers_than_its_folder_is_refused(backend_model, setting, value, said):
    model, folder = backend_model
    train.require_described(model, folder)
    before = getattr(model.model.config, setting)
    try:
        setattr(model.model.config, setting, value)
        with pytest.raises(RuntimeError, match=said):
            train.require_described(model, folder)
    finally:
        setattr(model.model.config, setting, before)


def test_model_without_a_rotary_module_is_not_sound():
    with pytest.raises(RuntimeError, match="no rotary module was found"):
        train.require_sound(nn.Linear(2, 2), "before the first step")


def test_profile_decides_what_a_rank_computes_on(monkeypatch):
    """Not what the machine has: here it seems to have a GPU."""
    laptop, instance = profiles.load("cpu"), profiles.load("trn2")
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "cuda")
    with pytest.raises(SettingError, match="trains on neuron, but PyTorch finds cuda"):
        train._prepare(instance)
    assert train._prepare(laptop) is True
    assert torch._utils._get_available_device_type() == "cpu"
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: None)
    with pytest.raises(SettingError, match="finds no accelerator"):
        train._prepare(instance)
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "neuron")
    before = dict(vars(torch.cpu))
    assert train._prepare(instance) is False
    assert vars(torch.cpu) == before
    monkeypatch.setattr(sys, "argv", ["train", "--comm.mode", "fake_backend"])
    assert train._prepare(instance) is True
