"""Programs whose memory that cannot go out is larger than their budget."""

from legacy import Case


def squeezed(context):
    """Two threads work on a little memory that can go out. They make progress, and what they have
    beyond the budget is bounded."""
    context.compare([context.binary("squeezed"), 48, 1, context.seed])


CASES = [Case("squeezed", squeezed, 32, limit=60, allowance=24)]
