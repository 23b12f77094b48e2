"""The Transformers backend on a CPU: documents kept apart, rotary frequencies, confined patches."""

import dataclasses
import types

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file
from torch.nn.attention.flex_attention import and_masks, create_mask

from qwen3_trainium import (
    assets,
    cpu,
    export,
    guards,
    hf_backend,
    launch,
    rotary,
    train,
    verify,
    weights,
)
from qwen3_trainium.attention import document_mask
from qwen3_trainium.errors import SettingError

# Two documents of unequal length, then one cut off by the end of the sequence.
POSITIONS = [*range(9), *range(4), *range(6)]


@pytest.fixture(scope="module")
def config(toy_profile):
    return launch.build_config("hf_finetune", "published", toy_profile)


@pytest.fixture
def model(config, toy_release):
    """torchtitan's model in this process, as its trainer builds it, with the release's weights."""
    return build(config, toy_release)


def build(config, folder, as_released: bool = False):
    from torchtitan.experiments.transformers_modeling_backend import HFTransformerModel

    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    with torch.device("meta"):
        model = model_config.build()
    model.to_empty(device="cpu")
    init_states = HFTransformerModel.init_states
    (init_states.as_released if as_released else init_states)(model)
    adapter = config.model_spec.state_dict_adapter(model_config, str(folder))
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    model.load_state_dict(adapter.from_hf(tensors))
    return model


def test_document_mask_is_flex_attentions():
    from torchtitan.models.common.attention import get_causal_mask_mod, get_document_mask_mod

    positions = torch.tensor([POSITIONS, [*range(19)]])
    flex = and_masks(get_causal_mask_mod(), get_document_mask_mod(positions))
    expected = create_mask(flex, 2, 1, 19, 19, device="cpu")
    assert torch.equal(document_mask(positions), expected)
    causal = document_mask(positions, by_document=False)
    assert not torch.equal(causal.expand(2, 1, 19, 19), expected), "the mask does something"


@torch.no_grad()
def test_same_document_twice_gives_the_same_logits(model, config):
    ids = torch.randint(0, 88, (1, 10), generator=torch.Generator().manual_seed(0))
    packed = torch.cat([ids, ids], dim=1)
    positions = torch.arange(10).repeat(2)[None]
    logits = model(packed, positions=positions)
    # Same numbers in the same order, but in matrices of another shape: float32 rounding alone.
    torch.testing.assert_close(logits[:, :10], logits[:, 10:], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        logits[:, :10], model(ids, positions=positions[:, :10]), rtol=0, atol=1e-5
    )
    # The flavour that torchtitan ships lets the second copy see the first.
    model.model.config.attn_mask_type = "causal"
    leaking = model(packed, positions=positions)
    model.model.config.attn_mask_type = "block_causal"
    assert (leaking[:, 10:] - logits[:, 10:]).abs().max() > 1e-2


@torch.no_grad()
def test_logits_equal_plain_transformers(model, toy_release):
    plain, _ = verify.load_model(toy_release)
    ids = torch.randint(0, 88, (2, 19), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([POSITIONS, [*range(19)]])
    mask = document_mask(positions)
    additive = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    expected = plain(ids, position_ids=positions, attention_mask=additive).logits
    torch.testing.assert_close(model(ids, positions=positions), expected, rtol=0, atol=1e-5)


def test_released_backend_leaves_frequencies_to_chance(config, toy_release):
    stock = build(config, toy_release, as_released=True)
    assert "not finite" in rotary.problem(stock)
    with pytest.raises(RuntimeError, match="inv_freq is not finite"):
        train.require_sound(stock, "before the first step")
    assert sorted(rotary.repair(stock)) == [
        "model.model.rotary_emb.inv_freq",
        "model.model.rotary_emb.original_inv_freq",
    ]
    assert rotary.problem(stock) is None
    assert rotary.repair(stock) == [], "where they are right nothing is written"


def test_repair_gives_the_frequencies_of_the_config(model):
    inv_freq = model.rotary_emb.inv_freq
    # theta and head_dim of the toy: 5e6 and 16, in float64; one rounding to float32 and a power.
    expected = 5e6 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(inv_freq.double(), expected, rtol=2**-21, atol=0)
    train.require_sound(model, "before the first step")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.zeros(8), "begins with 0"),
        (torch.ones(8), "does not decrease"),
        (10_000.0 ** -(torch.arange(8) / 8), "config asks for"),
    ],
)
def test_wrong_frequencies_are_named(model, values, said):
    model.rotary_emb.inv_freq.copy_(values)
    assert said in rotary.problem(model)


def store_head_apart(folder) -> None:
    """Keep a tied head as some releases do: a second time, in a file of its own."""
    head = {weights.HEAD: load_file(folder / "model.safetensors")[weights.EMBEDDING].clone()}
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (folder / "model.safetensors").rename(folder / names[0])
    save_file(head, folder / names[1], metadata={"format": "pt"})
    headers = {name: weights.read_header(folder / name) for name in names}
    (folder / weights.INDEX).write_text(export._index(headers))


