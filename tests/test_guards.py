"""Each guard refuses the fault that it is there for, in one sentence, and passes what is right."""

import dataclasses
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import toys

from qwen3_trainium import guards, neuron, weights
from qwen3_trainium.errors import SettingError

QWEN3_4B = weights.PUBLISHED["Qwen/Qwen3-4B-Instruct-2507"]
SHARD_1, SHARD_2 = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
NORM = "model.layers.1.self_attn.q_norm.weight"
GIB = 2**30


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """One sound folder of each kind, made once; tests break copies of them."""
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": toys.qwen3(root / "tied"),
        "untied": toys.qwen3(root / "untied", tied=False),
        "shards": toys.qwen3(root / "shards", shards=2),
        "moe": toys.qwen3(root / "moe", moe=True, tied=False),
    }


@pytest.fixture
def model(originals, tmp_path):
    """`model("tied")` is a fresh copy that a test may break."""
    return lambda kind: Path(shutil.copytree(originals[kind], tmp_path / kind))


def refused(call, *fragments: str) -> str:
    """Assert that the call raises one sentence with each fragment; returns it."""
    with pytest.raises(SettingError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert not message.endswith(".")
    assert ": " in message, "what to do is missing"
    for fragment in fragments:
        assert fragment in message, message
    return message


# --- What is right passes, and the facts are those of the config -----------------------------


@pytest.mark.parametrize("kind", ["tied", "untied", "shards", "moe"])
def test_sound_folder_passes_with_its_facts(model, kind):
    facts = guards.check_model_folder(model(kind))
    assert (facts.layers, facts.dim, facts.heads, facts.kv_heads, facts.head_dim) == (
        2,
        40,
        4,
        2,
        16,
    )
    assert (facts.ffn, facts.vocab, facts.eps, facts.theta) == (56, 96, 1e-6, 5e6)
    assert facts.tied == (kind in ("tied", "shards"))
    assert (facts.dtype, facts.bytes) == ("F32", 4 * facts.n_params)
    if kind == "moe":
        assert (facts.experts, facts.top_k, facts.expert_ffn, facts.norm_topk_prob) == (
            3,
            2,
            24,
            True,
        )


def test_parameter_count_is_transformers_own(originals):
    for kind, tied, moe in (("tied", True, False), ("untied", False, False), ("moe", False, True)):
        facts = weights.facts(json.loads((originals[kind] / "config.json").read_text()))
        model = toys.random_model(tied, moe)
        assert facts.n_params == sum(weight.numel() for weight in model.parameters())


def test_published_4b_has_its_published_size():
    facts = weights.facts(QWEN3_4B)
    assert facts.n_params == 4_022_468_096
    assert facts.heads * facts.head_dim == 4096 != facts.dim
    assert facts.theta == 5e6
    untied = weights.facts({**QWEN3_4B, "tie_word_embeddings": False})
    assert untied.n_params - facts.n_params == 151936 * 2560


def test_published_30b_moe_has_its_published_size():
    config = {
        **QWEN3_4B,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    assert weights.facts(config).n_params == 30_532_122_624


# --- config.json ------------------------------------------------------------------------------


def test_rope_theta_is_read_from_both_places_and_never_assumed():
    assert weights.rope_theta({"rope_theta": 5_000_000}) == 5e6
    assert weights.rope_theta({"rope_parameters": {"rope_theta": 5_000_000}}) == 5e6
    refused(lambda: weights.rope_theta({"hidden_size": 40}), "rotary base")
    both = {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e6}}
    refused(lambda: weights.rope_theta(both), "two rotary bases")


@pytest.mark.parametrize("key", ["head_dim", "vocab_size", "rms_norm_eps", "num_key_value_heads"])
def test_missing_config_key_is_named(model, key):
    folder = model("tied")
    toys.edit_json(folder / "config.json", **{key: None})
    refused(lambda: guards.check_model_folder(folder), key)


def test_config_that_is_missing_broken_or_of_another_model(model, tmp_path):
    refused(lambda: guards.check_model_folder(tmp_path / "nowhere"), "does not exist")
    folder = model("tied")
    toys.edit_json(folder / "config.json", architectures=["LlamaForCausalLM"])
    refused(lambda: guards.check_model_folder(folder), "LlamaForCausalLM", "Qwen3ForCausalLM")
    (folder / "config.json").write_text('{"architectures": [')
    refused(lambda: guards.check_model_folder(folder), "config.json", "JSON")
    (folder / "config.json").unlink()
    refused(lambda: guards.check_model_folder(folder), "config.json is missing")


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 48), ("head_dim", 10), ("intermediate_size", 80)]
)
def test_config_of_another_size_is_refused_by_shape(model, key, value):
    folder = model("tied")
    toys.edit_json(folder / "config.json", **{key: value})
    refused(lambda: guards.check_model_folder(folder), "has shape", "implies")


