"""The third recipe: its counts, its override under FSDP, parity, and what leaves as an export."""

import dataclasses
import json
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from configs import moe_nki
from qwen3_trainium import (
    cpu,
    dryrun,
    experts_bounds,
    export,
    guards,
    kernel_backend,
    launch,
    moe,
    parity,
    profiles,
    runlog,
    spec,
    verify,
    weights,
)
from qwen3_trainium.errors import SettingError

cpu.prepare()

TINY = {  # all sizes unequal, and 3 layers
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "moe_intermediate_size": 80,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 6,
    "vocab_size": 512,
}
SEQ = 256


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")


@pytest.fixture(scope="module")
def settings():
    return profiles.load("cpu")


# ------------------------------------------------------------------ config
@pytest.mark.parametrize("name", ["cpu", "trn2"])
def test_counts_are_those_of_the_guide(name, settings):
    if name == "trn2":
        settings = dryrun.profile_for(dryrun.real_width_folder(), steps=10, seq_len=2048)
    config = launch.build_config("moe_nki", "nki", settings)
    model = config.model_spec.model
    assert (len(model.layers), settings.ranks) == (4, {"cpu": 2, "trn2": 64}[name])
    for layer in model.layers:
        router = layer.moe.router
        assert (layer.moe.num_experts, router.num_experts, router.top_k) == (64, 64, 4)
        assert (router.score_func, router.route_norm) == ("softmax", True)
        assert layer.moe.load_balance_coeff == 1e-3
    dims = config.parallelism
    assert (dims.data_parallel_shard_degree, dims.tensor_parallel_degree) == (-1, 1)
    assert dims.expert_parallel_degree == 1
    assert not config.compile.enable
    assert config.override.imports == [moe_nki.SDPA, moe_nki.NKI_ROPE, moe_nki.NKI_EXPERTS]
    assert launch.build_config("moe_nki", "stock_experts", settings).override.imports == [
        moe_nki.SDPA,
        moe_nki.NKI_ROPE,
    ]


def test_widths_on_the_instance_are_as_published():
    described = moe.model_config(small=False)
    release = weights.PUBLISHED[moe.RELEASE]
    assert {key for key in release if described[key] != release[key]} == set(moe.COUNTS)
    assert weights.facts(described).n_params == 1_906_330_624


def test_small_sizes_are_all_unequal():
    sizes = [moe.SMALL[k] for k in ("hidden_size", "moe_intermediate_size", "head_dim")]
    assert len(set(sizes)) == 3
    assert moe.SMALL["head_dim"] * moe.SMALL["num_attention_heads"] != moe.SMALL["hidden_size"]


# ------------------------------------------------------------------ errors
def test_more_chosen_than_there_are():
    described = moe.model_config(small=True, num_experts_per_tok=65)
    with pytest.raises(SettingError, match="top_k is 65, but there are 64 experts") as error:
        moe_nki.model_spec(described)
    assert "\n" not in str(error.value)
    moe_nki.model_spec(moe.model_config(small=True, num_experts_per_tok=64))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 128}, "experts 64 against 128"),
        ({"norm_topk_prob": False}, "norm_topk_prob True against False"),
        ({"num_experts_per_tok": 8}, "top_k 4 against 8"),
        ({"moe_intermediate_size": 96}, "expert_ffn 48 against 96"),
    ],
)
def test_a_checkpoint_of_another_model(changes, said, tmp_path, settings):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(moe.model_config(small=True, **changes)))
    with pytest.raises(SettingError, match=said) as error:
        moe_nki.build(settings, overrides=[moe_nki.SDPA], folder=folder, published=True)
    assert "\n" not in str(error.value)


