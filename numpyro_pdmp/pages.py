# Copyright Contributors to the numpyro_pdmp project.
# SPDX-License-Identifier: Apache-2.0

"""Where the documentation explains an error."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explained(page: str) -> Iterator[None]:
    """Add the page of the documentation to errors; also a decorator.

    :param page: its name, as of a file in ``docs``.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not getattr(error, "__notes__", None):  # else the inner one knows better
            error.add_note(f"See the page docs/{page}.md of the documentation.")
        raise