# --- Weights: files ---------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file_is_found(model, keep):
    file = model("tied") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(lambda: guards.check_model_folder(file.parent), file.name, "truncated or corrupt")


def test_file_with_bytes_too_many_is_found(model):
    file = model("tied") / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    refused(lambda: guards.check_model_folder(file.parent), "header asks for")


def test_corrupt_header_is_found(model):
    file = model("tied") / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8] = 0xFF
    file.write_bytes(data)
    refused(lambda: guards.check_model_folder(file.parent), "header is not JSON")


def header_only(path: Path, header: dict, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},  # bytes do not fit the shape
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "I64X", "shape": [1], "data_offsets": [0, 8]},  # no such dtype
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},  # a gap before it
        {"dtype": "F32", "shape": [1]},
        "F32",
    ],
)
@pytest.mark.parametrize("size", [0, 4, 8])  # whatever the file's size, which is checked as well
def test_header_that_cannot_be_is_found(tmp_path, entry, size):
    path = header_only(tmp_path / "x.safetensors", {"a": entry}, b"\0" * size)
    refused(lambda: weights.read_header(path), "x.safetensors", "truncated or corrupt")


def test_overlapping_tensors_are_found(tmp_path):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    path = header_only(tmp_path / "x.safetensors", {"a": entry, "b": entry}, b"\0" * 4)
    refused(lambda: weights.read_header(path), "overlap")


def test_headers_are_read_as_safetensors_reads_them(originals):
    from safetensors import safe_open

    for tensor_file in originals["shards"].glob("*.safetensors"):
        ours = weights.read_header(tensor_file)
        with safe_open(tensor_file, framework="pt") as theirs:
            assert set(ours) == set(theirs.keys())
            for key, tensor in ours.items():
                assert list(tensor.shape) == theirs.get_slice(key).get_shape()
                assert tensor.dtype == theirs.get_slice(key).get_dtype()


def test_pickled_weights_are_refused(model):
    folder = model("tied")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(lambda: guards.check_model_folder(folder), "pytorch_model.bin", "pickle")
    (folder / "pytorch_model.bin").unlink()
    refused(lambda: guards.check_model_folder(folder), "model.safetensors is missing")


# --- Weights: index and shards ----------------------------------------------------------------


def test_missing_shard_is_named(model):
    folder = model("shards")
    (folder / SHARD_2).unlink()
    refused(lambda: guards.check_model_folder(folder), SHARD_2, "missing")


def test_missing_index_is_named(model):
    folder = model("shards")
    (folder / weights.INDEX).unlink()
    refused(lambda: guards.check_model_folder(folder), weights.INDEX, "missing")


def edit_map(folder: Path, change) -> None:
    index = json.loads((folder / weights.INDEX).read_text())
    change(index)
    (folder / weights.INDEX).write_text(json.dumps(index))


def test_ghost_key_of_a_tied_head_is_named(model):
    """The index of the base model lists a head that the export dropped."""
    folder = model("shards")
    edit_map(folder, lambda index: index["weight_map"].update({weights.HEAD: SHARD_2}))
    refused(lambda: guards.check_model_folder(folder), weights.HEAD, SHARD_2, "does not hold it")


