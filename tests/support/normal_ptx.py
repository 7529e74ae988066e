"""PTX without what two compilers of one version write differently for the same code."""

import re

_SECTIONS = re.compile(r"^\s*\.section\s.*?^\s*\}\n", re.MULTILINE | re.DOTALL)
_NO_CODE = re.compile(r"^\s*(?://|\.(?:loc|file|reg)\b|\$L__(?:tmp|func|info)).*", re.MULTILINE)
_CONSTANT = re.compile(r"^(?:\.weak )?\.global .*? (\w+)(?:\[\d+\])?(?: = .*)?;$", re.MULTILINE)
_LINKAGE = re.compile(r"^\.(?:weak|visible) ", re.MULTILINE)
_LONG_ADDRESS = re.compile(r"mov\.u64 (%rd\d+), (\w+);\ncvt\.u32\.u64 (%r\d+), \1;")
_REGISTER = re.compile(r"(%[a-z]+)\d+\b")


def normal_ptx(text: str) -> list[str]:
    """The lines of a module without comments, line tables, names for debuggers, linkage, and
    constants in global memory that nothing reads; registers are numbered as they first occur.

    The 32-bit address of a shared variable is one `mov`: NVRTC has no 32-bit pointers to shared
    memory, and narrows one of 64 bits.
    """
    text = _NO_CODE.sub("", _SECTIONS.sub("", text))
    words = (re.sub(r"\s+", " ", line.partition("//")[0]).strip() for line in text.splitlines())
    text = _LINKAGE.sub("", "\n".join(filter(None, words)))
    for name in _CONSTANT.findall(text):
        if len(re.findall(rf"(?<!\w){name}(?!\w)", text)) == 1:
            text = re.sub(rf"^.*(?<!\w){name}(?!\w).*\n", "", text, flags=re.MULTILINE)
    text = _LONG_ADDRESS.sub(r"mov.u32 \3, \2;", text)
    numbers: dict[str, str] = {}
    counts: dict[str, int] = {}

    def numbered(register: re.Match[str]) -> str:
        if register[0] not in numbers:
            counts[register[1]] = counts.get(register[1], -1) + 1
            numbers[register[0]] = f"{register[1]}{counts[register[1]]}"
        return numbers[register[0]]

    return _REGISTER.sub(numbered, text).splitlines()
