"""Spec against config.json: what differs is refused before anything is launched."""

import dataclasses
import json

import pytest
import tiny_release
import torch
import toys

from qwen3_trainium import cpu, dryrun, launch, profiles, spec, weights
from qwen3_trainium.errors import SettingError

cpu.prepare()

from configs import native  # noqa: E402, torchtitan may be imported only after prepare()

RELEASE = weights.PUBLISHED["Qwen/Qwen3-4B-Instruct-2507"]


@pytest.fixture
def folder(tmp_path):
    return tiny_release.copy_scaffold(tmp_path / "model")


def test_the_4b_spec_is_the_release_it_is_named_for():
    model = native.spec_4b_instruct_2507().model
    assert spec.differences(model, RELEASE) == {}
    with torch.device("meta"):
        built = model.build()
    assert sum(p.numel() for p in built.parameters()) == 4_022_468_096  # the tied head once


def test_torchtitans_own_4b_is_another_release():
    shipped = native.compat.native_spec("4B").model
    assert spec.differences(shipped, RELEASE) == {
        "theta": (1_000_000.0, 5_000_000.0),
        "positions": (40_960, 262_144),
    }


@pytest.mark.parametrize(
    ("key", "value", "fact", "ours"),
    [
        ("rope_theta", 1_000_000, "theta", "5000000.0"),
        ("vocab_size", 4224, "vocab", "4096"),
        ("head_dim", 24, "head_dim", "32"),
        ("num_hidden_layers", 5, "layers", "4"),
        ("tie_word_embeddings", False, "tied", "True"),
        ("rms_norm_eps", 1e-5, "eps", "1e-06"),
        ("max_position_embeddings", 4096, "positions", "2048"),
        ("hidden_size", 256, "dim", "192"),
        ("num_key_value_heads", 4, "kv_heads", "2"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling", "'none'"),
    ],
)
def test_a_difference_is_refused_before_launch_with_both_values(
    folder, tmp_path, key, value, fact, ours
):
    toys.edit_json(folder / "config.json", **{key: value})
    profile = dataclasses.replace(profiles.load("cpu"), model=str(folder))
    with pytest.raises(SettingError) as refused:
        launch.launch("native", "published", profile, runs=tmp_path / "runs")
    theirs = "'yarn'" if fact == "rope_scaling" else str(float(value) if fact == "theta" else value)
    assert f"{fact} {ours} against {theirs}" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs" / "native" / "published").exists()


def test_every_layer_is_compared():
    model = native.tiny_spec().model
    native.compat.set_fields(model.layers[2].attention.rope, theta=1_000_000.0)
    found = spec.differences(model, json.loads(json.dumps(native.tiny.CONFIG)))
    assert found == {"theta": ([1_000_000.0, 5_000_000.0], 5_000_000.0)}


def test_the_config_of_the_instance_has_the_guides_numbers():
    profile = dryrun.profile_for(dryrun.real_width_folder(), steps=10, seq_len=2048)
    assert (profile.ranks, profile.global_batch_size) == (64, 64)
    config = launch.build_config("native", "published", profile)
    assert config.model_spec.flavor == "4B"  # the builder's name says 32B
    assert config.training.local_batch_size == 1
    assert config.training.global_batch_size == 64
    assert config.training.steps == 10
    assert config.parallelism.data_parallel_shard_degree == -1  # 64, what the others leave
    assert config.parallelism.tensor_parallel_degree == 1
    assert config.dataloader.streams == 64
    assert config.checkpoint.initial_load_in_hf
    assert config.checkpoint.last_save_in_hf
    assert config.checkpoint.export_dtype == "bfloat16"
    assert config.loss.loss_fn.global_vocab_size == 151_936

    config = launch.build_config("native", "tensor_parallel", profile)
    assert config.parallelism.tensor_parallel_degree == 4  # × 16
    assert config.training.global_batch_size == 64
    assert config.validator.steps == 64 // 16
