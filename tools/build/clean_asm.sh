#!/usr/bin/env bash
# Strip from a SASS listing what moves when an instruction does, so that two can be compared by diff.
set -euo pipefail
export LC_ALL=C

usage() {
    cat <<'TEXT'
usage: clean_asm.sh [-o FILE] LISTING

Strip from a SASS listing what moves when an instruction does, so that two can be compared by diff:
addresses, encodings, source lines, live registers, sizes. Jumps go to labels, numbered in each
function from its start; labels that no instruction names are left out. LISTING is what nvdisasm,
cuobjdump -sass or tools/build/extract_sass.py print; - reads standard input. Registers stay as they
are: tools/analysis/compare_kernels.py --sass compares without their names.

  -o FILE   write there, whole or not at all, and not to standard output

examples:
  tools/build/clean_asm.sh before.sass > before.txt
  diff <(nvdisasm -c a.cubin | tools/build/clean_asm.sh -) \
       <(cuobjdump -sass b.cubin | tools/build/clean_asm.sh -)

exit status: 0 done, 2 wrong usage, or a file that is no listing
TEXT
}

fail() {
    echo "$1" >&2
    exit 2
}

output=
listing=
while [[ $# -gt 0 ]]; do
    case $1 in
    -h | --help)
        usage
        exit 0
        ;;
    -o)
        [[ $# -ge 2 ]] || fail "-o needs the name of a file"
        output=$2
        shift
        ;;
    -?*)
        usage >&2
        exit 2
        ;;
    *)
        [[ -z $listing ]] || fail "one listing at a time: $listing or $1"
        listing=$1
        ;;
    esac
    shift
done
if [[ -z $listing ]]; then
    usage >&2
    exit 2
fi

scratch=
temporary=$(mktemp -d)
trap 'rm -rf "$temporary" ${scratch:+"$scratch"}' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

name=$listing
if [[ $listing == - ]]; then
    name="standard input"
    cat > "$temporary/listing"
else
    # a pipe will do, as <(...) makes one
    [[ -r $listing && ! -d $listing ]] || fail "$listing cannot be read: name a listing"
    cat -- "$listing" > "$temporary/listing"
fi
if [[ $(head -c 4 "$temporary/listing" | od -An -tx1) == " 7f 45 4c 46" ]]; then
    fail "$name is an object file and no listing: tools/build/extract_sass.py makes one of it"
fi
if [[ $(tr -dc '\000' < "$temporary/listing" | wc -c) -ne 0 ]]; then
    fail "$name holds bytes that no listing does: name the text that nvdisasm or cuobjdump prints"
fi

# shellcheck disable=SC2016
program='
function base(text, parts) {
    sub(/^@[^ ]+ /, "", text)
    split(text, parts, /[ ;]/)
    return parts[1]
}

# the address that an instruction jumps to, without leading zeros; "" without one
function target(text, opcode) {
    opcode = base(text)
    if (opcode !~ /^(BRA|BSSY|WARPSYNC)(\.|$)/ && opcode !~ /^CALL\.REL/) return ""
    if (!match(text, /0x[0-9a-f]+;$/)) return ""
    return significant(substr(text, RSTART + 2, RLENGTH - 3))
}

function significant(digits) {
    sub(/^0+/, "", digits)
    return digits == "" ? "0" : digits
}

# gathers in `named` the labels that a line refers to
function note_names(text) {
    while (match(text, /\.L_[A-Za-z0-9_]+/)) {
        named[substr(text, RSTART, RLENGTH)] = 1
        text = substr(text, RSTART + RLENGTH)
    }
}

function rename(text, out, name) {
    out = ""
    while (match(text, /\.L_[A-Za-z0-9_]+/)) {
        name = substr(text, RSTART, RLENGTH)
        out = out substr(text, 1, RSTART - 1) (name in renamed ? renamed[name] : name)
        text = substr(text, RSTART + RLENGTH)
    }
    return out text
}

# the second half of an encoding
/^[ \t]*\/\* 0x/ { next }

