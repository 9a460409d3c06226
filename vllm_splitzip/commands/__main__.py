"""`python -m vllm_splitzip.commands` is `vllm-splitzip`."""

import sys

from .main import main

sys.exit(main())
