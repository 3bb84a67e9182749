"""Python imports this when a process of an engine starts: whoever waits there sleeps a moment instead of spinning.

vLLM's core and workers wait for each other by calling `os.sched_yield` again and again for a second after each message.
With more of them than cores that takes the cores from those who have work, and under Linux 6.18 an ordinary thread
beside them may not run for seconds. All else in the engine is as shipped.
"""

import os
import time
from functools import partial

os.sched_yield = partial(time.sleep, 50e-6)
