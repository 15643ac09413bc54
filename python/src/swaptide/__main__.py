"""`python -m swaptide`: as the console script."""

import sys

from swaptide._command import main

sys.exit(main())
