"""What is fetched and what is streamed. The hub is a fake: nothing here reaches a network."""

import dataclasses

import huggingface_hub
import pytest

from qwen3_trainium import assets, data, launch, profiles
from qwen3_trainium.errors import SettingError

# What a release of the hub may hold; the last three must not be downloaded.
RELEASE = {
    "config.json": "{}",
    "model-00001-of-00002.safetensors": "1",
    "model-00002-of-00002.safetensors": "2",
    "model.safetensors.index.json": "{}",
    "tokenizer.json": "{}",
    "merges.txt": "",
    "chat_template.jinja": "",
    "LICENSE": "",
    "modeling_qwen3.py": "raise SystemExit('code of the release was run')",
    "pytorch_model.bin": "pickle",
    "original/consolidated.00.pth": "pickle",
}
TOKEN = "hf_" + "abcdefgh" * 4


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "CACHE", tmp_path)
    return tmp_path


@pytest.fixture
def fake_hub(monkeypatch):
    """A fake `snapshot_download`: real file patterns, no network; returns its calls.

    Like the real one it keeps what a cut-off call has brought, and fetches only the rest.
    """
    calls = []

    def snapshot_download(repo, *, local_dir, allow_patterns):
        wanted = huggingface_hub.utils.filter_repo_objects(RELEASE, allow_patterns=allow_patterns)
        missing = [name for name in wanted if not (local_dir / name).is_file()]
        calls.append((repo, missing))
        for count, name in enumerate(missing):
            if count == 3 and len(calls) == 1:
                raise ConnectionError("cut off")
            (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / name).write_text(RELEASE[name])
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_cut_off_download_is_continued_and_brings_neither_code_nor_pickles(
    cache, fake_hub, monkeypatch, capsys
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    profile = profiles.load("trn2")
    with pytest.raises(ConnectionError):
        assets.fetch_model(profile)
    folder = assets.fetch_model(profile)
    assert folder == assets.model_folder(profile)
    assert folder == cache / "models" / "Qwen--Qwen3-4B-Instruct-2507"
    assert sorted(path.name for path in folder.rglob("*")) == sorted(list(RELEASE)[:-3])
    assert [repo for repo, _ in fake_hub] == [profile.model] * 2
    assert len(fake_hub[1][1]) == len(fake_hub[0][1]) - 3
    captured = capsys.readouterr()
    assert TOKEN not in captured.out + captured.err


def test_what_is_on_no_hub_is_not_asked_for(cache, fake_hub, tmp_path):
    with pytest.raises(SettingError, match="tiny-qwen3 is on no hub: run lesson 00"):
        assets.fetch_model(profiles.load("cpu"))
    local = tmp_path / "release"
    local.mkdir()
    assert assets.fetch_model(profiles.load("trn2", model=str(local))) == local
    assert fake_hub == []


def test_a_model_folder_is_named_without_anything_being_made(cache):
    assert assets.model_folder(profiles.load("cpu")).parent == cache
    assert not list(cache.iterdir())


def test_without_a_checkout_the_full_set_is_streamed(toy_profile, monkeypatch):
    """PyPI's torchtitan comes without its tests, and so without their text."""
    monkeypatch.delenv("TORCHTITAN", raising=False)
    profile = dataclasses.replace(toy_profile, dataset="c4_test")
    assert assets.train_folder(profile) is None
    built = launch.build_config("hf_finetune", "published", profile)
    assert (built.dataloader.dataset, built.dataloader.dataset_path) == ("c4", None)
    # Held-out text never comes from the hub.
    assert built.validator.dataloader.dataset_path == str(assets.heldout_folder(profile))


def test_a_checkout_is_named_by_an_absolute_path(toy_profile, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHTITAN", "titan")
    profile = dataclasses.replace(toy_profile, dataset="c4_test")
    with pytest.raises(SettingError, match="TORCHTITAN is the relative path titan"):
        assets.train_folder(profile)
