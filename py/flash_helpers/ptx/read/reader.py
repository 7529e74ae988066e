"""Reads PTX text into records (PTX ISA 9.0, "Syntax" and "State Spaces, Types, and Variables")."""

from __future__ import annotations

import bisect
import math
import re
import string
import struct
from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from flash_helpers.ptx.errors import PtxSyntaxError
from flash_helpers.ptx.read.constants import NAMED, evaluate
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
    StoredAddress,
    Symbol,
    Variable,
    Vector,
)
from flash_helpers.ptx.read.types import OPCODE_TYPES, SCALAR_TYPES, TYPE_NAMES, size_of

_DEEPEST = 256
"""Braces within braces, and calls inlined into each other, at most."""
_MOST_REGISTERS = 1 << 18
"""Limit for one function: each takes memory before anything runs."""
_LONGEST = 10_000
"""Characters of an instruction."""
_WIDEST = 1 << 20
"""Bytes that a variable is aligned to."""

_INTEGER = r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?"
_NAME = r"[A-Za-z_$%][\w$]*"
_LINKAGE_AND_KIND = r"((?:\.(?:visible|extern|weak|common)\s+)*)\.(entry|func)\b"
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_$%")


def _pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    # PTX is ASCII: no other digits and letters count as such.
    return re.compile(text, re.ASCII | flags)


