"""Profiles: where their folders lie, and files that are no profile."""

import pytest
import yaml

from qwen3_trainium import assets, profiles
from qwen3_trainium.errors import SettingError


@pytest.fixture
def profile_file(tmp_path):
    """`profile_file(**changes)` writes a copy of `cpu.yaml` with changed values."""

    def write(**changes):
        values = yaml.safe_load((profiles.PROFILES / "cpu.yaml").read_text()) | changes
        path = tmp_path / "profiles" / "mine.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def test_folders_are_found_beside_the_profile_or_in_the_working_directory(
    profile_file, tmp_path, monkeypatch
):
    path = profile_file(model="release", dataset="../texts")
    (path.parent / "release").mkdir()
    (tmp_path / "texts").mkdir()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "release").mkdir(parents=True)
    (elsewhere / "here").mkdir()
    monkeypatch.chdir(elsewhere)
    loaded = profiles.load(path)
    assert loaded.model == str(path.parent / "release")
    assert loaded.dataset == str(tmp_path / "texts")
    assert profiles.load(path, model="here").model == str(elsewhere / "here")
    # What the ranks of a run read, in a working directory of their own.
    profiles.save(loaded, tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    assert profiles.load(tmp_path / "run.yaml") == loaded
    assert assets.model_folder(loaded) == path.parent / "release"
    assert assets.train_folder(loaded) == tmp_path / "texts"


def test_names_of_ours_stay_names_whatever_the_working_directory_holds(
    profile_file, tmp_path, monkeypatch
):
    for name in ("tiny-qwen3", "pydoc", "c4_test"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    loaded = profiles.load("cpu")
    assert (loaded.model, loaded.dataset) == ("tiny-qwen3", "pydoc")
    assert profiles.load("trn2").dataset == "c4_test"
    assert profiles.load("trn2").model == "Qwen/Qwen3-4B-Instruct-2507"


@pytest.mark.parametrize("value", ["./nowhere", "../nowhere", "/nowhere/at/all", "~/nowhere"])
@pytest.mark.parametrize("key", ["model", "dataset"])
def test_a_path_that_leads_nowhere_is_refused(profile_file, key, value):
    with pytest.raises(SettingError, match=f"{key} names the folder {value}, which does not exist"):
        profiles.load(profile_file(**{key: value}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- profile: cpu\n", "mine.yaml must hold 'key: value' lines, found list"),
        ("cpu\n", "mine.yaml must hold 'key: value' lines, found str"),
        ("", "mine.yaml must hold 'key: value' lines, found NoneType"),
        ("profile: cpu\nranks: [2\n", "mine.yaml is not readable as YAML in line 3"),
        ("profile: cpu\n\tranks: 2\n", "mine.yaml is not readable as YAML in line 2"),
        ("profile: !!python/name:os.system\n", "mine.yaml is not readable as YAML in line 1"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_sentence(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SettingError, match=message) as error:
        profiles.load(tmp_path / "mine.yaml")
    assert "\n" not in str(error.value)


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match=r"mine\.yaml is not readable as YAML"):
        profiles.load(tmp_path / "mine.yaml")