def test_a_checkpoint_with_more_experts_than_its_config(tmp_path):
    folder = moe.random_weights(tmp_path / "moe", **TINY | {"num_experts": 16})
    wrong = json.loads((folder / "config.json").read_text()) | {"num_experts": 8}
    with pytest.raises(SettingError, match=r"mlp\.experts\.\d+.*config\.json"):
        guards.check_keys(weights.stored_tensors(folder), wrong, folder)


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({"seq_len": 200}, [], r"sequence length 200 .*: use 128 or 256"),
        ({}, ["--training.seq_len", "200"], r"sequence length 200 .*: use 128 or 256"),
        (
            {},
            ["--parallelism.expert_parallel_degree", "2"],
            "expert_parallel_degree is 2, but the nki_experts override",
        ),
    ],
)
def test_what_the_kernels_cannot_take_starts_no_rank(changes, arguments, said, settings, tmp_path):
    profile = dataclasses.replace(settings, **changes)
    with pytest.raises(SettingError, match=said) as error:
        launch.launch("moe_nki", "nki", profile, runs=tmp_path, arguments=arguments)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_expert_that_the_kernel_cannot_take_is_refused_by_the_recipe(tmp_path, settings):
    described = moe.model_config(small=True, moe_intermediate_size=88)
    (tmp_path / "config.json").write_text(json.dumps(described))

    def built(*overrides):
        return moe_nki.build(settings, overrides=overrides, folder=tmp_path, described=described)

    with pytest.raises(
        SettingError, match=r"expert width 88 is not a multiple of 16.*use 80 or 96"
    ):
        built(moe_nki.SDPA, moe_nki.NKI_EXPERTS)
    built(moe_nki.SDPA)  # torchtitan's own take it


def test_experts_are_refused_on_a_rank_that_shares_them():
    experts = build(moe.model_config(small=True, **TINY)).layers["0"].moe
    with pytest.raises(SettingError, match="expert_parallel_degree is 2"):
        moe.grouped_experts(experts).parallelize(types.SimpleNamespace(ep=2))


def test_experts_of_both_layouts_are_found():
    """Fakes of what other torchtitan lines have; only the installed one is real."""
    from torchtitan.models.common.moe import GroupedExperts

    from qwen3_trainium import nki_experts

    inner = object()
    now = types.SimpleNamespace(routed_experts=types.SimpleNamespace(inner_experts=inner))
    for block in (now, types.SimpleNamespace(experts=inner)):
        assert moe.grouped_experts(block) is inner
    with pytest.raises(SettingError, match=r"neither in routed_experts nor in experts: install"):
        moe.grouped_experts(types.SimpleNamespace())
    before = type("Before", (), {"_experts_forward": None, "forward": None})
    assert nki_experts.computing_method(before) == "_experts_forward"
    assert nki_experts.computing_method(GroupedExperts) == "forward"
    assert nki_experts.NKIGroupedExperts.forward is nki_experts.NKIGroupedExperts.compute


def test_dim_that_the_kernel_cannot_take():
    model = build(moe.model_config(small=True, **TINY | {"moe_intermediate_size": 88}))
    experts = next(iter(model.layers.values())).moe.routed_experts.inner_experts
    with pytest.raises(
        ValueError, match=r"expert width 88 is not a multiple of 16.*: use 80 or 96"
    ):
        experts(torch.zeros(8, 96), torch.tensor([1] * 8))


# ------------------------------------------------------------------ override
def built(described, overrides=(moe_nki.SDPA, moe_nki.NKI_EXPERTS)):
    """The spec's model config after its overrides."""
    from torchtitan.config.override import OverrideConfig, apply_overrides

    holder = types.SimpleNamespace(spec=moe_nki.model_spec(described))
    config = launch.build_config("moe_nki", "nki", profiles.load("cpu"))
    config.model_spec = holder.spec
    config.override = OverrideConfig(imports=list(overrides))
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    return config.model_spec.model


def build(described, overrides=(moe_nki.SDPA, moe_nki.NKI_EXPERTS)):
    torch.manual_seed(0)
    model = built(described, overrides).build()
    with torch.no_grad():
        model.init_weights()
    return model


