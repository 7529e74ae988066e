#!/usr/bin/env bash
# Look for races in the kernels' use of shared memory.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: check_race.sh [KERNEL...] [OPTION...]

Look for races in shared memory: two warps access the same bytes, at least one of them writes, and
no barrier separates the accesses. On a machine with a GPU, NVIDIA's compute-sanitizer watches the
kernels run on it. On any other machine the PTX simulator runs them. The simulator also finds reads
of memory that was never written, and of asynchronous copies that no thread waited for. Kernels with
clusters of thread blocks run in the simulator on every machine: compute-sanitizer ends them with an
illegal access of its own.

KERNEL is a step, a range of steps, a family or a config, as in sanity_check.py --kernel. The default
is every step at its fixed config; in the simulator also at its causal config. An OPTION is --dtype or
an option of the problem, such as --causal, --kv-heads 2 or --seq 77, as in sanity_check.py. Steps
that do not take the problem are left out unless they are named. PYTHON names the interpreter
(default: python3).

examples:
  tools/debug/check_race.sh
  tools/debug/check_race.sh 3 7..9
  tools/debug/check_race.sh h24..h30 --causal --heads 4 --kv-heads 2 --seq 77
  CUDA_VISIBLE_DEVICES= tools/debug/check_race.sh v16     the simulator, even with a GPU

exit status: 0 no race, 1 a race (or, in the simulator, a wrong result), 2 wrong usage
TEXT
}

case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
esac
kernels=()
while (($#)) && [[ $1 != -* ]]; do
    kernels+=("$1")
    shift
done

python=${PYTHON:-python3}
here=$(dirname "$0")
in_simulator() {
    "$python" "$here/sanity_check.py" --small --device cpu --keep-going "$@"
}
if ! "$python" -c 'import flash_helpers.console.quiet_start, sys, torch; sys.exit(not torch.cuda.is_available())'; then
    in_simulator ${kernels:+--kernel "${kernels[@]}"} "$@"
    exit
fi

sanitizer=$(command -v compute-sanitizer || true)
if [[ -z $sanitizer && -x ${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer ]]; then
    sanitizer=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer
fi
if [[ -z $sanitizer ]]; then
    echo "compute-sanitizer was not found: put it on PATH or set CUDA_HOME (it comes with the CUDA" \
        "toolkit), or run CUDA_VISIBLE_DEVICES= $0 to use the simulator" >&2
    exit 2
fi
# Not the sanity check: its reference calls libraries whose kernels the sanitizer cannot follow.
run_kernels=$here/../benchmark/run_kernels.py
listed=$("$python" "$run_kernels" --list ${kernels:+--kernel "${kernels[@]}"} "$@")
mapfile -t single < <(awk '$2 == 1 { print $1 }' <<<"$listed")
mapfile -t clustered < <(awk '$2 > 1 { print $1 }' <<<"$listed")
worst=0
if ((${#single[@]})); then
    names=$("$python" -c 'from flash_helpers.kernel_configs import FAMILIES
print(*{name for family in FAMILIES.values() for name in family.kernels})')
    for name in $names; do
        "$sanitizer" --tool racecheck --error-exitcode 1 --kernel-name "kernel_substring=$name" \
            "$python" "$run_kernels" --kernel "${single[@]}" "$@" || worst=$?
    done
fi
if ((${#clustered[@]})); then
    echo "in the simulator, as compute-sanitizer cannot follow clusters: ${clustered[*]}"
    in_simulator --kernel "${clustered[@]}" "$@" || worst=$?
fi
exit "$worst"