{
    sub(/\r$/, "")
    address = ""
    if (match($0, /^[ \t]*\/\*[0-9a-f]+\*\//)) {
        address = substr($0, RSTART, RLENGTH)
        $0 = substr($0, RSTART + RLENGTH)
        gsub(/[^0-9a-f]/, "", address)
    }
    comment = $0 ~ /^[ \t]*\/\//
    # encodings and remarks end the line
    if (i = index($0, "//")) $0 = substr($0, 1, i - 1)
    if (i = index($0, "/* 0x")) $0 = substr($0, 1, i - 1)
    # hints such as (*"SpillRefill"*), which cuobjdump does not print
    if (index($0, "(*\"")) gsub(/ *\(\*"[^"]*"\*\)/, "")
    sub(/[ \t]+$/, "")
    if (comment && $0 == "") next
    if ($0 ~ /^[ \t]*\.size[ \t]/) next
    if ($0 ~ /^[ \t]*\.section[ \t]/) in_data = $0 !~ /\.section[ \t]+\.text/
    if ($0 ~ /\.section[ \t]+\.text/ || $0 ~ /^[ \t]*Function : /) functions++

    text = $0
    gsub(/[ \t]+/, " ", text)
    sub(/^ /, "", text)
    sub(/ ;$/, ";", text)
    if (!in_data && text ~ /^(@!?U?P[0-9T] )?[A-Z][A-Za-z0-9_.]*( [^;]*)?;$/) {
        instructions++
        kind[++n] = "instruction"
        line[n] = text
        goal[n] = target(text)
        if (goal[n] != "") wanted[functions, goal[n]] = 1
        if (address != "") at[n] = significant(address)
        note_names(text)
    } else if (!in_data && (address != "" && text !~ /^\./ || text ~ /;$/)) {
        print name " line " NR ": not an instruction, or one that is cut off: " substr(text, 1, 60) \
            > "/dev/stderr"
        failed = 1
        exit 2
    } else if (!in_data && text ~ /^\.L_[A-Za-z0-9_]+:$/) {
        kind[++n] = "label"
        line[n] = substr(text, 1, length(text) - 1)
    } else {
        if (text == "" && (n == 0 || line[n] == "")) next
        kind[++n] = "other"
        line[n] = $0
    }
    in_function[n] = functions
}

END {
    if (failed) exit 2
    if (!instructions) {
        print name " holds no SASS: name the text that nvdisasm, cuobjdump -sass or" \
            " extract_sass.py prints" > "/dev/stderr"
        exit 2
    }
    for (i = 1; i <= n; i++) {
        f = in_function[i]
        if (kind[i] == "label" && line[i] in named) {
            # several labels of one place become one
            if (fresh != i - 1 || !fresh) numbers[f]++
            fresh = i
            renamed[line[i]] = ".L_x_" numbers[f]
        } else if (kind[i] == "instruction" && (f, at[i]) in wanted) {
            if (fresh != i - 1 || !fresh) numbers[f]++
            place[f, at[i]] = ".L_x_" numbers[f]
            opens[i] = fresh != i - 1 || !fresh
        }
    }
    for (i = 1; i <= n; i++) {
        f = in_function[i]
        if (kind[i] == "label") {
            if (!(line[i] in named) || renamed[line[i]] == last) continue
            last = renamed[line[i]]
            print last ":"
            continue
        }
        last = ""
        if (kind[i] == "other") {
            if (i == n && line[i] == "") continue
            print rename(line[i])
            continue
        }
        if (opens[i]) print place[f, at[i]] ":"
        text = line[i]
        if (goal[i] != "" && (f, goal[i]) in place)
            sub(/0x[0-9a-f]+;$/, "`(" place[f, goal[i]] ");", text)
        print "        " rename(text)
    }
}
'

awk -v name="$name" "$program" "$temporary/listing" > "$temporary/clean"
if [[ -z $output ]]; then
    cat "$temporary/clean"
else
    # beside the file, so that it is there whole or not at all
    scratch=$(mktemp "$(dirname -- "$output")/.$(basename -- "$output").XXXXXX") ||
        fail "$output cannot be written"
    cat "$temporary/clean" > "$scratch"
    chmod 644 "$scratch"
    mv -- "$scratch" "$output"
    scratch=
fi
