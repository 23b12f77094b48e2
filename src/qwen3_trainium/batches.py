"""The very batches that a run reads, from torchtitan's own loader, for a reference to read too."""


def of_run(config, ranks: int, *, heldout: bool = False, count: int = 1) -> list[dict]:
    """The first `count` batches of every data-parallel rank, in rank order.

    config    a torchtitan config, as a config function returns it
    heldout   the validator's batches in place of the training ones
    Returns dicts of int64 tensors `[B, S]`: `input_ids`; `labels`, already shifted by the loader,
    −100 where no token is predicted; `positions`, which restart at 0 with each document.
    """
    loader = config.validator.dataloader if heldout else config.dataloader
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    found = []
    for rank in range(ranks):
        batches = iter(
            loader.build(
                dp_world_size=ranks,
                dp_rank=rank,
                tokenizer=tokenizer,
                seq_len=config.training.seq_len,
                local_batch_size=config.training.local_batch_size,
            )
        )
        for _ in range(count):
            inputs, labels = next(batches)
            found.append(
                {
                    "input_ids": inputs["input"],
                    "labels": labels,
                    "positions": inputs["positions"],
                }
            )
    return found
