"""Rules that select the trained parameters."""

import jax.numpy as jnp
import pytest

from lcjax.errors import InputError
from lcjax.training.train_config import trainable
from lcjax.tree import flatten, split

TREE = {
    "embed": {"embedding": jnp.zeros(1)},
    "layers": {
        "attention": {"query": {"kernel": jnp.zeros(2), "lora_a": jnp.zeros(3)}},
        "attention_norm": {"scale": jnp.zeros(4)},
    },
    "final_norm": {"scale": jnp.zeros(5)},
    "head": {"kernel": jnp.zeros(6)},
}


def test_the_rule_lora_trains_adapters_alone():
    trained, _ = split(TREE, trainable(flatten(TREE), ("lora",)))
    assert list(flatten(trained)) == ["layers/attention/query/lora_a"]


def left_out(*rules):
    keep = trainable(flatten(TREE), rules)
    return [path for path in flatten(TREE) if not keep(path)]


def test_longlora_plus_trains_adapters_norms_and_the_embeddings_of_the_input():
    query = "layers/attention/query/kernel"
    assert left_out("lora", "embeddings", "norms") == [query, "head/kernel"]
    assert left_out("lora", "embeddings", "norms", "head") == [query]


def test_a_head_that_is_the_embedding_is_named_so():
    tied = {"embed": TREE["embed"]}
    with pytest.raises(InputError, match=r"'head' matches no parameter; .* rule is embeddings"):
        trainable(flatten(tied), ("embeddings", "head"))


def test_a_rule_may_be_a_regular_expression():
    keep = trainable(flatten(TREE), (r"attention/.*kernel$",))
    assert [path for path in flatten(TREE) if keep(path)] == ["layers/attention/query/kernel"]


def test_a_rule_that_matches_nothing_names_near_ones():
    with pytest.raises(InputError, match=r"'norm_s' matches no parameter; near: .*norms"):
        trainable(flatten(TREE), ("norm_s",))


def test_a_rate_for_nothing_that_is_trained_raises_input_error():
    with pytest.raises(InputError, match=r"^train.rates: rule 'rope' matches no parameter"):
        trainable(flatten(TREE), ["rope"], "train.rates")


def test_lora_without_adapters_names_the_setting():
    with pytest.raises(InputError, match=r"set train\.lora too"):
        trainable({"embed/embedding": 0}, ("lora",))


def test_a_broken_expression_is_named():
    with pytest.raises(InputError, match=r"rule '\(' is no regular expression"):
        trainable(flatten(TREE), ("(",))
