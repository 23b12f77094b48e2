"""Profiles and config functions: exact numbers, refused mistakes, and 64 fake ranks."""

import dataclasses

import pytest
import yaml

from qwen3_trainium import assets, compat, data, dryrun, launch, profiles, tiny, weights
from qwen3_trainium.errors import SettingError


@pytest.fixture
def trn2(tmp_path):
    """The instance's profile with a folder that holds the release's config and no weights."""
    return dataclasses.replace(
        profiles.load("trn2"),
        model=str(dryrun.real_width_folder()),
        dataset=str(data.make() / "train"),
    )


def test_trn2_profile_has_the_guides_numbers():
    profile = profiles.load("trn2")
    assert dataclasses.asdict(profile) == {
        "profile": "trn2",
        "device": "neuron",
        "ranks": 64,
        "model": "Qwen/Qwen3-4B-Instruct-2507",
        "dataset": "c4_test",
        "steps": 10,
        "seq_len": 2048,
        "local_batch_size": 1,
        "global_batch_size": 64,
    }


def test_trn2_recipe(trn2):
    config = launch.build_config("hf_finetune", "published", trn2)
    assert config.training.steps == 10
    assert (config.training.local_batch_size, config.training.global_batch_size) == (1, 64)
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.training.dtype == "float32", "master weights: bfloat16 alone would not move"
    assert config.parallelism.data_parallel_shard_degree == -1
    assert config.parallelism.tensor_parallel_degree == 1
    assert config.checkpoint.enable
    assert config.checkpoint.initial_load_in_hf
    assert config.checkpoint.last_save_in_hf
    assert config.checkpoint.export_dtype == "bfloat16"
    assert config.model_spec.model.attn_mask_type == "block_causal"
    assert config.lr_scheduler.total_steps == 10
    # A first step that compiles for minutes is no hang; torchtitan's own limits are 300 and 100 s.
    assert config.comm.init_timeout_seconds >= 3600
    assert config.comm.train_timeout_seconds > 100
    random = launch.build_config("hf_finetune", "random", trn2)
    assert not random.checkpoint.initial_load_in_hf


def test_both_profiles_build_the_same_recipe(trn2, toy_profile):
    """What differs between a laptop and the instance is in the profile, or is said here."""
    from qwen3_trainium.compare import changed_fields

    laptop = launch.build_config("hf_finetune", "published", toy_profile)
    instance = launch.build_config("hf_finetune", "published", trn2)
    assert {row["field"] for row in changed_fields(laptop, instance)} <= {
        *("hf_model", "hf_assets_path", "dataloader.dataset_path"),
        *("training.seq_len", "training.steps", "training.global_batch_size"),
        *("lr_scheduler.total_steps", "checkpoint.interval", "validator.freq"),
        "training.mixed_precision_param",  # float32 on a CPU, to compare losses to the digit
        "checkpoint.export_dtype",  # that of the folder's config.json
        "validator.dataloader.dataset_path",  # the documentation, where it is not trained on
        "validator.steps",  # the reference reads the same text on the host
        *("comm.init_timeout_seconds", "comm.train_timeout_seconds"),  # compilation takes long
    }


def test_64_fake_ranks_at_reduced_width(toy_release, tmp_path):
    profile = dryrun.profile_for(toy_release, steps=2, seq_len=64)
    found = dryrun.dry_run("hf_finetune", "random", profile, tmp_path)
    assert found["steps"] == 2
    assert (
        found["parameters"]
        == weights.facts(weights.read_json(toy_release / "config.json")).n_params
    )
    log = (tmp_path / "log.txt").read_text()
    assert "dp_shard=64" in log
    assert "[Check] before the first step" in log


def test_real_width_folder_is_the_release():
    config = weights.read_json(dryrun.real_width_folder() / "config.json")
    assert weights.facts(config).n_params == 4_022_468_096
    assert weights.rope_theta(config) == 5_000_000


@pytest.mark.parametrize("name", profiles.names())
def test_every_profile_loads(name):
    assert profiles.load(name).profile == name


def test_profile_mistakes_are_named(tmp_path):
    with pytest.raises(SettingError, match="'trn3' is unknown: choose one of cpu, trn2"):
        profiles.load("trn3")
    with pytest.raises(SettingError, match="no key 'stepz'"):
        profiles.load("cpu", stepz=3)
    with pytest.raises(SettingError, match="steps must be of type int, found 'ten'"):
        profiles.load("cpu", steps="ten")
    with pytest.raises(SettingError, match="seq_len must be at least 1, found 0"):
        profiles.load("cpu", seq_len=0)
    with pytest.raises(SettingError, match="not a multiple"):
        profiles.load("cpu", local_batch_size=2, global_batch_size=3)
    values = yaml.safe_load((profiles.PROFILES / "cpu.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**values, "sequence": 8}))
    with pytest.raises(SettingError, match="no key 'sequence'"):
        profiles.load(tmp_path / "mine.yaml")
    del values["ranks"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(SettingError, match="lacks the key 'ranks'"):
        profiles.load(tmp_path / "mine.yaml")


def test_another_number_of_ranks_keeps_the_local_batch():
    assert profiles.load("trn2", ranks=32).global_batch_size == 32


def test_saved_profile_is_the_same(tmp_path):
    profile = profiles.load("cpu", steps=3)
    profiles.save(profile, tmp_path / "p.yaml")
    assert profiles.load(tmp_path / "p.yaml") == profile


def test_other_torchtitan_is_refused_by_feature():
    with pytest.raises(SettingError, match=r"no torchtitan.config.NoSuchName.*0\.3\.0"):
        compat.symbol("torchtitan.config", "NoSuchName")
    config = compat.hf_backend_config()
    with pytest.raises(SettingError, match="no field 'stepz'"):
        compat.set_fields(config.training, stepz=1)


def test_text_is_that_of_python_and_not_of_what_this_process_changed(monkeypatch):
    """pytest and Jupyter replace functions of the standard library; the text stays the same."""

    def getpass():
        pass

    getpass.__doc__, getpass.__module__ = "Replaced. " * 40, "getpass"
    monkeypatch.setattr("getpass.getpass", getpass)
    texts = data.documents()
    assert any(text.startswith("Utilities to get a password") for text in texts)
    assert not any("Replaced." in text for text in texts)


def test_text_is_split_by_document_and_repeatable(tmp_path):
    folder = data.make(tmp_path / "text")
    train, heldout = data.read(folder / "train"), data.read(folder / "heldout")
    assert len(train) > 150
    assert len(heldout) > 15
    assert not set(train) & set(heldout)
    assert sorted([*train, *heldout]) == sorted(data.documents())
    assert data.read(data.make(tmp_path / "again") / "train") == train
    assert sum(map(len, train)) > 500_000
    assert not list(tmp_path.glob("*.partial*"))


def test_tokenizer_of_the_tiny_model():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.scaffold())
    assert len(tokenizer) == tiny.VOCAB
    assert [tokenizer.convert_tokens_to_ids(token) for token in tiny.SPECIAL_TOKENS] == [0, 1, 2]
    text = "def f(x):\n\treturn x ** 2  # naïve — 12,345 Ωμέγα"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_dataset_names(toy_profile, tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="'c5' is unknown"):
        assets.train_folder(dataclasses.replace(toy_profile, dataset="c5"))
    checkout = tmp_path / "titan"
    (checkout / "tests" / "assets" / "c4_test").mkdir(parents=True)
    monkeypatch.setenv("TORCHTITAN", str(checkout))
    found = assets.train_folder(dataclasses.replace(toy_profile, dataset="c4_test"))
    assert found == checkout / "tests" / "assets" / "c4_test"
