"""What the commands of pages begin with, imported once: see `commands.Runner`."""

from __future__ import annotations

import contextlib
import gc

import torch

import flash_helpers.check.sanity
import flash_helpers.course.build
import flash_helpers.measure.kernel_profile
import flash_helpers.sass.show.report_text  # noqa: F401
from flash_helpers.runtime.library import library_path
from flash_helpers.sass.read.reader import list_kernels

torch.set_num_threads(1)  # others run at the same time
with contextlib.suppress(RuntimeError, ValueError):  # the command tells it better
    list_kernels(library_path())  # which keeps what it has read of the library
gc.freeze()  # forks share these pages of memory as long as nobody touches them
