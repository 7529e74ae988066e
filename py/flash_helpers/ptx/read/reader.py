"""Reads PTX text into records (PTX ISA 9.0, "Syntax" and "State Spaces, Types, and Variables")."""

from __future__ import annotations

import bisect
import itertools
import re
import struct
from collections import ChainMap
from dataclasses import replace

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
from flash_helpers.ptx.read.types import OPCODE_TYPES, TYPE_NAMES, size_of

_INTEGER = r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?"
_NAME = r"[A-Za-z_$%][\w$]*"
_COMMENT = re.compile(r'("[^"\n]*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_SPACE = re.compile(r"\s+")
_LINE = re.compile(r"[^\n]*")
_DIRECTIVE = re.compile(r"\.\w+[ \t]+([\w.]+)[^\n]*")
_FILE = re.compile(r'\.file[ \t]+(\d+)[ \t]+"([^"]*)"[^\n]*')
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)"
    r"(?:\s*,\s*function_name\s+[\w$.+ ]+?\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?[^\n]*"
)
_INSTRUCTION = re.compile(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s][^,]*)\s*(?:,|$)")
_NUMBER = re.compile(
    rf"(?:-?0[fF][0-9a-fA-F]{{8}}|-?0[dD][0-9a-fA-F]{{16}}|-?\d+\.\d*(?:[eE][-+]?\d+)?|{_INTEGER})$"
)
_WHOLE_INTEGER = re.compile(rf"{_INTEGER}$")
_WHOLE_NAME = re.compile(rf"{_NAME}$")
_SYMBOL_PLUS = re.compile(rf"([A-Za-z_$%][\w$.]*?)\s*([+-])\s*({_INTEGER})$")
_REGISTERS = re.compile(r"\.reg\s*(?:\.v\d\s*)?\.(\w+)\s+(.*)", re.DOTALL)
_REGISTER_NAMES = re.compile(r"([\w$%]+)\s*(?:<\s*(\d+)\s*>)?$")
_VARIABLE = re.compile(
    r"(?P<attributes>(?:\.\w+(?:\s+\d+)?\s+)+)(?P<name>[\w$%]+)\s*(?:<(?P<count>\d+)>)?"
    r"\s*(?P<dimensions>(?:\[\s*\w*\s*\]\s*)*)(?:=\s*(?P<initial>.*))?$",
    re.DOTALL,
)
_FUNCTION = re.compile(r"((?:\.(?:visible|extern|weak|common)\s+)*)\.(entry|func)\s*", re.DOTALL)
_FUNCTION_NAME = re.compile(r"[\w$%]+")
_FUNCTION_DIRECTIVE = re.compile(r"\.(\w+)([\s\d,]*)")
_BRACE_OR_LABEL = re.compile(rf"[{{}}]|^\s*({_NAME})\s*:(?!:)", re.M)
_SPACES = frozenset({"shared", "local", "const", "global", "param", "reg"})
_SPECIAL_NAMES = (
    r"n?tid|n?ctaid|laneid|n?warpid|n?smid|gridid|clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?"
    r"|lanemask_(?:eq|le|lt|ge|gt)|(?:dynamic|total)_smem_size|n?clusterid"
    r"|cluster_n?cta(?:id|rank)|is_explicit_cluster"
)
_SPECIAL = re.compile(rf"%(?:{_SPECIAL_NAMES})(?:\.[xyzw])?$")
_CONSTANTS = {"WARP_SZ": 32}


def read_ptx(text: str) -> Module:
    """Reads a PTX module. Raises PtxSyntaxError, which names the line, for a text that is no whole
    one."""
    return _Reader(text).module()


def _integer(text: str) -> int:
    """The value of a PTX integer literal (decimal, hexadecimal, octal or binary)."""
    return int(re.sub(r"^(-?)0(?=\d)", r"\g<1>0o", text.rstrip("U")), 0)