def test_empty_corrupt_shard_of_a_dropped_head_is_named(model):
    folder = model("shards")
    name = "model-00003-of-00003.safetensors"
    edit_map(folder, lambda index: index["weight_map"].update({weights.HEAD: name}))
    for content in (b"", b"\0" * 8, b"\2" + b"\0" * 7 + b"[]"):
        (folder / name).write_bytes(content)
        refused(lambda: guards.check_model_folder(folder), name, "truncated or corrupt")


def test_key_that_the_index_lacks_or_misplaces_is_named(model):
    folder = model("shards")
    edit_map(folder, lambda index: index["weight_map"].pop(NORM))
    refused(lambda: guards.check_model_folder(folder), NORM, "nowhere")
    other = SHARD_1 if NORM in weights.read_header(folder / SHARD_2) else SHARD_2
    edit_map(folder, lambda index: index["weight_map"].update({NORM: other}))
    refused(lambda: guards.check_model_folder(folder), NORM, SHARD_1, SHARD_2)


def test_wrong_total_size_and_stray_shard_are_refused(model):
    folder = model("shards")
    shutil.copy(folder / SHARD_1, folder / "consolidated.safetensors")
    refused(lambda: guards.check_model_folder(folder), "consolidated.safetensors", "does not list")
    (folder / "consolidated.safetensors").unlink()
    edit_map(folder, lambda index: index["metadata"].update(total_size=7))
    refused(lambda: guards.check_model_folder(folder), "total_size 7", "131616")


# --- Weights: keys ----------------------------------------------------------------------------


def test_head_may_be_absent_only_when_tied(model):
    tied, untied = model("tied"), model("untied")
    toys.edit_weights(untied, lambda tensors: tensors.pop(weights.HEAD))
    refused(lambda: guards.check_model_folder(untied), weights.HEAD)
    copy = lambda tensors: tensors.update({weights.HEAD: tensors[weights.EMBEDDING].clone()})  # noqa: E731
    toys.edit_weights(tied, copy)
    assert guards.check_model_folder(tied).n_params == 32_904  # still counted once


@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_missing_and_renamed_keys_are_fatal(model, kind):
    folder = model(kind)
    toys.edit_weights(folder, lambda tensors: tensors.pop(NORM))
    refused(lambda: guards.check_model_folder(folder), NORM)


def test_renamed_expert_is_fatal(model):
    folder = model("moe")
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    rename = lambda tensors: tensors.update({key.replace(".2.", ".3."): tensors.pop(key)})  # noqa: E731
    toys.edit_weights(folder, rename)
    refused(lambda: guards.check_model_folder(folder), key)


def test_key_that_the_config_does_not_imply_is_fatal(model):
    folder = model("tied")
    toys.edit_weights(folder, lambda tensors: tensors.update(extra=tensors[NORM].clone()))
    refused(lambda: guards.check_model_folder(folder), "extra")


# --- Tokenizer --------------------------------------------------------------------------------


def test_tokenizer_may_be_shorter_but_not_longer_than_the_vocabulary(model):
    folder = model("tied")
    assert guards.check_tokenizer(folder, {"vocab_size": 96}) == 90
    toys.tokenizer(folder, tokens=97)
    refused(lambda: guards.check_model_folder(folder), "97 tokens", "vocab_size is 96")


def test_tokenizer_id_beyond_the_vocabulary_is_refused(model):
    folder = model("tied")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][1]["id"] = 96
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(lambda: guards.check_model_folder(folder), "ids up to 96")


def test_special_id_that_is_no_token_is_refused(model):
    folder = model("tied")
    toys.edit_json(folder / "generation_config.json", eos_token_id=[88, 92])
    refused(
        lambda: guards.check_model_folder(folder), "generation_config.json", "eos_token_id", "92"
    )
    toys.edit_json(folder / "config.json", pad_token_id=95)
    refused(lambda: guards.check_model_folder(folder), "config.json", "pad_token_id", "95")


