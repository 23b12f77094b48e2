"""What a profile trains from: a model folder in Hugging Face form, and folders of text.

`model_folder` says where a folder lies; every other function makes or fetches what is missing, so
that the folder it returns is complete.
"""

import importlib.util
import os
from pathlib import Path

from qwen3_trainium import data, tiny
from qwen3_trainium.errors import SettingError
from qwen3_trainium.profiles import Profile

# Only what a recipe reads: never pickled weights, never code.
MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja", "LICENSE"]


def scaffold() -> Path:
    """Config and tokenizer of the tiny model, without weights."""
    return tiny.make_scaffold(data.make())


def model_folder(profile: Profile) -> Path:
    """Where the published-style weights of a profile lie, whether or not they are there yet."""
    if profile.model == "tiny-qwen3":
        corpus = data.default_folder()
        return corpus.with_name(f"tiny-qwen3-{corpus.name.removeprefix('pydoc-')}")
    if (local := Path(profile.model)).is_absolute():
        return local
    return data.CACHE / "models" / profile.model.replace("/", "--")


def fetch_model(profile: Profile) -> Path:
    """The profile's model folder, brought from the hub unless the profile names a local one.

    An interrupted download is continued; the token is never printed.
    """
    folder = model_folder(profile)
    if profile.model == "tiny-qwen3":
        raise SettingError(f"tiny-qwen3 is on no hub: run lesson 00, which makes it in {folder}")
    if folder == Path(profile.model):
        return folder
    from huggingface_hub import snapshot_download

    snapshot_download(profile.model, local_dir=folder, allow_patterns=MODEL_FILES)
    return folder


def train_folder(profile: Profile) -> Path | None:
    """The text that a profile trains on, or None when torchtitan should stream `allenai/c4`."""
    if profile.dataset == "pydoc":
        return data.make() / "train"
    if (local := Path(profile.dataset)).is_absolute():
        return local
    if profile.dataset != "c4_test":
        raise SettingError(
            f"dataset {profile.dataset!r} is unknown: use 'pydoc', 'c4_test' or a folder of "
            "JSON lines with a 'text' field"
        )
    return _torchtitan_checkout_c4_test()


def _torchtitan_checkout_c4_test() -> Path | None:
    """`tests/assets/c4_test` of an editable torchtitan install, or of $TORCHTITAN."""
    roots = []
    if "TORCHTITAN" in os.environ:
        root = Path(os.environ["TORCHTITAN"])
        if not root.is_absolute():
            raise SettingError(
                f"TORCHTITAN is the relative path {root}, and the ranks of a run start in another "
                "folder: give the absolute path of the checkout"
            )
        roots.append(root)
    spec = importlib.util.find_spec("torchtitan")
    if spec and spec.submodule_search_locations:
        roots.append(Path(next(iter(spec.submodule_search_locations))).parent)
    for root in roots:
        folder = root / "tests" / "assets" / "c4_test"
        if folder.is_dir():
            return folder
    return None


def heldout_folder(profile: Profile) -> Path:
    """Text that the profile's recipes do not train on.

    Where the documentation itself is trained on, the documents kept apart; elsewhere all the
    others, so that each of 64 ranks has some of its own to read.
    """
    return data.make() / ("heldout" if profile.dataset == "pydoc" else "train")
