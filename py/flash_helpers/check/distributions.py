"""Names of distributions of inputs. Standard library only."""

from __future__ import annotations

from collections.abc import Collection


def check_distribution(name: str, known: Collection[str]) -> None:
    """Raises ValueError for a distribution that an operation does not know."""
    if name not in known:
        raise ValueError(f"inputs {name!r} are not known: choose one of {', '.join(known)}")
