"""No test reaches a hub, and every test sees the same numbers whatever ran before."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes: before torch counts the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