_COMMENT = _pattern(r'("[^"\n]*")|//[^\n]*|/\*.*?(?:\*/|(\Z))', re.DOTALL)
_SPACE = _pattern(r"\s+")
_VERSION = _pattern(r"\.version\s+(\d+\.\d+)")
_TARGET = _pattern(r"\.target\s+(\w+)(?:\s*,\s*\w+)*")
_ADDRESS_SIZE = _pattern(r"\.address_size\s+(\d+)")
_FILE = _pattern(r'\.file\s+(\d{1,9})\s+"([^"\n]*)"(?:\s*,\s*\d+){0,2}')
_OUTLINE = _pattern(r'"[^"\n]*"|::|[{}:]')
_LABEL = _pattern(rf"({_NAME})\s*:(?!:)")
_LOC = _pattern(
    r"\.loc\s+(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})"
    r"(?:\s*,\s*function_name\s+[\w$.+ \t]+,\s*inlined_at\s+(\d{1,9})\s+(\d{1,9})\s+(\d{1,9}))?"
)
_INSTRUCTION = _pattern(r"(?:@\s*(!?)\s*([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = _pattern(r"\s*(\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s][^,]*)\s*(?:,|$)")
# Says which variables an address may be of, not which bytes.
_UNIFIED = _pattern(r"(?<=\])\s*\.unified\b")
_NUMBER = _pattern(
    rf"(?:-?0[fF][0-9a-fA-F]{{8}}|-?0[dD][0-9a-fA-F]{{16}}|-?\d+\.\d*(?:[eE][-+]?\d+)?|{_INTEGER})$"
)
_WHOLE_INTEGER = _pattern(rf"{_INTEGER}$")
_WHOLE_NAME = _pattern(rf"{_NAME}$")
_NAME_OF_REGISTER = _pattern(rf"!\s*(?!WARP_SZ\b){_NAME}")
_TENSOR = _pattern(r"([^,{]*),\s*\{([^{}]*)\}\s*$")
_GENERIC = _pattern(r"generic\s*\(\s*([^()]*?)\s*\)")
_SYMBOL_PLUS = _pattern(r"([A-Za-z_$%][\w$.]*)\s*([+-].*)$", re.DOTALL)
_REGISTERS = _pattern(r"\.reg\s*(?:\.(v2|v4)\s*)?\.(\w+)\s+(.*)", re.DOTALL)
_REGISTER_NAMES = _pattern(r"([\w$%]+)\s*(?:<\s*(\d{1,9})\s*>)?$")
# Of declarations whose white space is single spaces.
_POINTER = _pattern(r"\.ptr( \.(?:global|shared|const|local))?( \.align \d+)?")
_ATTRIBUTE = _pattern(r"\.(\w+)(?: (\d+))?")
_VARIABLE = _pattern(
    r"(?P<attributes>\.\w+(?: \d+)?(?: ?\.\w+(?: \d+)?)*) (?P<name>[\w$%]+)"
    r"(?P<dimensions>(?: ?\[ ?\w* ?\])*)(?: ?= ?(?P<initial>.*))?$"
)
_DECLARED_NAME = _pattern(r"(?:\.\w+ ?(?:\d+ |\([^)]*\) ?)?)+([A-Za-z_$%][\w$]*)")
_PART_OF_ADDRESS = _pattern(r"(0[xX][0-9a-fA-F]+)\s*\((.*)\)$")
# Managed memory is global memory that the host sees too; unified addresses are those of one device.
_ATTRIBUTES = (
    r"\.attribute\s*\(\s*(?:\.managed|\.unified\s*\([^()]*\))"
    r"(?:\s*,\s*(?:\.managed|\.unified\s*\([^()]*\)))*\s*\)"
)
_ANY_ATTRIBUTES = _pattern(_ATTRIBUTES)
_ALIAS = _pattern(r"\.alias\s+([\w$%]+)\s*,\s*([\w$%]+)\s*;")
_FUNCTION = _pattern(rf"{_LINKAGE_AND_KIND}\s*(?:{_ATTRIBUTES}\s*)?(\([^)]*\))?\s*([\w$%]+)")
_HEAD = _pattern(_LINKAGE_AND_KIND)
_HEAD_OF_LINE = _pattern(rf"^[ \t]*{_LINKAGE_AND_KIND}", re.MULTILINE)
_PRAGMA = r'\.pragma\s+"[^"\n]*"(?:\s*,\s*"[^"\n]*")*\s*;'
_HEAD_END = _pattern(rf'{_PRAGMA}|"[^"\n]*"|[{{;]')
_HEAD_PRAGMA = _pattern(_PRAGMA)
_FUNCTION_DIRECTIVE = _pattern(r"\.(\w+)([\s\d,]*)")
_SPACES = frozenset({"shared", "local", "const", "global", "param", "reg"})
# PTX ISA, "Texture Sampler and Surface Types"
_OPAQUE = {"surfref": "surfaces", "texref": "textures", "samplerref": "samplers of textures"}
_LINKAGES = frozenset({"visible", "extern", "weak", "common"})
_LANES = {"v2": 2, "v4": 4}
_SPECIAL_NAMES = (
    r"n?tid|n?ctaid|laneid|n?warpid|n?smid|gridid|clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?"
    r"|lanemask_(?:eq|le|lt|ge|gt)|(?:dynamic|total|aggr)_smem_size|n?clusterid"
    r"|cluster_n?cta(?:id|rank)|is_explicit_cluster|current_graph_exec"
    r"|envreg(?:[12]?\d|3[01])|pm[0-7](?:_64)?|reserved_smem_offset_(?:begin|end|cap|[01])"
)
_SPECIAL = _pattern(rf"%(?:{_SPECIAL_NAMES})(?:\.[xyzw])?$")
_EXPRESSION = _pattern(r"[-+~!(\d]|(?:WARP_SZ)\b")
# Names of the elements of a vector ("Vectors as Operands").
_ELEMENTS = ("xr", "yg", "zb", "wa")
_WRITTEN_OUT = {"shared::cta": "shared", "param::entry": "param", "param::func": "param"}
_Named = TypeVar("_Named", Function, Variable)
_BRACKETS = {"{": "}", "[": "]"}


def read_ptx(text: str) -> Module:
    """Reads a PTX module.

    A part of a function or of a variable's declaration that cannot be read becomes its `problem`;
    the rest of the module is read all the same.

    Raises PtxSyntaxError, which names the line, for a text that is cut off, has no `.version` and
    `.target`, or holds something else between functions and variables.
    """
    return _Reader(text).module()


