"""Imports that the commands of pages share, done once: see `commands.Runner`."""

from __future__ import annotations

import gc

import torch

import flash_helpers.check.sanity
import flash_helpers.course.build
import flash_helpers.measure.kernel_profile
import flash_helpers.sass.show.report_text  # noqa: F401

torch.set_num_threads(1)  # other commands run at the same time
gc.freeze()  # forks share these pages of memory as long as no process writes to them
