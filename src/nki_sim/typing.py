"""The module that kernels import as `nki.typing`: annotations without effect."""


class tensor:  # noqa: N801 (NKI's own spelling)
    """`tensor[shape]` annotates a tensor argument."""

    def __class_getitem__(cls, shape):
        return cls
