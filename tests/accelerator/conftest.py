"""What is in on_device/ is collected only where the simulated device is installed: by `python -m tests.accelerator`."""

import os

from tests.accelerator.build import LIBRARY

collect_ignore = [] if LIBRARY in os.environ else ["on_device"]
