"""Models, policies and readers that tests of cache policies share."""

import functools
import re

import numpy as np
from kv_cache_golden import head_file
from tiny_lm import sharp_decoder

from lcjax.attention import Channels
from lcjax.attention.policies import (
    DuoAttention,
    Knorm,
    SimLayerKV,
)
from lcjax.generation.sampling import Sampling
from lcjax.generation.session import Session
from lcjax.models import cache as cache_lib
from lcjax.models import preset

TINY = preset("tiny")
SIX = Sampling(max_new_tokens=6, min_new_tokens=6)
DUO = DuoAttention(head_file([[0.9, 0.1], [0.2, 0.8]]), sinks=3, recent=17, every=4)
# Channels of keys are dropped, of those that stay or of all.
THIN = Knorm(ratio=0.5, every=4, channels=Channels(window=8))
LAZY = SimLayerKV(lazy_threshold=0.25, recent=24)
KVZIP = {"first_request": "F", "next_request": "N", "suffix": "S"}


@functools.cache
def small_model():
    """Its attention is sharp, so that policies keep different tokens."""
    return sharp_decoder(TINY)


def named(policy):
    """Its fields, the same in every process: without the folder of a file."""
    return re.sub(r"file='[^']*/", "file='", str(policy))


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


class Requests:
    """A tokenizer that encodes the last letter of a text as fixed ids."""

    def __init__(self, ids):
        self.ids = ids

    def encode(self, text, *, allow_special=False):
        return self.ids.get(text[-1], [])


def read_session(lm, prompts, new, tokenizer=None, **options):
    """Returns a session that has read prompts of one length."""
    prompts = np.asarray(prompts, np.int32)
    length = prompts.shape[1]
    options = {"chunk": length, "mesh": lm.mesh} | options
    cache = cache_lib.create(lm.model.config, len(prompts), length + new, **options)
    session = Session(lm.model, lm.params, cache, lm.rotation(length + new))
    session.read(prompts, None, np.tile(np.arange(length), (len(prompts), 1)))
    session.end_prompt(new, options["chunk"], prompts, tokenizer or lm.tokenizer)
    return session


def order_of(layer):
    """Order indices plus 1 of the tokens of heads that evict, [B, K, S, 1]."""
    return layer["order" if "order" in layer else "streaming.order"]


def held_tokens(cache):
    """The order indices of the tokens in layers that evict, a set for each (layer, row, head)."""
    orders = {
        number: np.asarray(order_of(layer))[..., 0]
        for number, layer in enumerate(cache.layers)
        if {"order", "streaming.order"} & layer.keys()
    }
    return {
        (number, *head): set((order[head][order[head] > 0] - 1).tolist())
        for number, order in orders.items()
        for head in np.ndindex(order.shape[:2])
    }
