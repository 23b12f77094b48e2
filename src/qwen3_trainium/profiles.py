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


def load(name: str | Path, **changes) -> Profile:
    """Read a profile by name, or from a file's path; `None` in `changes` keeps the file's value.

    Raises SettingError for an unknown profile, a misspelt or missing key, or a wrong type.
    """
    path = Path(name) if str(name).endswith(".yaml") else PROFILES / f"{name}.yaml"
    if not path.is_file():
        raise SettingError(f"profile {str(name)!r} is unknown: choose one of {', '.join(names())}")
    values = yaml.safe_load(path.read_text()) or {}
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
    return Profile(**values)


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
