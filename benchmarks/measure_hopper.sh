#!/usr/bin/env bash
# Measures anew what benchmarks/results has of the speed of family hopper's last steps, and of all
# of its steps beside each other, on the GPU of this machine:
#
#   benchmarks/measure_hopper.sh FOLDER GPU [OPTION...]
#
# such as build/results h200: a file's name ends in _GPU.json. Options go to each pt_bench.py.
# It takes about half an hour, and can be ended at any time: called again, it goes on with the files
# in FOLDER. Shortest first. FlashAttention-3 takes part where fa3_fwd is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?FOLDER} gpu=${2:?GPU}
shift 2
options=("$@")
mkdir -p "$folder"

measure() { # NAME OPTION...
    local file="$folder/$1_$gpu.json"
    echo "$file"
    python3 tools/benchmark/pt_bench.py --rounds 3 --resume --json "$file" "${options[@]}" "${@:2}"
}

lengths=(512 1024 2048 4096 8192 16384)
whole=(512 1024 2048 4096 7680 15360) # which tiles of 192 rows and 80 keys divide, too
square=d128_Br128_Bc128_K3_V2_pp long=d128_Br192_Bc80_K3_V3 short=d128_Br128_Bc64_K3_V3_pp
causal=("h24_bf16_${short}_causal" "h27_bf16_${square}_causal" "h28_bf16_${square}_causal")
both=(h20_{bf16,fp16}_$square h28_{bf16,fp16}_$square h24_{bf16,fp16}_${long}_pp)
alone=(1024 2048 4096 8192 16384) # one sequence at a time

measure hopper_alone_causal --load sustained --batch 1 --seq "${alone[@]}" --causal \
    --kernel h{28,29,30}_bf16_${square}_causal
measure hopper_alone --load sustained --batch 1 --seq "${alone[@]}" \
    --kernel h{28,30}_bf16_$square h26_bf16_${long}_pp
measure hopper_last_causal --load sustained --seq 512 1024 2048 4096 --causal \
    --kernel h{28,29,30}_bf16_${square}_causal
measure hopper_grouped --load sustained --seq "${lengths[@]}" --causal --heads 32 --kv-heads 8 \
    --kernel "${causal[@]}"
measure hopper_causal --load sustained --seq "${lengths[@]}" --causal \
    --kernel "${causal[@]}" h2{4,5,6}_bf16_"${square}_causal"
measure hopper_causal_fp16 --load sustained --seq "${lengths[@]}" --causal --dtype fp16 \
    --kernel h2{4,7,8}_fp16_"${square}_causal"
measure hopper_mantissa --load sustained --seq "${whole[@]}" --mantissa-bits 7 --dtype both \
    --kernel h20_{bf16,fp16}_$square
measure hopper_last_dtypes --load sustained --seq "${whole[@]}" --dtype both --kernel "${both[@]}"
measure hopper_odd --load sustained --seq 1000 1024 4000 4096 8191 8192 15360 \
    --kernel h28_bf16_$square h26_bf16_${long}_pp
read -ra steps < <(PYTHONPATH=py python3 -c "
from flash_helpers.registry.hopper import HOPPER
print(*(c.short_form() for c in HOPPER.progression() if c.dtype.short == 'bf16'))")
measure hopper --seq "${whole[@]}" \
    --kernel "${steps[@]}" h24_bf16_${long}_pp h26_bf16_${long}_pp h26_bf16_$long
