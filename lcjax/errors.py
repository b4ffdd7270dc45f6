"""The one error that scripts turn into a single line and exit code 2."""


class InputError(ValueError):
    """Something that the user can put right: a key, a file, a length.

    The message is one line that names the key, the value, the rule and the way out.
    """
