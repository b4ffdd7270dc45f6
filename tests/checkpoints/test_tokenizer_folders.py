"""A few folders of the campaign `tools/campaigns/tokenizer_folders.py`."""

import warnings

import pytest
import transformers

from tools.campaigns import tokenizer_folders


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_drawn_tokenizer_folders_equal_autotokenizer(tmp_path, count):
    transformers.logging.set_verbosity(50)
    for index in range(count):
        with warnings.catch_warnings(action="ignore"):
            outcome, lines = tokenizer_folders.run(2, index, tmp_path)
        is_expected = outcome in tokenizer_folders.EXPECTED
        assert is_expected or outcome.startswith(tokenizer_folders.DOCUMENTED), (index, lines[:3])