def test_missing_tokenizer_is_named(model):
    folder = model("tied")
    (folder / "tokenizer.json").unlink()
    refused(lambda: guards.check_model_folder(folder), "tokenizer.json")


# --- Data -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ('{"txt": "a"}', "txt"),
        ('{"text": 3}', "text"),
        ('["text"]', "list"),
        ("plain text", "not JSON"),
    ],
)
def test_first_bad_document_is_named_by_file_and_line(tmp_path, line, fragment):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert guards.check_dataset_folder(tmp_path) == 2
    (tmp_path / "b.json").write_text('{"text": "three"}\n' + line + "\n")
    refused(lambda: guards.check_dataset_folder(tmp_path), "line 2 of", "b.json", fragment)


def test_dataset_folder_that_is_missing_or_empty(tmp_path):
    refused(lambda: guards.check_dataset_folder(tmp_path / "nowhere"), "does not exist")
    (tmp_path / "notes.txt").write_text("hello")
    refused(lambda: guards.check_dataset_folder(tmp_path), "no document")


# --- Ranks, disk, memory, run folder ----------------------------------------------------------


def machine(chips: int, cores_per_chip: int, lnc: int) -> neuron.Machine:
    return neuron.Machine(chips, cores_per_chip, lnc, 96 * GIB // cores_per_chip)


@pytest.fixture(autouse=True)
def _no_core_variables(monkeypatch):
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_LOGICAL_NC_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def test_ranks_against_cores():
    one_chip_lnc2, one_chip_lnc1 = machine(1, 4, 2), machine(1, 8, 1)
    refused(
        lambda: guards.check_ranks(8, "neuron", one_chip_lnc2),
        "8 ranks", "chips 1, physical cores 8, LNC 2, logical cores 4", "use 4",
    )  # fmt: skip
    assert guards.check_ranks(4, "neuron", one_chip_lnc2) == []
    assert guards.check_ranks(8, "neuron", one_chip_lnc1) == []
    (warning,) = guards.check_ranks(8, "neuron", machine(16, 4, 2))
    assert "56 of 64" in warning


def test_group_sizes_that_collectives_do_not_support():
    trn1 = machine(16, 2, 1)
    refused(lambda: guards.check_ranks(24, "neuron", trn1), "24 ranks", "use 16 or 32")
    refused(lambda: guards.check_ranks(4, "neuron", trn1), "use 2 or 8")
    refused(lambda: guards.check_ranks(48, "neuron", machine(16, 4, 2)), "use 32 or 64")


def test_visible_cores_limit_the_ranks(monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3")
    refused(lambda: guards.check_ranks(8, "neuron", machine(16, 4, 2)), "4 are usable", "use 4")


def test_cpu_ranks():
    assert guards.check_ranks(2, "cpu", cpus=2) == []
    assert "share 2 CPU cores" in guards.check_ranks(8, "cpu", cpus=2)[0]
    refused(
        lambda: guards.check_ranks(9, "cpu", cpus=2), "9 ranks", "2 CPU cores", "use 8 or fewer"
    )


def test_batch_of_the_data_parallel_ranks():
    def check(ranks: int, global_batch: int, local_batch: int = 1, tensor_parallel: int = 1):
        degrees = {"pipeline_parallel_degree": 1, "context_parallel_degree": 1}
        mesh = types.SimpleNamespace(tensor_parallel_degree=tensor_parallel, **degrees)
        training = types.SimpleNamespace(
            local_batch_size=local_batch, global_batch_size=global_batch
        )
        guards.check_batch(types.SimpleNamespace(parallelism=mesh, training=training), ranks)

    check(2, 4)
    check(2, -1)  # torchtitan's "one local batch a rank"
    check(2, 3, tensor_parallel=2)
    check(64, 64, tensor_parallel=4)
    refused(lambda: check(2, 3), "global_batch_size 3", "1 × 2 data-parallel")
    refused(lambda: check(2, 6, local_batch=2), "no multiple of 4")
    refused(lambda: check(2, 2, tensor_parallel=4), "take 4 ranks together", "2 are no multiple")


def test_disk_room(tmp_path):
    guards.check_disk(tmp_path / "not" / "yet", 1)
    refused(lambda: guards.check_disk(tmp_path / "not" / "yet", 2**60), "GiB free", "are needed")


def test_training_state_of_the_4b():
    facts = weights.facts(QWEN3_4B)
    assert guards.training_bytes(facts, 1) == 64_359_489_536  # 64.4 GB: 16 bytes a parameter
    assert guards.training_bytes(facts, 4) / 1e9 == pytest.approx(16.1, abs=0.05)
    assert guards.training_bytes(facts, 8) / 1e9 == pytest.approx(8.0, abs=0.05)
    assert guards.logits_bytes(facts, 4096) / guards.LOGITS_COPIES / 1e9 == pytest.approx(
        2.49, abs=0.005
    )


def test_device_memory_includes_logits():
    facts = weights.facts(QWEN3_4B)
    big_host = {"host_bytes": 2000 * GIB}
    lnc2, lnc1 = machine(16, 4, 2), machine(16, 8, 1)
    assert (lnc2.core_bytes, lnc1.core_bytes) == (24 * GIB, 12 * GIB)
    assert guards.check_memory(facts, 8, "neuron", 4096, machine=lnc2, **big_host) == []
    (warning,) = guards.check_memory(facts, 8, "neuron", 4096, machine=lnc1, **big_host)
    assert "logits" in warning
    refused(
        lambda: guards.check_memory(facts, 2, "neuron", 64, machine=lnc2, **big_host),
        "4,022,468,096 parameters", "24.0 GiB", "more ranks",
    )  # fmt: skip


def test_host_memory_when_each_rank_reads_the_checkpoint():
    facts = dataclasses.replace(weights.facts(QWEN3_4B), bytes=8_044_936_192)
    case = (facts, 64, "neuron", 2048)
    (warning,) = guards.check_memory(*case, machine=machine(16, 4, 2), host_bytes=256 * GIB)
    assert "64 ranks" in warning
    assert guards.check_memory(*case, machine=machine(16, 4, 2), host_bytes=2000 * GIB) == []
    each_of_two = guards.check_memory(
        *case, machine=machine(16, 4, 2), host_bytes=256 * GIB, nodes=2
    )
    assert each_of_two == []  # 32 ranks × 7.5 GiB


def test_cpu_memory_is_shared_by_the_ranks():
    facts = weights.facts(QWEN3_4B)
    refused(lambda: guards.check_memory(facts, 2, "cpu", 256, host_bytes=24 * GIB), "host memory")
    # The state of all ranks is 59.9 GiB, their logits are another 0.9.
    (warning,) = guards.check_memory(facts, 2, "cpu", 256, host_bytes=60 * GIB)
    assert "logits" in warning
    assert guards.check_memory(facts, 2, "cpu", 256, host_bytes=128 * GIB) == []
    # On two machines each holds half of it.
    assert guards.check_memory(facts, 2, "cpu", 256, host_bytes=31 * GIB, nodes=2) == []


def test_run_folder_that_holds_results_is_refused(tmp_path):
    guards.check_run_folder(tmp_path / "new")
    guards.check_run_folder(tmp_path)
    (tmp_path / "log.txt").write_text("x")
    refused(lambda: guards.check_run_folder(tmp_path), "already exists", "--overwrite")
    guards.check_run_folder(tmp_path, overwrite=True)
    assert (tmp_path / "log.txt").read_text() == "x"


def test_guards_need_no_torch():
    """A wrong setting is reported in less time than torch takes to import."""
    code = (
        "import sys; from qwen3_trainium import guards, logs, preflight; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
