"""Which parameters are trained: rules about their paths, for `lcjax.tree.split`.

Only the trained tree is differentiated, so frozen weights have no gradient, no moments and no
place in a checkpoint.
"""

import difflib
import re
from collections.abc import Callable, Iterable

from lcjax.errors import InputError

# Names for common rules; anything else is a regular expression, searched in the path.
NAMED_RULES = {
    "all": r"",
    "lora": r"(^|/)lora_[ab]$",
    "embeddings": r"^embed/",  # of the input, as LongLoRA has it; they are the head where tied
    "head": r"^head/",
    "norms": r"norm/(scale|bias)$",
    "rope": r"^rope/",
    "encoder": r"^encoder/",
    "cross_attention": r"(^|/)memory/",
    "memory": r"^encoder/|(^|/)memory/",  # all that a memory adds to a decoder
}

_WAYS_OUT = {
    "lora": "set train.lora too",
    "head": "this model's head is its embedding, for which the rule is embeddings",
}


def matcher(rules: Iterable[str], key: str) -> Callable[[str], bool]:
    """A test of paths: does any rule hold? `key` names the config field in errors."""
    patterns = []
    for rule in rules:
        try:
            patterns.append(re.compile(NAMED_RULES.get(rule, rule)))
        except re.error as error:
            raise InputError(
                f"{key}: rule {rule!r} is no regular expression ({error}); "
                f"names: {', '.join(NAMED_RULES)}"
            ) from None
    return lambda path: any(pattern.search(path) for pattern in patterns)


def trainable(
    paths: Iterable[str], rules: Iterable[str], key: str = "train.trainable"
) -> Callable[[str], bool]:
    """The test for trained parameters; a rule that holds for no path is an error."""
    paths, rules = list(paths), tuple(rules)
    for rule in rules:
        if not any(map(matcher((rule,), key), paths)):
            near = difflib.get_close_matches(rule, [*NAMED_RULES, *paths], n=3, cutoff=0.3)
            way_out = _WAYS_OUT.get(rule) or f"near: {', '.join(near) or 'all'}"
            raise InputError(f"{key}: rule {rule!r} matches no parameter; {way_out}")
    return matcher(rules, key)
