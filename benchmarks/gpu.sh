#!/usr/bin/env bash
# What is to be measured on a GPU, in steps by value; never run on one yet. From the checkout:
#   benchmarks/gpu.sh first [FOLDER]               at most 8 minutes: the limits of its steps add up to 470 s
#   benchmarks/gpu.sh rest [FOLDER]                what a second quarter of an hour is worth
#   DEVICE=cpu SIZE=tiny benchmarks/gpu.sh first   tries every step on a CPU, where its times mean nothing
#
# first
#   readme        the README's command on the device: 54.7721 within the tolerance of float32
#   tests         those that have a device
#   none, dual    tokens/s, memory, share of the matrix rate of LLaDA-8B's shape in bfloat16, blocks of 32, without and
#                 with a dual cache: the deployed loop, this package, and its network calls alone
#   blocks        the same for a block-causal network with blocks of 4
#   memory        the batch found by trial, and the same numbers when memory runs out
#   waits         waits of the host for the device, by line of code
# rest
#   bfloat16      demo-mdm in bfloat16 against float32 on the same weights: near ties, nats of each document
#   compiled      the bidirectional network through torch.compile
#   gradient      seconds and memory of an exact gradient of 1,024 tokens
#   sotu_full     a real run
#
# FOLDER (default: figures) gets one file for each step, written when the step ends. A step that fails or runs out of
# time does not stop the others. Figures go into docs/running.md.
set -u
cd "$(dirname "$0")/.."
part=${1:-first} out=${2:-figures}
DEVICE=${DEVICE:-cuda}
SIZE=${SIZE:-8b}
case $SIZE in
  8b) layers=32 width=4096 vocab=126464 length=256 dtype=bfloat16 tokens=1024 rule=greedy limit="" ;;
  tiny) layers=1 width=64 vocab=300 length=32 dtype=float32 tokens=64 rule=greedy:k=32 limit="--limit 1" ;;
  *) echo "SIZE is 8b or tiny; got $SIZE" >&2; exit 2 ;;
esac
patience=$([ "$DEVICE" = cpu ] && echo 6 || echo 1) # a CPU computes the README's number for half a minute
small="$((layers < 16 ? layers : 16)) $((width < 2048 ? width : 2048)) $((vocab < 32000 ? vocab : 32000))"
export HF_HUB_OFFLINE=1
mkdir -p "$out"
failed=()

step() { # NAME SECONDS COMMAND...: what it prints goes to NAME.txt
  local name=$1 seconds=$(($2 * patience)) start=$SECONDS
  shift 2
  timeout "$seconds" "$@" >"$out/$name.txt" 2>&1 || failed+=("$name")
  echo "$name: $((SECONDS - start)) s"
}

bench() { # NAME SECONDS NETWORK MODEL_ARGS
  step "$1" "$2" python -m benchmarks "random:$3" --model_args "rule=greedy,dtype=$dtype,$4" --layers $layers \
    --hidden_size $width --vocab $vocab --length $length --repeats 1 --no_memory --device "$DEVICE"
}

first() {
  step readme 60 python benchmarks/device.py "$DEVICE" readme $limit
  step tests 90 python -m pytest -q -n 0 tests/core/test_device.py tests/test_golden.py tests/denoisers/test_quantization.py
  bench none 100 llada-8b block=32
  bench dual 80 llada-8b block=32,cache=dual
  bench blocks 60 block-causal block=4
  step memory 40 python benchmarks/device.py "$DEVICE" memory $small $tokens
  step waits 40 python benchmarks/device.py "$DEVICE" waits $small $tokens
}

rest() {
  step bfloat16 120 python -m lm_eval_duel run demo-mdm --model_args rule=$rule,block=32,dtype=bfloat16,verify=8 \
    --tasks sotu $limit --device "$DEVICE" --output_path "$out/bfloat16"
  bench compiled 200 llada-8b block=32,compile=true
  step gradient 100 python benchmarks/device.py "$DEVICE" gradient $small $tokens
  step sotu_full 180 python -m lm_eval_duel run demo-mdm --model_args rule=$rule,block=32 --tasks sotu_full $limit \
    --device "$DEVICE" --output_path "$out/sotu_full"
}

case $part in
  first | rest) "$part" ;;
  *) echo "benchmarks/gpu.sh first|rest [FOLDER]; got $part" >&2; exit 2 ;;
esac
grep -h -E "token_perplexity|passed|TFLOP/s|ours / forwards|loop / ours" "$out"/*.txt
[ ${#failed[@]} = 0 ] || { echo "failed or out of time: ${failed[*]}; see $out/*.txt" >&2; exit 1; }