def test_one_replacement_a_layer():
    kinds = [
        type(layer.moe.routed_experts.inner_experts).__qualname__
        for layer in built(moe.model_config(small=True)).layers
    ]
    assert kinds == ["NKIGroupedExperts.Config"] * 4


def test_checkpoints_move_both_ways(tmp_path):
    """torchtitan's own format: what one saves the other loads, bit for bit."""
    described = moe.model_config(small=True, **TINY)
    nki, stock = build(described), build(described, [moe_nki.SDPA])
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(1)
    for name, (source, target) in {"there": (nki, stock), "back": (stock, nki)}.items():
        with torch.no_grad():
            next(iter(source.parameters())).mul_(2)
        kept = {key: value.clone() for key, value in source.state_dict().items()}
        dcp.save(source.state_dict(), checkpoint_id=tmp_path / name, no_dist=True)
        loaded = target.state_dict()
        dcp.load(loaded, checkpoint_id=tmp_path / name, no_dist=True)
        assert loaded.keys() == kept.keys()
        assert all(torch.equal(loaded[key], kept[key]) for key in kept)


# ------------------------------------------------------------------ parity
@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return moe.random_weights(tmp_path_factory.mktemp("moe") / "tiny", **TINY)


@pytest.fixture(scope="module")
def batch():
    """256 random tokens of two documents."""
    g = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, TINY["vocab_size"], (2, 1, SEQ), generator=g)
    positions = torch.cat([torch.arange(100), torch.arange(SEQ - 100)])[None]
    return {"input_ids": ids, "labels": labels, "positions": positions}


def config_for(settings, folder, overrides):
    described = weights.read_json(folder / "config.json")
    return moe_nki.build(
        settings, overrides=overrides, folder=folder, published=True, described=described
    )


def program(settings, folder, name):
    """(program, its trace-able config): Transformers, stock torchtitan or our experts in it."""
    if name == "Transformers":
        return parity.transformers(folder)
    overrides = [moe_nki.SDPA] + [moe_nki.NKI_EXPERTS] * (name == "NKI")
    return parity.torchtitan(name, config_for(settings, folder, overrides))


@pytest.fixture(scope="module")
def programs(settings, tiny_folder):
    return {n: program(settings, tiny_folder, n) for n in ("Transformers", "stock", "NKI")}


@pytest.fixture(scope="module")
def seen(programs, batch):
    """Logits and the routers' choices of each program."""
    result = {}
    for name, each in programs.items():
        with moe.choices(each.model) as chosen:
            logits = parity.trace(each, batch).logits
        result[name] = logits, chosen
    return result


WIDEST = max(SEQ, 6 * 32, 96, 80)


def test_logits_against_transformers(seen):
    """NKI within a float32 bound; torchtitan's own experts within a bfloat16 one, and not in it."""
    right = seen["Transformers"][0]
    largest = right.abs().max().item()
    narrow = experts_bounds.logit_bound(largest, WIDEST, 3)
    wide = experts_bounds.logit_bound(largest, WIDEST, 3, torch.bfloat16)
    assert parity.largest_difference(seen["NKI"][0], right) <= narrow
    assert narrow < parity.largest_difference(seen["stock"][0], right) <= wide
    assert parity.largest_difference(seen["stock"][0], seen["NKI"][0]) <= wide


def test_routers_choose_the_same_experts(seen):
    assert [len(chosen) for _, chosen in seen.values()] == [3, 3, 3]
    for ours, theirs in zip(seen["NKI"][1], seen["Transformers"][1], strict=True):
        assert ours.shape == (SEQ, 2)
        assert torch.equal(ours, theirs)


