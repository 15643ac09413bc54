"""Programs whose memory that cannot go out is larger than their budget."""

import pytest


@pytest.mark.swaptide(budget=32, limit=60, allowance=24)
def test_thrashing(case):
    """Two threads work on a little memory that can go out. They make progress, and what they have
    beyond the budget is bounded."""
    case.compare([case.binary("thrashing"), 48, 1, case.seed])
