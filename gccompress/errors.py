"""The errors this package raises on purpose; the command line turns each into one line and exit 2.

Every message names the object, what was found, what was wanted, and the remedy.
"""


class GccompressError(Exception):
    """Base of every deliberate error: bad input, missing data, an unmet budget."""


class ModelError(GccompressError):
    """A model cannot be found, read, or is damaged."""


class UnsupportedModelError(ModelError):
    """A model's architecture or storage is not one this package handles."""


class TextError(GccompressError):
    """Calibration or evaluation text is missing, unreadable or too short."""


class NumericalError(GccompressError):
    """A non-finite value or a factorisation that failed, named by tensor or window."""


class PlanError(GccompressError):
    """A plan is malformed, does not fit the model, or no plan can meet the budget."""


class CheckpointError(GccompressError):
    """A compressed checkpoint cannot be written, or does not reload as it was."""
