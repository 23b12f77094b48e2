"""Three programs, one set of weights; and seven wrong models that the comparison must reject."""

import copy
import dataclasses

import pytest
import tiny_release
import torch

from qwen3_trainium import batches, cpu, launch, mutants, parity, profiles, rotary

cpu.prepare()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_release.make(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def profile(folder):
    return profiles.load("cpu", model=str(folder), seq_len=64)


@pytest.fixture(scope="module")
def config(profile):
    return launch.build_config("native", "published", profile)


@pytest.fixture(scope="module")
def batch(config, profile):
    """Two rows of held-out text, those that pack most documents: their masks are compared too."""
    rows = batches.of_run(config, profile.ranks, heldout=True, count=24)
    batch = parity.joined(parity.most_packed(rows, 2))
    assert (batch["positions"] == 0).sum() > len(batch["positions"]), "no row packs documents"
    return batch


@pytest.fixture(scope="module")
def reference(folder):
    return parity.transformers(folder)


@pytest.fixture(scope="module")
def backend(profile):
    config = launch.build_config("hf_finetune", "published", profile)
    return parity.torchtitan("Transformers backend", config)


@pytest.fixture(scope="module")
def native(config):
    return parity.torchtitan("native", config)


@pytest.mark.parametrize("name", ["backend", "native"])
def test_logits_blocks_and_loss_are_those_of_plain_transformers(name, request, reference, batch):
    ours = parity.trace(request.getfixturevalue(name), batch)
    theirs = parity.trace(reference, batch)
    assert len(ours.blocks) == len(theirs.blocks) == 4
    # The same operators on the same numbers in the same order: nothing is left to round.
    assert [
        parity.largest_difference(a, b) for a, b in zip(ours.blocks, theirs.blocks, strict=True)
    ] == [0.0] * 4
    assert parity.largest_difference(ours.logits, theirs.logits) == 0.0
    assert torch.equal(
        parity.loss(ours.logits, batch["labels"]), parity.loss(theirs.logits, batch["labels"])
    )


@pytest.mark.parametrize("name", ["backend", "native"])
def test_one_optimizer_step_gives_the_same_weights(name, request, reference, batch, config):
    ours = parity.step(request.getfixturevalue(name), batch, config)
    theirs = parity.step(reference, batch, config)
    assert ours.gradients.keys() == theirs.gradients.keys()
    bound = parity.gradient_bound(batch["labels"].numel(), widest=512, layers=4)
    assert parity.gradient_difference(ours, theirs) <= bound
    assert parity.weight_difference(ours, theirs) <= parity.update_bound(ours, theirs, config)


@pytest.mark.parametrize("name", ["reference", "backend", "native"])
def test_weights_come_back_bit_for_bit(name, request, folder):
    program = request.getfixturevalue(name)
    assert parity.different_tensors(parity.round_trip(program), parity.stored(folder)) == []


@pytest.mark.parametrize("name", mutants.ALL)
def test_a_wrong_model_is_rejected(name, native, reference, batch):
    wrong = dataclasses.replace(native, model=copy.deepcopy(native.model))
    mutants.ALL[name](wrong.model)
    found = parity.trace(wrong, batch)
    # The check asks for 0.0: what it must reject is far away, not near a tolerance.
    assert parity.largest_difference(found.logits, parity.trace(reference, batch).logits) > 0.1
    assert parity.largest_difference(found.blocks[0], parity.trace(reference, batch).blocks[0]) > 0


def test_a_wrong_gradient_is_rejected(reference, native, batch, config):
    theirs = parity.step(reference, batch, config)
    ours = parity.step(native, batch, config)
    doubled = {key: 2 * gradient for key, gradient in ours.gradients.items()}
    bound = parity.gradient_bound(batch["labels"].numel(), widest=512, layers=4)
    assert parity.gradient_difference(dataclasses.replace(ours, gradients=doubled), theirs) > bound
    # A step the other way is 2 lr away; the bound on weights is far below that.
    rate = config.optimizer.param_groups[0].optimizer_kwargs["lr"]
    assert parity.update_bound(ours, theirs, config) < rate / 10


def test_a_changed_tensor_is_named(native, folder):
    weights = parity.round_trip(native)
    key = "model.layers.2.mlp.up_proj.weight"
    changed = weights[key].clone()
    changed[3, 4] = torch.nextafter(changed[3, 4], torch.tensor(9.0))  # one bit
    assert parity.different_tensors({**weights, key: changed}, parity.stored(folder)) == [key]
    del weights[key]
    assert parity.different_tensors(weights, parity.stored(folder)) == [key]


def test_the_backend_leaves_later_references_whole(backend, folder):
    """As released it replaces how every Transformers model is initialised, rotary buffers too."""
    assert rotary.problem(parity.transformers(folder).model) is None
