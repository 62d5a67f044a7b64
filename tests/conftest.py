"""No test reaches a hub, and every test sees the same numbers whatever ran before."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
