"""A C header that launches an exported kernel: its arguments, and a function that fills them in
for a problem. It is C11 and C++11, and includes nothing of CUDA. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

from flash_helpers.export.formulas import MARK, Condition, Formula
from flash_helpers.export.launches import Check, Input, LaunchFormula
from flash_helpers.registry.call import Kind

_TYPES = {"i": "int32_t", "f": "float", "Q": "uint64_t", "q": "int64_t", "s": "unsigned char"}
_OF_INPUTS = {"real": "double", "address": "uint64_t"}
_MAX_RANK = 5  # of a tensor map
_WORD = 8  # bytes: C's types are aligned to so many at most

# What the headers of several kernels share.
_COMMON = f"""\
#ifndef FLASH_ATTENTION_EXPORT
#define FLASH_ATTENTION_EXPORT

#include <assert.h>
#include <stdalign.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

// Arguments of cuTensorMapEncodeTiled; its element strides are 1, without interleaving, and zeros
// outside of the tensor. The map belongs at byte `member` of the arguments. data_type, swizzle and
// l2_promotion: as cuda.h numbers them.
struct flash_tensor_map {{
    size_t member;
    int data_type;
    int swizzle;
    int l2_promotion;
    uint32_t rank;
    uint64_t address;
    uint64_t dims[{_MAX_RANK}];    // elements, innermost first
    uint64_t strides[{_MAX_RANK}]; // bytes, of all dimensions but the innermost
    uint32_t box[{_MAX_RANK}];     // elements
}};

// Writes the reason of a refusal. Returns 1.
static inline int flash_refuse(char *reason, size_t size, const char *text, ...) {{
    va_list values;
    va_start(values, text);
    vsnprintf(reason, size, text, values);
    va_end(values);
    return 1;
}}

static inline int flash_is_outside(const char *name, int64_t value, int64_t least, int64_t most,
        char *reason, size_t size) {{
    return (value < least || value > most) &&
        flash_refuse(reason, size, "%s %lld is not from %lld to %lld", name, (long long)value,
            (long long)least, (long long)most);
}}

// Rounded down, and the remainder of that. A launch never depends on a division by 0.
static inline int64_t flash_quotient(int64_t a, int64_t b) {{
    return b == 0 ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0));
}}
static inline int64_t flash_remainder(int64_t a, int64_t b) {{
    return b == 0 ? 0 : a - b * flash_quotient(a, b);
}}

#endif
"""


def c_header(launch: LaunchFormula, symbol: str, target: str) -> str:
    """Return the header of a kernel. `symbol`: its name in the cubin. `target`: such as sm_90a."""
    return _Header(launch, symbol, target).text()


class _Header:
    def __init__(self, launch: LaunchFormula, symbol: str, target: str) -> None:
        self.launch = launch
        self.symbol = symbol
        self.target = target
        self.name = launch.kernel
        self.shared = _Shared(
            [*launch.outputs, *(x for check in launch.checks for x in check.conditions)],
            {given.name for given in launch.inputs if given.least > 0},
        )

    def text(self) -> str:
        """Return the whole header."""
        config, name = self.launch.config, self.name
        step, guard = config.step, f"{name.upper()}_H"
        options = ", ".join(f"{key} {value}" for key, value in config.to_dict().items())
        return f"""\
// {name}: {self.launch.function} of {step.id}, {step.idea}
// {options}
//
// {name}_plan checks a call and fills in its launch. Written by python -m flash_attention export.

#ifndef {guard}
#define {guard}

{_COMMON}
#define {name}_SYMBOL "{self.symbol}" // in the cubin and in the PTX
#define {name}_TARGET "{self.target}"
enum {{
{self._options()}\
    {name}_THREADS = {self.launch.block}, // of a block
    {name}_SHARED_BYTES = {self.launch.shared_bytes}, // dynamic, of a block
    {name}_ALIGNMENT = {config.supports.alignment}, // bytes: the most that an address needs
}};

