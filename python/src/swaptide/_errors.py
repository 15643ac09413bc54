"""What goes wrong, in one line each."""


class SwaptideError(Exception):
    """Any error of this package."""


class BinaryNotFoundError(SwaptideError):
    """The program `swaptide` is not installed."""


class RefusedError(SwaptideError):
    """`swaptide` has refused something; the text is its line. Nothing was changed."""


class NotLimitedError(SwaptideError):
    """This process is under no budget."""