def test_gradients_against_transformers(programs, batch, settings, tiny_folder):
    config = config_for(settings, tiny_folder, [moe_nki.SDPA])
    ours, theirs = (parity.step(programs[n], batch, config) for n in ("NKI", "Transformers"))
    assert ours.gradients.keys() == theirs.gradients.keys()
    bound = parity.gradient_bound(SEQ, 512, 3)
    assert parity.gradient_difference(ours, theirs) <= bound


def gates_not_normalised(model):
    for layer in model.layers.values():
        layer.moe.router.route_norm = False


def gate_and_up_swapped(model):
    for layer in model.layers.values():
        experts = layer.moe.routed_experts.inner_experts
        experts.w1_EFD, experts.w3_EFD = experts.w3_EFD, experts.w1_EFD


def experts_in_another_order(model):
    experts = next(iter(model.layers.values())).moe.routed_experts.inner_experts
    with torch.no_grad():
        experts.w2_EDF.copy_(experts.w2_EDF.roll(1, dims=0))


def a_bias(model):
    for layer in model.layers.values():
        layer.moe.expert_bias_E[0] = 1.0


@pytest.mark.parametrize(
    "mutate", [gates_not_normalised, gate_and_up_swapped, experts_in_another_order, a_bias]
)
def test_parity_rejects(mutate, settings, tiny_folder, batch, seen):
    """Four ways to be wrong with weights that load; even the bfloat16 bound sees them."""
    wrong = program(settings, tiny_folder, "NKI")
    mutate(wrong.model)
    right = seen["Transformers"][0]
    bound = experts_bounds.logit_bound(right.abs().max().item(), WIDEST, 3, torch.bfloat16)
    assert parity.largest_difference(parity.trace(wrong, batch).logits, right) > bound


def test_both_layouts_of_transformers_give_the_same_weights(programs, tiny_folder):
    """Fused in memory, one by one on disk."""
    stored = parity.stored(tiny_folder)
    for each in programs.values():
        assert parity.different_tensors(parity.round_trip(each), stored) == []


# ------------------------------------------------------------------ routing and its bias
def test_the_bias_decides_who_is_chosen_and_not_with_which_weight(settings, tiny_folder, batch):
    """`moe.biased` makes Transformers do what torchtitan does with the same bias."""
    titan, hf = (program(settings, tiny_folder, n) for n in ("NKI", "Transformers"))
    bias = torch.randn(3, 8, generator=torch.Generator().manual_seed(2)) * 0.1
    for layer, values in zip(titan.model.layers.values(), bias, strict=True):
        layer.moe.expert_bias_E.copy_(values)
    ours = parity.trace(titan, batch).logits
    plain = parity.trace(hf, batch).logits
    with moe.biased(hf.model, bias.numpy()):
        theirs = parity.trace(hf, batch).logits
    bound = experts_bounds.logit_bound(theirs.abs().max().item(), WIDEST, 3)
    assert parity.largest_difference(ours, theirs) <= bound
    assert parity.largest_difference(ours, plain) > 1000 * bound
    assert parity.largest_difference(parity.trace(hf, batch).logits, plain) == 0.0


