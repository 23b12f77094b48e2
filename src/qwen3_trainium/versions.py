"""The versions that the lessons were written for. Every pin of the project repeats this file.

`pyproject.toml`, `environment.yml` and the preflight are held to these tables by
`tests/test_pins.py`, so a version is changed here first.
"""

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
