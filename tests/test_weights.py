"""A config, index or tokenizer of the wrong shape ends in one sentence, never in a traceback."""

import json

import pytest
import toys

from qwen3_trainium import guards, weights
from qwen3_trainium.errors import SettingError

WRONG = (None, True, -1, 0, 2.5, "many", [], ["x"], {}, {"a": 1})


def config(moe: bool) -> dict:
    sizes = {**toys.SIZES, **(toys.EXPERTS if moe else {})}
    name = "Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"
    moe_keys = {"mlp_only_layers": [], "decoder_sparse_step": 1} if moe else {}
    return {"architectures": [name], "rms_norm_eps": 1e-6, "rope_theta": 5e6, **sizes, **moe_keys}


@pytest.mark.parametrize("moe", [False, True])
def test_a_value_of_any_type_is_read_or_refused(moe):
    weights.facts(config(moe))
    for key in config(moe):
        for value in WRONG:
            try:
                facts = weights.facts({**config(moe), key: value})
            except SettingError:
                continue
            assert facts.n_params > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2.5}, "num_hidden_layers as a positive whole number, found 2.5"),
        ({"hidden_size": "40"}, "hidden_size as a positive whole number, found '40'"),
        ({"head_dim": None}, "head_dim as a positive whole number, found None"),
        ({"rms_norm_eps": 0}, "rms_norm_eps as a positive number, found 0"),
        ({"rope_theta": "5e6"}, "rope_theta as a positive number, found '5e6'"),
        ({"rope_parameters": "default", "rope_theta": None}, "has a rotary base neither"),
        ({"architectures": "Qwen3ForCausalLM"}, "names the architecture none"),
        ({"architectures": []}, "names the architecture none"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    with pytest.raises(SettingError, match=message):
        weights.facts({**config(moe=False), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {weights.EMBEDDING: 3}}, "has no weight_map"),
        ({"metadata": [1]}, "gives total_size None"),
    ],
)
def test_an_index_of_the_wrong_shape_is_refused(tmp_path, change, message):
    folder = toys.qwen3(tmp_path / "model", shards=2)
    index = json.loads((folder / weights.INDEX).read_text())
    (folder / weights.INDEX).write_text(json.dumps(index | change))
    with pytest.raises(SettingError, match=message):
        weights.stored_tensors(folder)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"model": "BPE"},
        {"model": []},
        {"model": {"vocab": []}},
        {"model": {"vocab": {}}},
        {"model": {"vocab": {"a": "0"}}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [3]},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]},
    ],
)
def test_a_tokenizer_of_the_wrong_shape_is_refused(tmp_path, value):
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(SettingError, match=r"tokenizer\.json in .* has no vocabulary"):
        guards.check_tokenizer(tmp_path, {"vocab_size": 96})
