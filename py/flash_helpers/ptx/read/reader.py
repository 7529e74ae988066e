"""Reads PTX text into records (PTX ISA 9.0, "Syntax" and "State Spaces, Types, and Variables")."""

from __future__ import annotations

import bisect
import itertools
import re
import struct
from dataclasses import dataclass, field

from flash_helpers.ptx.errors import PtxSyntaxError
from flash_helpers.ptx.read.module import (
    Address,
    Arguments,
    Function,
    Immediate,
    Instruction,
    Location,
    Module,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from flash_helpers.ptx.read.types import TYPE_NAMES, size_of

_COMMENT = re.compile(r'("[^"\n]*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_SPACE = re.compile(r"\s+")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LINE = re.compile(r"[^\n]*")
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)"
    r"(?:\s*,\s*function_name\s+[\w$.+ ]+?\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?"
)
_INSTRUCTION = re.compile(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s][^,]*)\s*(?:,|$)")
_NUMBER = re.compile(
    r"-?(?:0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?"
    r"|\d+\.\d*(?:[eE][-+]?\d+)?|\d+U?)$"
)
_NAME = re.compile(r"[A-Za-z_$%][\w$]*$")
_SYMBOL_PLUS = re.compile(r"([A-Za-z_$%][\w$.]*?)\s*([+-])\s*(-?\w+)$")
_VARIABLE = re.compile(
    r"(?P<attributes>(?:\.\w+(?:\s+\d+)?\s+)+)(?P<name>[\w$%]+)\s*(?:<(?P<count>\d+)>)?"
    r"\s*(?P<dimensions>(?:\[\s*\w*\s*\]\s*)*)(?:=\s*(?P<initial>.*))?$",
    re.DOTALL,
)
_FUNCTION_HEAD = re.compile(
    r"((?:\.(?:visible|extern|weak|common)\s+)*)\.(entry|func)\s*", re.DOTALL
)
_SPACES = frozenset({"shared", "local", "const", "global", "param", "reg"})
_SPECIAL_NAMES = (
    r"n?tid|n?ctaid|laneid|n?warpid|n?smid|gridid|clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?"
    r"|lanemask_(?:eq|le|lt|ge|gt)|(?:dynamic|total)_smem_size|n?clusterid"
    r"|cluster_n?cta(?:id|rank)|is_explicit_cluster"
)
_SPECIAL = re.compile(rf"%(?:{_SPECIAL_NAMES})(?:\.[xyzw])?$")
_CONSTANTS = {"WARP_SZ": 32}


def parse_integer(text: str) -> int:
    """The value of a PTX integer literal (decimal, hexadecimal, octal or binary)."""
    text = text.rstrip("U")
    negative = text.startswith("-")
    digits = text.lstrip("-")
    base = 10
    if digits[:2] in ("0x", "0X"):
        base = 16
    elif digits[:2] in ("0b", "0B"):
        base = 2
    elif len(digits) > 1 and digits.startswith("0"):
        base = 8
    value = int(digits, base)
    return -value if negative else value


def read_ptx(text: str) -> Module:
    """Reads a PTX module.

    Raises:
        PtxSyntaxError: the text is not a whole PTX module; the message names the line.
    """
    return _Reader(text).module()


@dataclass
class _Scope:
    """Names declared between two braces."""

    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class _Body:
    """A function under construction."""

    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)