class _Reader:
    def __init__(self, text: str) -> None:
        # Comments become spaces of equal line count, so that offsets still give line numbers.
        self.text = _COMMENT.sub(lambda m: m[1] or "\n" * m.group().count("\n") or " ", text)
        self.position = 0
        self.line_starts = [0] + [m.end() for m in re.finditer("\n", self.text)]
        self.files: dict[int, str] = {}
        self.raw_locations: dict[tuple[int, ...], Location] = {}
        self.location: Location | None = None
        # Unique names of what is declared between braces, the innermost braces first.
        self.registers: ChainMap[str, str] = ChainMap()
        self.symbols: ChainMap[str, str] = ChainMap()
        self.scope_count = 0
        self.operands: dict[str, Operand] = {}
        self.opcodes: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {}

    # -- text --------------------------------------------------------------------------------------

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

    def starts(self, word: str) -> bool:
        return self.text.startswith(word, self.position)

    def until(self, character: str, what: str) -> str:
        end = self.text.find(character, self.position)
        if end < 0:
            raise self.error(f"the text ends inside {what}: no {character!r} follows")
        text = self.text[self.position : end]
        self.position = end + 1
        return text

    def take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Moves over what has to come next."""
        match = pattern.match(self.text, self.position)
        if match is None:
            raise self.error(f"{what} {_LINE.match(self.text, self.position).group()[:60]!r}")
        self.position = match.end()
        return match

    # -- module ------------------------------------------------------------------------------------

    def module(self) -> Module:
        version = target = ""
        functions: dict[str, Function] = {}
        variables: dict[str, Variable] = {}
        while self.skip_space():
            if self.starts(".version"):
                version = self.take(_DIRECTIVE, "cannot read")[1]
            elif self.starts(".target"):
                target = self.take(_DIRECTIVE, "cannot read")[1]
            elif self.starts(".address_size"):
                if self.take(_DIRECTIVE, "cannot read")[1] != "64":
                    raise self.error("only 64-bit addresses are supported")
            elif self.starts(".file"):
                self.take(_FILE, "an index and a quoted path are due in")
            elif self.starts(".section"):
                self.until("{", "a section")
                self.until("}", "a section")
            elif self.starts(".pragma") or self.starts(".alias"):
                self.until(";", "a directive")
            elif _FUNCTION.match(self.text, self.position):
                function = self.function()
                if function is not None:
                    functions[function.name] = function
            elif self.starts("."):
                start = self.position
                variable = self.variable(self.until(";", "a variable"), start)
                variables[variable.name] = variable
            else:
                found = _LINE.match(self.text, self.position).group()
                raise self.error(f"not a PTX directive: {found[:60]!r}")
        if not version or not target:
            raise PtxSyntaxError("no .version and .target: this is not a PTX module", 1)
        return Module(version, target, functions, variables)

    def variable(self, text: str, start: int) -> Variable:
        text = text.strip()
        match = _VARIABLE.match(text)
        if match is None:
            raise self.error(f"cannot read the declaration {text[:80]!r}", start)
        words = match["attributes"].replace(".", " ").split()
        alignment = 0
        for name, value in itertools.pairwise(words):
            if name == "align" and value.isdecimal():
                alignment = int(value)
        spaces = [w for w in words if w in _SPACES]
        types = [w for w in words if w in TYPE_NAMES]
        if not spaces or not types:
            raise self.error(f"a declaration needs a space and a type: {text[:80]!r}", start)
        element = size_of(types[0])
        lanes = 4 if "v4" in words else 2 if "v2" in words else 1
        count = lanes
        for dimension in re.findall(r"\[\s*(\w*)\s*\]", match["dimensions"]):
            if dimension and not _WHOLE_INTEGER.match(dimension):
                raise self.error(f"the size {dimension!r} is no number", start)
            count *= _integer(dimension) if dimension else 0
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
        values = [v.strip() for v in re.findall(r"[^{},\s][^{},]*", text)]
        if not all(map(_NUMBER.match, values)):
            # Addresses of other variables: resolved when the module is loaded.
            return tuple(
                _integer(v) if _WHOLE_INTEGER.match(v) else self.symbol(v, start) for v in values
            )
        size = size_of(type_name)
        data = b""
        for value in values:
            literal = self.number(value)
            if literal.float_bits:
                data += literal.value.to_bytes(literal.float_bits // 8, "little")
            elif isinstance(literal.value, float):
                data += struct.pack("<f" if size == 4 else "<d", literal.value)
            else:
                data += (literal.value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        return data

    # -- functions ---------------------------------------------------------------------------------

    def function(self) -> Function | None:
        start = self.position
        head = self.take(_FUNCTION, "")
        self.operands, self.registers, self.symbols = {}, ChainMap(), ChainMap()
        results: tuple[Variable, ...] = ()
        self.skip_space()
        if self.starts("("):
            results = self.parameter_list()
            self.skip_space()
        name = self.take(_FUNCTION_NAME, "a function needs a name:").group()
        if not self.skip_space():
            raise self.error(f"the text ends inside the head of {name}")
        parameters = self.parameter_list() if self.starts("(") else ()
        directives: dict[str, tuple[int, ...]] = {}
        while self.skip_space() and not self.starts("{"):
            if self.starts(";"):
                self.position += 1
                return None
            match = self.take(_FUNCTION_DIRECTIVE, f"cannot read the head of {name}:")
            directives[match[1]] = tuple(int(v) for v in re.findall(r"\d+", match[2]))
        if not self.starts("{"):
            raise self.error(f"the text ends before the body of {name}")
        if "extern" in head[1]:
            raise self.error(f"an external function has no body: {name}")
        self.position += 1
        is_entry, line = head[2] == "entry", self.line(start)
        function = Function(name, is_entry, parameters, results, line, directives)
        for variable in (*parameters, *results):
            if variable.space == "reg":
                function.registers[variable.name] = variable.type
                self.registers[variable.name] = variable.name
        self.location = None
        self.raw_locations = {}
        self.body(function)
        return function

    def parameter_list(self) -> tuple[Variable, ...]:
        start = self.position
        self.position += 1
        text = self.until(")", "a parameter list").strip()
        # `.ptr .global .align 16` describes what a parameter points to, not the parameter.
        text = re.sub(r"\.ptr(\s+\.(?:global|shared|const|local))?(\s+\.align\s+\d+)?", "", text)
        return tuple(self.variable(p, start) for p in text.split(",")) if text else ()

    def body(self, function: Function) -> None:
        while True:
            if not self.skip_space():
                raise self.error(
                    f"the text ends inside {function.name}: a closing brace is missing"
                )
            character = self.text[self.position]
            if character in "{};":
                self.position += 1
            if character == "{":
                self.scope_count += 1
                self.registers = self.registers.new_child()
                self.symbols = self.symbols.new_child(self.labels_of_scope())
                self.operands = {}
            elif character == "}":
                if len(self.symbols.maps) == 1:
                    self.check_labels(function)
                    return
                self.registers, self.symbols = self.registers.parents, self.symbols.parents
                self.operands = {}
            elif character == ".":
                self.directive(function)
            elif character != ";":
                match = _LABEL.match(self.text, self.position)
                if match:
                    self.position = match.end()
                    self.label(match[1], function)
                else:
                    self.instruction(function)

    def labels_of_scope(self) -> dict[str, str]:
        """Labels of the block that opens here: a branch may precede its label."""
        labels, depth = {}, 1
        for match in _BRACE_OR_LABEL.finditer(self.text, self.position):
            depth += {"{": 1, "}": -1}.get(match.group(), 0)
            if depth == 0:
                break
            if match[1] and depth == 1:
                labels[match[1]] = f"{match[1]}@{self.scope_count}"
        return labels

    def label(self, name: str, function: Function) -> None:
        self.skip_space()
        if self.starts(".branchtargets"):
            names = self.until(";", "a .branchtargets list").removeprefix(".branchtargets")
            function.branch_targets[name] = tuple(
                self.symbol(n.strip(), self.position).name for n in names.split(",")
            )
        elif self.starts(".callprototype"):
            self.until(";", "a .callprototype")
        else:
            function.labels[self.symbol(name, self.position).name] = len(function.instructions)

    def check_labels(self, function: Function) -> None:
        for instruction in function.instructions:
            if instruction.name != "bra":
                continue
            target = instruction.operands[0] if instruction.operands else None
            if not isinstance(target, Symbol) or target.name not in function.labels:
                raise PtxSyntaxError("a branch to a label that does not exist", instruction.line)
        if not {n for names in function.branch_targets.values() for n in names} <= set(
            function.labels
        ):
            raise self.error("a list of branches to a label that does not exist")

    def directive(self, function: Function) -> None:
        start = self.position
        if self.starts(".loc ") or self.starts(".loc\t"):
            self.read_location(self.take(_LOC, "cannot read"))
            return
        text = self.until(";", "a declaration").strip()
        if text.startswith(".pragma"):
            return
        if text.startswith(".reg"):
            self.declare_registers(text, function, start)
            return
        variable = self.variable(text, start)
        if len(self.symbols.maps) > 1:
            self.symbols[variable.name] = unique = f"{variable.name}@{self.scope_count}"
            self.operands = {}
            variable = replace(variable, name=unique)
        function.variables.append(variable)

    def declare_registers(self, text: str, function: Function, start: int) -> None:
        match = _REGISTERS.match(text)
        names = (
            [_REGISTER_NAMES.match(item.strip()) for item in match[2].split(",")] if match else []
        )
        if match is None or match[1] not in TYPE_NAMES or not all(names):
            raise self.error(f"cannot read the register declaration {text[:80]!r}", start)
        suffix = "" if len(self.registers.maps) == 1 else f"@{self.scope_count}"
        for name, count in (item.groups() for item in names):
            declared = [f"{name}{i}" for i in range(int(count))] if count else [name]
            unique = [register + suffix for register in declared]
            self.registers.update(zip(declared, unique, strict=True))
            function.registers.update(dict.fromkeys(unique, match[1]))
        self.operands = {}

    def read_location(self, match: re.Match[str]) -> None:
        numbers = [int(n) for n in match.groups() if n is not None]
        key, call = tuple(numbers[:3]), tuple(numbers[3:])
        file, line, column = key
        if line == 0:
            return
        # nvcc repeats a line of an inlined function without its call: keep the call.
        if call or key not in self.raw_locations:
            parent = None
            if call:
                parent = self.raw_locations.get(call) or Location(self.file(call[0]), *call[1:])
            self.raw_locations[key] = Location(self.file(file), line, column, parent)
        self.location = self.raw_locations[key]

    def file(self, index: int) -> str:
        # The .file directives stand at the end of the text, after the functions that use them.
        if not self.files:
            self.files = {
                int(m[1]): m[2]
                for m in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', self.text, re.M)
            }
        if index not in self.files:
            raise self.error(
                f"a .loc names file {index}, but no .file {index} follows: the text is cut off"
            )
        return self.files[index]

    # -- instructions ------------------------------------------------------------------------------

    def instruction(self, function: Function) -> None:
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
            types = tuple(m for m in modifiers if m in OPCODE_TYPES)
            self.opcodes[opcode] = (name, tuple(modifiers), types)
        name, modifiers, types = self.opcodes[opcode]
        operands = []
        position, rest = 0, rest.strip()
        while position < len(rest):
            item = _OPERAND.match(rest, position)
            if item is None:
                raise self.error(f"cannot read the operands {rest[:80]!r}", start)
            operands.append(self.operand(item[1].strip(), start))
            position = item.end()
        line = self.line(start)
        function.instructions.append(
            Instruction(opcode, tuple(operands), guard, line, self.location, name, modifiers, types)
        )

    def register(self, name: str, start: int) -> str:
        if name not in self.registers:
            raise self.error(f"the register {name} is not declared", start)
        return self.registers[name]

    def operand(self, text: str, start: int) -> Operand:
        cached = self.operands.get(text)
        if cached is None:
            cached = self.operands[text] = self.read_operand(text, start)
        return cached

    def read_operand(self, text: str, start: int) -> Operand:
        if not text:
            raise self.error("an operand is missing", start)
        first, inner = text[0], text[1:-1].strip()
        if first == "{":
            return Vector(self.operand_list(inner, start))
        if first == "(":
            return Arguments(self.operand_list(inner, start) if inner else ())
        if first == "[":
            # With a comma, coordinates of a texture: no instruction that is known has them.
            return Arguments(()) if "," in text else self.address(inner, start)
        if text == "_":
            return Sink()
        if first == "!":
            return Register(self.register(text[1:].strip(), start), negated=True)
        if "|" in text:
            return Pair(*(self.operand(t.strip(), start) for t in text.split("|", 1)))
        if _NUMBER.match(text):
            return self.number(text)
        if text in _CONSTANTS:
            return Immediate(_CONSTANTS[text])
        if text in self.registers:
            return Register(self.registers[text])
        return Special(text) if _SPECIAL.match(text) else self.symbol(text, start)

    def operand_list(self, text: str, start: int) -> tuple[Operand, ...]:
        return tuple(self.operand(t.strip(), start) for t in text.split(","))

    def symbol(self, text: str, start: int) -> Symbol:
        name, offset = _base_and_offset(text)
        generic = re.match(r"generic\((.*)\)$", name)
        name = generic[1] if generic else name
        if not _WHOLE_NAME.match(name):
            raise self.error(f"cannot read the operand {text[:60]!r}", start)
        if name.startswith("%"):
            raise self.error(f"the register {name} is not declared", start)
        return Symbol(self.symbols.get(name, name), offset)

    def address(self, text: str, start: int) -> Address:
        base, offset = _base_and_offset(text)
        operand = self.operand(base, start)
        if isinstance(operand, Symbol):
            return Address(operand, operand.offset + offset)
        if not isinstance(operand, Register | Immediate):
            raise self.error(f"cannot read the address [{text}]", start)
        return Address(operand, offset)

    def number(self, text: str) -> Immediate:
        negative, digits = text.startswith("-"), text.lstrip("-")
        if digits[:2] in ("0f", "0F", "0d", "0D"):
            bits = 4 * (len(digits) - 2)
            return Immediate(int(digits[2:], 16) ^ (negative << (bits - 1)), bits)
        return Immediate(float(text) if "." in text else _integer(text))


def _base_and_offset(text: str) -> tuple[str, int]:
    match = _SYMBOL_PLUS.match(text)
    if match is None:
        return text, 0
    offset = _integer(match[3])
    return match[1], -offset if match[2] == "-" else offset