def test_tokens_are_counted_once_with_recomputation(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for wrap in (checkpoint_wrapper, lambda block: block):
        model = build(moe.model_config(small=True, **TINY)).train()
        for name, block in list(model.layers.items()):
            model.layers[name] = wrap(block)
        trainer = types.SimpleNamespace(
            model_parts=[model],
            config=types.SimpleNamespace(dump_folder=str(tmp_path)),
            optimizers=types.SimpleNamespace(step=lambda: None),
            step=1,
        )
        moe.record_routing(trainer)
        ids, positions = torch.arange(16)[None], torch.arange(16)[None]
        masks = model.get_attention_masks(positions)
        model(ids, positions=positions, attention_masks=masks).sum().backward()
        trainer.optimizers.step()
        assert (moe.routing(tmp_path).sum(axis=2) == 16 * 2).all()


def test_a_run_without_experts_has_no_routing(tmp_path):
    with pytest.raises(SettingError, match=r"no routing\.jsonl"):
        moe.routing(tmp_path)


# ------------------------------------------------------------------ the first loss of a run
def test_a_first_loss_tells_gate_and_up_apart(settings, monkeypatch):
    """The tolerance lies between what bfloat16 does to the loss and what the exchange does.

    Three random starts and the recipe's first batch, in one process; the swap must fail in most,
    since a mean over tokens can hide it by chance.
    """
    from qwen3_trainium import batches, moe_runs

    monkeypatch.setenv(kernel_backend.VARIABLE, kernel_backend.REFERENCE)
    config = {n: launch.build_config("moe_nki", n, settings) for n in ("nki", "stock_experts")}
    rows = batches.of_run(config["nki"], settings.ranks)

    def first_loss(model):
        with torch.no_grad():
            return np.mean([parity.loss(forward(model, row), row["labels"]).item() for row in rows])

    def forward(model, row):
        masks = model.get_attention_masks(row["positions"])
        return model(row["input_ids"], positions=row["positions"], attention_masks=masks)

    bound, seen = moe_runs.BOUNDS["cpu"][moe_runs.STOCK][0], 0
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        ours, stock = (parity.initialised(each)[0] for each in config.values())
        stock.load_state_dict(ours.state_dict())
        right = first_loss(stock)
        assert abs(first_loss(ours) - right) <= bound
        gate_and_up_swapped(ours)
        seen += abs(first_loss(ours) - right) > bound
    assert seen >= 2


# ------------------------------------------------------------------ a run on two ranks
STEPS = 3
EVERY_STEP = ["--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "3"]


@pytest.fixture(scope="module")
def run(settings, tmp_path_factory):
    """Three steps with simulated kernels; a full checkpoint after each but the last."""
    profile = dataclasses.replace(settings, steps=STEPS)
    runs = tmp_path_factory.mktemp("runs")
    return launch.launch("moe_nki", "nki", profile, runs=runs, arguments=EVERY_STEP)


def test_every_rank_replaced_every_layer_and_ran_the_kernels(run):
    from qwen3_trainium import overrides

    log = (run.folder / "log.txt").read_text()
    for name in ("nki_experts", "nki_rope", "sdpa"):
        found = overrides.replaced(log, name)
        assert {rank: len(modules) for rank, modules in found.items()} == {0: 4, 1: 4}
    ran = kernel_backend.ran_in(log)
    for kernel in ("grouped_experts_kernel", "grouped_experts_backward_kernel"):
        assert ran[kernel].startswith("simulator")
    assert np.isfinite(runlog.read(run.folder)[["loss", "grad_norm"]]).all(axis=None)


def test_every_token_went_to_four_experts(run, settings):
    tokens = moe.routing(run.folder)
    assert tokens.shape == (STEPS, 4, 64)
    assert (tokens.sum(axis=2) == settings.seq_len * 4).all()
    bias = moe.routing(run.folder, "bias")
    assert np.abs(bias).max() > 0
    assert np.abs(bias.mean(axis=2)).max() < 1e-6  # torchtitan centres its update


def test_an_export_is_the_model_that_was_trained(run, settings):
    """With the bias given back, the loss is the trainer's; without it, or wrong, it is not."""
    from qwen3_trainium import batches

    source = moe.model_folder(settings)
    exported = export.complete(run.last_checkpoint, source, run.folder / "export")
    assert (
        spec.differences(
            launch.build_config("moe_nki", "nki", settings).model_spec.model,
            weights.read_json(exported / "config.json"),
        )
        == {}
    )
    model, info = verify.load_model(exported)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = launch.build_config("moe_nki", "nki", settings)
    heldout = batches.of_run(config, settings.ranks, heldout=True, count=config.validator.steps)
    trained = runlog.read(run.folder).heldout_loss[STEPS]
    rms = model(heldout[0]["input_ids"]).logits.square().mean().sqrt().item()
    bound = experts_bounds.loss_bound(rms, trained, settings.seq_len, 4)

    def off():
        return abs(verify.heldout_loss(model, heldout) - trained)

    with moe.biased(model, moe.routing(run.folder, "bias")[-1]):
        assert off() <= bound
        with torch.no_grad():
            for layer in model.model.layers:
                experts = layer.mlp.experts
                gate, up = experts.gate_up_proj.chunk(2, dim=1)
                experts.gate_up_proj.copy_(torch.cat([up, gate], 1))
        assert off() > 2 * bound
    model, _ = verify.load_model(exported)
    assert off() > 2 * bound


def test_a_run_goes_on_with_the_other_experts(run):
    """Full checkpoints on two ranks: torchtitan's experts resume ours, and ours resume theirs."""
    from qwen3_trainium import moe_runs

    right, bound = runlog.read(run.folder).loss, moe_runs.BOUNDS["cpu"][moe_runs.STOCK][0]
    before = run.folder
    for step, config in ((1, "stock_experts"), (2, "nki")):
        folder = run.folder.with_name(f"from-{step}")
        checkpoint = Path("checkpoint") / f"step-{step}"
        shutil.copytree(before / checkpoint, folder / checkpoint)
        asked = json.loads((run.folder / "run.json").read_text())["asked"] | {"config": config}
        state = {"status": "interrupted", "pid": None, "asked": asked}
        (folder / "run.json").write_text(json.dumps(state))
        with moe_runs.by_reference():
            resumed = launch.launch(
                *("moe_nki", config, run.profile),
                name=folder.name,
                runs=run.folder.parents[1],
                arguments=EVERY_STEP,
            )
        loss = runlog.read(resumed.folder).loss
        assert list(loss.index) == list(range(step + 1, STEPS + 1))
        assert (loss - right[loss.index]).abs().max() <= bound
        before = folder


def test_a_dry_run_says_what_it_built_and_fails_when_that_is_wrong(
    settings, tmp_path, monkeypatch, capsys
):
    """64 fake ranks at the widths of a CPU: the recipe's parameters and its overrides, counted."""
    small = dataclasses.replace(settings, ranks=64, global_batch_size=64, steps=1)
    found = dryrun.dry_run("moe_nki", "nki", small, tmp_path / "run")
    right = dataclasses.replace(dryrun.DRY_RUNS["moe"], parameters=2_999_104)
    assert dryrun.faults(right, found, 1) == []
    assert dryrun.DRY_RUNS["moe"].parameters == 1_906_330_624

    monkeypatch.setattr(dryrun, "dry_run", lambda *arguments: found)
    for wanted, code in (
        (right, 0),
        (dryrun.DRY_RUNS["moe"], 1),
        (dataclasses.replace(right, overrides={"sdpa": 4}), 1),
    ):
        monkeypatch.setitem(dryrun.DRY_RUNS, "moe", wanted)
        assert dryrun.main(["--only", "moe", "--steps", "1"]) == code
    assert "overrides must be {'sdpa': 4}, found" in capsys.readouterr().out
    monkeypatch.setitem(dryrun.DRY_RUNS, "moe", right)
    assert dryrun.main(["--only", "moe", "--steps", "2"]) == 1


def test_an_export_of_ours_loads_into_stock_torchtitan(run, settings, batch):
    exported = run.folder / "export"
    right = parity.trace(parity.transformers(exported), batch).logits
    for experts, dtype in (([], torch.bfloat16), ([moe_nki.NKI_EXPERTS], torch.float32)):
        config = config_for(settings, exported, [moe_nki.SDPA, *experts])
        loaded = parity.torchtitan("loaded", config)
        bound = experts_bounds.logit_bound(right.abs().max().item(), SEQ, 4, dtype)
        assert parity.largest_difference(parity.trace(loaded, batch).logits, right) <= bound
