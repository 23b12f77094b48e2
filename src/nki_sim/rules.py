"""Documented rules that many instructions share. Each returns a `Rule` for the table."""

from .table import Rule
from .tensors import NkiTensor


def same_partitions(*names):
    def check(a):
        first = a[names[0]]
        count = first.shape[0]
        for name in names[1:]:
            t = a[name]
            if t.__class__ is NkiTensor and t.shape[0] != count:
                return (
                    f"{names[0]} {first.describe()} has {count} partitions, "
                    f"{name} {t.describe()} has {t.shape[0]}"
                )
        return None

    return Rule("equal P: " + ", ".join(names), check, "same_partitions", names)


def same_size(*names):
    def check(a):
        first = a[names[0]]
        count, size = first.shape[0], first.size
        for name in names[1:]:
            t = a[name]
            if t.__class__ is NkiTensor and (t.shape[0] != count or t.size != size):
                return (
                    f"{names[0]} {first.describe()} has {count} × {size // count} elements, "
                    f"{name} {t.describe()} has {t.shape[0]} × {t.size // t.shape[0]}"
                )
        return None

    return Rule(
        "equal P and equal N: " + ", ".join(names) + " (nothing broadcasts)",
        check,
        "same_size",
        names,
    )


def not_both_psum(one, two):
    def check(a):
        x, y = a[one], a[two]
        both = x.__class__ is NkiTensor and y.__class__ is NkiTensor
        if both and x.storage.place == "psum" and y.storage.place == "psum":
            return f"{one} {x.describe()} and {two} {y.describe()} both lie in psum"
        return None

    return Rule(f"{one} and {two} are not both in PSUM", check, "not_both_psum", (one, two))


def same_dtype(*names):
    def check(a):
        tiles = [(n, a[n]) for n in names if a[n].__class__ is NkiTensor]
        for name, t in tiles[1:]:
            if t.dtype != tiles[0][1].dtype:
                return f"{tiles[0][0]} {tiles[0][1].describe()}, {name} {t.describe()}"
        return None

    return Rule("equal dtype: " + ", ".join(names), check, "same_dtype", names)


def engine_is(*allowed):
    def check(a):
        if a["engine"].name not in (*allowed, "unknown"):
            return f"engine {a['engine'].name}"
        return None

    return Rule("engine " + "/".join(allowed), check, "engine_is", allowed)


def resolved_engine(a, pick):
    """The engine that will run the instruction: the one asked for, or `pick`'s choice."""
    name = a["engine"].name
    return pick(a) if name == "unknown" and pick else name


def gpsimd_not_psum(*names, pick=None):
    def check(a):
        if resolved_engine(a, pick) != "gpsimd":
            return None
        for name in names:
            t = a[name]
            if t.__class__ is NkiTensor and t.storage.place == "psum":
                return f"{name} {t.describe()} on engine gpsimd"
        return None

    return Rule("GpSimd has no access to PSUM", check, "gpsimd_not_psum", names)