class _Reader:
    def __init__(self, text: str) -> None:
        # Comments become spaces of equal line count, so that offsets still give line numbers.
        self.text = _COMMENT.sub(_blank, text)
        self.position = 0
        self.end = len(self.text)
        """The part that is being read: the whole text, or a function's head or body."""
        self.line_starts = [0] + [m.end() for m in re.finditer("\n", self.text)]
        self.function_starts = [m.start() for m in _HEAD_OF_LINE.finditer(self.text)]
        # The .file directives stand at the end of the text, after the functions that use them.
        self.files = {int(m[1]): m[2] for m in _FILE.finditer(self.text)}
        self.lost_file: PtxSyntaxError | None = None
        self.raw_locations: dict[tuple[int, ...], Location] = {}
        self.location: Location | None = None
        # Unique names of what is declared between braces, the innermost braces first.
        self.registers: ChainMap[str, str] = ChainMap()
        self.vectors: ChainMap[str, Vector] = ChainMap()
        self.symbols: ChainMap[str, str] = ChainMap()
        self.scopes: list[int] = []
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
        """Moves to the next token; False at the end of what is being read."""
        match = _SPACE.match(self.text, self.position)
        if match:
            self.position = match.end()
        return self.position < self.end

    def starts(self, word: str) -> bool:
        return self.text.startswith(word, self.position)

    def until(self, character: str, what: str) -> str:
        end = self.text.find(character, self.position, self.end)
        if end < 0:
            whole = "text" if self.end == len(self.text) else "function"
            raise self.error(f"the {whole} ends inside {what}: no {character!r} follows")
        text = self.text[self.position : end]
        self.position = end + 1
        return text

    def take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Moves past a token that must come next."""
        match = pattern.match(self.text, self.position)
        if match is None:
            raise self.error(f"{what} {self.ahead()!r}")
        self.position = match.end()
        return match

    def ahead(self) -> str:
        """The beginning of the rest of the line."""
        return self.text[self.position : self.position + 60].partition("\n")[0]

    def integer(self, text: str, position: int) -> int:
        """The value of an integer literal (decimal, hexadecimal, octal or binary), which has 64
        bits (PTX ISA 9.0, "Integer Constants")."""
        # Python refuses to read numbers of thousands of digits.
        if _WHOLE_INTEGER.match(text) and len(text) < 70:
            value = int(re.sub(r"^(-?)0(?=\d)", r"\g<1>0o", text.removesuffix("U")), 0)
            if -(1 << 63) <= value < 1 << 64:
                return value
        raise self.error(f"{text[:80]!r} is no integer of at most 64 bits", position)

    # -- module ------------------------------------------------------------------------------------

    def module(self) -> Module:
        version = target = ""
        functions: dict[str, Function] = {}
        variables: dict[str, Variable] = {}
        aliases: dict[str, str] = {}
        while self.skip_space():
            if self.starts(".version"):
                version = self.take(_VERSION, "cannot read")[1]
            elif self.starts(".target"):
                target = self.take(_TARGET, "cannot read")[1]
            elif self.starts(".address_size"):
                if self.take(_ADDRESS_SIZE, "cannot read")[1] != "64":
                    raise self.error("only 64-bit addresses are supported")
            elif self.starts(".file"):
                self.take(_FILE, "an index and a quoted path are due in")
            elif self.starts(".section"):
                self.until("{", "a section")
                self.until("}", "a section")
            elif self.starts(".pragma"):
                self.until(";", "a directive")
            elif self.starts(".alias"):
                alias, aliased = self.take(_ALIAS, "two functions are due in").groups()
                aliases[alias] = aliased
            elif _HEAD.match(self.text, self.position):
                function = self.function()
                if function is not None:
                    functions[function.name] = _once(function, functions)
            elif self.starts("."):
                variable = self.module_variable()
                known = variables.get(variable.name)
                if known is None or known.external:
                    variables[variable.name] = variable
                elif not variable.external:
                    variables[variable.name] = _once(variable, variables)
            else:
                raise self.error(f"not a PTX directive: {self.ahead()!r}")
        if not version or not target:
            raise PtxSyntaxError("no .version and .target: this is not a PTX module", 1)
        if self.lost_file is not None:
            raise self.lost_file
        for alias, aliased in aliases.items():
            if aliased not in functions:
                raise self.error(f".alias of {aliased}, which is no function of the text")
            functions[alias] = _once(replace(functions[aliased], name=alias), functions)
        return Module(version, target, functions, variables)

    def module_variable(self) -> Variable:
        start = self.position
        text = self.until(";", "a variable")
        try:
            return self.variable(text, start)
        except PtxSyntaxError as error:
            name = _DECLARED_NAME.match(" ".join(text.split()))
            if name is None:
                raise
            problem = PtxSyntaxError(f"{error.message} (in {name[1]})", error.line)
            return Variable(name[1], "global", "b8", 0, 1, line=error.line, problem=problem)

    def variable(self, text: str, start: int) -> Variable:
        """A declaration, without its semicolon."""
        text = " ".join(_ANY_ATTRIBUTES.sub(" ", text).split())
        match = _VARIABLE.match(text)
        if match is None:
            raise self.error(f"cannot read the declaration {text[:80]!r}", start)
        attributes = _ATTRIBUTE.findall(match["attributes"])
        words = [word for word, _ in attributes]
        spaces = [w for w in words if w in _SPACES]
        types = [w for w in words if w in TYPE_NAMES and (w != "pred" or spaces == ["reg"])]
        lanes, alignment = 1, 0
        for word, number in attributes:
            if word == "align" and number:
                alignment = self.integer(number, start)
                if not 1 <= alignment <= _WIDEST or alignment & (alignment - 1):
                    message = f"an alignment of {number} is no power of two up to {_WIDEST:,}"
                    raise self.error(message, start)
            elif word in _LANES and not number:
                lanes = _LANES[word]
            elif word in _OPAQUE:
                told = f"{_OPAQUE[word]} are not simulated, as in {text[:80]!r}"
                raise self.error(told, start)
            elif number or word not in {*spaces, *types, *_LINKAGES}:
                raise self.error(f"the attribute .{word} is not known in {text[:80]!r}", start)
        if len(spaces) != 1 or len(types) != 1:
            raise self.error(f"a declaration needs a space and a type: {text[:80]!r}", start)
        (space,), (type_name,) = spaces, types
        sizes = re.findall(r"\[ ?(\w*) ?\]", match["dimensions"])
        if not all(sizes[1:]):
            raise self.error(f"only the first size may be left out: {text[:80]!r}", start)
        count = math.prod((self.integer(size or "0", start) for size in sizes), start=lanes)
        element = size_of(type_name)
        initial: bytes | None = None
        addresses: tuple[StoredAddress, ...] = ()
        if match["initial"] is not None:
            if space not in ("global", "const"):
                raise self.error(f"a variable in .{space} has no initial value", start)
            initial, addresses = self.initial(match["initial"], type_name, count, start)
            count = count or len(initial) // element
        return Variable(
            name=match["name"],
            space=space,
            type=type_name,
            size=element * count,
            alignment=alignment or element * lanes,
            initial=initial,
            addresses=addresses,
            external="extern" in words,
            line=self.line(start),
        )

    def initial(
        self, text: str, type_name: str, count: int, start: int
    ) -> tuple[bytes, tuple[StoredAddress, ...]]:
        """The bytes of an initial value, and the places of addresses in them. `count`: number of
        elements; 0 for as many as the text has."""
        values = [v.strip() for v in re.findall(r"[^{},\s][^{},]*", text)]
        if count and len(values) > count:
            raise self.error(f"{len(values)} initial values for {count} elements", start)
        if text.count("{") > 1 and len(values) != count:
            raise self.error("rows of initial values that leave out elements", start)
        size, data, addresses = size_of(type_name), bytearray(), []
        for value in values:
            if _EXPRESSION.match(value) and not _PART_OF_ADDRESS.match(value):
                data += self.initial_number(value, type_name, start)
            else:
                addresses.append(self.stored_address(value, len(data), size, start))
                data += bytes(size)
        return bytes(data), tuple(addresses)

    def initial_number(self, text: str, type_name: str, start: int) -> bytes:
        size = size_of(type_name)
        is_literal = _NUMBER.match(text)
        number = self.number(text, start) if is_literal else Immediate(self.constant(text, start))
        kind = SCALAR_TYPES[type_name].kind if type_name in SCALAR_TYPES else "b"
        fits = type(number.value) is int and kind in "sub"
        if number.float_bits:
            fits = number.float_bits == 8 * size and kind in "fb"
        elif kind == "f" and isinstance(number.value, float):
            with suppress(OverflowError):
                return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], number.value)
        if not fits:
            raise self.error(f"{text} is no initial value of a .{type_name}", start)
        return (int(number.value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def stored_address(self, text: str, offset: int, size: int, start: int) -> StoredAddress:
        part = _PART_OF_ADDRESS.match(text)
        if part is None:
            return StoredAddress(offset, size, self.symbol(text, start))
        mask = self.integer(part[1], start)
        shift = max((mask & -mask).bit_length() - 1, 0)
        if mask >> shift != (1 << 8 * size) - 1:
            raise self.error(f"{part[1]} is no mask of {8 * size} bits of an address", start)
        return StoredAddress(offset, size, self.symbol(part[2], start), shift)

    # -- functions ---------------------------------------------------------------------------------

    def function(self) -> Function | None:
        """The function that begins here; None if it is only declared."""
        start = self.position
        head = self.take(_FUNCTION, "a function needs a name:")
        linkage, kind, results, name = head.groups()
        i = bisect.bisect_right(self.function_starts, start)
        limit = self.function_starts[i] if i < len(self.function_starts) else len(self.text)
        head_end = self.head_end(limit)
        if head_end < limit and self.text[head_end] == ";":
            self.position = head_end + 1
            return None
        end, labels = self.closing_brace(head_end, limit)
        if end == len(self.text):
            self.position = end
            if head_end == end:
                raise self.error(f"the text ends inside the head of {name}")
            raise self.error(f"the text ends inside {name}: a closing brace is missing")
        function = Function(name, kind == "entry", (), (), self.line(start), {})
        is_closed = end < limit
        try:
            if not is_closed:
                raise self.error("a closing brace is missing", start)
            self.end = head_end
            function = self.head(function, results, start)
            if "extern" in linkage:
                raise self.error("an external function has no body", start)
            self.position, self.end = head_end + 1, end
            self.body(function, labels)
        except PtxSyntaxError as error:
            problem = PtxSyntaxError(f"{error.message} (in {name})", error.line)
            function = replace(function, problem=problem)
        self.position, self.end = end + is_closed, len(self.text)
        return function

    def head_end(self, limit: int) -> int:
        """The end of a function's head: a brace, or the semicolon of a declaration; `limit` without
        either."""
        tokens = _HEAD_END.finditer(self.text, self.position, limit)
        return next((t.start() for t in tokens if t[0] in "{;"), limit)

    def closing_brace(self, start: int, limit: int) -> tuple[int, dict[int, list[str]]]:
        """The position at which the brace at `start` is closed, `limit` if it is not. Also the
        labels of each block inside, by the position of its brace, since a branch may precede its
        label."""
        opened: list[int] = []
        labels: defaultdict[int, list[str]] = defaultdict(list)
        for token in _OUTLINE.finditer(self.text, start, limit):
            if token[0] == "{":
                opened.append(token.start())
            elif token[0] == "}":
                if len(opened) == 1:
                    return token.start(), labels
                opened.pop()
            elif token[0] == ":" and len(opened) > 1:
                labels[opened[-1]].append(self.name_before(token.start()))
        return limit, labels

    def name_before(self, end: int) -> str:
        while self.text[end - 1].isspace():
            end -= 1
        start = end
        while self.text[start - 1] in _NAME_CHARACTERS:
            start -= 1
        return self.text[start:end]

    def head(self, function: Function, results: str | None, start: int) -> Function:
        """The function with its parameters and directives, which stand between its name and its
        body."""
        returned = self.variables(results or "", start)
        parameters = function.parameters
        if self.skip_space() and self.starts("("):
            self.position += 1
            parameters = self.variables(self.until(")", "a parameter list"), start)
        for variable in (*returned, *parameters):
            if variable.space == "reg":
                function.registers[variable.name] = variable.type
        directives: dict[str, tuple[int, ...]] = {}
        while self.skip_space():
            if self.starts(".pragma"):
                self.take(_HEAD_PRAGMA, "cannot read the head:")
                continue
            match = self.take(_FUNCTION_DIRECTIVE, "cannot read the head:")
            numbers = re.findall(r"\d+", match[2])
            directives[match[1]] = tuple(self.integer(n, start) for n in numbers)
        return replace(function, results=returned, parameters=parameters, directives=directives)

    def variables(self, text: str, start: int) -> tuple[Variable, ...]:
        """A list of parameters or results."""
        text = " ".join(text.strip("()").split())
        # `.ptr .global .align 16` describes what a parameter points to, not the parameter.
        text = _POINTER.sub("", text)
        return tuple(self.variable(p, start) for p in text.split(",")) if text else ()

    def body(self, function: Function, labels: Mapping[int, Sequence[str]]) -> None:
        self.registers = ChainMap({name: name for name in function.registers})
        self.vectors, self.symbols = ChainMap(), ChainMap()
        self.scopes, self.scope_count, self.operands = [], 0, {}
        self.location, self.raw_locations = None, {}
        while self.skip_space():
            start = self.position
            character = self.text[start]
            if character in "{};":
                self.position += 1
            if character == "{":
                self.open_scope(labels.get(start, ()))
            elif character == "}":
                self.registers, self.symbols = self.registers.parents, self.symbols.parents
                self.vectors = self.vectors.parents
                self.scopes.pop()
                self.operands = {}
            elif character == ".":
                self.directive(function)
            elif character != ";":
                match = _LABEL.match(self.text, start)
                if match:
                    self.position = match.end()
                    self.label(match[1], function)
                else:
                    self.instruction(function)
        self.check_labels(function)

    def open_scope(self, labels: Sequence[str]) -> None:
        if len(self.scopes) == _DEEPEST:
            raise self.error(f"more than {_DEEPEST} braces within braces")
        self.scope_count += 1
        self.scopes.append(self.scope_count)
        self.registers, self.vectors = self.registers.new_child(), self.vectors.new_child()
        self.symbols = self.symbols.new_child({name: self.unique(name) for name in labels})
        self.operands = {}

    def unique(self, name: str) -> str:
        """A name that no other block of the function has."""
        return f"{name}@{self.scopes[-1]}" if self.scopes else name

    def label(self, name: str, function: Function) -> None:
        start = self.position
        self.skip_space()
        if self.starts(".branchtargets"):
            names = self.until(";", "a .branchtargets list").removeprefix(".branchtargets")
            function.branch_targets[name] = tuple(
                self.symbol(n.strip(), start).name for n in names.split(",")
            )
        elif self.starts(".callprototype") or self.starts(".calltargets"):
            self.until(";", "what a call may reach")
        else:
            name = self.symbol(name, start).name
            if name in function.labels:
                raise self.error(f"the label {name} stands in two places", start)
            function.labels[name] = len(function.instructions)

    def check_labels(self, function: Function) -> None:
        for instruction in function.instructions:
            if instruction.name != "bra":
                continue
            target = instruction.operands[0] if len(instruction.operands) == 1 else None
            if (
                not isinstance(target, Symbol)
                or target.offset
                or target.name not in function.labels
            ):
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
        if self.scopes:
            self.symbols[variable.name] = self.unique(variable.name)
            self.operands = {}
        function.variables.append(replace(variable, name=self.unique(variable.name)))

    def declare_registers(self, text: str, function: Function, start: int) -> None:
        match = _REGISTERS.match(text)
        names = (
            [_REGISTER_NAMES.match(item.strip()) for item in match[3].split(",")] if match else []
        )
        if match is None or match[2] not in TYPE_NAMES or not all(names):
            raise self.error(f"cannot read the register declaration {text[:80]!r}", start)
        for name, count in (item.groups() for item in names if item):
            if int(count or 1) + len(function.registers) > _MOST_REGISTERS:
                raise self.error(f"more than {_MOST_REGISTERS:,} registers in one function", start)
            declared = [f"{name}{i}" for i in range(int(count))] if count else [name]
            if match[1]:
                declared = self.vectors_of(declared, int(match[1][1]))
            unique = [self.unique(register) for register in declared]
            if not function.registers.keys().isdisjoint(unique):
                raise self.error(f"registers declared twice: {text[:80]!r}", start)
            self.registers.update(zip(declared, unique, strict=True))
            function.registers.update(dict.fromkeys(unique, match[2]))
        self.operands = {}

    def vectors_of(self, names: Sequence[str], count: int) -> list[str]:
        """The elements of vectors of registers, each under its first name."""
        for name in names:
            elements = [Register(self.unique(f"{name}.{e[0]}")) for e in _ELEMENTS[:count]]
            self.vectors[name] = Vector(tuple(elements))
            for register, letters in zip(elements, _ELEMENTS, strict=False):
                self.registers[f"{name}.{letters[1]}"] = register.name
        return [f"{name}.{e[0]}" for name in names for e in _ELEMENTS[:count]]

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
                parent = self.raw_locations.get(call) or Location(
                    self.file(call[0]), call[1], call[2]
                )
                if len(parent.frames()) > _DEEPEST:
                    raise self.error(f"more than {_DEEPEST} calls inlined into each other")
            self.raw_locations[key] = Location(self.file(file), line, column, parent)
        self.location = self.raw_locations[key]

    def file(self, index: int) -> str:
        if index not in self.files and self.lost_file is None:
            self.lost_file = self.error(
                f"a .loc names file {index}, but no .file {index} follows: the text is cut off"
            )
        return self.files.get(index, "")

    # -- instructions ------------------------------------------------------------------------------

    def instruction(self, function: Function) -> None:
        start = self.position
        text = self.until(";", "an instruction")
        match = _INSTRUCTION.match(text)
        if match is None or len(text) > _LONGEST:
            raise self.error(f"cannot read the instruction {text.strip()[:80]!r}", start)
        negated, guard_name, opcode, rest = match.groups()
        guard = None
        if guard_name is not None:
            guard = Register(self.register(guard_name, start), bool(negated))
            if function.registers[guard.name] != "pred":
                raise self.error(f"the guard {guard_name} is no predicate", start)
        if opcode not in self.opcodes:
            name, *written = re.split(r"\.(?!:)", opcode)
            modifiers = tuple(_WRITTEN_OUT.get(m, m) for m in written)
            types = tuple(m for m in modifiers if m in OPCODE_TYPES)
            self.opcodes[opcode] = (name, modifiers, types)
        name, modifiers, types = self.opcodes[opcode]
        operands = []
        if ".unified" in rest:
            rest = _UNIFIED.sub("", rest)
        position, rest = 0, rest.strip()
        while position < len(rest):
            item = _OPERAND.match(rest, position)
            if item is None:
                raise self.error(f"cannot read the operands {rest[:80]!r}", start)
            is_list = name == "call" and item[1][0] == "("
            read = self.arguments if is_list else self.operand
            operands.append(read(item[1].strip(), start))
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
        first, inner = text[0], text[1:-1].strip()
        if first not in _BRACKETS:
            if "|" in text and "||" not in text and not _EXPRESSION.match(text):
                return Pair(*(self.simple(t, start) for t in text.split("|", 1)))
            return self.simple(text, start)
        if text[-1] != _BRACKETS[first] or len(text) == 1:
            raise self.error(f"cannot read the operand {text[:60]!r}", start)
        if first == "{":
            return Vector(self.operand_list(inner, start))
        if "," not in text:
            return self.address(inner, start)
        tensor = _TENSOR.match(inner)
        if tensor is None:
            # A texture with its sampler: no instruction that is known has that.
            return Arguments(())
        address = self.address(tensor[1].strip(), start)
        return replace(address, coordinates=self.operand_list(tensor[2], start))

    def arguments(self, text: str, start: int) -> Arguments:
        """The arguments or results of a call."""
        inner = text[1:-1].strip()
        if text[-1] != ")":
            raise self.error(f"cannot read the operand {text[:60]!r}", start)
        return Arguments(self.operand_list(inner, start) if inner else ())

    def simple(self, text: str, start: int) -> Operand:
        """An operand without brackets: a register, a vector of them, a number or a symbol."""
        text = text.strip()
        if not text:
            raise self.error("an operand is missing", start)
        if text == "_":
            return Sink()
        if text[0] == "!" and _NAME_OF_REGISTER.match(text):
            return Register(self.register(text[1:].strip(), start), negated=True)
        if _NUMBER.match(text):
            return self.number(text, start)
        if text in self.registers:
            return Register(self.registers[text])
        if text in self.vectors:
            return self.vectors[text]
        if _EXPRESSION.match(text):
            return Immediate(self.constant(text, start))
        return Special(text) if _SPECIAL.match(text) else self.symbol(text, start)

    def constant(self, text: str, start: int) -> int | float:
        """The value of a constant expression."""
        try:
            return evaluate(text)
        except ValueError as error:
            raise self.error(f"cannot read the operand {text[:60]!r}: {error}", start) from None

    def operand_list(self, text: str, start: int) -> tuple[Operand, ...]:
        return tuple(self.simple(t, start) for t in text.split(","))

    def symbol(self, text: str, start: int) -> Symbol:
        name, offset = self.base_and_offset(_GENERIC.sub(r"\1", text), start)
        if not _WHOLE_NAME.match(name):
            raise self.error(f"cannot read the operand {text[:60]!r}", start)
        if name.startswith("%"):
            raise self.error(f"the register {name} is not declared", start)
        return Symbol(self.symbols.get(name, name), offset)

    def address(self, text: str, start: int) -> Address:
        base, offset = self.base_and_offset(text, start)
        operand = self.simple(base, start)
        if isinstance(operand, Symbol):
            return Address(operand, operand.offset + offset)
        if not isinstance(operand, Register | Immediate):
            raise self.error(f"cannot read the address [{text[:60]}]", start)
        return Address(operand, offset)

    def base_and_offset(self, text: str, start: int) -> tuple[str, int]:
        match = _SYMBOL_PLUS.match(text)
        if match is None or match[1] in NAMED:
            return text, 0
        offset = self.constant(match[2], start)
        if isinstance(offset, float):
            raise self.error(f"an offset of floating point: {text[:60]!r}", start)
        return match[1], offset

    def number(self, text: str, start: int) -> Immediate:
        negative, digits = text.startswith("-"), text.lstrip("-")
        if digits[:2] in ("0f", "0F", "0d", "0D"):
            bits = 4 * (len(digits) - 2)
            return Immediate(int(digits[2:], 16) ^ (negative << (bits - 1)), bits)
        return Immediate(float(text) if "." in text else self.integer(text, start))


def _blank(match: re.Match[str]) -> str:
    """White space instead of a comment; strings stay unchanged."""
    if match[2] is not None:
        line = 1 + match.string.count("\n", 0, match.start())
        raise PtxSyntaxError("the text ends inside a comment: no '*/' follows", line)
    return match[1] or "\n" * match.group().count("\n") or " "


def _once(found: _Named, known: Mapping[str, _Named]) -> _Named:
    """The declaration found, with a problem if its name is taken."""
    if found.name not in known:
        return found
    message = f"{found.name} is defined twice, first at line {known[found.name].line}"
    return replace(found, problem=PtxSyntaxError(message, found.line))
