"""Small instances of the library's RoPE types, on which the tests of all types run."""

import draccus

from lcjax.rope import Rope

HEAD_DIM = 16  # the rotary channels that the examples are made for


def library_ropes() -> dict[str, type[Rope]]:
    """The registered types without those that other tests have registered."""
    choices = Rope.get_known_choices().items()
    return {name: cls for name, cls in choices if cls.__module__.startswith("lcjax.")}


def rope_examples(**checkpoint) -> dict[str, Rope]:
    """All `examples` by name and number: `yarn-0`, `yarn-1`, ...

    Args:
      **checkpoint: the `theta` and `length` of `Rope.resolve`; none: fields stay null.
    """
    return {
        f"{name}-{number}": draccus.decode(Rope, {"type": name, **fields}).resolve(**checkpoint)
        for name, cls in library_ropes().items()
        for number, fields in enumerate(cls.examples)
    }
