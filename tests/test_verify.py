"""An export is accepted when it is right, and each fault is found by the finding named for it."""

import dataclasses
import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file
from torch.nn import functional

from qwen3_trainium import checks, verify, weights
from qwen3_trainium.errors import SettingError

HEAD, EMBEDDING = weights.HEAD, weights.EMBEDDING
FINDINGS = [
    "hf.export.keys",
    "hf.export.tied_lm_head",
    "hf.export.finite",
    "hf.export.files",
    "hf.export.changed",
    "hf.export.reload",
]


@pytest.fixture(autouse=True)
def _offline_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Sources, and "exports": the same model with weights of another seed."""
    root = tmp_path_factory.mktemp("models")
    kinds = {"tied": {}, "untied": {"tied": False}, "shards": {"shards": 2}, "moe": {"moe": True}}
    return {
        kind: (toys.qwen3(root / kind, **how), toys.qwen3(root / f"{kind}-export", seed=2, **how))
        for kind, how in kinds.items()
    }


@pytest.fixture
def folders(originals, tmp_path):
    """`folders("tied")` is (source, export), the export being a copy that a test may break."""

    def copy(kind: str) -> tuple[Path, Path]:
        source, export = originals[kind]
        return source, Path(shutil.copytree(export, tmp_path / f"{kind}-export"))

    return copy


@pytest.fixture
def heldout(tmp_path):
    path = tmp_path / "heldout.jsonl"
    texts = ["abcHELLOabcabc" * 3, "wwwwaaaaxxxx"] * 8
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def by_id(findings):
    return {finding.id: finding for finding in findings}


def failed(findings) -> list[str]:
    return [finding.id for finding in findings if finding.passed is False]


# --- The loss ---------------------------------------------------------------------------------


def test_loss_is_cross_entropy_with_one_shift():
    model = toys.random_model()
    tokens = torch.arange(33).repeat(2, 1)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
        right = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        shifted_twice = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:]).loss
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    assert verify.heldout_loss(model, [batch]) == pytest.approx(right.item(), abs=1e-6)
    # What handing shifted labels to the model would give is another number altogether.
    assert abs(shifted_twice - right) > 0.1


def test_loss_weighs_tokens_and_not_batches():
    model = toys.random_model()
    tokens = torch.randint(0, 90, (1, 25), generator=torch.Generator().manual_seed(0))
    whole = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
    part = {"input_ids": whole["input_ids"], "labels": whole["labels"].clone()}
    part["labels"][:, 5:] = verify.IGNORED_LABEL
    losses = verify.token_losses(model, **whole)
    expected = (losses.sum() + losses[:, :5].sum()) / (24 + 5)
    measured = verify.heldout_loss(model, [whole, part])
    assert measured == pytest.approx(expected.item(), abs=1e-6)


def test_loss_of_nothing_is_refused_and_not_a_nan():
    batch = {"input_ids": torch.ones(1, 8).long(), "labels": torch.full((1, 8), -100)}
    with pytest.raises(SettingError, match="no token to predict"):
        verify.heldout_loss(toys.random_model(), [batch])


def test_mask_of_two_documents():
    mask = verify.additive_mask(torch.tensor([[3, 4, 0, 1, 2]]))
    seen = (mask[0, 0] == 0).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert mask[0, 0, 0, 4] == -torch.inf


@pytest.mark.parametrize("moe", [False, True])
def test_document_packed_twice_has_the_same_losses(moe):
    model = toys.random_model(moe=moe)
    document = torch.tensor([7, 3, 61, 20, 5])
    tokens = document.repeat(2)[None]
    labels = document.roll(-1).repeat(2)[None]
    restarted = torch.arange(5).repeat(2)[None]
    packed = verify.token_losses(model, tokens, labels, restarted)[0]
    alone = verify.token_losses(model, tokens[:, :5], labels[:, :5])[0]
    torch.testing.assert_close(packed[:5], packed[5:], atol=1e-5, rtol=0)
    torch.testing.assert_close(packed[:5], alone, atol=1e-5, rtol=0)
    # Without restarts the second copy sees the first one.
    leaking = verify.token_losses(model, tokens, labels)[0]
    assert (leaking[:5] - leaking[5:]).abs().max() > 0.01


def test_reloaded_folder_has_the_loss_of_the_model_in_memory(originals):
    tokens = torch.arange(40)[None]
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    batch["positions"] = torch.arange(39)[None] % 13
    for kind, how in (("tied", {}), ("shards", {}), ("untied", {"tied": False})):
        in_memory = verify.heldout_loss(toys.random_model(seed=2, **how), [batch])
        assert verify.heldout_loss(originals[kind][1], [batch]) == pytest.approx(
            in_memory, abs=1e-6
        )


def test_heldout_batches_are_shifted_and_restart_with_each_document(originals, heldout):
    source, _ = originals["tied"]
    batches = verify.heldout_batches(source, heldout, seq_len=30, limit=4)
    assert len(batches) == 4
    joined = torch.cat([batch["input_ids"] for batch in batches], dim=1)[0]
    labels = torch.cat([batch["labels"] for batch in batches], dim=1)[0]
    positions = torch.cat([batch["positions"] for batch in batches], dim=1)[0]
    assert joined[1:].tolist() == labels[:-1].tolist()
    # 42 characters and an end token, then 12 and one.
    assert (positions == 0).nonzero().flatten().tolist() == [0, 43, 56, 99, 112]
    assert joined[42] == joined[55] == 88
    with pytest.raises(SettingError, match="fewer than 1001 tokens"):
        verify.heldout_batches(source, heldout, seq_len=1000)
    heldout.write_text('{"txt": "a"}\n')
    with pytest.raises(SettingError, match="line 1 of"):
        verify.heldout_batches(source, heldout)


# --- A right export ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "untied", "shards", "moe"])
def test_right_export_passes_every_finding(originals, heldout, kind):
    source, export = originals[kind]
    batches = verify.heldout_batches(source, heldout, seq_len=32)
    trained = verify.heldout_loss(export, batches)
    findings = verify.verify(export, source, batches, trained)
    assert [finding.id for finding in findings] == FINDINGS
    assert all(finding.passed for finding in findings), findings
    assert by_id(findings)["hf.export.reload"].measured == pytest.approx(trained, abs=1e-6)


def test_findings_can_be_recorded_as_checks(originals):
    fields = {field.name for field in dataclasses.fields(verify.Finding)}
    assert fields == set(inspect.signature(checks.check).parameters)


def test_tied_head_may_be_stored_when_it_is_equal(folders):
    source, export = folders("tied")
    store = lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()})  # noqa: E731
    toys.edit_weights(export, store)
    findings = verify.verify(export, source)
    assert failed(findings) == []
    assert by_id(findings)["hf.export.tied_lm_head"].measured == "equal to the embedding"


# --- Wrong exports ----------------------------------------------------------------------------


def test_loss_that_is_not_the_trained_one_fails(originals, heldout):
    source, export = originals["tied"]
    batches = verify.heldout_batches(source, heldout, seq_len=32)
    trained = verify.heldout_loss(export, batches)
    assert failed(verify.verify(export, source, batches, trained + 5e-5)) == []
    assert failed(verify.verify(export, source, batches, trained + 2e-4)) == ["hf.export.reload"]


def test_stored_head_that_differs_is_named(folders):
    source, export = folders("tied")
    spoil = lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1e-3})  # noqa: E731
    toys.edit_weights(export, spoil)
    findings = verify.verify(export, source)
    assert failed(findings) == ["hf.export.tied_lm_head"]
    assert HEAD in by_id(findings)["hf.export.tied_lm_head"].detail
    assert by_id(findings)["hf.export.reload"].passed is None


def test_untied_head_that_is_absent_fails(folders):
    source, export = folders("untied")
    toys.edit_weights(export, lambda tensors: tensors.pop(HEAD))
    assert set(failed(verify.verify(export, source))) == {
        "hf.export.keys",
        "hf.export.tied_lm_head",
    }


def test_values_that_are_not_finite_are_named(folders):
    source, export = folders("tied")

    def spoil(tensors):
        tensors["model.norm.weight"][3] = torch.nan
        tensors["model.layers.0.mlp.up_proj.weight"][5, 7] = torch.inf

    toys.edit_weights(export, spoil)
    finding = by_id(verify.verify(export, source))["hf.export.finite"]
    assert (finding.passed, finding.measured) == (False, "2 tensors")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"),
        lambda tensors: tensors.update(another=torch.ones(2)),
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(41)}),
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(40).bfloat16()}),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_key_shape_and_dtype_faults_are_found(folders, spoil):
    source, export = folders("tied")
    toys.edit_weights(export, spoil)
    findings = by_id(verify.verify(export, source))
    assert findings["hf.export.keys"].passed is False
    assert findings["hf.export.keys"].detail
    assert findings["hf.export.reload"].passed is None


def test_damaged_and_unindexed_exports_are_found(folders):
    source, export = folders("shards")
    shard = export / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    findings = by_id(verify.verify(export, source))
    assert "truncated or corrupt" in findings["hf.export.keys"].detail
    source, export = folders("moe")
    (export / "model.safetensors").rename(export / "model-00001-of-00001.safetensors")
    assert weights.INDEX in by_id(verify.verify(export, source))["hf.export.keys"].detail


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_weights_without_their_companions_fail(folders, name):
    source, export = folders("tied")
    (export / name).unlink()
    findings = by_id(verify.verify(export, source))
    assert findings["hf.export.files"].passed is False
    assert name in findings["hf.export.files"].measured


def test_config_that_is_not_the_sources_fails(folders):
    source, export = folders("tied")
    rope = {"rope_type": "default", "rope_theta": 1e6}
    toys.edit_json(export / "config.json", rope_parameters=rope)
    finding = by_id(verify.verify(export, source))["hf.export.files"]
    assert finding.passed is False
    assert "theta" in finding.detail


def test_config_must_give_the_stored_dtype(folders):
    """Exported in bfloat16: config.json has to say so, and the caller that it is wanted."""
    source, export = folders("tied")
    toys.edit_weights(export, lambda t: t.update({key: x.bfloat16() for key, x in t.items()}))
    assert "hf.export.keys" in failed(verify.verify(export, source))
    assert failed(verify.verify(export, source, dtype="bfloat16")) == ["hf.export.files"]
    toys.edit_json(export / "config.json", dtype="bfloat16")
    assert failed(verify.verify(export, source, dtype="bfloat16")) == []


def test_export_of_the_starting_weights_fails(originals):
    source, _ = originals["tied"]
    assert failed(verify.verify(source, source)) == ["hf.export.changed"]


def test_changes_are_relative_norms(folders):
    source, export = folders("tied")

    original = load_file(source / "model.safetensors")
    changed = {**original, "model.norm.weight": original["model.norm.weight"] * 1.25}
    toys.edit_weights(export, lambda tensors: tensors.update(changed))
    changes = verify.tensor_changes(source, export).set_index("key")
    assert len(changes) == 24
    assert changes.relative["model.norm.weight"] == pytest.approx(0.25, rel=1e-6)
    assert changes.relative.drop("model.norm.weight").max() == 0
    largest = original["model.norm.weight"].abs().max().item() / 4
    assert changes.largest["model.norm.weight"] == pytest.approx(largest, rel=1e-6)


# --- The command ------------------------------------------------------------------------------


def test_command_passes_and_fails_by_exit_code(folders, heldout, capsys):
    source, export = folders("shards")
    arguments = [str(export), "--source", str(source), "--heldout", str(heldout)]
    assert verify.main(arguments) == 0
    assert capsys.readouterr().out.count("[OK]") == len(FINDINGS)
    assert verify.main([*arguments, "--loss", "1.0"]) == 1
    assert "[FAIL] The export reloads" in capsys.readouterr().out
    with pytest.raises(SettingError, match="does not exist"):
        verify.main([str(export / "nowhere"), "--source", str(source)])
    with pytest.raises(SettingError, match=r"held-out file .*missing.jsonl does not exist"):
        verify.main([*arguments[:-1], str(heldout.with_name("missing.jsonl"))])
    with pytest.raises(SettingError, match="give its file with --heldout"):
        verify.main([*arguments[:3], "--loss", "1.0"])
    (export / "tokenizer.json").unlink()
    with pytest.raises(SettingError, match=r"tokenizer.json is missing"):
        verify.main([arguments[0], "--source", str(export), *arguments[3:]])
