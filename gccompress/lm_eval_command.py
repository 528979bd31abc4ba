"""lm-eval's own command line in a process that knows compressed checkpoints."""

import sys
from collections.abc import Sequence

from gccompress.errors import GccompressError
from gccompress.registration import register_when_needed


def lm_eval_main(arguments: Sequence[str]) -> None:
    """Run `lm-eval ARGUMENTS`; it exits as lm-eval does.

    Raises:
        GccompressError: lm-eval is not installed.
    """
    register_when_needed()
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        raise GccompressError(
            f"lm-eval is not here ({error}); install it: pip install 'gccompress[eval]'"
        ) from error
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
