#!/usr/bin/env bash
# All that is to be measured on a GPU, in one go; never run on one yet. Estimated at ten minutes; its limits add up to 29.
# From the checkout:
#   benchmarks/gpu.sh [FOLDER]                   (default: figures)
#   DEVICE=cpu SIZE=tiny benchmarks/gpu.sh       tries every step on a CPU, where its times mean nothing
#
#   bidirectional_*, block_causal, compiled      tokens/s, memory and TFLOP/s of a random network of LLaDA-8B's shape
#                                                (1B below 40 GiB), the deployed loop and the bare network calls
#   device                                       waits of the host by line of code, and an exact gradient of 1,024 tokens
#   tests                                        those that have a device, with the slow ones
#   sotu_full                                    a real run
#
# FOLDER/GPU'S NAME gets a JSON and a log for each step. A step that fails or takes too long does not stop the others.
# Figures go into docs/running.md.
set -u
cd "$(dirname "$0")/.."
DEVICE=${DEVICE:-cuda}
NAME=cpu GIB=0
if [ "$DEVICE" != cpu ]; then
  NAME=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr ' /' '__')
  GIB=$(($(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1) / 1024))
fi
SIZE=${SIZE:-$([ "$GIB" -ge 40 ] && echo 8b || echo 1b)}
case $SIZE in
  8b) layers=32 width=4096 vocab=126464 length=256 dtype=bfloat16 tokens=1024 rule=greedy limit="" ;;
  1b) layers=16 width=2048 vocab=126464 length=256 dtype=bfloat16 tokens=1024 rule=greedy limit="" ;;
  tiny) layers=1 width=64 vocab=300 length=32 dtype=float32 tokens=64 rule=greedy:k=32 limit="--limit 1" ;;
  *) echo "SIZE is 8b, 1b or tiny; got $SIZE" >&2; exit 2 ;;
esac
patience=$([ "$DEVICE" = cpu ] && echo 6 || echo 1)  # a CPU compiles and collects tests for minutes
out=${1:-figures}/$NAME
mkdir -p "$out"
failed=()

step() {  # NAME SECONDS COMMAND...: the output goes to NAME.log
  local name=$1 seconds=$(($2 * patience)) start=$SECONDS
  shift 2
  timeout "$seconds" "$@" >"$out/$name.log" 2>&1 || failed+=("$name")
  echo "$name: $((SECONDS - start)) s"
}

bench() {  # NAME NETWORK MODEL_ARGS
  rm -f "$out/$1.json"
  step "$1" 240 python -m benchmarks "random:$2" --model_args "rule=greedy,block=32,dtype=$dtype$3" \
    --layers $layers --hidden_size $width --vocab $vocab --length $length --repeats 1 --device "$DEVICE" \
    $([ "$DEVICE" = cpu ] && echo --no_memory) --json "$out/$1.json"
}

# Tokens a second, memory, share of the matrix rate, the deployed loop and the bare network calls, in one run each.
for cache in none prefix dual; do bench "bidirectional_$cache" llada-8b ",cache=$cache"; done
bench block_causal block-causal ""
bench compiled llada-8b ",compile=true"
# Waits of the host by line, what one read less would gain, and the gradient of a long window (of the 1B network).
step device 150 python benchmarks/device.py "$DEVICE" random:llada-8b $((layers < 16 ? layers : 16)) \
  $((width < 2048 ? width : 2048)) 32000 $tokens
slow=(-m "slow or not slow")
[ "$SIZE" = tiny ] && slow=()
step tests 150 python -m pytest -q -n 0 tests/core/test_device.py tests/test_golden.py \
  tests/denoisers/test_quantization.py "${slow[@]}"
step sotu_full 200 python -m lm_eval_duel run demo-mdm --model_args rule=$rule,block=32 --tasks sotu_full $limit \
  --device "$DEVICE" --output_path "$out/sotu_full"

grep -h -E "TFLOP/s|ours / forwards|loop / ours" "$out"/*.log
[ ${#failed[@]} = 0 ] || { echo "failed or out of time: ${failed[*]}; see $out/*.log" >&2; exit 1; }
