"""What the backward pass keeps of the layers, fetches from host memory, or computes again.

Three results of a block have names: `input`, the hidden states that it reads; `attention`, the
output of attention and its log-sum-exp; and `product`, the results of products with weights. A
result is kept on the device, or in the memory of its host, or is computed again. With `input` in
host memory, a device holds the hidden states of one layer or two, however many layers there are.
For long texts the recomputation of attention costs the most time and the most traffic between
devices that share a text.
"""

from collections.abc import Callable
from typing import Annotated

import jax

from lcjax.errors import InputError, OneOf, check_one_of

NAMES = ("input", "attention", "product")
PLACES = ("device", "host")
# The places of names that are kept. The input of a block is kept in any case, unless on the host.
# `dots` recomputes elementwise operations, which is cheaper than storing their results.
WORDS = {
    "none": {},
    "full": {},
    "attention": {"attention": "device"},
    "dots": {"attention": "device", "product": "device"},
    "offload": {"input": "host", "attention": "host"},
}


class _Rule(OneOf):
    """One of the words, or places of names: `input=host,attention=device`."""

    def __contains__(self, value: object) -> bool:
        try:
            self.check("remat", value)
        except InputError:
            return False
        return True

    def check(self, key: str, value: object, way_out: str = "") -> None:
        """Raises an InputError unless `value` is one of the words, or gives names a place."""
        if not isinstance(value, str) or "=" not in value:
            if not isinstance(value, str) or value not in self.known:
                raise InputError(
                    f"{key}={value!r} must be one of {', '.join(self.known)}, or places of results:"
                    f" NAME=device or NAME=host of {', '.join(NAMES)}, such as input=host"
                )
            return
        names = []
        for part in value.split(","):
            name, _, place = part.partition("=")
            check_one_of(f"{key}={value}: a name", name.strip(), NAMES)
            check_one_of(f"{key}={value}: {name.strip()}", place.strip(), PLACES)
            names.append(name.strip())
        if len(set(names)) < len(names):
            raise InputError(
                f"{key}={value} has a name twice; give each of {', '.join(NAMES)} once"
            )


Remat = Annotated[str, _Rule(WORDS)]


def places(remat: str) -> dict[str, str]:
    """Returns where each named result is kept, `device` or `host`; others are computed again."""
    if remat in WORDS:
        return WORDS[remat]
    pairs = (part.split("=") for part in remat.split(","))
    return {name.strip(): place.strip() for name, place in pairs}


def recomputes(remat: str, name: str) -> bool:
    """Returns whether the backward pass computes the result `name` again."""
    return remat != "none" and name not in places(remat)


def policy(remat: str) -> Callable[..., object] | None:
    """Returns the policy of `jax.checkpoint` for a block; None: it keeps the input alone."""
    place_of = places(remat)
    on_device, on_host = (
        [name for name in place_of if place_of[name] == place] for place in PLACES
    )
    if not place_of:
        return None
    if not on_host:
        return jax.checkpoint_policies.save_only_these_names(*on_device)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=on_device,
        names_which_can_be_offloaded=on_host,
        offload_src="device",
        offload_dst="pinned_host",
    )