class _Reader:
    def __init__(self, text: str) -> None:
        # Comments become spaces of equal line count, so that offsets still give line numbers.
        self.text = _COMMENT.sub(lambda m: m[1] or "\n" * m.group().count("\n") or " ", text)
        self.position = 0
        self.line_starts = [0] + [m.end() for m in re.finditer("\n", self.text)]
        self.files: dict[int, str] = {}
        self.raw_locations: dict[tuple[int, int, int], Location] = {}
        self.location: Location | None = None
        self.scopes: list[_Scope] = []
        self.operands: dict[str, Operand] = {}
        self.scope_count = 0
        self.opcodes: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {}

    # -- text ------------------------------------------------------------------------------

    def line(self, position: int | None = None) -> int:
        position = self.position if position is None else position
        return bisect.bisect_right(self.line_starts, position)

    def error(self, message: str, position: int | None = None) -> PtxSyntaxError:
        return PtxSyntaxError(message, self.line(position))

    def skip_space(self) -> bool:
        """Moves to the next token; False at the end of the text."""
        match = _SPACE.match(self.text, self.position)
        if match:
            self.position = match.end()
        return self.position < len(self.text)

    def until(self, character: str, what: str) -> str:
        end = self.text.find(character, self.position)
        if end < 0:
            raise self.error(f"the text ends inside {what}: no {character!r} follows")
        text = self.text[self.position : end]
        self.position = end + 1
        return text

    def rest_of_line(self) -> str:
        match = _LINE.match(self.text, self.position)
        self.position = match.end()
        return match.group()

    # -- module ----------------------------------------------------------------------------

    def module(self) -> Module:
        version = target = ""
        functions: dict[str, Function] = {}
        variables: dict[str, Variable] = {}
        while self.skip_space():
            if self.starts(".version"):
                version = self.rest_of_line().split()[1]
            elif self.starts(".target"):
                target = self.rest_of_line().split()[1].rstrip(",")
            elif self.starts(".address_size"):
                if self.rest_of_line().split()[1] != "64":
                    raise self.error("only 64-bit addresses are supported")
            elif self.starts(".file"):
                self.read_file()
            elif self.starts(".section"):
                self.until("{", "a section")
                self.until("}", "a section")
            elif self.starts(".pragma") or self.starts(".alias"):
                self.until(";", "a directive")
            elif _FUNCTION_HEAD.match(self.text, self.position):
                function = self.function()
                if function is not None:
                    functions[function.name] = function
            elif self.text[self.position] == ".":
                start = self.position
                variable = self.variable(self.until(";", "a variable"), start)
                variables[variable.name] = variable
            else:
                raise self.error(f"not a PTX directive: {self.rest_of_line()[:60]!r}")
        if not version or not target:
            raise PtxSyntaxError("no .version and .target: this is not a PTX module", 1)
        return Module(version, target, self.files, functions, variables)

    def starts(self, word: str) -> bool:
        return self.text.startswith(word, self.position)

    def read_file(self) -> None:
        match = re.match(r'\.file\s+(\d+)\s+"([^"]*)"', self.rest_of_line())
        if match is None:
            raise self.error("a .file directive needs an index and a quoted path")
        self.files[int(match[1])] = match[2]

    def variable(self, text: str, start: int) -> Variable:
        match = _VARIABLE.match(text.strip())
        if match is None:
            raise self.error(f"cannot read the declaration {text.strip()[:80]!r}", start)
        words = match["attributes"].replace(".", " ").split()
        alignment = 0
        for name, value in itertools.pairwise(words):
            if name == "align":
                alignment = int(value)
        spaces = [w for w in words if w in _SPACES]
        types = [w for w in words if w in TYPE_NAMES]
        if not spaces or not types:
            raise self.error(
                f"a declaration needs a space and a type: {text.strip()[:80]!r}", start
            )
        element = size_of(types[0])
        lanes = 4 if "v4" in words else 2 if "v2" in words else 1
        count = lanes
        for dimension in re.findall(r"\[\s*(\w*)\s*\]", match["dimensions"]):
            count *= parse_integer(dimension) if dimension else 0
        initial = None
        if match["initial"] is not None:
            initial = self.initial(match["initial"], types[0], start)
            if count == 0:
                count = len(initial) // element
        return Variable(
            name=match["name"],
            space=spaces[0],
            type=types[0],
            size=element * count,
            alignment=alignment or element * lanes,
            initial=initial,
            external="extern" in words,
        )

    def initial(self, text: str, type_name: str, start: int) -> bytes | tuple[int | Symbol, ...]:
        values = re.findall(r"[^{},\s][^{},]*", text)
        if any(not _NUMBER.match(v.strip()) for v in values):
            # Addresses of other variables: resolved when the module is loaded.
            return tuple(
                parse_integer(v.strip()) if _NUMBER.match(v.strip()) else self.symbol(v.strip())
                for v in values
            )
        size = size_of(type_name)
        data = b""
        for value in values:
            literal = self.number(value.strip())
            if literal.float_bits:
                data += int(literal.value).to_bytes(literal.float_bits // 8, "little")
            elif isinstance(literal.value, float):
                data += struct.pack("<f" if size == 4 else "<d", literal.value)
            else:
                data += (literal.value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        return data

    # -- functions -------------------------------------------------------------------------

    def function(self) -> Function | None:
        start = self.position
        head = _FUNCTION_HEAD.match(self.text, self.position)
        self.position = head.end()
        external, is_entry = "extern" in head[1], head[2] == "entry"
        self.operands = {}
        self.scopes = [_Scope()]
        results: tuple[Variable, ...] = ()
        self.skip_space()
        if self.starts("("):
            results = self.parameter_list()
            self.skip_space()
        match = re.compile(r"[\w$%]+").match(self.text, self.position)
        if match is None:
            raise self.error("a function needs a name")
        name = match.group()
        self.position = match.end()
        if not self.skip_space():
            raise self.error(f"the text ends inside the head of {name}")
        parameters = self.parameter_list() if self.starts("(") else ()
        directives: dict[str, tuple[int, ...]] = {}
        while True:
            if not self.skip_space():
                raise self.error(f"the text ends before the body of {name}")
            character = self.text[self.position]
            if character == ";":
                self.position += 1
                return None
            if character == "{":
                break
            match = re.compile(r"\.(\w+)([\s\d,]*)").match(self.text, self.position)
            if match is None:
                raise self.error(f"cannot read the head of {name}")
            directives[match[1]] = tuple(int(v) for v in re.findall(r"\d+", match[2]))
            self.position = match.end()
        if external:
            raise self.error(f"an external function has no body: {name}")
        self.position += 1
        body = _Body()
        for variable in (*parameters, *results):
            if variable.space == "reg":
                body.registers[variable.name] = variable.type
                self.scopes[0].registers[variable.name] = variable.name
        self.location = None
        self.raw_locations = {}
        self.body(body, name)
        return Function(
            name=name,
            is_entry=is_entry,
            parameters=parameters,
            results=results,
            registers=body.registers,
            variables=tuple(body.variables),
            instructions=tuple(body.instructions),
            labels=body.labels,
            branch_targets=body.branch_targets,
            line=self.line(start),
            directives=directives,
        )

    def parameter_list(self) -> tuple[Variable, ...]:
        start = self.position
        self.position += 1
        text = self.until(")", "a parameter list").strip()
        # `.ptr .global .align 16` describes what a parameter points to, not the parameter.
        text = re.sub(r"\.ptr(\s+\.(?:global|shared|const|local))?(\s+\.align\s+\d+)?", "", text)
        return tuple(self.variable(p, start) for p in text.split(",")) if text else ()

    def body(self, body: _Body, name: str) -> None:
        depth = 1
        while True:
            if not self.skip_space():
                raise self.error(f"the text ends inside {name}: a closing brace is missing")
            character = self.text[self.position]
            if character == "{":
                self.position += 1
                depth += 1
                self.scope_count += 1
                self.scopes.append(self.scan_scope())
                self.operands = {}
            elif character == "}":
                self.position += 1
                depth -= 1
                if depth == 0:
                    self.check_labels(body)
                    return
                self.scopes.pop()
                self.operands = {}
            elif character == ".":
                self.directive(body)
            elif character == ";":
                self.position += 1
            else:
                match = _LABEL.match(self.text, self.position)
                if match:
                    self.position = match.end()
                    self.label(match[1], body)
                else:
                    self.instruction(body)

    def scan_scope(self) -> _Scope:
        """Labels of the block that opens here: a branch may precede its label."""
        scope = _Scope()
        depth, position = 1, self.position
        for match in re.compile(r"[{}]|^\s*([A-Za-z_$%][\w$]*)\s*:(?!:)", re.M).finditer(
            self.text, position
        ):
            depth += {"{": 1, "}": -1}.get(match.group(), 0)
            if depth == 0:
                break
            if match[1] and depth == 1:
                scope.labels[match[1]] = f"{match[1]}@{self.scope_count}"
        return scope

    def label(self, name: str, body: _Body) -> None:
        if self.text.startswith(".branchtargets", self.position) or (
            self.skip_space() and self.starts(".branchtargets")
        ):
            text = self.until(";", "a .branchtargets list")
            targets = [t.strip() for t in text.split(None, 1)[1].split(",")]
            body.branch_targets[name] = tuple(self.resolve_label(t) for t in targets)
            return
        if self.starts(".callprototype"):
            self.until(";", "a .callprototype")
            return
        body.labels[self.resolve_label(name)] = len(body.instructions)

    def resolve_label(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope.labels:
                return scope.labels[name]
        return name

    def check_labels(self, body: _Body) -> None:
        for instruction in body.instructions:
            if instruction.name != "bra":
                continue
            target = instruction.operands[0] if instruction.operands else None
            if not isinstance(target, Symbol) or target.name not in body.labels:
                raise PtxSyntaxError("a branch to a label that does not exist", instruction.line)

    def directive(self, body: _Body) -> None:
        start = self.position
        if self.starts(".loc ") or self.starts(".loc\t"):
            self.read_location(self.rest_of_line(), start)
            return
        text = self.until(";", "a declaration").strip()
        if text.startswith(".pragma"):
            return
        if text.startswith(".reg"):
            self.declare_registers(text, body, start)
            return
        variable = self.variable(text, start)
        unique = variable.name
        if len(self.scopes) > 1:
            unique = f"{variable.name}@{self.scope_count}"
            self.scopes[-1].variables[variable.name] = unique
            self.operands = {}
        body.variables.append(
            Variable(
                unique,
                variable.space,
                variable.type,
                variable.size,
                variable.alignment,
                variable.initial,
                variable.external,
            )
        )

    def declare_registers(self, text: str, body: _Body, start: int) -> None:
        match = re.match(r"\.reg\s*(?:\.v\d\s*)?\.(\w+)\s+(.*)", text, re.DOTALL)
        if match is None or match[1] not in TYPE_NAMES:
            raise self.error(f"cannot read the register declaration {text[:80]!r}", start)
        suffix = "" if len(self.scopes) == 1 else f"@{self.scope_count}"
        for item in match[2].split(","):
            name, _, count = item.strip().partition("<")
            names = [f"{name}{i}" for i in range(int(count.rstrip("> ")))] if count else [name]
            for register in names:
                self.scopes[-1].registers[register] = register + suffix
                body.registers[register + suffix] = match[1]
        self.operands = {}

    def read_location(self, text: str, start: int) -> None:
        match = _LOC.match(text)
        if match is None:
            raise self.error(f"cannot read {text[:80]!r}", start)
        file, line, column = int(match[1]), int(match[2]), int(match[3])
        if line == 0:
            return
        key = (file, line, column)
        known = self.raw_locations.get(key)
        if match[4] is None and known is not None:
            # nvcc repeats a line of an inlined function without its call: keep the call.
            self.location = known
            return
        parent = None
        if match[4] is not None:
            call = (int(match[4]), int(match[5]), int(match[6]))
            parent = self.raw_locations.get(call) or Location(self.file(call[0]), *call[1:])
        self.location = Location(self.file(file), line, column, parent)
        self.raw_locations[key] = self.location

    def file(self, index: int) -> str:
        # The .file directives stand at the end of the text, after the functions that use them.
        if not self.files:
            self.files.update(
                (int(m[1]), m[2])
                for m in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', self.text, re.M)
            )
        if index not in self.files:
            raise self.error(
                f"a .loc names file {index}, but no .file {index} follows: the text is cut off"
            )
        return self.files[index]

    # -- instructions ----------------------------------------------------------------------

    def instruction(self, body: _Body) -> None:
        start = self.position
        text = self.until(";", "an instruction")
        match = _INSTRUCTION.match(text)
        if match is None:
            raise self.error(f"cannot read the instruction {text.strip()[:80]!r}", start)
        negated, guard_name, opcode, rest = match.groups()
        guard = None
        if guard_name is not None:
            guard = Register(self.register(guard_name, start), bool(negated))
        if opcode not in self.opcodes:
            name, *modifiers = re.split(r"\.(?!:)", opcode)
            modifiers = ["shared" if m == "shared::cta" else m for m in modifiers]
            types = tuple(m for m in modifiers if m in TYPE_NAMES)
            self.opcodes[opcode] = (name, tuple(modifiers), types)
        name, modifiers, types = self.opcodes[opcode]
        operands = []
        position = 0
        rest = rest.strip()
        while position < len(rest):
            item = _OPERAND.match(rest, position)
            if item is None:
                raise self.error(f"cannot read the operands {rest[:80]!r}", start)
            operands.append(self.operand(item[1].strip(), start))
            position = item.end()
        body.instructions.append(
            Instruction(
                opcode,
                tuple(operands),
                guard,
                self.line(start),
                self.location,
                name,
                modifiers,
                types,
            )
        )

    def register(self, name: str, start: int) -> str:
        for scope in reversed(self.scopes):
            if name in scope.registers:
                return scope.registers[name]
        raise self.error(f"the register {name} is not declared", start)

    def operand(self, text: str, start: int) -> Operand:
        cached = self.operands.get(text)
        if cached is None:
            cached = self.operands[text] = self.read_operand(text, start)
        return cached

    def read_operand(self, text: str, start: int) -> Operand:
        if not text:
            raise self.error("an operand is missing", start)
        first = text[0]
        if first == "{":
            return Vector(tuple(self.operand(t.strip(), start) for t in text[1:-1].split(",")))
        if first == "[":
            if "," in text:
                # Coordinates of a texture: no instruction that is known has them.
                return Arguments(())
            return self.address(text[1:-1].strip(), start)
        if first == "(":
            inner = text[1:-1].strip()
            items = inner.split(",") if inner else []
            return Arguments(tuple(self.operand(t.strip(), start) for t in items))
        if text == "_":
            return Sink()
        if first == "!":
            return Register(self.register(text[1:].strip(), start), negated=True)
        if "|" in text:
            a, b = (self.operand(t.strip(), start) for t in text.split("|"))
            return Pair(a, b)
        if _NUMBER.match(text):
            return self.number(text)
        if text in _CONSTANTS:
            return Immediate(_CONSTANTS[text])
        for scope in reversed(self.scopes):
            if text in scope.registers:
                return Register(scope.registers[text])
        if _SPECIAL.match(text):
            return Special(text)
        return self.symbol(text, start)

    def symbol(self, text: str, start: int | None = None) -> Symbol:
        match = _SYMBOL_PLUS.match(text)
        name, offset = text, 0
        if match:
            name, offset = match[1], parse_integer(match[3])
            offset = -offset if match[2] == "-" else offset
        generic = re.match(r"generic\((.*)\)$", name)
        name = generic[1] if generic else name
        if not _NAME.match(name):
            raise self.error(f"cannot read the operand {text[:60]!r}", start)
        if name.startswith("%"):
            raise self.error(f"the register {name} is not declared", start)
        for scope in reversed(self.scopes):
            if name in scope.variables:
                return Symbol(scope.variables[name], offset)
        return Symbol(self.resolve_label(name), offset)

    def address(self, text: str, start: int) -> Address:
        base, offset = text, 0
        match = _SYMBOL_PLUS.match(text)
        if match:
            base, offset = match[1], parse_integer(match[3])
            offset = -offset if match[2] == "-" else offset
        operand = self.operand(base, start)
        if isinstance(operand, Register | Immediate):
            return Address(operand, offset)
        if isinstance(operand, Symbol):
            return Address(operand, operand.offset + offset)
        raise self.error(f"cannot read the address [{text}]", start)

    def number(self, text: str) -> Immediate:
        negative, digits = text.startswith("-"), text.lstrip("-")
        if digits[:2] in ("0f", "0F", "0d", "0D") and len(digits) in (10, 18):
            bits = 32 if len(digits) == 10 else 64
            value = int(digits[2:], 16) ^ (negative << (bits - 1))
            return Immediate(value, bits)
        if "." in text:
            return Immediate(float(text))
        return Immediate(parse_integer(text))
