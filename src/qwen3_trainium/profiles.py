"""Profiles: the only difference between a laptop and the instance.

A profile is a flat YAML file in `configs/profiles/`. Papermill takes it with `-f`, a lesson's
parameters cell names it, and a config function builds its recipe from it.
"""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from qwen3_trainium.errors import SettingError

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "configs" / "profiles"
# torchrun's ranks learn the profile of their run from this variable, set by `launch`.
PROFILE_VARIABLE = "QWEN3_TRAINIUM_PROFILE"
# Values that are no folders, whatever lies in the working directory: lesson 00 makes the first two,
# torchtitan brings the third.
NOT_FOLDERS = {"model": ("tiny-qwen3",), "dataset": ("pydoc", "c4_test")}


@dataclasses.dataclass(frozen=True)
class Profile:
    """Sizes of one kind of machine. Lengths in tokens, batches in sequences."""

    profile: str
    device: str
    ranks: int
    model: str
    dataset: str
    steps: int
    seq_len: int
    local_batch_size: int
    global_batch_size: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, field.type) or isinstance(value, bool):
                raise SettingError(
                    f"profile key {field.name} must be of type {field.type.__name__}, "
                    f"found {value!r}: correct it in the profile or the parameters cell"
                )
            if field.type is int and value < 1:
                raise SettingError(
                    f"profile key {field.name} must be at least 1, found {value}: "
                    "correct it in the profile or the parameters cell"
                )
        if self.device not in ("cpu", "neuron"):
            raise SettingError(f"device {self.device!r} is unknown: use 'cpu' or 'neuron'")
        if self.global_batch_size % self.local_batch_size:
            raise SettingError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"local_batch_size {self.local_batch_size}: change one of them"
            )


def names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def path_of(name: str | Path) -> Path:
    """The file of a profile: one of `configs/profiles/` by name, or any other `*.yaml` by path."""
    path = Path(name).resolve() if str(name).endswith(".yaml") else PROFILES / f"{name}.yaml"
    if not path.is_file():
        raise SettingError(f"profile {str(name)!r} is unknown: choose one of {', '.join(names())}")
    return path


def load(name: str | Path, **changes) -> Profile:
    """Read a profile by name, or from a file's path; `None` in `changes` keeps the file's value.

    A model or dataset that is a folder is named relative to the profile's file or to the working
    directory; the profile returned holds its absolute path, which the ranks of a run share.
    Raises SettingError for an unknown profile, a file that is no flat table, a misspelt or missing
    key, a wrong type, or a path that leads nowhere.
    """
    path = path_of(name)
    values = _read(path)
    values.update({key: value for key, value in changes.items() if value is not None})
    known = [field.name for field in dataclasses.fields(Profile)]
    if wrong := [key for key in values if key not in known]:
        raise SettingError(
            f"profile {path.stem} has no key {wrong[0]!r}: the keys are {', '.join(known)}"
        )
    if missing := [key for key in known if key not in values]:
        raise SettingError(
            f"profile {path.stem} lacks the key {missing[0]!r}: add it to {path.name}"
        )
    if "ranks" in changes and changes["ranks"] and changes.get("global_batch_size") is None:
        # Another number of ranks keeps the local batch: that is what a reader expects to be fixed.
        values["global_batch_size"] = values["local_batch_size"] * values["ranks"]
    profile = Profile(**values)
    folders = {key: _folder(key, getattr(profile, key), path.parent) for key in NOT_FOLDERS}
    return dataclasses.replace(profile, **folders)


def _read(path: Path) -> dict:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise SettingError(
            f"profile {path.name} is not readable as YAML{where}: write one 'key: value' a line"
        ) from error
    if not isinstance(values, dict):
        raise SettingError(
            f"profile {path.name} must hold 'key: value' lines, found {type(values).__name__}: "
            "copy one of configs/profiles/ and change its values"
        )
    return values


def _folder(key: str, value: str, beside: Path) -> str:
    """The absolute path of an existing folder, or the value as it is: a name of ours or a hub's."""
    if value in NOT_FOLDERS[key]:
        return value
    found = next((base / value for base in (beside, Path.cwd()) if (base / value).is_dir()), None)
    if found is None and value.startswith(("/", ".", "~")):
        raise SettingError(
            f"profile key {key} names the folder {value}, which does not exist: give its absolute "
            "path, or one relative to the profile's file"
        )
    return str(found.resolve()) if found else value


def save(profile: Profile, path: Path) -> None:
    """Write the resolved profile beside a run, so that the run can be repeated from its folder."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(profile), sort_keys=False))


def detect() -> str:
    """`trn2` where the Neuron driver's tool is installed, else `cpu`; initialises no device."""
    neuron_tool = shutil.which("neuron-ls") or Path("/opt/aws/neuron/bin/neuron-ls").exists()
    return "trn2" if neuron_tool else "cpu"


@contextlib.contextmanager
def using(profile: Profile) -> Iterator[None]:
    """Build configs for `profile` inside the block, as the ranks of its run will."""
    global _using
    before, _using = _using, profile
    try:
        yield
    finally:
        _using = before


_using: Profile | None = None


def current() -> Profile:
    """The profile that a config function builds for: `using`'s, the run's, or the detected one."""
    return _using or load(os.environ.get(PROFILE_VARIABLE) or detect())