def save(model, adapter, folder):
    """torchtitan's own last save, its checkpointer being no more than these two fields here."""
    from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager

    checkpointer = types.SimpleNamespace(sd_adapter=adapter, pg=None)
    CheckpointManager.dcp_save(
        checkpointer, model.state_dict(), str(folder), AsyncMode.DISABLED, to_hf=True
    )
    return folder


def test_release_that_stores_its_tied_head_is_exported(toy_profile, tmp_path):
    source = toys.qwen3(tmp_path / "release")
    store_head_apart(source)
    assert guards.check_model_folder(source).tied, "a launch would accept it"
    profile = dataclasses.replace(toy_profile, model=str(source))
    config = launch.build_config("hf_finetune", "published", profile)
    model = build(config, source)
    with torch.no_grad():
        model.norm.weight += 0.5  # stands for training
    adapter = config.model_spec.state_dict_adapter(config.model_spec.model, str(source))
    exported = export.complete(save(model, adapter, tmp_path / "saved"), source, tmp_path / "e")
    assert [f.id for f in verify.verify(exported, source) if not f.passed] == []
    assert weights.HEAD not in weights.stored_tensors(exported)

    adapter.fqn_to_index_mapping[weights.HEAD] = 2  # as upstream's adapter reads the index
    corrupt = save(model, adapter, tmp_path / "corrupt")
    with pytest.raises(SettingError, match="corrupt"):
        export.complete(corrupt, source, tmp_path / "e2")


def test_every_profile_attends_by_masked_sdpa(toy_profile, toy_release):
    """FlexAttention has no backward on a CPU and no kernel on Neuron: no profile may get it."""
    for device in ("cpu", "neuron"):
        profile = dataclasses.replace(toy_profile, device=device)
        model = build(launch.build_config("hf_finetune", "published", profile), toy_release)
        assert hf_backend.attention_of(model) == "sdpa, documents apart"
        assert {layer.self_attn.config._attn_implementation for layer in model.layers} == {"sdpa"}
    model.model.config.attn_mask_type = "causal"
    assert "CAUSAL ONLY" in hf_backend.attention_of(model)
    model.model.config._attn_implementation = "flex_torchtitan"
    assert hf_backend.attention_of(model).startswith("flex_torchtitan")


def test_attention_is_read_from_the_last_launch_of_a_log():
    line = "[rank{}]:[titan] 2026-11-30 12:22:23,147 - root - INFO - [Attention] {}\n"
    log = "=== launch: a\n" + "".join(line.format(rank, "flex, documents apart") for rank in (0, 1))
    assert hf_backend.attention_by_rank(log) == dict.fromkeys((0, 1), "flex, documents apart")
    log += "=== launch: b\n" + line.format(1, "sdpa, documents apart")
    assert hf_backend.attention_by_rank(log) == {1: "sdpa, documents apart"}
    assert hf_backend.attention_by_rank("=== launch: c\n") == {}


def test_untied_head_stops_a_run(model):
    assert not train.tie_is_broken(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with pytest.raises(RuntimeError, match="two parameters before the first step"):
        train.require_sound(model, "before the first step")


def test_patches_of_transformers_are_confined(model, config, toy_release):
    from transformers import PreTrainedModel

    for name in hf_backend.PATCHED:
        assert getattr(PreTrainedModel, name).__module__.startswith("transformers.")
    assert rotary.problem(verify.load_model(toy_release)[0]) is None
    # Unconfined, a plain model loaded in this process has the very fault that it should reveal.
    patches = model.__dict__["_titan_patches"]
    before = {name: getattr(PreTrainedModel, name) for name in patches}
    try:
        for name, patch in patches.items():
            setattr(PreTrainedModel, name, patch)
        with pytest.raises(RuntimeError, match="the reference is not sound"):
            verify.load_model(toy_release)
    finally:
        for name, original in before.items():
            setattr(PreTrainedModel, name, original)


def test_peak_memory_is_that_of_the_process():
    cpu.prepare()
    torch.cpu.reset_peak_memory_stats()
    before = torch.cpu.memory_stats()["active_bytes.all.peak"]
    held = torch.ones(64 * 2**20)  # 256 MiB
    after = torch.cpu.memory_stats()["active_bytes.all.peak"]
    assert after - before > 0.9 * held.nbytes


def test_folder_of_published_weights(toy_profile, toy_release):
    assert assets.model_folder(toy_profile) == toy_release


def overfit(model, learning_rate: float) -> float:
    """Loss on one batch of 2 × 64 tokens after 60 steps on it."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 88, (2, 65), generator=generator)
    positions = torch.arange(64).expand(2, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(60):
        logits = model(ids[:, :-1], positions=positions)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_model_overfits_one_batch(config, toy_release):
    assert overfit(build(config, toy_release), 1e-2) < 0.1
    assert overfit(build(config, toy_release), 0.0) > 1.0, "the gate sees a model that cannot learn"
