"""Reading YAML configs: `!include`, and errors that name the file and what it should have been."""

import difflib
from collections.abc import Iterable
from pathlib import Path

import yaml
from draccus.parsers.yaml_loader import SafeLoaderWithInclusion

from lcjax.errors import InputError

_CLOSE = 0.65  # of difflib: `trian` is close to `train`, `nope` is not to `longrope_7b`
_MANY = 16  # names; of more only those near to what was written are worth reading


def near(word: object, known: Iterable[str], ending: str = "") -> str:
    """`did you mean factor? known: beta_fast, factor`: the end of an error about a name.

    `ending` is what all names have in common, which makes none of them likely.
    """
    known = sorted(known)
    names = {name.removesuffix(ending): name for name in known}
    close = difflib.get_close_matches(str(word).removesuffix(ending), names, n=4, cutoff=_CLOSE)
    if close and len(known) > _MANY:
        first, *rest = (names[name] for name in close)
        also = f"or {', '.join(rest)}; " if rest else ""
        return f"did you mean {first}? {also}{len(known)} are known"
    guess = f"did you mean {names[close[0]]}? " if close else ""
    return f"{guess}known: {', '.join(known) or 'none'}"


def _refuse_twins(name: str, pairs: list[tuple[yaml.Node, yaml.Node]], sections_only: bool) -> None:
    seen = set()
    for key, value in pairs:
        if key.value in seen and (not sections_only or isinstance(value, yaml.MappingNode)):
            raise InputError(
                f"{name}: `{key.value}` stands twice (here or through `<<:`); one would replace "
                f"the other whole; merge inside: `{key.value}: {{<<: !include ..., key: value}}`"
            )
        seen.add(key.value)


class _Loader(SafeLoaderWithInclusion):
    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        own = [pair for pair in node.value if pair[0].tag != "tag:yaml.org,2002:merge"]
        _refuse_twins(self.stream.name, own, sections_only=False)
        return node

    def flatten_mapping(self, node):
        # `<<:` may give defaults for single values, but merges no deeper than one level: a base
        # that sets `train.steps` under a child that sets `train.lr` would lose its steps unseen.
        super().flatten_mapping(node)
        _refuse_twins(self.stream.name, node.value, sections_only=True)


def read_yaml(path: Path) -> dict:
    """The file as nested dicts and lists, included files in place (paths relative to each file)."""
    try:
        with path.open(encoding="utf-8") as stream:
            raw = yaml.load(stream, _Loader)
    except FileNotFoundError as error:
        missing = Path(error.filename)
        where = "" if missing == path else f" (included from {path})"
        beside = [file.name for file in missing.parent.glob("*.yaml")]
        guess = near(missing.name, beside, ".yaml")
        raise InputError(f"{missing}{where} does not exist; {guess}") from None
    except IsADirectoryError as error:
        folder = Path(error.filename)
        where = "" if folder == path else f" (included from {path})"
        files = sorted(file.name for file in folder.glob("*.yaml"))
        more = ", ..." if len(files) > _MANY else ""
        held = f"it has {', '.join(files[:_MANY])}{more}" if files else "it has no .yaml"
        raise InputError(f"{folder}{where} is a folder; give a file: {held}") from None
    except RecursionError:
        raise InputError(f"{path} includes itself; take one `!include` out") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read as YAML: {why}") from None
    if not isinstance(raw or {}, dict):
        raise InputError(f"{path} must hold `key: value` lines, not one {type(raw).__name__}")
    return raw or {}
