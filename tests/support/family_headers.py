"""The file that the generator reads of each family: the C++ header with its config's struct."""

import shutil
from pathlib import Path

from flash_helpers.kernel_configs import FAMILIES


def copy_family_headers(root: Path, tree: Path) -> None:
    for family in FAMILIES.values():
        (tree / family.header).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / family.header, tree / family.header)
