"""Tables in pages of the documentation that scripts make from their results."""

import re
from collections.abc import Callable


def filled(page: str, kind: str, tables: dict[str, Callable[[], str]]) -> str:
    """Returns a page with the tables between `<!-- KIND: NAME -->` and `<!-- end -->` made anew.

    Args:
      page: text in Markdown.
      kind: names the script.
      tables: a function for each NAME that returns its table.
    """
    pattern = re.compile(rf"(<!-- {kind}: (\w+) -->)\n.*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}\n{tables[match[2]]()}\n{match[3]}", page)
