"""The processes that a file's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes that make groups of one to four."""
    found = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield found
    found.stop()
