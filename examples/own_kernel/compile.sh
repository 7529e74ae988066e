#!/usr/bin/env bash
# Compile kernels into what the tools read: KERNEL.ptx for the simulator, and from that PTX
# KERNEL.sm_80.cubin and KERNEL.sm_90.cubin, with line numbers and the PTX inside, for the others.
#
#   examples/own_kernel/compile.sh KERNEL.cu [KERNEL.cu ...]
#   ARCHS=90 examples/own_kernel/compile.sh KERNEL.cu
#
# The files land beside the .cu. ARCHS names the compute capabilities of the cubins, the first that
# of the PTX (default: 80 90), NVCC the compiler (default: nvcc).
#
# exit status: 0 compiled, 2 wrong usage, else that of nvcc
set -euo pipefail

usage() {
    sed -n '2,/^set/{/^# \{0,1\}/s///p}' "$0"
}

case "${1-}" in
    -h | --help) usage && exit ;;
    "" | -*) usage >&2 && exit 2 ;;
esac
read -ra archs <<<"${ARCHS:-80 90}"
for source in "$@"; do
    (
        cd "$(dirname "$source")"
        name=$(basename "$source" .cu)
        "${NVCC:-nvcc}" -ptx -arch="compute_${archs[0]}" -lineinfo -std=c++20 -o "$name.ptx" "$name.cu"
        # without folder names the files do not depend on where they are made
        sed -i -E 's|^(\s*\.file\s.*")[^"]*/|\1|' "$name.ptx"
        for arch in "${archs[@]}"; do
            "${NVCC:-nvcc}" -cubin -arch="sm_$arch" -lineinfo -o "$name.sm_$arch.cubin" "$name.ptx"
        done
    )
done
