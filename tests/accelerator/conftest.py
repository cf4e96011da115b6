"""What runs on the simulated device is collected only where it is installed, and of the make that a folder is for: by
`python -m tests.accelerator`."""

import os

from tests.accelerator.build import LIBRARY, make

NOT_HERE = ["on_second_make"] if make() == "cuda" else []
collect_ignore = NOT_HERE if LIBRARY in os.environ else ["on_device", "on_second_make"]
