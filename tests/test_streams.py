"""A global batch is the same text on any number of ranks, also after a resume."""

import dataclasses

import pytest
import torch

from qwen3_trainium import assets, batches, cpu, launch, profiles
from qwen3_trainium.errors import SettingError

cpu.prepare()

STREAMS = 4


@pytest.fixture(scope="module")
def build():
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from qwen3_trainium.data import make
    from qwen3_trainium.streams import StreamDataLoader

    tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=str(assets.scaffold()))
    config = StreamDataLoader.Config(
        dataset="c4_test", dataset_path=str(make() / "train"), streams=STREAMS
    )

    def build(ranks, rank, streams=STREAMS):
        return dataclasses.replace(config, streams=streams).build(
            dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, seq_len=64, local_batch_size=1
        )

    return build


def steps(loaders, count):
    """The tokens of `count` optimizer steps: one batch of each stream, in stream order."""
    iterators = [iter(loader) for loader in loaders]
    share = STREAMS // len(loaders)
    return [
        torch.cat([next(it)[0]["input"] for it in iterators for _ in range(share)])
        for _ in range(count)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_ranks_read_what_one_rank_a_stream_reads(build, ranks):
    expected = steps([build(STREAMS, rank) for rank in range(STREAMS)], 3)
    found = steps([build(ranks, rank) for rank in range(ranks)], 3)
    assert all(map(torch.equal, found, expected))
    assert len({tuple(row.tolist()) for row in found[0]}) == STREAMS  # four different texts


def test_saved_text_goes_on_with_another_number_of_ranks(build):
    expected = steps([build(1, 0)], 4)[2:]
    two = [build(2, rank) for rank in range(2)]
    steps(two, 2)
    saved = {key: value for loader in two for key, value in loader.state_dict().items()}
    one = build(1, 0)
    one.load_state_dict(saved)
    assert all(map(torch.equal, steps([one], 2), expected))


def test_streams_that_cannot_be_shared_are_refused(build):
    with pytest.raises(SettingError, match="4 streams of text cannot be shared by 3"):
        build(3, 0)


def test_another_number_of_streams_cannot_take_up_a_saved_text(build):
    saved = build(1, 0).state_dict()
    with pytest.raises(SettingError, match="in 4 streams, now 2 are asked"):
        build(1, 0, streams=2).load_state_dict(saved)


def test_with_a_stream_a_rank_the_text_is_that_of_torchtitans_own_loader():
    profile = profiles.load("cpu", model=str(assets.scaffold()))
    native = batches.of_run(launch.build_config("native", "random", profile), profile.ranks)
    stock = batches.of_run(launch.build_config("hf_finetune", "random", profile), profile.ranks)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(native, stock, strict=True) for key in a)
