"""Messages of ptxas about a kernel, and the kernel's name in its PTX. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

_EVENT = re.compile(
    r"Compiling entry function '(?P<symbol>[^'\n]+)' for '(?P<target>sm_\d+[a-z]?)'"
    r"|Function properties for (?P<function>\S+)"
    r"|(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r"|\bUsed (?P<registers>\d+) registers(?P<more>[^\n]*)"
)
_LOSS = re.compile(r"Potential Performance Loss: .*(?:serialized|setmaxnreg).*")
HOW_TO_AVOID_LOSSES = (
    "ptxas did not compile it as it is written; find out what it needs (registers, a wgmma.fence, "
    "constant indices of accumulators), or choose a smaller tile"
)
_PTX_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SMEM = re.compile(r"(\d+) bytes smem")
_CMEM = re.compile(r"(\d+) bytes cmem\[(\d+)\]")


@dataclass(frozen=True)
class PtxasReport:
    """One kernel compiled for one architecture.

    `target`: such as "sm_90" or "sm_90a". `registers`: per thread. stack_bytes, spill_store_bytes
    and spill_load_bytes: per thread, too. `barriers`: named barriers of a block; None where ptxas
    does not tell (11.8 and 12.4 do not). `smem_bytes`: static shared memory of a block.
    `cmem_bytes`: constant memory by bank; for sm_90 ptxas leaves out bank 0, where the parameters
    are.
    """

    symbol: str
    target: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    barriers: int | None
    smem_bytes: int
    cmem_bytes: dict[int, int]

    @property
    def architecture(self) -> int:
        """The target as a number: 90 for sm_90 and for sm_90a."""
        return int(self.target.removeprefix("sm_").rstrip("abcdefghijklmnopqrstuvwxyz"))


@dataclass
class _Entry:
    """Facts that the log has told so far of the kernel that ptxas is compiling."""

    symbol: str
    target: str
    properties: re.Match[str] | None = None
    usage: re.Match[str] | None = None

    def report(self) -> PtxasReport:
        if self.properties is None or self.usage is None:
            raise ValueError(
                f"ptxas -v tells no registers or spills of {self.symbol} for {self.target}"
            )
        more = self.usage["more"]
        barriers, smem = _BARRIERS.search(more), _SMEM.search(more)
        return PtxasReport(
            symbol=self.symbol,
            target=self.target,
            registers=int(self.usage["registers"]),
            stack_bytes=int(self.properties["stack"]),
            spill_store_bytes=int(self.properties["stores"]),
            spill_load_bytes=int(self.properties["loads"]),
            barriers=int(barriers[1]) if barriers else None,
            smem_bytes=int(smem[1]) if smem else 0,
            cmem_bytes={int(bank): int(size) for size, bank in _CMEM.findall(more)},
        )


def performance_losses(text: str) -> list[str]:
    """Messages of ptxas about an optimisation that it gave up: `wgmma` serialized (C7510 to C7520),
    or `setmaxnreg` ignored (C7508).

    A message about a missing `wgmma.fence` that ptxas has inserted is left out: it costs nothing.
    """
    return list(dict.fromkeys(_LOSS.findall(text)))


def entry_symbols(ptx: str) -> list[str]:
    """The symbols of the kernels in a PTX text, each once: PTX for a debugger declares a kernel
    before it defines it."""
    return list(dict.fromkeys(_PTX_ENTRY.findall(ptx)))


def parse_ptxas_log(text: str) -> list[PtxasReport]:
    """The reports in the output of `ptxas -v`, in its order; empty if there is none.

    Lines about functions that kernels call stand between the kernels, and are left out. Raises
    ValueError for a kernel whose registers or spills are missing: the log breaks off, or compilers
    that ran at the same time wrote into each other's lines.
    """
    entries: list[_Entry] = []
    function = ""
    for event in _EVENT.finditer(text):
        if event["symbol"]:
            function = event["symbol"]
            entries.append(_Entry(event["symbol"], event["target"]))
        elif event["function"]:
            function = event["function"]
        elif entries and event["registers"]:
            # Only kernels are given registers: those of a function are counted in its callers.
            if entries[-1].usage is not None:
                raise ValueError(f"ptxas -v tells the registers of {entries[-1].symbol} twice")
            entries[-1].usage = event
        elif entries and event["stack"] and function == entries[-1].symbol:
            entries[-1].properties = entries[-1].properties or event
    return [entry.report() for entry in entries]
