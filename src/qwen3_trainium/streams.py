"""Training text that does not depend on the number of ranks.

torchtitan deals the documents of a data set out to the data-parallel ranks. Another number of
ranks then reads other batches, and cannot continue a saved run. Here documents are dealt out to a
fixed number of streams, and ranks share the streams: one optimizer step reads one batch of every
stream, by whichever rank.

    streams   0  1  2  3            batches of one step
    4 ranks   a  b  c  d            each rank one
    2 ranks   a a' b b'             each rank two, in turn (gradient accumulation)
    1 rank    all four              four, in turn
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from qwen3_trainium.errors import SettingError


class StreamDataLoader(BaseDataLoader):
    """torchtitan's own loader, one a stream; this rank's streams are read in turn.

    With as many streams as ranks it yields what torchtitan's loader yields, and its saved state is
    that loader's, with `stream` for `rank`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        streams: int = 1
        """Sequences of a global batch, divided by the local batch."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **settings) -> None:
        if config.streams % dp_world_size:
            raise SettingError(
                f"{config.streams} streams of text cannot be shared by {dp_world_size} "
                "data-parallel ranks: use a divisor of global_batch_size / local_batch_size"
            )
        self.streams = config.streams
        share = config.streams // dp_world_size
        stock = HuggingFaceTextDataLoader.Config(
            dataset=config.dataset, dataset_path=config.dataset_path, infinite=config.infinite
        )
        self.loaders = [
            stock.build(dp_world_size=config.streams, dp_rank=stream, **settings)
            for stream in range(dp_rank * share, (dp_rank + 1) * share)
        ]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batches in zip(*self.loaders, strict=False):  # a finite text ends with its first stream
            yield from batches

    def state_dict(self) -> dict:
        return {key: value for loader in self.loaders for key, value in loader.state_dict().items()}

    def load_state_dict(self, state_dict: dict) -> None:
        saved = state_dict.get("world_size", self.streams)  # torchtitan's name for it
        if saved != self.streams:
            raise SettingError(
                f"the saved run read its text in {saved} streams, now {self.streams} are asked: "
                "keep global_batch_size and local_batch_size"
            )
        for loader in self.loaders:
            loader.load_state_dict(state_dict)