{self._call()}
{self._arguments()}
{self._launch()}
{self._plan()}
#endif
"""

    def _options(self) -> str:
        """Return the config's fields as constants."""
        numbers = {k: v for k, v in self.launch.config.to_dict().items() if not isinstance(v, str)}
        return "".join(f"    {self.name}_{key} = {int(v)},\n" for key, v in numbers.items())

    def _call(self) -> str:
        lines = []
        for given in self.launch.inputs:
            kind = _OF_INPUTS.get(given.kind, "int64_t")
            lines.append(f"    {kind} {given.name}; // {_meaning(given)}")
        return (
            "// A call. The last dimension of a tensor has stride 1; an address is on the device.\n"
            f"struct {self.name}_call {{\n" + "\n".join(lines) + "\n};\n"
        )

    def _arguments(self) -> str:
        layout, name = self.launch.layout, f"{self.name}_arguments"
        members = "\n".join(f"    {_declared(m.name, m.kind)};" for m in layout.members)
        checks = [f"sizeof(struct {name}) == {layout.size}"]
        checks += [
            f"offsetof(struct {name}, {member.name}) == {member.offset}"
            for member in layout.members
        ]
        asserted = "\n".join(f'static_assert({check}, "{layout.name}");' for check in checks)
        return (
            f"// {layout.name}, the kernel's one parameter.\n"
            f"struct {name} {{\n{members}\n}};\n{asserted}\n"
        )

    def _launch(self) -> str:
        buffers = "".join(
            f"    uint64_t {buffer.name}_bytes; // of the buffer, "
            f"{'zeros before each launch' if buffer.zeroed else 'of any content'}; 0: none\n"
            for buffer in self.launch.buffers
        )
        count = len(self.launch.tensor_maps)
        return f"""\
struct {self.name}_launch {{
    struct {self.name}_arguments arguments; // all but the tensor maps
    unsigned grid[3];    // blocks
    unsigned cluster[3]; // blocks
    unsigned block;      // threads
    unsigned shared_bytes;
    int programmatic;    // 1: may have CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
{buffers}    int n_tensor_maps;
    struct flash_tensor_map tensor_maps[{max(count, 1)}];
}};
"""

    def _plan(self) -> str:
        launch, name = self.launch, self.name
        buffers = " and ".join(buffer.name for buffer in launch.buffers)
        ahead = (
            f"\n// The bytes of {buffers} do not depend on addresses: plan, allocate, plan again."
        )
        inputs = "\n".join(
            f"    const {'double' if given.kind == 'real' else 'int64_t'} {given.name} = "
            f"{'' if given.kind == 'real' else '(int64_t)'}call->{given.name};"
            for given in launch.inputs
        )
        return f"""\
// Returns 0 and fills in the launch; or returns 1, and writes the reason to `reason`, which has
// `reason_size` bytes.{ahead if buffers else ""}
static inline int {name}_plan(const struct {name}_call *call,
        struct {name}_launch *launch, char *reason, size_t reason_size) {{
{inputs}
{"".join(map(self._range_check, launch.inputs))}\
{"".join(f"    const int64_t {line};" + chr(10) for line in self.shared.definitions)}\
{"".join(map(self._check, launch.checks))}\
    memset(launch, 0, sizeof *launch);
{"".join(f"    launch->{line};" + chr(10) for line in self._assignments())}\
    return 0;
}}
"""

    def _range_check(self, given: Input) -> str:
        name, least, most = given.name, given.least, given.most
        if given.kind == "real":
            outside = f"!({least} <= {name} && {name} <= {most})"  # NaN is outside, too
            return _refused(outside, f"{name} %g is not finite", [name])
        return (
            f'    if (flash_is_outside("{name}", {name}, {least}, {most}, reason, reason_size))\n'
            "        return 1;\n"
        )

    def _check(self, check: Check) -> str:
        numbers = [int(x) for x in re.findall(f"{MARK}([0-9]+){MARK}", check.text)]
        values = [self.launch.named[number] for number in numbers]
        text = check.text.replace("%", "%%")
        for number, value in zip(numbers, values, strict=True):
            text = text.replace(f"{MARK}{number}{MARK}", "%g" if value.is_real else "%lld", 1)
        arguments = [
            f"{'' if value.is_real else '(long long)'}{self.shared.text(value)}" for value in values
        ]
        return _refused(" && ".join(map(self.shared.text, check.conditions)), text, arguments)

    def _assignments(self) -> Iterator[str]:
        launch, text = self.launch, self.shared.text
        for name in ("grid", "cluster"):
            for i, formula in enumerate(getattr(launch, name)):
                yield f"{name}[{i}] = (unsigned){text(formula)}"
        yield f"block = {launch.block}"
        yield f"shared_bytes = {launch.shared_bytes}"
        yield f"programmatic = {int(launch.programmatic)}"
        for buffer in launch.buffers:
            yield f"{buffer.name}_bytes = (uint64_t){text(buffer.bytes)}"
        for member in launch.layout.members:
            values = launch.members.get(member.name, ())
            kind = c_type(member.kind)
            for i, formula in enumerate(values):
                at = f"[{i}]" if len(values) > 1 else ""
                yield f"arguments.{member.name}{at} = ({kind}){text(formula)}"
        yield f"n_tensor_maps = {len(launch.tensor_maps)}"
        for i, found in enumerate(launch.tensor_maps):
            place = f"tensor_maps[{i}]"
            argument = f"struct {self.name}_arguments"
            yield f"{place}.member = offsetof({argument}, {found.member.name})"
            yield f"{place}.data_type = {found.form.data_type}"
            yield f"{place}.swizzle = {found.form.swizzle_mode}"
            yield f"{place}.l2_promotion = {found.form.promotion_mode}"
            yield f"{place}.rank = {len(found.dims)}"
            yield f"{place}.address = (uint64_t){text(found.address)}"
            for name in ("dims", "strides", "box"):
                kind = "uint32_t" if name == "box" else "uint64_t"
                for j, formula in enumerate(getattr(found, name)):
                    yield f"{place}.{name}[{j}] = ({kind}){text(formula)}"


