"""Speed and memory of this package and of the loops that people run, on the same windows.

    python -m benchmarks random:block-causal --model_args block=4 --vocab 8192 --length 1024

Each arm is an entry of `arms.ARMS`. gpu.sh runs everything for a GPU; device.py and gradients.py measure waits of
the host and the memory of gradients.
"""
