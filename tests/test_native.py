"""The second recipe on real ranks: every mesh trains the same model, and a stopped run goes on.

Three launches in all, four steps each: sharded on two ranks, tensor parallel on two ranks, and the
first one resumed. The runs on one rank stay in this process.
"""

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest
import tiny_release
import torch
from torch.distributed import checkpoint as dcp

from qwen3_trainium import (
    batches,
    compat,
    cpu,
    data,
    dryrun,
    export,
    launch,
    onerank,
    parity,
    profiles,
    runlog,
    train,
    verify,
)
from qwen3_trainium.errors import SettingError

cpu.prepare()

STOPPED = 2  # the step after which the run is cut
# The norm of a gradient is a float32 sum of squares; of n equal ones, in 8 lanes, each lane's
# rounding errors reach (n/8)·2⁻²⁴ at most, and a norm has half of its square's. Shards are summed
# apart, so meshes differ by that: n is the embedding, 4,096 × 192.
NORM_TOLERANCE = 4096 * 192 / 8 * 2**-24 / 2


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tiny_release.make(tmp_path_factory.mktemp("release"))
    # Short documents, so that every sequence packs several and masks and positions matter.
    text = tmp_path_factory.mktemp("text")
    shortest = sorted(data.read(data.make() / "train"), key=len)[:120]
    lines = [json.dumps({"text": document[:120]}) for document in shortest]
    (text / "train.jsonl").write_text("\n".join(lines))
    return profiles.load("cpu", model=str(folder), dataset=str(text), seq_len=64, steps=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def sharded(profile, runs):
    return launch.launch("native", "published", profile, runs=runs, arguments=[train.SAVE_INITIAL])


def one_rank(profile):
    """The config of the same run on one rank: the global batch, and so the text, stays."""
    return launch.build_config("native", "published", dataclasses.replace(profile, ranks=1))


@pytest.fixture(scope="module")
def single(profile, runs):
    return runlog.read(onerank.train(one_rank(profile), runs / "single"))


def test_the_text_of_every_step_packs_documents(profile):
    rows = batches.of_run(one_rank(profile), 1, count=4 * 2)
    assert min(int((row["positions"] == 0).sum()) for row in rows) > 1


def require_same_training(ours, theirs):
    assert (ours.loss - theirs.loss).abs().max() <= verify.FLOAT32_TOLERANCE
    # Adam's steps do not depend on the scale of gradients, so losses cannot show a wrong one.
    assert (ours.grad_norm / theirs.grad_norm - 1).abs().max() <= NORM_TOLERANCE
    heldout = (ours.heldout_loss - theirs.heldout_loss).dropna()
    assert heldout.abs().max() <= verify.FLOAT32_TOLERANCE
    assert len(heldout)


def test_sharded_and_single_rank_train_alike(sharded, single):
    metrics = runlog.read(sharded.folder)
    assert list(metrics.index) == [1, 2, 3, 4]
    require_same_training(metrics, single)


def test_tensor_parallel_trains_alike(profile, runs, single):
    run = launch.launch("native", "tensor_parallel", profile, runs=runs)
    assert "tp=2" in (run.folder / "log.txt").read_text()
    require_same_training(runlog.read(run.folder), single)


def test_the_comparison_rejects_other_text(profile, runs, single):
    """With torchtitan's own loader, one rank reads other batches than two."""
    config = one_rank(profile)
    loader = compat.symbol("torchtitan.hf_datasets.text_datasets", "HuggingFaceTextDataLoader")
    config.dataloader = loader.Config(
        dataset="c4_test", dataset_path=config.dataloader.dataset_path
    )
    other = runlog.read(onerank.train(config, runs / "other-text"))
    with pytest.raises(AssertionError):
        require_same_training(other, single)


@pytest.fixture(scope="module")
def compiled_config(profile):
    config = one_rank(profile)
    # The graph is captured and differentiated ahead of time, and run by PyTorch's own kernels:
    # what a C++ compiler would add is shown in the lesson and in test_compiled.py.
    compat.set_fields(config.compile, enable=True, backend="aot_eager")
    return config


@pytest.fixture(scope="module")
def compiled(compiled_config, runs):
    return onerank.train(copy.deepcopy(compiled_config), runs / "compiled")


def test_compiled_trains_alike(profile, compiled, single):
    require_same_training(runlog.read(compiled), single)
    # Compilation wraps modules; their wrappers must not get into the names of an export.
    saved = parity.stored(compiled / "checkpoint" / "step-4")
    assert saved.keys() == parity.stored(profile.model).keys()


@pytest.mark.parametrize("saved_by", ["compiled", "eager"])
def test_a_checkpoint_goes_from_compiled_to_eager_and_back(
    saved_by, profile, compiled_config, compiled, single, runs
):
    source = compiled if saved_by == "compiled" else runs / "single"
    config = one_rank(profile) if saved_by == "compiled" else copy.deepcopy(compiled_config)
    folder = runs / f"{saved_by}-goes-on"
    checkpoint = Path("checkpoint") / f"step-{STOPPED}"
    shutil.copytree(source / checkpoint, folder / checkpoint)
    names = dcp.FileSystemReader(folder / checkpoint).read_metadata().state_dict_metadata
    assert any("k_norm" in name for name in names)
    assert not any("_orig_mod" in name for name in names)
    after = runlog.read(onerank.train(config, folder))
    assert list(after.index) == [3, 4]
    assert (after.loss - single.loss.loc[after.index]).abs().max() <= verify.FLOAT32_TOLERANCE


def test_a_step_that_was_not_saved_is_not_replaced_by_a_fresh_start(profile, runs, sharded):
    config = one_rank(profile)
    config.checkpoint.load_step = 3
    saved = launch.stopped_after(sharded, STOPPED, "asked-for-step-3")
    for folder in (saved, runs / "nothing-saved"):
        with pytest.raises(FileNotFoundError, match="load_step=3 not found"):
            onerank.train(copy.deepcopy(config), folder)


def test_on_neuron_the_lesson_asks_for_the_compiler_by_its_name(profile):
    """Without a backend torchtitan would compile by inductor, on any device."""
    lesson = nbformat.read(profiles.ROOT / "notebooks" / "02_native_qwen3.ipynb", as_version=4)
    cell = next(each.source for each in lesson.cells if "--compile.enable" in each.source)
    options = re.search(r"arguments = \[(.*)\]", cell)[1].replace('"', "").split(", ")
    manager = compat.symbol("torchtitan.config", "ConfigManager")()
    with profiles.using(profile):
        built = manager.parse_args(
            ["--module", "configs.native", "--config", "published", *options]
        )
    assert built.compile.enable
    assert built.compile.backend == "neuron"


def test_losses_do_not_depend_on_how_often_they_are_logged(profile, runs, single):
    config = one_rank(profile)
    config.metrics.log_freq = 4
    metrics = runlog.read(onerank.train(config, runs / "rarely-logged"))
    assert list(metrics.index) == [1, 4]
    assert metrics.loss.tolist() == single.loss.loc[metrics.index].tolist()


def test_in_bfloat16_the_rotary_cache_stays_float32_and_one_shape_is_compiled(
    profile, runs, monkeypatch
):
    """Sharding casts parameters; were it to cast a block's inputs as well, positions would blur.

    Training, its last step and held-out text bring one shape: another would compile once more.
    """
    rope = compat.symbol("torchtitan.models.common.rope", "CosSinRoPE")
    forward, dtypes, shapes = rope.forward, set(), set()

    def record(self, query, key, positions=None):
        rotated = forward(self, query, key, positions)
        dtypes.add((self.cache.dtype, query.dtype, positions.dtype, rotated[0].dtype))
        shapes.add((query.shape, key.shape, positions.shape))
        return rotated

    monkeypatch.setattr(rope, "forward", record)
    config = one_rank(dataclasses.replace(profile, steps=2))
    config.training.mixed_precision_param = "bfloat16"
    metrics = runlog.read(onerank.train(config, runs / "bfloat16"))
    assert metrics.heldout_loss.notna().all()  # held-out text was read on both steps
    assert dtypes == {(torch.float32, torch.bfloat16, torch.int64, torch.bfloat16)}
    assert len(shapes) == 1


def test_causal_attention_is_another_run_and_its_folder_says_so(profile, runs, single):
    alone = dataclasses.replace(profile, ranks=1)
    config = launch.build_config("native", "published_causal", alone)
    folder = onerank.train(config, runs / "causal")
    assert (runlog.read(folder).loss - single.loss).abs().max() > 10 * verify.FLOAT32_TOLERANCE
    written = json.loads((folder / "config.json").read_text())
    assert written["override"]["imports"] == ["qwen3_trainium.overrides.sdpa_causal"]


def test_an_unsound_native_model_is_stopped_before_step_1(profile):
    model, _ = parity.initialised(one_rank(profile))
    train.require_sound(model, "before the first step")
    rope = model.layers["2"].attention.rope
    right = rope.cache
    rope.cache = right.bfloat16().float()  # as if a cast had caught the cache
    with pytest.raises(RuntimeError, match=r"layers\.2\.attention\.rope\.cache differs"):
        train.require_sound(model, "before the first step")
    rope.cache = right
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(RuntimeError, match="two parameters before the first step"):
        train.require_sound(model, "before the first step")


def test_the_weights_that_step_1_starts_from_are_the_published_bits(profile, sharded, tmp_path):
    """Folder → two shards of the native model → folder."""
    initial = export.complete(
        sharded.folder / train.INITIAL, Path(profile.model), tmp_path / "initial"
    )
    assert parity.different_tensors(parity.stored(initial), parity.stored(profile.model)) == []


def test_the_export_is_a_model_of_plain_transformers(profile, sharded, tmp_path):
    exported = export.complete(sharded.last_checkpoint, Path(profile.model), tmp_path / "export")
    findings = verify.verify(exported, profile.model)
    assert [finding.id for finding in findings if not finding.passed] == []


def test_resumed_on_the_same_ranks_it_is_the_same_run_to_the_last_bit(profile, runs, sharded):
    launch.stopped_after(sharded, STOPPED, "resumed")
    resumed = launch.launch(
        "native",
        "published",
        profile,
        runs=runs,
        name="resumed",
        arguments=[train.SAVE_INITIAL],
    )
    before, after = runlog.read(sharded.folder), runlog.read(resumed.folder)
    assert list(after.index) == [3, 4]
    for column in ("loss", "grad_norm", "learning_rate"):
        assert after[column].tolist() == before[column].tolist()[STOPPED:]
    weights = [parity.stored(run.last_checkpoint) for run in (sharded, resumed)]
    assert parity.different_tensors(*weights) == []


def test_resumed_on_another_number_of_ranks_it_reads_on_in_the_text(profile, sharded):
    folder = launch.stopped_after(sharded, STOPPED, "resumed-on-one")
    after = runlog.read(onerank.train(one_rank(profile), folder))
    before = runlog.read(sharded.folder).loc[after.index]
    assert list(after.index) == [3, 4]
    assert after.learning_rate.tolist() == before.learning_rate.tolist()
    assert (after.loss - before.loss).abs().max() <= verify.FLOAT32_TOLERANCE
    assert (after.grad_norm / before.grad_norm - 1).abs().max() <= NORM_TOLERANCE


def test_a_run_is_stopped_only_where_it_kept_a_full_checkpoint(sharded):
    with pytest.raises(SettingError, match="keeps no full checkpoint of step 4"):
        launch.stopped_after(sharded, 4, "too-late")  # step 4 is the export: weights alone


def test_a_finished_run_on_one_rank_is_not_written_again(profile, runs, single):
    with pytest.raises(SettingError, match="already exists"):
        onerank.train(one_rank(profile), runs / "single")


def test_attention_of_a_run_can_be_read_from_its_folder(sharded):
    written = json.loads((sharded.folder / "config.json").read_text())
    assert written["override"]["imports"] == ["qwen3_trainium.overrides.sdpa"]
    log = (sharded.folder / "log.txt").read_text()
    layers, ranks = 4, 2
    assert log.count("[Override] qwen3_trainium.overrides.sdpa") == layers * ranks


def test_64_ranks_tensor_parallel_step_at_reduced_width(profile, tmp_path):
    """Rank 0 of 2 × 32; at the instance's widths and 4 × 16 it is `make dry-run`'s."""
    many = dataclasses.replace(profile, ranks=64, global_batch_size=64, steps=2)
    found = dryrun.dry_run("native", "tensor_parallel", many, tmp_path / "dry")
    assert found["steps"] == 2
    log = (tmp_path / "dry" / "log.txt").read_text()
    assert "dp_shard=32" in log
    assert "tp=2" in log
