"""Everything that stops a run before it is launched, each guard with one sentence.

A guard raises SettingError (what is wrong, what was found, what to do) or returns; what is only
worth knowing comes back as a list of warnings. None imports torch or touches a device.
"""

import dataclasses
import json
import operator
import os
import shutil
from pathlib import Path

from qwen3_trainium import neuron
from qwen3_trainium.errors import SettingError
from qwen3_trainium.weights import (
    EMBEDDING,
    HEAD,
    ModelFacts,
    Tensor,
    expected_shapes,
    facts,
    read_json,
    stored_tensors,
)

# AdamW in float32: weight, gradient and two moments of 4 bytes each.
TRAINING_BYTES_PER_PARAMETER = 16
# Float32 copies of the logits that live at once: themselves, their softmax, their gradient.
LOGITS_COPIES = 3
# Ranks that a CPU may be asked to share: more only wait for each other.
RANKS_PER_CPU = 4
# Half of bfloat16's spacing around 0.02, the size of a typical weight: 2⁻⁶ · 2⁻⁷ / 2. A step of
# AdamW is about the learning rate, and a smaller one than this is rounded away.
SMALLEST_BFLOAT16_STEP = 2**-14


def check_model_folder(folder: Path | str) -> ModelFacts:
    """Prove that a Hugging Face folder can be trained: config, weights and tokenizer agree.

    Every key that the config implies is stored with its shape and none besides; only a *tied*
    `lm_head.weight` may be absent. Raises SettingError naming the first fault.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SettingError(f"model folder {folder} does not exist: run lesson 00 or download it")
    config = read_json(folder / "config.json")
    model = facts(config)
    tensors = stored_tensors(folder)
    check_keys(tensors, config, folder)
    check_tokenizer(folder, config)
    stored = sum(tensor.bytes for tensor in tensors.values())
    return dataclasses.replace(model, dtype=tensors[EMBEDDING].dtype, bytes=stored)


def check_keys(tensors: dict[str, Tensor], config: dict, folder: Path | str) -> None:
    """Prove that the stored keys and shapes are those that the config implies."""
    expected = expected_shapes(config)
    if missing := [key for key in expected if key not in tensors]:
        raise SettingError(
            f"{folder} lacks {missing[0]} ({len(missing)} of {len(expected)} keys missing), which "
            "would keep random values: use the config.json that belongs to these weights"
        )
    # Some releases store a tied head a second time; an untied one is expected already.
    allowed = {**expected, HEAD: expected[EMBEDDING]}
    if extra := sorted(key for key in tensors if key not in allowed):
        raise SettingError(
            f"{folder} holds {extra[0]} ({len(extra)} such keys), which config.json does not "
            "imply: use the config.json that belongs to these weights"
        )
    for key, tensor in tensors.items():
        if tensor.shape != allowed[key]:
            raise SettingError(
                f"{key} in {folder} has shape {list(tensor.shape)}, but config.json implies "
                f"{list(allowed[key])}: use the config.json that belongs to these weights"
            )


def check_tokenizer(folder: Path | str, config: dict) -> int:
    """Prove that every token has a row in the embedding; returns the number of tokens.

    A tokenizer may be shorter than the vocabulary, which is padded (151,669 of 151,936 in Qwen3).
    """
    folder, vocab = Path(folder), config["vocab_size"]
    tokenizer = read_json(folder / "tokenizer.json")
    try:
        words = tokenizer["model"]["vocab"]
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
        ids = {**words, **added}
        last = max(map(operator.index, ids.values()))
    except (KeyError, TypeError, ValueError):
        words = None
    if not words:
        raise SettingError(f"tokenizer.json in {folder} has no vocabulary: download it again")
    if max(len(ids), last + 1) > vocab:
        raise SettingError(
            f"the tokenizer in {folder} has {len(ids)} tokens with ids up to {last}, "
            f"but the model's vocab_size is {vocab}: use the tokenizer of this model"
        )
    known = set(ids.values())
    special = [(file, name) for file, name in _special_ids(folder, config) if name[1] not in known]
    if special:
        file, (name, value) = special[0]
        raise SettingError(
            f"{file} in {folder} sets {name} to {value}, which is no token of the tokenizer: "
            "use the config and tokenizer of one release"
        )
    return len(ids)


def _special_ids(folder: Path, config: dict) -> list[tuple[str, tuple[str, int]]]:
    """(file, (setting, id)) of each special token that a config names."""
    generation = folder / "generation_config.json"
    sources = {"config.json": config}
    if generation.is_file():
        sources[generation.name] = read_json(generation)
    found = []
    for file, values in sources.items():
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = values.get(name)
            ids = value if isinstance(value, list) else [value]
            found += [(file, (name, id)) for id in ids if id is not None]
    return found


def check_dataset_folder(folder: Path | str) -> int:
    """Prove that each line is a JSON object with a `text`; returns the number of documents."""
    folder = Path(folder)
    if not folder.is_dir():
        raise SettingError(f"dataset folder {folder} does not exist: run lesson 00 or correct it")
    files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jsonl"))
    documents = 0
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if (wrong := wrong_document(line)) is not None:
                    raise SettingError(
                        f"line {number} of {file} {wrong}: write one JSON object a line, with "
                        "the document under 'text'"
                    )
                documents += 1
    if not documents:
        raise SettingError(
            f"dataset folder {folder} holds no document ({len(files)} .json or .jsonl files): "
            "name a folder of JSON lines with a 'text' field"
        )
    return documents


def wrong_document(line: bytes) -> str | None:
    """What is wrong with one line of a dataset, as the end of a sentence; None when it is right."""
    try:
        value = json.loads(line)
    except ValueError:
        return "is not JSON"
    if not isinstance(value, dict):
        return f"is a {type(value).__name__}, not an object"
    if not isinstance(value.get("text"), str):
        return f"has no 'text' string (its keys: {', '.join(value) or 'none'})"
    return None


def check_ranks(
    ranks: int, device: str, machine: "neuron.Machine | None" = None, cpus: int | None = None
) -> list[str]:
    """Prove that `ranks` processes fit this *one* machine; returns warnings (idle cores, crowded
    CPUs).

    On "neuron" one rank needs one logical NeuronCore, and their number must be one that
    collectives support. `machine` and `cpus` are read here unless they are given.
    """
    if device == "cpu":
        cpus = cpus or os.cpu_count() or 1
        if ranks > RANKS_PER_CPU * cpus:
            raise SettingError(
                f"{ranks} ranks are more than {RANKS_PER_CPU} for each of the {cpus} CPU cores "
                f"found: use {RANKS_PER_CPU * cpus} or fewer"
            )
        return [f"{ranks} ranks share {cpus} CPU cores"] if ranks > cpus else []
    machine = machine or neuron.read()
    cores = neuron.usable_cores(machine)
    allowed = neuron.group_sizes(machine.cores, machine.lnc, machine.cores_per_chip)
    within = [size for size in allowed if size <= cores]
    if ranks > cores:
        raise SettingError(
            f"{ranks} ranks need as many logical NeuronCores, but {cores} are usable here "
            f"({neuron.describe(machine)}): use {within[-1]}"
        )
    if ranks not in allowed:
        below = max(size for size in allowed if size < ranks)
        above = min((size for size in within if size > ranks), default=below)
        nearest = " or ".join(str(size) for size in dict.fromkeys((below, above)))
        raise SettingError(
            f"{ranks} ranks are no group size that collectives support on this instance "
            f"({', '.join(map(str, allowed))}): use {nearest}"
        )
    return [f"{cores - ranks} of {cores} logical NeuronCores are idle"] if ranks < cores else []


def check_training(config, as_recipe, ranks: int) -> None:
    """Prove that a torchtitan config starts from the weights it means to and that its batch fits.

    as_recipe   the same config before options of the command line were read
    """
    checkpoint, training = config.checkpoint, config.training
    if checkpoint.initial_load_in_hf and not checkpoint.enable:
        raise SettingError(
            "checkpoint.enable is off, so the published weights would not be loaded and the run "
            "would start from random ones: leave it on, or use the recipe's random config"
        )
    if as_recipe.checkpoint.initial_load_in_hf and not checkpoint.initial_load_in_hf:
        raise SettingError(
            "checkpoint.initial_load_in_hf is switched off in a recipe of published weights, which "
            "would start from random ones: leave it on, or use the recipe's random config"
        )
    if checkpoint.load_step != -1:
        raise SettingError(
            f"checkpoint.load_step is {checkpoint.load_step}, but an unfinished run goes on after "
            "its last full checkpoint, and a new one has none: leave the option out"
        )
    rates = [group.optimizer_kwargs["lr"] for group in config.optimizer.param_groups]
    if training.dtype == "bfloat16" and min(rates) < SMALLEST_BFLOAT16_STEP:
        raise SettingError(
            f"training.dtype is bfloat16, in which weights do not move at learning rate "
            f"{min(rates):g}: leave it float32, training.mixed_precision_param computes in bfloat16"
        )
    check_batch(config, ranks)


def check_batch(config, ranks: int) -> None:
    """Prove that a torchtitan config's global batch is whole local batches of its ranks."""
    mesh, training = config.parallelism, config.training
    others = (
        mesh.tensor_parallel_degree * mesh.pipeline_parallel_degree * mesh.context_parallel_degree
    )
    if ranks % others:
        raise SettingError(
            f"tensor, pipeline and context parallelism take {others} ranks together, of which "
            f"{ranks} are no multiple: change the degrees, or the ranks"
        )
    # Data-parallel ranks, replicated or sharded, read different text; the others share theirs.
    step = training.local_batch_size * (ranks // others)
    if training.global_batch_size > 0 and training.global_batch_size % step:
        raise SettingError(
            f"global_batch_size {training.global_batch_size} is no multiple of {step}, which is "
            f"local_batch_size {training.local_batch_size} × {ranks // others} data-parallel "
            "ranks: change one of them"
        )


def check_disk(folder: Path | str, needed_bytes: int) -> None:
    """Prove that `folder`'s disk has `needed_bytes` free; the folder need not exist yet."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise SettingError(
            f"the disk of {folder} has {_gib(free)} free, but {_gib(needed_bytes)} are needed: "
            "free space, or name a folder on another disk"
        )


def run_bytes(n_params: int) -> int:
    """Disk room for a run: two checkpoints (float32 weights and two moments) and one export,
    written twice while its shards are joined."""
    return n_params * 4 * (2 * 3 + 2)


def training_bytes(model: ModelFacts, ranks: int) -> int:
    """Bytes a rank holds while training, fully sharded: weights, gradients, both Adam moments."""
    return TRAINING_BYTES_PER_PARAMETER * model.n_params // ranks


def logits_bytes(model: ModelFacts, seq_len: int, local_batch_size: int = 1) -> int:
    """Bytes of the live float32 copies of one rank's logits [B, S, V]; they are not sharded."""
    return LOGITS_COPIES * local_batch_size * seq_len * model.vocab * 4


def check_memory(
    model: ModelFacts,
    ranks: int,
    device: str,
    seq_len: int,
    local_batch_size: int = 1,
    machine: "neuron.Machine | None" = None,
    host_bytes: int | None = None,
    nodes: int = 1,
) -> list[str]:
    """Prove that the training state fits; returns warnings where an estimate does not.

    The state is shared by all `ranks`; a machine has room for those of them, one in `nodes`, that
    run on it.

    The state (16 bytes a parameter) is certain, so that it alone can refuse a run. Logits are an
    estimate, and activations are not counted: what passes here may still be too large.
    """
    host_bytes = host_bytes or host_memory()
    state = training_bytes(model, ranks)
    total = state + logits_bytes(model, seq_len, local_batch_size)
    ranks_here = ranks // nodes
    warnings = []
    if device == "cpu":
        room, ranks_there, place = host_bytes, ranks_here, "host memory"
    else:
        machine = machine or neuron.read()
        room, ranks_there, place = machine.core_bytes, 1, f"a core's memory at LNC={machine.lnc}"
        # Each rank may read the whole checkpoint into host memory before it keeps its share.
        if ranks_here * model.bytes > host_bytes:
            warnings.append(
                f"{ranks_here} ranks × a checkpoint of {_gib(model.bytes)} exceed the host memory "
                f"of {_gib(host_bytes)} if each rank reads all of it"
            )
    if state * ranks_there > room:
        raise SettingError(
            f"weights, gradients and optimizer of {model.n_params:,} parameters need "
            f"{_gib(state * ranks_there)} of {place}, which has {_gib(room)}: "
            "use more ranks or a smaller model"
        )
    if total * ranks_there > room:
        warnings.append(
            f"with {LOGITS_COPIES} float32 copies of the logits about "
            f"{_gib(total * ranks_there)} of {place} are needed, which has {_gib(room)}: shorten "
            "seq_len, or use more ranks"
        )
    return warnings


def host_memory() -> int:
    """Physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gib(n: int) -> str:
    return f"{n / 2**30:.1f} GiB"


def check_run_folder(folder: Path | str, overwrite: bool = False) -> None:
    """Refuse a folder that holds anything, unless `overwrite`; nothing is deleted here."""
    folder = Path(folder)
    if overwrite or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise SettingError(
            f"run folder {folder} already exists and may hold results: choose another name, "
            "or pass --overwrite"
        )
