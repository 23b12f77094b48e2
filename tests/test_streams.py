"""A global batch is the same text on any number of ranks, also after a resume."""

import copy
import dataclasses
import json

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


def test_text_goes_on_exactly_after_it_has_begun_again(tmp_path):
    """Each pass over the documents has its own order, which a resumed run must find again."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from qwen3_trainium.streams import StreamDataLoader

    documents = [f"Document {i} of seven. " * (i + 1) for i in range(7)]
    lines = "\n".join(json.dumps({"text": document}) for document in documents)
    (tmp_path / "train.jsonl").write_text(lines)
    tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=str(assets.scaffold()))
    config = StreamDataLoader.Config(dataset="c4_test", dataset_path=str(tmp_path), streams=1)

    def load():
        settings = {"tokenizer": tokenizer, "seq_len": 8, "local_batch_size": 1}
        return config.build(dp_world_size=1, dp_rank=0, **settings)

    def read(batches, count):
        return [next(batches)[0]["input"] for _ in range(count)]

    # torchtitan trains on all tokens of a document but its last: what a pass holds, in batches.
    tokens = sum(len(tokenizer.encode(each, add_bos=True, add_eos=True)) - 1 for each in documents)
    a_pass = tokens // 8
    loader = load()
    batches = iter(loader)
    first, second = read(batches, a_pass), read(batches, a_pass + 2)  # past the second pass's end
    assert not all(map(torch.equal, first, second))
    saved = copy.deepcopy(loader.state_dict())
    expected = read(batches, a_pass)
    resumed = load()
    resumed.load_state_dict(saved)
    assert all(map(torch.equal, read(iter(resumed), a_pass), expected))


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
