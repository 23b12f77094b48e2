"""The versions that the lessons were written for, and those that are installed.

Every pin of the project repeats these tables: `pyproject.toml`, `environment.yml` and the preflight
are held to them by `tests/test_pins.py`, so a version is changed here first.
"""

import importlib.metadata
import json
import platform

# What `make run` and `make test` install and run on a laptop or a CI machine.
CPU = {"torch": "2.14", "torchtitan": "0.3.0", "transformers": "5.16.0"}

# The guide's environment on a Trainium machine. Its torchtitan is a fork that installs under the
# same name, with a second package `torchtitan_neuron` beside it.
NEURON = {
    "python": "3.12",
    "torch": "2.14.0",
    "torch_neuronx": "2.14.3",
    "transformers": "5.16.0",
    "torchtitan": "0.2.2+neuron.1",
    "neuron_sdk": "2.33",
    "nki": "0.7",
}

# The NKI release that each Neuron SDK ships; kernels of one are not promised to run under another.
NKI_OF_SDK = {"2.29": "0.3", "2.30": "0.4", "2.31": "0.5", "2.32": "0.6", "2.33": "0.7"}


def installed(*names: str) -> dict[str, str]:
    """Python's version and those of the packages that are installed, from metadata alone.

    A torchtitan that was installed from a repository also has its `torchtitan_commit`: the version
    of a moving branch says little.
    """
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # torch_neuronx and nki are absent from a laptop, and that is a fact as well
    if "torchtitan" in found and (commit := _commit("torchtitan")):
        found["torchtitan_commit"] = commit
    return found


def _commit(name: str) -> str:
    """The commit that pip installed a package from; empty for a wheel or a local folder."""
    # https://packaging.python.org/en/latest/specifications/direct-url/
    recorded = importlib.metadata.distribution(name).read_text("direct_url.json")
    return json.loads(recorded or "{}").get("vcs_info", {}).get("commit_id", "")