def _refused(condition: str, text: str, arguments: Iterable[str]) -> str:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    given = ", ".join([f'"{quoted}"', *arguments])
    refusal = f"return flash_refuse(reason, reason_size,\n            {given});"
    return f"    if ({condition})\n        {refusal}\n"


def _meaning(given: Input) -> str:
    return f"{given.text}; 0 or 1" if given.kind == "option" else given.text


def c_type(kind: Kind) -> str:
    """Return the C type of a member, or of an item of an array."""
    return _TYPES[kind.code[-1]]


def _declared(name: str, kind: Kind) -> str:
    length = kind.code[:-1]
    aligned = f"alignas({kind.align}) " if kind.align > _WORD else ""
    return f"{aligned}{c_type(kind)} {name}{length and f'[{length}]'}"


class _Shared:
    """Texts of formulas in C. A part that several of them have is a constant, defined once.

    `positive`: inputs that are. `definitions`: the constants, in an order in which they can be
    computed.
    """

    def __init__(self, formulas: Iterable[Formula | Condition], positive: Container[str]) -> None:
        self._positive = positive
        self._uses: dict[str, int] = {}
        self._found: list[Formula] = []  # operands before what they are operands of
        for formula in formulas:
            self._count(formula)
        self._names: dict[str, str] = {}
        self.definitions: list[str] = []
        for formula in self._found:
            if self._uses[formula.text] > 1 and not formula.is_real:
                name = f"part{len(self._names)}"
                self.definitions.append(f"{name} = {_bare(self._expression(formula))}")
                self._names[formula.text] = name

    def _count(self, formula: Any) -> None:
        if isinstance(formula, Condition) or not formula.operands:
            for operand in formula.operands:
                self._count(operand)
            return
        self._uses[formula.text] = self._uses.get(formula.text, 0) + 1
        if self._uses[formula.text] == 1:
            for operand in formula.operands:
                self._count(operand)
            self._found.append(formula)

    def text(self, formula: Formula | Condition) -> str:
        """Return a formula, or a condition, by the constants."""
        if isinstance(formula, Condition):
            if formula.operator == "!":
                return f"!({self.text(formula.operands[0])})"
            return f" {formula.operator} ".join(map(self.text, formula.operands))
        return self._names.get(formula.text) or self._expression(formula)

    def _expression(self, formula: Formula) -> str:
        if not formula.operands:
            return formula.text
        parts = [self.text(operand) for operand in formula.operands]
        if formula.operator == "?":
            return f"({parts[0]} ? {parts[1]} : {parts[2]})"
        first, second = formula.operands
        # Constants come before the refusals, by which a divisor may have become positive.
        divides = (second.is_constant and second.low > 0) or second.text in self._positive
        if formula.operator in "/%" and not formula.is_real and (first.low < 0 or not divides):
            name = "quotient" if formula.operator == "/" else "remainder"
            return f"flash_{name}({parts[0]}, {parts[1]})"
        return f"({parts[0]} {formula.operator} {parts[1]})"


def _bare(text: str) -> str:
    """Return an expression without the parentheses around all of it."""
    return text[1:-1] if text.startswith("(") else text
